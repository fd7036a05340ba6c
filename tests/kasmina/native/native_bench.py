"""One rule of the native executor in float64, beside the module that it stands for."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.native.assembler import NUM_WORKING, Assembler, Operation, Place
from esper.kasmina.native.compiled import stride_of
from esper.kasmina.native.machine import Batchwork, Machine
from esper.kasmina.native.rules import Features, Weights
from esper.kasmina.native.seeds import RULES
from esper.kasmina.stacking import buffer_layout, parameter_layout

DOUBLE = torch.float64
IMAGES, VALUES, SLOPES, BUFFERS, ONES, INTO, OUT, BACK = range(NUM_WORKING, NUM_WORKING + 8)


def spread(x: Tensor) -> Tensor:
    """[B, ...] -> rows of lanes [rows, stride]."""
    rows = torch.zeros(x[0].numel(), stride_of(len(x)), dtype=DOUBLE)
    rows[:, : len(x)] = x.flatten(1).t()
    return rows


def collect(rows: Tensor, batch: int, *shape: int) -> Tensor:
    """The way back; what lies beyond the lanes must be zero."""
    assert not rows[:, batch:].any()
    return rows[:, :batch].t().reshape(batch, *shape)


class Answer:
    """Output, gradient of the input (None: not asked for) and gradients of the weights by name."""

    def __init__(self, y: Tensor, of_input: Tensor | None, of_weights: dict[str, Tensor], buffers: dict[str, Tensor]):
        self.y, self.of_input, self.of_weights, self.buffers = y, of_input, of_weights, buffers


def run_rule(module: nn.Module, x: Tensor, slope: Tensor, *, wanted: bool, learns: bool = True, rule=None) -> Answer:
    """Forward of `module` on x [B, C, H, W], then backward from `slope`, as instructions.

    With `learns` False there is no way back.
    """
    batch, channels, height, width = x.shape
    skeleton = copy.deepcopy(module).float()
    layout, kept = parameter_layout(skeleton), buffer_layout(skeleton)
    values = layout.pack({name: p.detach() for name, p in module.named_parameters()})
    buffers = kept.pack(dict(module.named_buffers())) if kept.tensors else torch.zeros(1, dtype=DOUBLE)
    slopes = torch.full_like(values, torch.nan)
    a = Assembler(learns=learns)
    h = Features(a.rows(x[0].numel()), channels, height, width)
    a.emit(Operation.TRANSPOSE, Place(IMAGES, 0), h.rows, sizes=(h.rows.size,))
    weights = Weights(layout, VALUES, SLOPES if learns else None, kept, BUFFERS)
    y, back = (rule or RULES[type(module)])(a, module, weights, h)
    ones = Place(ONES, 0)  # a factor of one copies rows from one space to another
    a.emit(Operation.SCALE, ones, y.rows, Place(OUT, 0), sizes=(y.rows.size, 1))
    out = torch.zeros(y.rows.size, stride_of(batch), dtype=DOUBLE)
    of_input = torch.zeros(h.rows.size, stride_of(batch), dtype=DOUBLE)
    if learns:
        g = a.rows(y.rows.size)
        a.emit(Operation.SCALE, ones, Place(INTO, 0), g, sizes=(g.size, 1))
        into = back(g, wanted)
        assert (into is not None) == wanted
        if into is not None:
            a.emit(Operation.SCALE, ones, into, Place(BACK, 0), sizes=(into.size, 1))
    spaces = [x.contiguous(), values, slopes, buffers, torch.ones(2**16, dtype=DOUBLE), spread(slope), out, of_input]
    base = np.array([[0] * NUM_WORKING + [tensor.data_ptr() for tensor in spaces]], dtype=np.int64)
    Machine(dtype=DOUBLE).run(Batchwork.of([a.program()], np.zeros(1, dtype=np.int64)), base, batch)
    return Answer(
        collect(out, batch, y.channels, y.height, y.width),
        collect(of_input, batch, channels, height, width) if wanted else None,
        layout.unpack(slopes),
        kept.unpack(buffers) if kept.tensors else {},
    )


def by_torch(module: nn.Module, x: Tensor, slope: Tensor) -> Answer:
    """The same by PyTorch."""
    x = x.clone().requires_grad_()
    y = module(x)
    names = [name for name, _ in module.named_parameters()]
    of_input, *of_weights = torch.autograd.grad(y, [x, *module.parameters()], slope.view_as(y), materialize_grads=True)
    return Answer(y.detach(), of_input, dict(zip(names, of_weights, strict=True)), dict(module.named_buffers()))


def assert_same(ours: Answer, theirs: Answer) -> None:
    """To 1e-9, in everything that was asked for."""
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(ours.y, theirs.y.view_as(ours.y), **close)
    if ours.of_input is not None:
        torch.testing.assert_close(ours.of_input, theirs.of_input, **close)
    assert set(ours.of_weights) == set(theirs.of_weights)
    for name, slope in theirs.of_weights.items():
        torch.testing.assert_close(ours.of_weights[name], slope, **close, msg=lambda text, n=name: f"{n}: {text}")
    for name, value in ours.buffers.items():
        torch.testing.assert_close(value, theirs.buffers[name], **close)


def random_module(module: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, with weights that hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) * 0.5 + 0.1)
    return module


def random_features(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
