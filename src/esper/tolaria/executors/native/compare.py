"""A module as instructions beside the same module in PyTorch, on the same weights and inputs."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.parameters.dropout import Draws, Moment
from esper.kasmina.parameters.layout import Template
from esper.leyline.errors import in_words

# rules register themselves
from esper.tolaria.executors.native import convolutions, functions, normalizations, pooling, rules, sequences  # noqa: F401
from esper.tolaria.executors.native.lowering import Constants, Lowering, Weight, run_graph
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload
from esper.tolaria.executors.native.program import NUM_WORKING, Operation, Place, Rows
from esper.tolaria.executors.native.trace import NoRuleError, trace

_INPUTS, _LABELS, _OUTPUTS, _OUT_GRADS, _IN_GRADS, _KEYS, _VALUES, _GRADS, _BUFFERS, _CONSTANTS = range(
    NUM_WORKING, NUM_WORKING + 10
)
_EXAMPLES = 7
TOLERANCE, IN_FLOAT32 = 1e-8, 1e-4
"""Relative to the largest number."""
_MOMENT, _HOST = Moment(run_seed=7, episode=2, t=3), torch.tensor([5])
"""Of masks of dropout."""


@dataclass(frozen=True)
class Outcome:
    """Outputs [B, ...], gradients of inputs and of the row of weights (None: no backward pass), buffers afterwards."""

    outputs: Tensor
    input_grads: Tensor | None
    weight_grads: Tensor | None
    buffers: Tensor


def gradient_like(outputs: Tensor) -> Tensor:
    """A gradient of outputs; no two neighbours are equal."""
    count = outputs.numel()
    found = torch.linspace(-1.0, 1.0, 101, dtype=outputs.dtype).repeat(-(-count // 101))[:count]
    return found.view(outputs.shape) / max(1, len(outputs))


class _InDouble(TorchDispatchMode):
    """Conversions to float32 are to float64 here, as the instructions take all numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else kwargs))


def by_torch(template: Template, row: Tensor, buffers: Tensor, x: Tensor, *, training: bool) -> Outcome:
    """A module with these weights in PyTorch; the gradient of its outputs is `gradient_like` them."""
    buffers, own = buffers.clone(), Template(copy.deepcopy(template.module))
    own.module.to(row.dtype)
    own.train(training)
    leaf = row.clone().requires_grad_()
    given = x.clone().requires_grad_(x.is_floating_point())
    own.bind(leaf, buffers, Draws(_MOMENT, _HOST, 0))
    inputs = given.clone() if x.is_floating_point() else x
    in_double = _InDouble() if row.dtype is torch.float64 else nullcontext()  # type: ignore[no-untyped-call]
    with in_double, torch.set_grad_enabled(training):
        outputs = own(inputs, lambda slot_id, h: h) if hasattr(own.module, "execution_order") else own(inputs)
    if not training:
        return Outcome(outputs.detach(), None, None, buffers)
    wanted = (leaf, given) if x.is_floating_point() else (leaf,)
    grads = torch.autograd.grad(outputs, wanted, gradient_like(outputs), materialize_grads=True, allow_unused=True)
    return Outcome(outputs.detach(), grads[1] if len(grads) > 1 else None, grads[0], buffers)


def by_instructions(
    graph: fx.Graph, row: Tensor, buffers: Tensor, x: Tensor, *, training: bool, chunk: int | None = None
) -> Outcome:
    """The same by instructions, written from a graph; `chunk` examples pass through the layers together.

    Raises:
        NoRuleError: something has no rule.
    """
    floats = x.is_floating_point()
    low = Lowering(trainable=training, constants=Constants(_CONSTANTS))
    if training:
        low.emit(Operation.CLEAR, Place(_GRADS, 0, len(row)))
    h = low.make(*x.shape[1:])
    low.emit(Operation.LOAD, Place(_INPUTS, 0, h.size), h.rows, sizes=(h.size,))

    def keep(g: Rows) -> None:
        low.emit(Operation.STORE, g, Place(_IN_GRADS, 0, h.size), sizes=(h.size, h.size))

    h = low.leaf(h, keep) if training and floats else h
    weights = Weight(Place(_VALUES, 0, len(row)), tuple(row.shape), Place(_GRADS, 0, len(row)) if training else None)
    (y,) = run_graph(low, graph, weights, Weight(Place(_BUFFERS, 0, len(buffers)), tuple(buffers.shape)), h)
    y = low.leading(y)
    low.emit(Operation.STORE, y.rows, Place(_OUTPUTS, 0, y.size), sizes=(y.size, y.size))
    if training:
        grad = low.rows(y.size)
        low.emit(Operation.LOAD, Place(_OUT_GRADS, 0, y.size), grad, sizes=(y.size,))
        low.give(y, grad)
        low.backward()
    dtype, features, buffers = row.dtype, y.features, buffers.clone()
    outputs = torch.full((len(x), *features), torch.nan, dtype=dtype)
    input_grads, weight_grads = torch.zeros(x.shape, dtype=dtype), torch.full_like(row, torch.nan)
    out_grads = gradient_like(outputs)
    tensors = {
        _INPUTS: x.to(dtype).contiguous(), _LABELS: torch.zeros(0), _OUTPUTS: outputs, _OUT_GRADS: out_grads,
        _IN_GRADS: input_grads, _VALUES: row, _GRADS: weight_grads, _BUFFERS: buffers,
        _CONSTANTS: low.constants.tensor(dtype), _KEYS: sequences.pass_keys(_MOMENT, _HOST, low.masks, 1),
    }  # fmt: skip
    spaces = Spaces(1, NUM_WORKING + len(tensors))
    for space, tensor in tensors.items():
        spaces.share(space, tensor)
    work = Workload.of_each([low.program()])
    if chunk is not None:
        work.chunk[:] = chunk
    sizes = {"numbers": h.size, "outputs_each": y.size, "keys_each": len(low.masks)}
    Machine(dtype=dtype).run(work, spaces, batch=len(x), **sizes)
    if not training:
        return Outcome(outputs, None, None, buffers)
    return Outcome(outputs, input_grads if floats else None, weight_grads, buffers)


def both_graphs(template: Template, x: Tensor, *, lines: bool = False) -> tuple[fx.Graph, fx.Graph]:
    """Those of a module in training and in evaluation; see `trace`."""
    return trace(template, x, training=True, lines=lines), trace(template, x, training=False, lines=lines)


def disagreement(
    module: Template | nn.Module,
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float = TOLERANCE,
    chunk: int | None = None,
    graphs: tuple[fx.Graph, fx.Graph] | None = None,
    drawn: bool = True,
) -> str | None:
    """How a module differs as instructions from PyTorch on inputs like x [B, ...], or on x itself; None if it does not.

    Compared are outputs in training and evaluation mode, all gradients, and buffers after the pass; `chunk` as in
    `by_instructions`. `graphs`: in training and evaluation, if they are known. `drawn`: floats are drawn at random.

    Raises:
        NoRuleError: something has no rule.
    """
    template = module if isinstance(module, Template) else Template(copy.deepcopy(module))
    if graphs is None:
        graphs = both_graphs(Template(copy.deepcopy(template.module)), x)
    generator = torch.Generator().manual_seed(0)
    row, buffers = (
        layout.pack({name: t.detach() for name, t in tensors}).to(dtype)
        for layout, tensors in (
            (template.parameters, template.module.named_parameters()),
            (template.buffers, template.module.named_buffers()),
        )
    )
    row = row + 0.1 * torch.randn(row.shape, generator=generator, dtype=dtype)
    row[template.parameters.padding_mask] = 0.0
    x = x[torch.arange(max(_EXAMPLES, len(x))) % len(x)]
    if x.is_floating_point():
        x = torch.randn(x.shape, generator=generator, dtype=dtype) if drawn else x.to(dtype)

    for training, graph in zip((True, False), graphs, strict=True):
        try:
            want = by_torch(template, row, buffers, x, training=training)
        except Exception as error:  # any error of the user's code
            if dtype is torch.float64:  # it makes numbers of float32 itself
                x, dtype = x.float() if x.is_floating_point() else x, torch.float32
                return disagreement(
                    template, x, dtype=dtype, tolerance=IN_FLOAT32, chunk=chunk, graphs=graphs, drawn=drawn
                )
            raise NoRuleError(f"PyTorch cannot run it: {in_words(error)[:200]}") from error
        found = by_instructions(graph, row, buffers, x, training=training, chunk=chunk)
        for name, a in vars(found).items():
            b = getattr(want, name)
            if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
                return f"its {name.replace('_', ' ')} have another shape than PyTorch's"
            if a is None or not a.numel():
                continue
            scale = max(1.0, float(b.abs().max()))
            if not torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True):
                mode = "training" if training else "evaluation"
                return f"its {name.replace('_', ' ')} differ from PyTorch's in {mode}"
    return None
