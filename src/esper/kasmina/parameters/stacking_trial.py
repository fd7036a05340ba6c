"""The choice how a module is stacked, by trial, once for each kind."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.host import Apply
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers
from esper.kasmina.parameters.flat_layout import StackedTemplate, buffer_layout, drop_batch_counters, parameter_layout
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.stacked_layers import Vmapped, can_stack_layers, stack_layers, vmapped
from esper.leyline.errors import StackingError

_HOSTS, _EXAMPLES = 3, 4
HOST_EXAMPLES = _HOSTS * _EXAMPLES
"""How many examples the trial of a host takes."""
Way = Callable[[nn.Module], nn.Module]
"""A function from a module to its stacked module with the same parameter names; the module is not changed."""


def _no_arguments(rows: int) -> tuple[Any, ...]:
    return ()


class _Trial(NamedTuple):
    """Inputs [examples, hosts, ...], parameters and buffers [hosts, ...], further arguments by number of rows."""

    x: Tensor
    rows: Tensor
    state: Tensor
    arguments: Callable[[int], tuple[Any, ...]] = _no_arguments


def way_to_stack(name: str, module: nn.Module, example: Tensor) -> Way:
    """How to stack modules of the blueprint `name`: with stacked layers, or else with `torch.vmap`.

    A way is used if it reproduces outputs, gradients and buffers of `module` host by host, on random examples like
    `example` [1, ...], in train and in evaluation mode.

    Raises:
        StackingError: neither way does.
    """
    ways: tuple[Way, ...] = (stack_layers, vmapped) if can_stack_layers(module) else (vmapped,)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_HOSTS, parameter_layout(module).total, generator=generator)
    state = torch.rand(_HOSTS, buffer_layout(module).total, generator=generator) + 0.5
    trial = _Trial(torch.randn(_EXAMPLES, _HOSTS, *example.shape[1:], generator=generator), rows, state)
    for way in ways:
        if _reproduces(way(module), module, trial):
            return way
    raise StackingError(f"blueprint {name!r} {_problem(ways[-1](module), module, trial)}; use executor 'streamed'.")


def stacked_host(build: Callable[[], nn.Module], examples: Tensor) -> nn.Module:
    """The module for many hosts, of a host from `build`: of stacked layers, or else the whole by `torch.vmap`.

    It reproduces three hosts one by one on inputs like `examples` [HOST_EXAMPLES, ...], on the CPU.

    Raises:
        StackingError: it does not.
    """
    builds = [deterministic_build(build, seed) for seed in range(_HOSTS)]
    for module in builds:
        drop_batch_counters(module)
    layout, buffers, generator = parameter_layout(builds[0]), buffer_layout(builds[0]), torch.Generator().manual_seed(0)
    rows = torch.stack([layout.pack(dict(module.named_parameters())) for module in builds])
    state = torch.stack([buffers.pack(dict(module.named_buffers())) for module in builds])
    x = examples
    if x.is_floating_point():  # normalization of constant examples has no meaningful gradient
        x = x + torch.randn(x.shape, generator=generator)
    trial = _Trial(
        x=x.unflatten(0, (_EXAMPLES, _HOSTS)),
        rows=rows + 0.02 * torch.randn(rows.shape, generator=generator),  # a weight that starts at zero hides errors
        state=state + 0.1 * torch.rand(state.shape, generator=generator),
        arguments=lambda rows: (_unchanged(rows),),
    )
    ways = [way(builds[0]) for way in (stack_layers, vmapped)]
    for stacked in ways:
        # a ReLU of a large network may get inputs so close to zero that float32 rounds them to either side
        if any(_reproduces(stacked, builds[0], trial, dtype) for dtype in (torch.float32, torch.float64)):
            return stacked
    first, second = (_problem(stacked, builds[0], trial) for stacked in ways)
    raise StackingError(f"the host {first}; with torch.vmap it {second}; use executor 'streamed'.")


def _unchanged(rows: int) -> Apply:
    """Slots without seeds, which insist on features of all rows: inside `torch.vmap` they would see one host's."""

    def apply(slot_id: str, h: Tensor) -> Tensor:
        if h.shape[0] != rows:
            raise StackingError(f"slot {slot_id!r} has features {tuple(h.shape)}; expected {rows} rows.")
        return h

    return apply


def _reproduces(stack: nn.Module, module: nn.Module, trial: _Trial, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the stacked module gives each of three hosts the results of the module alone, in this precision."""
    layout, buffers = parameter_layout(module), buffer_layout(module)
    stacked, alone = StackedTemplate(copy.deepcopy(stack).to(dtype), layout, buffers), copy.deepcopy(module).to(dtype)
    x = trial.x.to(dtype) if trial.x.is_floating_point() else trial.x
    trial = trial._replace(x=x, rows=trial.rows.to(dtype), state=trial.state.to(dtype))
    for training in (False, True):
        alone.train(training)
        try:
            together, pull = _trial_of_all(stacked, trial, training)
        except Exception:  # `_problem` says what a forward pass raises that needs one host, or more than vmap supports
            return False
        for g in range(_HOSTS):
            state = {name: buffer.clone() for name, buffer in buffers.unpack(trial.state[g]).items()}
            single = _trial_of_one(alone, g, layout.unpack(trial.rows[g]), state, trial, pull)
            if not all(_near(ours[g], theirs) for ours, theirs in zip(together, single, strict=True)):
                return False
    return True


def _problem(stack: nn.Module, module: nn.Module, trial: _Trial) -> str:
    """Why `_reproduces` is False: the error and its layer, or the first layer whose outputs differ."""
    layout, buffers, alone = parameter_layout(module), buffer_layout(module), copy.deepcopy(module)
    stacked = StackedTemplate(copy.deepcopy(stack), layout, buffers)
    for training in (True, False):
        with _watched(stacked.module) as (running, together):
            try:
                _, pull = _trial_of_all(stacked, trial, training)
            except Exception as error:  # see `_reproduces`
                where = f" in layer {running[-1]!r}" if running and running[-1] else ""
                said = str(error).strip().split("\n")[0].rstrip(".")
                return f"fails for many hosts at once ({type(error).__name__}{where}: {said})"
        for g in range(_HOSTS):
            params, state = layout.unpack(trial.rows[g]), buffers.unpack(trial.state[g].clone())
            with _watched(alone.train(training)) as (_, single):
                _trial_of_one(alone, g, params, state, trial, pull)
            for path, want in single.items():
                if path and path in together and not _near(together[path][g::_HOSTS], want):
                    kind = type(module.get_submodule(path)).__name__
                    return f"gives other results for many hosts at once than for one, first in layer {path!r} ({kind})"
    return (
        f"gives other results for many hosts at once than for one, in {type(module).__name__} itself (an operation "
        "across examples, or weights used outside of a layer)"
    )


@contextmanager
def _watched(module: nn.Module) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """The paths of the layers that run now, the innermost last, and the outputs of those that have ended."""
    running: list[str] = []
    outputs: dict[str, Tensor] = {}

    def begin(path: str, *_: object) -> None:
        running.append(path)

    def end(path: str, layer: nn.Module, args: object, y: object) -> None:
        running.pop()
        if isinstance(y, Tensor) and not torch._C._functorch.is_batchedtensor(y):
            outputs.setdefault(path, y.detach())

    layers = dict(module.named_modules())
    for at, wrapped in list(layers.items()):
        if isinstance(wrapped, Vmapped):
            layers |= {
                ".".join(filter(None, (at, path))): layer for path, layer in wrapped.single.named_modules() if path
            }
    hooks = []
    for path, layer in layers.items():
        hooks += [
            layer.register_forward_pre_hook(partial(begin, path)),
            layer.register_forward_hook(partial(end, path)),
        ]
    try:
        yield running, outputs
    finally:
        for hook in hooks:
            hook.remove()


def _trial_of_all(stacked: StackedTemplate, trial: _Trial, training: bool) -> tuple[list[Tensor], Tensor]:
    """Outputs, gradients of inputs and parameters, and buffers after a pass; the host is the first axis of each.

    Second, the gradient of the outputs that was used.
    """
    leaves = tuple(view.requires_grad_() for view in stacked.views(trial.rows))
    moved = stacked.buffer_views(trial.state.clone())
    stacked.train(training)
    stacked.bind(leaves, moved)
    draw_for(stacked.dropouts, Draws(Moment(0), torch.arange(_HOSTS), 0))
    x = _trainable(trial.x)
    y = stacked(x.flatten(0, 1), *trial.arguments(HOST_EXAMPLES)).unflatten(0, (_EXAMPLES, _HOSTS))
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    of_x, of_leaves = _gradients(y, pull, x, leaves)
    return [y.detach().transpose(0, 1), *(g.transpose(0, 1) for g in of_x), *of_leaves, *moved], pull


def _trial_of_one(
    alone: nn.Module, g: int, params: dict[str, Tensor], moved: dict[str, Tensor], trial: _Trial, pull: Tensor
) -> list[Tensor]:
    """The same for one host, by the module itself."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    draw_for(dropout_layers(alone), Draws(Moment(0), torch.tensor([g]), 0))
    x = _trainable(trial.x[:, g])
    y = torch.func.functional_call(alone, {**leaves, **moved}, (x, *trial.arguments(_EXAMPLES)))
    of_x, of_leaves = _gradients(y, pull[:, g], x, tuple(leaves.values()))
    return [y.detach(), *of_x, *of_leaves, *moved.values()]


def _trainable(x: Tensor) -> Tensor:
    """A copy that records gradients, unless it holds whole numbers (tokens)."""
    return x.clone().requires_grad_(x.is_floating_point())


def _gradients(y: Tensor, pull: Tensor, x: Tensor, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the inputs (none of tokens) and of the parameters."""
    inputs = (x,) if x.requires_grad else ()
    found = torch.autograd.grad((y * pull).sum(), (*inputs, *leaves), materialize_grads=True)
    return list(found[: len(inputs)]), list(found[len(inputs) :])


def _near(got: Tensor, want: Tensor) -> bool:
    """Equal up to the rounding of the largest element; NaN equals NaN."""
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    largest = max(1.0, float(want.abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return torch.allclose(got, want, rtol=0.0, atol=1e-4 * largest, equal_nan=True)
