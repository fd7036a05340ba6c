"""One forward pass of a network with a function at the outputs of some of its submodules."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.interface import inputs_in_words
from esper.leyline.errors import ConfigError
from esper.leyline.random import seeded_generators


@contextmanager
def replaced_outputs(network: nn.Module, replace: Callable[[str, Any], Any], paths: Iterable[str]) -> Iterator[None]:
    """Replace the output of each of these submodules by `replace(path, output)`, until the end of the context.

    The hooks run after those that the user has registered, and are gone when the context ends.
    """
    handles = [network.get_submodule(path).register_forward_hook(partial(_hook, replace, path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(replace: Callable[[str, Any], Any], path: str, module: nn.Module, args: object, output: object) -> object:
    return replace(path, output)


class Call(NamedTuple):
    """One call of a submodule: its path, its output, the version of the output if it is a tensor, and `grad`.

    `grad` says whether it ran with gradients enabled.
    """

    path: str
    output: Any
    version: int
    grad: bool


class Pass(NamedTuple):
    """The output of a network, and the calls of its submodules in the order in which they ended.

    `draws` says whether it used the global generators.
    """

    output: Any
    calls: tuple[Call, ...]
    draws: bool

    def of(self, path: str) -> list[Call]:
        """The calls of one submodule."""
        return [call for call in self.calls if call.path == path]


def recorded_pass(network: nn.Module, x: Tensor, *, differentiable: Collection[str] = (), seed: int = 0) -> Pass:
    """A forward pass that records every call; the outputs of `differentiable` submodules require a gradient.

    It starts with global generators from `seed`.

    Raises:
        ConfigError: the forward pass fails, or a differentiable output lies within `torch.inference_mode()`.
    """
    calls: list[Call] = []

    def record(path: str, output: object) -> object:
        if path in differentiable and isinstance(output, Tensor) and not output.requires_grad:
            if output.is_inference():
                raise ConfigError(
                    f"slot {path!r} lies within torch.inference_mode() of {type(network).__name__}, in which nothing "
                    "can learn; use torch.no_grad() there, or choose a slot behind it."
                )
            with torch.enable_grad():  # a leaf could not be edited in place
                output = output.detach().requires_grad_().clone()
        version = output._version if isinstance(output, Tensor) and not output.is_inference() else 0
        calls.append(Call(path, output, version, torch.is_grad_enabled()))
        return output

    paths = [name for name, _ in network.named_modules(remove_duplicate=False)]
    with replaced_outputs(network, record, paths), seeded_generators(seed) as used:
        output = _output(network, x)
        return Pass(output, tuple(calls), used())


def plain_pass(network: nn.Module, x: Tensor) -> Any:  # noqa: ANN401 -- whatever the user returns
    """The output of the network, which starts with the same global generators in every call.

    Raises:
        ConfigError: the forward pass fails, or edits its inputs.
    """
    with seeded_generators(0):
        return _output(network, x)


def _output(network: nn.Module, x: Tensor) -> Any:  # noqa: ANN401 -- whatever the user returns
    """The output of the network, which finds the global generators as they are; raises as `plain_pass` does."""
    before, version = x.clone(), x._version
    try:
        output = network(x)
    except ConfigError:
        raise  # says already what the network returns
    except Exception as error:  # any error of the user's code
        last = x.dim() == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] > 4
        hint = "images have channels first, [B, C, H, W]: x.permute(0, 3, 1, 2); " * last
        raise ConfigError(
            f"{type(network).__name__} cannot process inputs {inputs_in_words(network, x)}, which are like the "
            f"example: {str(error).rstrip('.')}. Inputs come as [B, ...] with any B, as in the data; {hint}correct the "
            "network or the example."
        ) from error
    if x._version != version or not torch.allclose(x, before, rtol=0.0, atol=0.0, equal_nan=True):
        raise ConfigError(
            f"{type(network).__name__} edits its inputs in place, which all hosts read; let it work on a copy, e.g. "
            "x = x.clone()."
        )
    return output
