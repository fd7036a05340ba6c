"""Compares the rule of each seed and gate with PyTorch once, before the rule is used.

Both get the same random weights and features in float64, so a difference is not rounding. A module whose results differ
has no rule: PyTorch runs the hosts that grow it.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.parameters.layout import FlatLayout, buffer_layout, parameter_layout
from esper.tolaria.executors.native.assembler import NUM_WORKING, Assembler, Operation, Place, ShapeError
from esper.tolaria.executors.native.kernel_library import stride_of
from esper.tolaria.executors.native.layer_rules import Rule, Weights, images
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload
from esper.tolaria.executors.native.seed_rules import RULES

_SHAPES = ((3, 5, 4), (17, 1, 1))
"""Examples, height and width: partly filled rows, a map that is not square, and a single position."""
_TOLERANCE = 1e-8
_IMAGES, _VALUES, _GRADS, _BUFFERS, _ONES, _GRAD_OUT, _OUT, _GRAD_IN = range(NUM_WORKING, NUM_WORKING + 8)


@dataclass(frozen=True)
class Outcome:
    """Output [B, C, H, W], gradient of the input (None: not asked for), gradient of the weights (None: no backward)."""

    y: Tensor
    grad_input: Tensor | None
    grad_weights: Tensor | None


def disagreement(module: nn.Module, channels: int) -> str | None:
    """How a seed or gate differs as instructions from PyTorch, for features of this many channels; None if it does not.

    Compared are outputs in training and evaluation mode, all gradients, and a seed's output shape with its input's.
    """
    generator = torch.Generator().manual_seed(0)
    layout, rule = parameter_layout(module), RULES[type(module)]
    for batch, height, width in _SHAPES:
        row = torch.randn(layout.total, generator=generator, dtype=torch.float64) * 0.5 + 0.1
        x = torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float64)
        for trainable in (True, False):
            try:
                want = by_torch(module, layout, row, x, trainable=trainable)
            except (RuntimeError, ValueError) as error:
                return f"PyTorch refuses features {tuple(x.shape)}: {error}"
            if not isinstance(module, GateNetwork) and want.y.shape != x.shape:
                return f"it makes {tuple(want.y.shape)} of features {tuple(x.shape)}"
            try:
                found = by_instructions(rule, module, layout, row, x, trainable=trainable)
            except ShapeError as error:
                return str(error)
            if not _same(found.y, want.y):
                return f"its output differs from PyTorch's in {'training' if trainable else 'evaluation'} mode"
            if not _same(found.grad_weights, want.grad_weights):
                return "its gradients differ from PyTorch's"
    return None


def by_torch(
    module: nn.Module, layout: FlatLayout, row: Tensor, x: Tensor, *, trainable: bool = True, input_grad: bool = False
) -> Outcome:
    """A module with these weights in PyTorch; the gradient of its output is `_grad_like` it.

    Raises:
        ValueError: it writes into its input.
    """
    reference = copy.deepcopy(module).double().train(trainable)
    row, leaf = row.clone().requires_grad_(trainable), x.clone().requires_grad_(trainable)
    given = leaf.clone()
    y: Tensor = torch.func.functional_call(reference, layout.unpack(row), (given,))
    if not torch.equal(given, x):
        raise ValueError("it writes into its input")
    if not trainable:
        return Outcome(y, None, None)
    grad_row, grad_x = torch.autograd.grad(y, (row, leaf), _grad_like(y), materialize_grads=True)
    return Outcome(y.detach(), grad_x if input_grad else None, grad_row)


def by_instructions(
    rule: Rule,
    module: nn.Module,
    layout: FlatLayout,
    row: Tensor,
    x: Tensor,
    *,
    trainable: bool = True,
    input_grad: bool = False,
    buffers: Tensor | None = None,
) -> Outcome:
    """The same by instructions; running statistics in `buffers` are updated.

    Raises:
        ShapeError: layers do not fit each other.
    """
    batch, channels, height, width = x.shape
    a, one = Assembler(trainable=trainable), Place(_ONES, 0)  # SCALE by one copies rows between spaces
    h = images(a, Place(_IMAGES, 0), (channels, height, width))
    weights = Weights(layout, _VALUES, _GRADS if trainable else None, buffer_layout(module), _BUFFERS)
    y, backward = rule(a, module, weights, h)
    a.emit(Operation.SCALE, one, y.rows, Place(_OUT, 0), sizes=(1, y.rows.size))
    if trainable:
        into = backward(images(a, Place(_GRAD_OUT, 0), y.shape).rows, input_grad)
        if into is not None:
            a.emit(Operation.SCALE, one, into, Place(_GRAD_IN, 0), sizes=(1, into.size))
    out, grad_in = (torch.zeros(f.rows.size, stride_of(batch), dtype=x.dtype) for f in (y, h))
    grad_out = _grad_like(torch.empty(batch, *y.shape, dtype=x.dtype))
    grad_row = torch.full_like(row, torch.nan).masked_fill_(layout.padding_mask, 0.0)
    tensors = {
        _IMAGES: x.contiguous(), _VALUES: row, _GRADS: grad_row,
        _BUFFERS: torch.zeros(0) if buffers is None else buffers,
        _ONES: torch.ones(1, dtype=x.dtype), _GRAD_OUT: grad_out, _OUT: out, _GRAD_IN: grad_in,
    }  # fmt: skip
    spaces = Spaces(1, NUM_WORKING + len(tensors))
    for space, tensor in tensors.items():
        spaces.share(space, tensor)
    Machine(dtype=x.dtype).run(Workload.of_each([a.program()]), spaces, batch)
    grad_x = _examples_of(grad_in, x.shape) if trainable and input_grad else None
    return Outcome(_examples_of(out, (batch, *y.shape)), grad_x, grad_row if trainable else None)


def _grad_like(y: Tensor) -> Tensor:
    """A gradient of an output; no two neighbours are equal."""
    return torch.linspace(-1.0, 1.0, 101, dtype=y.dtype).repeat(-(-y.numel() // 101))[: y.numel()].view(y.shape)


def _examples_of(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of lanes -> [B, ...]; NaN where lanes beyond the examples are not zero."""
    batch = shape[0]
    x = rows[:, :batch].t().reshape(shape)
    return torch.full_like(x, torch.nan) if rows[:, batch:].any() else x


def _same(found: Tensor | None, want: Tensor | None) -> bool:
    if found is None or want is None:
        return found is want
    return found.shape == want.shape and torch.allclose(found, want, rtol=_TOLERANCE, atol=_TOLERANCE)
