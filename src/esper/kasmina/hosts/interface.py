"""How a host calls a network of the user's, and what it takes of the result.

batch        x [B, ...]  -- arguments -->  network(x), network(a, b) or network(tokens=..., mask=...)
outputs      whatever the network returns  -- collected -->  one float tensor [B, ...]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.structure import Structure, described, flatten, selection, unflatten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


@final
@dataclass(frozen=True)
class Interface:
    """What a batch becomes for a network, and what its result becomes for an objective.

    Attributes:
        inputs: the structure of an example, whose batches come packed; None for one tensor.
        outputs: the function of the user's that takes from a result what counts; None for all of it.
        packs: whether what counts may be several tensors of floats [B, ...], because a loss of the user's takes them.
    """

    inputs: Structure | None = None
    outputs: Callable[[Any], Any] | None = None
    packs: bool = False

    def arguments(self, x: Tensor) -> Arguments:
        """Those of the network for a batch: a dictionary is given by name, a tuple in order."""
        if self.inputs is None:
            return (x,), {}
        tree = self.inputs.unpack(x)
        return ((), tree) if isinstance(tree, dict) else (tuple(tree), {})

    def selected(self, network: nn.Module, result: Any) -> Any:  # noqa: ANN401 -- whatever the user returns
        """What counts of a result; raises ConfigError if the user's function fails on it."""
        if self.outputs is None:
            return result
        try:
            return self.outputs(result)
        except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"outputs fails on {described(result)}, which {type(network).__name__} returns"
                f"{' in training' * network.training}: {type(error).__name__}: {error}"
            ) from error

    def collected(self, network: nn.Module, result: Any) -> Tensor:  # noqa: ANN401
        """What an objective gets of a result, [B, ...].

        Raises:
            ConfigError: it is not a tensor, and nothing says what to do with it.
        """
        found = self.selected(network, result)
        if isinstance(found, Tensor):
            return found
        name = "outputs" if self.outputs is not None else type(network).__name__
        what = f"{name} gives {described(found)}{' in training' * network.training}"
        if not self.packs:
            place = selection(found)
            choice = f"out if isinstance(out, torch.Tensor) else {place}" if network.training else place
            raise ConfigError(
                f"{what}, but an objective takes one tensor: say which with outputs=lambda out: {choice}, or give a "
                "loss(outputs, targets) of your own that takes all of it."
            )
        try:
            tree = as_floats(found)
            return Structure.of(tree).pack(tree)
        except (TypeError, ConfigError) as error:
            raise ConfigError(
                f"{what}, but your loss can take tensors of floats [B, ...] alone; choose them with outputs=, e.g. "
                f"outputs=lambda out: {selection(found)}."
            ) from error

    def attach(self, network: nn.Module) -> nn.Module:
        """Make a network take batches and give outputs as an objective takes them, wherever it is called."""
        network.register_forward_pre_hook(self._given, with_kwargs=True)
        network.register_forward_hook(self._collect)
        return network

    def _given(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return self.arguments(args[0])

    def _collect(self, network: nn.Module, args: tuple[Any, ...], result: Any) -> Tensor:  # noqa: ANN401
        return self.collected(network, result)


def inputs_in_words(network: nn.Module, x: Tensor) -> str:
    """What a network is called with for a batch, where an interface may be attached to it."""
    for hook in network._forward_pre_hooks.values():
        interface = getattr(hook, "__self__", None)
        if isinstance(interface, Interface) and interface.inputs is not None:
            return str(interface.inputs)
    return f"{list(x.shape)} of {x.dtype}"


ONE_TENSOR = Interface()
"""network(x) gives outputs."""


def as_floats(tree: object) -> object:
    """A tree of tensors of floats, all as float32.

    Raises:
        TypeError, ConfigError: it holds something else.
    """
    tensors, form = flatten(tree)
    if not all(x.is_floating_point() for x in tensors):
        raise ConfigError(f"{described(tree)} holds something else than floats.")
    return unflatten(form, [x.float() for x in tensors])
