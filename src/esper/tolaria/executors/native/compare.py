"""A module as instructions beside the same module in PyTorch, on the same weights and inputs."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# rules register themselves
from esper.tolaria.executors.native import convolutions, layers, rules, sequences  # noqa: F401
from esper.tolaria.executors.native.lowering import Constants, Lowering, Value, Weight, run_graph
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload, cached_library, stride_of
from esper.tolaria.executors.native.program import NUM_WORKING, Assembler, Operation, Place, Rows
from esper.tolaria.executors.native.trace import BATCH, trace
from esper.kasmina.parameters.layout import Template

INPUTS, LABELS, VALUES, GRADS, BUFFERS, CONSTANTS, GRAD_OUT, OUT, GRAD_IN, ONE = range(NUM_WORKING, NUM_WORKING + 10)


@dataclass(frozen=True)
class Outcome:
    """Outputs [B, ...], gradients of inputs and of the row of weights (None: no backward pass), buffers afterwards."""

    y: Tensor
    grad_x: Tensor | None
    grad_row: Tensor | None
    buffers: Tensor


def grad_like(y: Tensor) -> Tensor:
    """A gradient of an output; no two neighbours are equal."""
    return torch.linspace(-1.0, 1.0, 101, dtype=y.dtype).repeat(-(-y.numel() // 101))[: y.numel()].view(y.shape)


def by_torch(template: Template, row: Tensor, buffers: Tensor, x: Tensor, *, training: bool) -> Outcome:
    """A module with these weights in PyTorch; the gradient of its output is `grad_like` it."""
    buffers = buffers.clone()
    own = Template(copy.deepcopy(template.module))
    own.module.to(row.dtype)
    own.train(training)
    leaf = row.clone().requires_grad_()
    given = x.clone().requires_grad_(x.is_floating_point())
    own.bind(leaf, buffers, None)
    y = own(given.clone() if x.is_floating_point() else x)
    if not training:
        return Outcome(y.detach(), None, None, buffers)
    wanted = (leaf, given) if x.is_floating_point() else (leaf,)
    grads = torch.autograd.grad(y, wanted, grad_like(y), materialize_grads=True)
    return Outcome(y.detach(), grads[1] if len(grads) > 1 else None, grads[0], buffers)


def by_instructions(template: Template, row: Tensor, buffers: Tensor, x: Tensor, *, training: bool,
                    chunk: int | None = None) -> Outcome:  # fmt: skip
    """The same by instructions.

    Raises:
        NoRuleError: something has no rule.
    """
    graph = trace(Template(copy.deepcopy(template.module)), x[:1].expand(BATCH, *x.shape[1:]).clone().to(torch.float32 if x.is_floating_point() else x.dtype), training=training)
    dtype, batch, buffers = row.dtype, len(x), buffers.clone()
    floating = x.is_floating_point()
    low = Lowering(Assembler(training), training, Constants(CONSTANTS), cached_library().scratch)

    def load(space: int, shape: tuple[int, ...]) -> Value:
        value = low.make(*shape)
        low.emit(Operation.LOAD, Place(space, 0, value.size), value.rows, sizes=(value.size, 1, 1, 1))
        return value

    if training:
        low.emit(Operation.CLEAR, Place(GRADS, 0, len(row)))
    h = load(INPUTS, tuple(x.shape[1:]))
    h = Value(h.rows, h.shape, needs=training and floating)
    weights = Weight(Place(VALUES, 0, len(row)), tuple(row.shape), Place(GRADS, 0, len(row)) if training else None)
    (y,) = run_graph(low, graph, weights, Weight(Place(BUFFERS, 0, len(buffers)), tuple(buffers.shape)), h)
    features = y.features
    keep = lambda rows, space: low.emit(Operation.COMBINE, rows, rows, Place(space, 0, rows.size * stride_of(batch)), sizes=(1, rows.size, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), numbers=(0.0,))  # noqa: E731, E501
    keep(y.rows, OUT)
    if training:
        grad = load(GRAD_OUT, features)
        low.give(y, grad.rows)
        if floating:
            low._tape.insert(0, (h, lambda g: keep(g, GRAD_IN)))
        low.backward()
    out, grad_in = (torch.zeros(f, stride_of(batch), dtype=dtype) for f in (y.size, h.size))
    grad_out = grad_like(torch.empty(batch, *features, dtype=dtype))
    grad_row = torch.zeros_like(row)
    tensors = {
        INPUTS: x.to(dtype).contiguous(), LABELS: torch.zeros(0), VALUES: row, GRADS: grad_row, BUFFERS: buffers,
        CONSTANTS: low.constants.tensor(dtype), GRAD_OUT: grad_out, OUT: out, GRAD_IN: grad_in, ONE: torch.ones(1, dtype=dtype),
    }  # fmt: skip
    spaces = Spaces(1, NUM_WORKING + len(tensors))
    for space, tensor in tensors.items():
        spaces.share(space, tensor)
    Machine(dtype=dtype).run(Workload.of_each([low.a.program()]), spaces, batch)
    of = lambda rows, shape: rows[:, :batch].t().reshape(batch, *shape)  # noqa: E731
    assert not out[:, batch:].any()
    return Outcome(of(out, features), of(grad_in, x.shape[1:]) if training and floating else None,
                   grad_row if training else None, buffers)  # fmt: skip


def disagreement(module: nn.Module, x: Tensor, *, dtype: torch.dtype = torch.float64, tolerance: float = 1e-8,
                 seed: int = 0) -> str | None:  # fmt: skip
    """How a module differs as instructions from PyTorch on inputs [B, ...]; None if it does not.

    Compared are outputs in training and evaluation mode, all gradients, and buffers after the pass.
    """
    template = Template(copy.deepcopy(module))
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(template.parameters.total, generator=generator, dtype=dtype) * 0.3 + 0.1
    row[template.parameters.padding_mask] = 0.0
    buffers = torch.rand(template.buffers.total, generator=generator, dtype=dtype) + 0.5
    buffers[template.buffers.padding_mask] = 0.0
    x = x.to(dtype) if x.is_floating_point() else x
    for training in (True, False):
        want = by_torch(template, row, buffers, x, training=training)
        found = by_instructions(template, row, buffers, x, training=training)
        for name in ("y", "grad_x", "grad_row", "buffers"):
            a, b = getattr(found, name), getattr(want, name)
            if a is None and b is None:
                continue
            if a is None or b is None or a.shape != b.shape:
                return f"{name} has another shape in {'training' if training else 'evaluation'}"
            scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                return f"{name} differs by {float((a - b).abs().max()):.3g} in {'training' if training else 'evaluation'}"
    return None
