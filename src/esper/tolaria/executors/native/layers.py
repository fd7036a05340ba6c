"""Rules of normalizations, activation functions and pooling, whose kernels are in layers.h."""

from typing import Any

from torch import fx

from esper.tolaria.executors.native.lowering import Lowering, Value, rule_of
from esper.tolaria.executors.native.program import Operation, Rows
from esper.tolaria.executors.native.trace import FUSIONS, RELU, aten, joined, only_user


def batch_norm_relu() -> None:
    """Batch normalization, then ReLU."""


def _fuse(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is aten.batch_norm.default and (relu := only_user(node, RELU)):
            joined(graph, relu, batch_norm_relu, *node.args)
            graph.erase_node(node)


FUSIONS.append(_fuse)


@rule_of(batch_norm_relu)
def _batch_norm_relu(low: Lowering, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
                     momentum: float, eps: float, _: bool) -> Value:  # fmt: skip
    x = low.leading(x)
    channels = x.features[0]
    space = x.size // channels
    w, b, running = low.weight(weight, channels), low.weight(bias, channels), (mean.place, var.place)
    y, sizes = low.like(x), (channels, space)
    if not training:
        low.emit(Operation.BATCH_NORM_FIXED, x.rows, w.place, b.place, *running, y.rows, sizes=sizes, numbers=(eps,))
        return y
    stats = low.a.numbers(channels), low.a.numbers(channels)
    low.a.normalizes(x.features, groups=channels)
    low.emit(Operation.BATCH_NORM, x.rows, w.place, b.place, *running, *stats, y.rows, sizes=sizes,
             numbers=(eps, momentum))  # fmt: skip

    def backward(g: Rows) -> None:
        g = low.own(g)
        low.emit(Operation.BATCH_NORM_BACKWARD, x.rows, w.place, b.place, *stats, low.grad_of(w), low.grad_of(b), g,
                 sizes=sizes)  # fmt: skip
        low.give(x, g)

    return low.result(y, backward, x, w, b)
