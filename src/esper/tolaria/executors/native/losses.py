"""Losses as instructions: cross-entropy by its kernel, any other one by the graph of its objective, as modules are.

    outputs of a host, targets --graph of `Objective.scores`--> rows of losses, scores and weights --> sums over a batch

Targets reach a program as numbers of 8 bytes of each example, which C++ gathers as it does labels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction

from esper.kasmina.parameters.layout import Template
from esper.leyline.errors import ConfigError, in_words
from esper.leyline.messages import Objective
from esper.leyline.random import seeded_generators
from esper.tasks.losses import PADDING, Classification, NextToken, WithMetric
from esper.tolaria.executors.native.compare import disagreement
from esper.tolaria.executors.native.functions import LARGEST, SMALLEST, reduce
from esper.tolaria.executors.native.lowering import Dims, Lowering, Value, Weight, rule, run_graph
from esper.tolaria.executors.native.program import Operation, Place, Space
from esper.tolaria.executors.native.rules import cat, mul, neg, reshaped, squeeze, total, unsqueeze
from esper.tolaria.executors.native.sequences import EXACT, compare, select
from esper.tolaria.executors.native.trace import BATCH, NoRuleError, aten, trace

_EXAMPLES: Final = 64
"""Most examples whose targets an objective is tried on."""
_TRIED_AGAIN: Final = 8
"""Of these, in each pass."""


@final
@dataclass(frozen=True)
class CrossEntropy:
    """That of classes or tokens, by its kernel. `smoothing` as in `Classification`.

    `pads`: examples whose labels are all -1 do not count, so that they may fill a batch.
    """

    smoothing: float
    pads: ClassVar[bool] = True

    def stored(self, y: Tensor) -> Tensor:
        """Targets as LABELS holds them, int64."""
        return y.long().contiguous()

    def write(self, low: Lowering, outputs: Sequence[Value]) -> None:
        """Add the scores of the outputs of each state to TOTALS; in training, give the outputs their gradient."""
        for k, logits in enumerate(outputs):
            *positions, classes = logits.features
            count = math.prod(positions)
            grad = low.rows(logits.size) if logits.needs else None
            operands = logits.rows, Place(Space.LABELS, 0, count), Place(Space.TOTALS, 3 * k, 3), grad, low.rows(3)
            low.emit(Operation.CROSS_ENTROPY, *operands, sizes=(classes, count), numbers=(self.smoothing,))
            if grad is not None:
                low.give(logits, grad)


@final
@dataclass(frozen=True, eq=False)
class TracedLoss:
    """That of a graph: rows of outputs and of targets --> loss, score and weight.

    Attributes:
        numbers: of the targets of an example. whole: they are integers.
        counted: each that is not `PADDING` counts 1; else an example does.
        module, tried: what was traced, and some of its inputs with the scores.
        pads: as in `CrossEntropy`.
    """

    graph: fx.Graph = field(repr=False)
    numbers: int
    whole: bool
    counted: bool
    module: "_OfRows" = field(repr=False)
    tried: tuple[Tensor, Tensor] = field(repr=False)
    pads: ClassVar[bool] = False

    def holds(self) -> bool:
        """Whether the objective still gives what it gave; a function of the user's may read what changes."""
        x, scores = self.tried
        with torch.no_grad():
            return torch.allclose(self.module(x), scores, rtol=1e-6, equal_nan=True)

    def stored(self, y: Tensor) -> Tensor:
        """Targets as LABELS holds them, int64; floats are the bits of their double precision."""
        return y.long().contiguous() if self.whole else y.double().contiguous().view(torch.int64)

    def write(self, low: Lowering, outputs: Sequence[Value]) -> None:
        """As `CrossEntropy.write`."""
        targets, nothing = low.make(self.numbers), Weight(Place(Space.CONSTANTS, 0, 0), (0,))
        place = Place(Space.LABELS, 0, self.numbers)
        low.emit(Operation.LOAD_TARGETS, place, targets.rows, sizes=(self.numbers,), flag=self.whole)
        for k, value in enumerate(outputs):
            flat = low.value(reshaped(low, value, (BATCH, value.size)))
            (scores,) = run_graph(low, self.graph, nothing, nothing, cat(low, [flat, targets], 1))
            grad = low.rows(scores.size) if scores.needs else None
            low.emit(Operation.ADD_SCORES, scores.rows, Place(Space.TOTALS, 3 * k, 3), grad, flag=self.counted)
            if grad is not None:
                low.give(scores, grad)


Loss = CrossEntropy | TracedLoss


def loss_of(objective: Objective, outputs: Dims, y: Tensor) -> Loss:
    """The loss for outputs [B, *outputs] and the targets y [n, ...] of a split.

    Raises:
        NoRuleError: PyTorch must compute it.
    """
    if isinstance(objective, Classification | NextToken) and len(outputs) == 1 + isinstance(objective, NextToken):
        return CrossEntropy(objective.label_smoothing)
    if y.dtype not in (torch.float32, torch.int64):
        raise NoRuleError(f"targets of {y.dtype}")
    ends: tuple[int, ...] = () if y.dtype is torch.float32 else (int(y.min()), int(y.max()))
    if any(abs(end) > EXACT for end in ends):
        raise NoRuleError(f"targets from {ends[0]} to {ends[1]}")
    some = y[:: -(-len(y) // _EXAMPLES)]
    return _traced(objective, outputs, torch.cat((some, *(some[:1] * 0 + end for end in ends))))


class _OfRows(nn.Module):
    """An objective of rows [B, numbers of the outputs and of the targets], as loss, score and weight [B, 3]."""

    def __init__(self, objective: Objective, outputs: Dims, y: Tensor) -> None:
        super().__init__()
        self.scores, self.outputs = objective.scores, outputs
        self.targets, self.whole = y.shape[1:], y.dtype is torch.int64

    def forward(self, x: Tensor) -> Tensor:
        count = math.prod(self.outputs)
        y = x[:, count:].reshape(-1, *self.targets)
        y = torch.ops.esper.whole(y) if self.whole else y
        return torch.stack(self.scores(x[:, :count].reshape(-1, *self.outputs), y), dim=1)


def _traced(objective: Objective, outputs: Dims, y: Tensor) -> TracedLoss:
    """The graph of an objective, compared with PyTorch on the targets y [n, ...] and on random outputs.

    Raises:
        NoRuleError: an operation has no rule, its results differ, or they depend on more than outputs and targets.
    """
    inner = objective.objective if isinstance(objective, WithMetric) else objective
    counted = isinstance(inner, Classification | NextToken)
    if counted and (y.is_floating_point() or int(y.min()) < PADDING):
        raise NoRuleError("targets that are no classes")
    flat = y.reshape(len(y), -1).float()
    made = torch.randn(len(y), math.prod(outputs), generator=torch.Generator().manual_seed(0))
    if made.shape == flat.shape:
        made[::2] += flat[::2]  # small errors beside those of the size of the targets
    x, module = torch.cat((made, flat), dim=1), _OfRows(objective, outputs, y)
    try:
        with seeded_generators(0) as used, torch.enable_grad():
            scores = module(x.clone().requires_grad_())
            template = Template(module, global_rng=used())
    except (ConfigError, RuntimeError, ValueError, IndexError, TypeError) as error:
        raise NoRuleError(f"PyTorch cannot compute it: {in_words(error)[:200]}") from error
    if not _derived(scores):
        raise NoRuleError("it has a backward pass of its own")
    with torch.enable_grad():
        graph = trace(template, x, training=True)
        (stacked,) = graph.output_node().args
        if not counted and stacked.args[0][2].target is not aten.ones_like.default:  # type: ignore[union-attr, index]
            raise NoRuleError("examples that count differently")
        if reason := disagreement(template, x, graphs=(graph, graph), drawn=False):
            raise NoRuleError(reason)
    tried = x[:_TRIED_AGAIN]
    with torch.no_grad():
        return TracedLoss(graph, flat.shape[1], module.whole, counted, module, (tried, module(tried)))


def _derived(x: Tensor) -> bool:
    """Whether the gradient of a tensor is that of PyTorch's own operations, which alone is traced."""
    seen, todo = set[object](), [x.grad_fn]
    while todo:
        node = todo.pop()
        if isinstance(node, BackwardCFunction):
            return False
        if node is not None and node not in seen:
            seen.add(node)
            todo += [source for source, _ in node.next_functions]
    return True


# -- rules -------------------------------------------------------------------------------------------------------------


def _picked(low: Lowering, x: Value, index: Value, dim: int) -> Value:
    """The numbers of `x` at these places along an axis, which `index` has with the size 1; NaN where there is none."""
    places = torch.arange(x.shape[dim]).reshape(-1, *(1,) * (len(x.shape) - 1 - dim)).float()
    here = compare(low, index, places, 0)
    found = total(low, select(low, here, x, 0.0), dim, True, mean=False)
    return select(low, reduce(low, here, dim, True, kind=LARGEST), found, math.nan)


@rule("gather.default")
def gather(low: Lowering, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Value:
    """One number along an axis."""
    x, index, dim = low.value(x), low.value(index), dim % len(x.shape)
    if sparse_grad or dim == x.axis or index.shape != (*x.shape[:dim], 1, *x.shape[dim + 1 :]):
        raise low.refuse(f"numbers of {x.shape} at {index.shape}")
    return _picked(low, x, index, dim)


@rule("nll_loss_nd.default")
def likelihood(low: Lowering, logs: Any, classes: Any, weight: Any = None, reduction: int = 1,
               ignored: int = -100) -> Value:  # fmt: skip
    """Minus the logarithm [B, C, ...] of each class [B, ...]."""
    logs, classes = low.value(logs), low.value(classes)
    if reduction != 0 or len(logs.shape) < 2 or logs.axis != 0:
        raise low.refuse(f"a mean over examples, or logarithms {logs.shape}")
    if weight is not None:
        logs = mul(low, logs, reshaped(low, low.value(weight), (logs.shape[1], *(1,) * (len(logs.shape) - 2))))
    found = neg(low, squeeze(low, _picked(low, logs, low.value(unsqueeze(low, classes, 1)), 1), 1))
    return select(low, compare(low, classes, ignored, 0), 0.0, found)


@rule("argmax.default")
def argmax(low: Lowering, x: Any, dim: int | None = None, keepdim: bool = False) -> Value:
    """Where the first of the largest numbers along an axis is; beyond the axis if one of them is NaN."""
    x = low.value(x)
    if dim is None or dim % len(x.shape) == x.axis:
        raise low.refuse("a place among several examples")
    dim = dim % len(x.shape)
    places = torch.arange(x.shape[dim]).reshape(-1, *(1,) * (len(x.shape) - 1 - dim)).float()
    here = compare(low, x, reduce(low, x, dim, True, kind=LARGEST), 0)
    return replace(reduce(low, select(low, here, places, x.shape[dim]), dim, keepdim, kind=SMALLEST), needs=False)
