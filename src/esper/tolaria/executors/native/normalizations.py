"""Rules of normalizations, and the fusions with what follows them, whose kernels are in normalizations.h."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from esper.tolaria.executors.native.functions import FUNCTIONS, Function, activate, completed
from esper.tolaria.executors.native.lowering import RULES, Dims, Lowering, Value, Weight, rule
from esper.tolaria.executors.native.program import WIDEST, Operation, Place, Rows
from esper.tolaria.executors.native.rules import mul, permute
from esper.tolaria.executors.native.trace import BATCH, FUSIONS, aten, joined, only_user

# -- normalizations ----------------------------------------------------------------------------------------------------

_Simple = tuple[Function, tuple[float, ...]]
_NOTHING: Final[_Simple] = (Function.IDENTITY, ())


def _optional(low: Lowering, x: object, *shape: int) -> Weight | None:
    return None if x is None else low.weight(x, *shape)


def _place(x: Weight | None) -> Place | None:
    return None if x is None else x.place


def _batch_norm(low: Lowering, given: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
                momentum: float, eps: float, _: bool = True, *, simple: _Simple = _NOTHING,
                other: Value | None = None) -> Value:  # fmt: skip
    """f(bn(x) + other)."""
    x, settings = low.value(given), (mean, var, training, momentum, eps)
    if x.axis == 0 and not x.leads:
        return _with_parts(low, x, lambda h: _batch_norm(low, h, weight, bias, *settings, simple=simple))
    x = low.leading(x)
    channels, (function, more) = x.features[0], simple
    if isinstance(weight, Value) or isinstance(bias, Value):
        assert other is None, "fused without computed weights"
        plain = _batch_norm(low, x, None, None, *settings)
        return activate(low, _affine_channels(low, plain, weight, bias), function, *more)
    options: dict[str, Any] = {
        "sizes": (channels, x.size // channels), "flag": function, "numbers": (eps, momentum, *more)
    }  # fmt: skip
    w, b = _optional(low, weight, channels), _optional(low, bias, channels)
    running = _place(_optional(low, mean, channels)), _place(_optional(low, var, channels))
    y, residual = low.like(x), None if other is None else other.rows
    of_x = x.rows, _place(w), _place(b)
    stats: tuple[Place, ...] = ()
    if training:
        stats = low.numbers(channels), low.numbers(channels)
        low.normalizes(x.features, groups=channels)
    operation = Operation.BATCH_NORM if training else Operation.BATCH_NORM_FIXED
    low.emit(operation, *of_x, *running, *stats, y.rows, residual, **options)

    def backward(g: Rows) -> None:
        g = low.own(g)
        apart = other is not None and other.needs
        grads = low.rows(x.size) if apart else g, low.grad_of(w), low.grad_of(b)
        of_y = None if other is None else y.rows
        if training:
            low.emit(Operation.BATCH_NORM_BACKWARD, *of_x, *stats, low.numbers(2 * channels), g, of_y, *grads,
                     **options)  # fmt: skip
        else:
            low.emit(Operation.BATCH_NORM_FIXED_BACKWARD, *of_x, *running, g, of_y, *grads, **options)
        low.give(x, grads[0])
        if other is not None:
            low.give(other, g)

    return low.result(y, backward, x, w, b, other)


rule("batch_norm.default")(_batch_norm)


def _with_parts(low: Lowering, x: Value, normalize: Callable[[Value], Value]) -> Value:
    """Of values whose first axis is that of the examples and of parts of them: the parts become an axis of space."""
    parts = x.dims[0]
    apart = permute(low, low.view(x, (BATCH, parts, *x.shape[1:]), 0), [0, 2, 1, *range(3, len(x.shape) + 1)])
    y = permute(low, normalize(apart), [0, 2, 1, *range(3, len(x.shape) + 1)])
    return low.view(y, x.shape, 0, x.outer)


def _affine_channels(low: Lowering, y: Value, weight: Any, bias: Any, shape: Dims | None = None) -> Value:
    """A weight times y plus a bias, which were computed in the forward pass."""
    full = (-1, *(1 for _ in y.shape[2:])) if shape is None else shape
    view, found = RULES[aten.view.default], y
    if weight is not None:
        found = mul(low, found, view(low, weight, full))
    added: Value = found if bias is None else RULES[aten.add.Tensor](low, found, view(low, bias, full))
    return added


def fused_batch_norm() -> None:
    """Batch normalization, perhaps the addition of a residual, then an activation function."""


@rule(fused_batch_norm)
def _fused_batch_norm(low: Lowering, function: int, numbers: tuple[float, ...], other: Any, *arguments: Any) -> Value:
    (x, weight, bias, *_), simple = arguments, (Function(function), tuple(numbers))
    computed = isinstance(weight, Value) or isinstance(bias, Value)
    alike = isinstance(other, Value) and other.leads and other.shape == x.shape
    if other is None or (alike and not computed):
        return _batch_norm(low, *arguments, simple=simple, other=other)
    return activate(low, RULES[aten.add.Tensor](low, _batch_norm(low, *arguments), other), *_spread(simple))


def _spread(simple: _Simple) -> tuple[Any, ...]:
    return (simple[0], *simple[1])


def _normalize(low: Lowering, x: Value, groups: Dims, weight: Any, bias: Any, shape: Dims, eps: float, *,
               centered: bool = True, simple: _Simple = _NOTHING, gamma: Weight | None = None) -> Value:  # fmt: skip
    """Factor gamma times f((x - mean) / deviation * weight + bias); `groups` as in the header, weights have a shape."""
    if isinstance(weight, Value) or isinstance(bias, Value):
        plain = _normalize(low, x, groups, None, None, shape, eps, centered=centered)
        moved = _affine_channels(low, plain, weight, bias, None if groups[3] else shape)
        found = activate(low, moved, *_spread(simple))
        return found if gamma is None else mul(low, found, gamma)
    w, b = _optional(low, weight, *shape), _optional(low, bias, *shape)
    function, numbers = simple
    numbers = (eps, 0.0, *numbers)
    weights = max(groups[3], 1) * groups[1]
    y, mean, rstd = low.like(x), low.rows(groups[0]) if centered else None, low.rows(groups[0])
    of_x = x.rows, _place(w), _place(b), _place(gamma), mean, rstd
    low.emit(Operation.GROUP_NORM, *of_x, y.rows, sizes=groups, flag=function, numbers=numbers)
    if not low.trains(x, w, b, gamma):
        return y
    after = *(low.grad_of(of) for of in (w, b, gamma)), low.scratch(weights * 3 * WIDEST)
    options: dict[str, Any] = {"sizes": groups, "flag": function, "numbers": numbers}
    return low.leaf(y, low.in_place(x, Operation.GROUP_NORM_BACKWARD, *of_x, after=after, **options))


def _group_norm(low: Lowering, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
                _: bool = True, **after: Any) -> Value:  # fmt: skip
    x = low.value(x)
    if x.axis != 0:
        raise low.refuse("features whose first axis is not that of the examples")
    channels = x.shape[1]
    if x.leads:
        low.normalizes(x.features, groups=groups)
    sizes = x.dims[0] * groups, channels // groups, x.size // (x.dims[0] * channels), groups
    return _normalize(low, x, sizes, weight, bias, (channels,), eps, **after)


def _last(low: Lowering, x: Any, shape: Sequence[int]) -> tuple[Value, Dims]:
    """A value that is normalized over its last axes, and its groups."""
    x = low.value(x)
    if x.axis is not None and x.axis >= len(x.shape) - len(shape):
        raise low.refuse("a normalization over the examples of a batch")
    count = math.prod(shape)
    return x, (x.size // count, count, 1, 0)


def _layer_norm(low: Lowering, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
                _: bool = True, **after: Any) -> Value:  # fmt: skip
    x, groups = _last(low, x, shape)
    return _normalize(low, x, groups, weight, bias, tuple(shape), eps, **after)


def _rms_norm(low: Lowering, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None,
              **after: Any) -> Value:  # fmt: skip
    x, groups = _last(low, x, shape)
    smallest = -1.0 if eps is None else eps  # that of the type of the numbers, which the kernel knows
    return _normalize(low, x, groups, weight, None, tuple(shape), smallest, centered=False, **after)


def _instance_norm(low: Lowering, x: Any, weight: Any, bias: Any, mean: Any, var: Any, by_input: bool,
                   momentum: float, eps: float, _: bool, **after: Any) -> Value:  # fmt: skip
    if mean is not None or var is not None or not by_input:
        raise low.refuse("running statistics of single examples")
    return _group_norm(low, x, low.value(x).shape[1], weight, bias, eps, **after)


_NORMALIZATIONS: Final[dict[Any, Callable[..., Value]]] = {
    aten.group_norm.default: _group_norm, aten.layer_norm.default: _layer_norm, aten.rms_norm.default: _rms_norm,
    aten.instance_norm.default: _instance_norm,
}  # fmt: skip
for _target, _found in _NORMALIZATIONS.items():
    rule(_target)(_found)


def fused_normalization() -> None:
    """Normalization of each example, perhaps an activation function, perhaps a factor for each channel."""


@rule(fused_normalization)
def _fused_normalization(low: Lowering, target: Any, function: int, numbers: tuple[float, ...], gamma: Any,
                         *arguments: Any) -> Value:  # fmt: skip
    normalize, simple = _NORMALIZATIONS[target], (Function(function), tuple(numbers))
    if gamma is None:
        return normalize(low, *arguments, simple=simple)
    if isinstance(gamma, Weight):
        return normalize(low, *arguments, simple=simple, gamma=gamma)
    return mul(low, normalize(low, *arguments, simple=simple), gamma)


# -- fusions -----------------------------------------------------------------------------------------------------------

_SIMPLE: Final[dict[Any, _Simple]] = {
    getattr(aten, name).default: FUNCTIONS[function]
    for function in ("relu", "hardtanh", "silu", "hardswish")
    for name in (function, f"{function}_")
}


def _simple_after(node: fx.Node) -> tuple[fx.Node, _Simple] | None:
    """The activation function that alone reads a node, if it can be part of a normalization."""
    found = only_user(node, tuple(_SIMPLE))
    if found is None or found.kwargs:
        return None
    function, defaults = _SIMPLE[found.target]
    given: tuple[Any, ...] = found.args[1:]
    return found, (function, completed(given, defaults))


def _shape(node: object) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node, fx.Node) and "val" in node.meta else ()


def _keeps(first: fx.Node, last: fx.Node) -> bool:
    """Whether `first` gives the same where `last` is: nothing in between edits what was there before."""
    node = first.next
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        same = node.target is first.target is aten.batch_norm.default and node.args[3] is first.args[3]
        if node.target is torch._C._set_grad_enabled or (same and node.args[3] is not None):
            return False
        if schema is not None and schema.is_mutable:
            root = node.args[0]
            while isinstance(root, fx.Node) and root > first and root.all_input_nodes and _shares(root):
                root = root.args[0]
            if not isinstance(root, fx.Node) or root < first:
                return False
        node = node.next
    return True


def _shares(node: fx.Node) -> bool:
    """Whether a node may be the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _fuse_batch_norms(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not aten.batch_norm.default or node.kwargs or len(node.args) != 9:
            continue
        before, other = node, None
        added = only_user(node, (aten.add.Tensor, aten.add_.Tensor))
        if added is not None and not added.kwargs and len(added.all_input_nodes) == 2:
            a, b = added.args[:2]
            first = a is node  # else the addition may edit the residual
            if (first or added.target is aten.add.Tensor) and _shape(a) == _shape(b):
                before, other = added, b if first else a
        after = _simple_after(before)
        if after is None or (other is not None and after[1][0] > Function.HARDTANH):
            before, other = node, None
            after = _simple_after(node)
        if after is None or not _keeps(node, after[0]):
            continue
        function, numbers = after[1]
        joined(graph, after[0], fused_batch_norm, int(function), numbers, other, *node.args)
        for gone in dict.fromkeys((before, node)):
            graph.erase_node(gone)


def _fuse_normalizations(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in _NORMALIZATIONS or node.kwargs:
            continue
        chain, (function, numbers), gamma = [node], _NOTHING, None
        after = _simple_after(node)
        if after is not None:
            chain.append(after[0])
            function, numbers = after[1]
        times = only_user(chain[-1], (aten.mul.Tensor,))
        if times is not None and len(times.all_input_nodes) == 2:
            factor = times.args[1] if times.args[0] is chain[-1] else times.args[0]
            if _shape(factor) == _shape_of_factor(node):
                chain.append(times)
                gamma = factor
        if len(chain) == 1 or not _keeps(node, chain[-1]):
            continue
        joined(graph, chain.pop(), fused_normalization, node.target, int(function), numbers, gamma, *node.args)
        for gone in reversed(chain):
            graph.erase_node(gone)


def _shape_of_factor(node: fx.Node) -> tuple[int, ...]:
    """Of one factor for each weight of a normalization."""
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        shape = node.args[1]
        assert isinstance(shape, Sequence)
        return tuple(int(size) for size in shape if isinstance(size, int))
    _, channels, *space = _shape(node)
    return (channels, *(1 for _ in space))


FUSIONS.extend((_fuse_batch_norms, _fuse_normalizations))
