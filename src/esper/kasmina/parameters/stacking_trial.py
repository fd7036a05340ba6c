"""The choice how a module is stacked, by trial, once for each kind."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers
from esper.kasmina.parameters.flat_layout import StackedTemplate, buffer_layout, parameter_layout
from esper.kasmina.parameters.stacked_layers import can_stack_layers, stack_layers, vmapped
from esper.leyline.errors import StackingError

_HOSTS, _EXAMPLES = 3, 4
Way = Callable[[nn.Module], nn.Module]
"""A function from a module to its stacked module with the same parameter names; the module is not changed."""


def way_to_stack(name: str, module: nn.Module, example: Tensor) -> Way:
    """How to stack modules of the blueprint `name`: with stacked layers, or else with `torch.vmap`.

    A way is used if it reproduces outputs, gradients and buffers of `module` host by host, on random examples like
    `example` [1, ...], in train and in evaluation mode.

    Raises:
        StackingError: neither way does.
    """
    ways: tuple[Way, ...] = (stack_layers, vmapped) if can_stack_layers(module) else (vmapped,)
    for way in ways:
        if _reproduces(way(module), module, example):
            return way
    raise StackingError(
        f"blueprint {name!r} gives other results for many hosts at once than for one; use executor 'streamed'."
    )


def _reproduces(stack: nn.Module, module: nn.Module, example: Tensor) -> bool:
    """Whether the stacked module gives each of three hosts the results of the module alone."""
    generator = torch.Generator().manual_seed(0)
    layout, buffers = parameter_layout(module), buffer_layout(module)
    rows = torch.randn(_HOSTS, layout.total, generator=generator)
    state = torch.rand(_HOSTS, buffers.total, generator=generator) + 0.5
    x, pull = (torch.randn(_EXAMPLES, _HOSTS, *example.shape[1:], generator=generator) for _ in range(2))
    stacked, alone = StackedTemplate(copy.deepcopy(stack), layout, buffers), copy.deepcopy(module)
    for training in (False, True):
        alone.train(training)
        try:
            together = _trial_of_all(stacked, rows, state, x, pull, training)
        except (RuntimeError, IndexError):
            return False  # the forward pass needs the shape of one host, or vmap does not support it
        for g in range(_HOSTS):
            single = _trial_of_one(alone, g, layout.unpack(rows[g]), buffers.unpack(state[g].clone()), x, pull)
            if not all(_near(ours[g], theirs) for ours, theirs in zip(together, single, strict=True)):
                return False
    return True


def _trial_of_all(
    stacked: StackedTemplate, rows: Tensor, state: Tensor, x: Tensor, pull: Tensor, training: bool
) -> list[Tensor]:
    """Outputs, gradients of inputs and parameters, and buffers after a pass; the host is the first axis of each."""
    leaves = tuple(view.requires_grad_() for view in stacked.views(rows))
    moved = stacked.buffer_views(state.clone())
    stacked.train(training)
    stacked.bind(leaves, moved)
    draw_for(stacked.dropouts, Draws(Moment(0), torch.arange(_HOSTS), 0))
    h = x.clone().requires_grad_()
    y = stacked(h.flatten(0, 1)).unflatten(0, (_EXAMPLES, _HOSTS))
    of_h, *of_leaves = torch.autograd.grad((y * pull).sum(), (h, *leaves), materialize_grads=True)
    return [y.detach().transpose(0, 1), of_h.transpose(0, 1), *of_leaves, *moved]


def _trial_of_one(
    alone: nn.Module, g: int, params: dict[str, Tensor], moved: dict[str, Tensor], x: Tensor, pull: Tensor
) -> list[Tensor]:
    """The same for one host, by the module itself."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    draw_for(dropout_layers(alone), Draws(Moment(0), torch.tensor([g]), 0))
    h = x[:, g].clone().requires_grad_()
    y = torch.func.functional_call(alone, {**leaves, **moved}, (h,))
    grads = torch.autograd.grad((y * pull[:, g]).sum(), (h, *leaves.values()), materialize_grads=True)
    return [y.detach(), *grads, *moved.values()]


def _near(got: Tensor, want: Tensor) -> bool:
    """Equal up to the rounding of the largest element; NaN equals NaN."""
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    largest = max(1.0, float(want.abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return torch.allclose(got, want, rtol=0.0, atol=1e-4 * largest, equal_nan=True)
