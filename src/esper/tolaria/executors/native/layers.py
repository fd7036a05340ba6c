"""Rules of normalizations, activation functions and pooling, whose kernels are in layers.h."""

from typing import Any

from torch import fx

from esper.tolaria.executors.native.lowering import Lowering, Value, rule, rule_of
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


def _act(kind, *names):
    @rule(*names)
    def f(low, x, inplace=False):
        x = low.value(x); y = low.like(x)
        low.emit(Operation.ACTIVATE, x.rows, y.rows, sizes=(x.size,), flag=kind)
        def backward(g):
            g = low.own(g)
            low.emit(Operation.ACTIVATE_BACKWARD, (x if kind == 1 else y).rows, g, sizes=(x.size,), flag=kind)
            low.give(x, g)
        return low.result(y, backward, x)
_act(0, "relu.default", "relu_.default"); _act(1, "silu.default"); _act(2, "tanh.default"); _act(3, "sigmoid.default")

@rule("group_norm.default")
def gn(low, x, groups, weight=None, bias=None, eps=1e-5, *a):
    x = low.leading(x); c = x.features[0]
    w, b = low.weight(weight, c), low.weight(bias, c)
    low.a.normalizes(x.features, groups=groups)
    y, sizes = low.like(x), (c, x.size // c, groups)
    st = low.rows(groups), low.rows(groups)
    ops = (x.rows, w.place, b.place, None, *st)
    low.emit(Operation.GROUP_NORM, *ops, y.rows, sizes=sizes, numbers=(eps,))
    def backward(g):
        g = low.own(g)
        low.emit(Operation.GROUP_NORM_BACKWARD, *ops, g, low.grad_of(w) or low.a.numbers(c), low.grad_of(b) or low.a.numbers(c), None, sizes=sizes)
        low.give(x, g)
    return low.result(y, backward, x, w, b)

@rule("max_pool2d.default")
def mp(low, x, k, *a):
    x = low.leading(x); c,h,w = x.features
    y = low.make(c, h//2, w//2); win = low.rows(y.size)
    low.emit(Operation.MAX_POOL, x.rows, y.rows, win, sizes=x.features)
    return low.result(y, lambda g: low.into(x, lambda r: low.emit(Operation.MAX_POOL_BACKWARD, win, g, r, sizes=x.features)), x)
