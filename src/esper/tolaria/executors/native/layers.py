"""Rules of normalizations, activation functions, pooling, padding and resizing, whose kernels are in layers.h."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Final

import torch
from torch import fx

from esper.tolaria.executors.native.lowering import (
    RULES,
    Dims,
    Lowering,
    Value,
    Weight,
    loop,
    rule,
    rule_of,
    strides_of,
)
from esper.tolaria.executors.native.program import Operation, Place, Rows
from esper.tolaria.executors.native.rules import (
    affine,
    broadcast,
    cat,
    mul,
    permute,
    rearranged,
    reshaped,
    slice_,
    total,
)
from esper.tolaria.executors.native.trace import BATCH, FUSIONS, aten, joined, only_user

Function = IntEnum(
    "Function",
    "IDENTITY RELU HARDTANH SILU HARDSWISH LEAKY_RELU ELU GELU GELU_TANH MISH HARDSIGMOID SIGMOID TANH SOFTPLUS EXP "
    "EXPM1 LOG LOG1P SQRT RSQRT RECIPROCAL ABS SIGN SQUARE CUBE POWER CLAMP SIN COS ERF SOFTSHRINK HARDSHRINK "
    "THRESHOLD ROOT",
    start=0,
)
"""As in layers.h. The first five can be part of a normalization."""

_FROM_OUTPUT: Final = {
    Function.RELU, Function.HARDTANH, Function.SIGMOID, Function.TANH, Function.EXP, Function.EXPM1, Function.SQRT,
    Function.RSQRT, Function.RECIPROCAL, Function.ROOT,
}  # fmt: skip
"""Functions whose slope layers.h computes from their value; that of the others comes from their argument."""

# -- activation functions ----------------------------------------------------------------------------------------------


def activate(low: Lowering, x: object, function: Function, *numbers: float) -> Value:
    """f(x)."""
    x = low.value(x)
    if function is Function.IDENTITY:
        return x
    y = low.like(x)
    low.emit(Operation.ACTIVATE, x.rows, y.rows, sizes=(x.size,), flag=function, numbers=numbers)
    # a leaky ReLU keeps the sign
    from_output = function in _FROM_OUTPUT or (function is Function.LEAKY_RELU and numbers[0] > 0.0)

    def backward(g: Rows) -> None:
        g, saved = low.own(g), y if from_output else x
        low.emit(Operation.ACTIVATE_BACKWARD, saved.rows, g, sizes=(x.size,), flag=function, numbers=numbers)
        low.give(x, g)

    return low.result(y, backward, x)


def _register(names: str, function: Function) -> None:
    """Functions without further arguments."""

    def plain(low: Lowering, x: Any) -> Value:
        return activate(low, x, function)

    for name in names.split():
        rule(f"{name}.default", f"{name}_.default")(plain)


for _names, _function in {
    "relu": Function.RELU, "silu": Function.SILU, "hardswish": Function.HARDSWISH, "mish": Function.MISH,
    "hardsigmoid": Function.HARDSIGMOID, "sigmoid": Function.SIGMOID, "tanh": Function.TANH, "exp": Function.EXP,
    "expm1": Function.EXPM1, "log": Function.LOG, "log1p": Function.LOG1P, "sqrt": Function.SQRT,
    "rsqrt": Function.RSQRT, "reciprocal": Function.RECIPROCAL, "abs": Function.ABS, "sign": Function.SIGN,
    "sgn": Function.SIGN, "square": Function.SQUARE, "sin": Function.SIN, "cos": Function.COS, "erf": Function.ERF,
}.items():  # fmt: skip
    _register(_names, _function)


@rule("relu6.default", "relu6_.default")
def relu6(low: Lowering, x: Any) -> Value:
    return activate(low, x, Function.HARDTANH, 0.0, 6.0)


@rule("hardtanh.default", "hardtanh_.default")
def hardtanh(low: Lowering, x: Any, least: float = -1.0, most: float = 1.0) -> Value:
    return activate(low, x, Function.HARDTANH, float(least), float(most))


@rule("leaky_relu.default", "leaky_relu_.default")
def leaky_relu(low: Lowering, x: Any, slope: float = 0.01) -> Value:
    return activate(low, x, Function.LEAKY_RELU, float(slope))


@rule("elu.default", "elu_.default")
def elu(low: Lowering, x: Any, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Value:
    return activate(low, x, Function.ELU, float(alpha) * float(scale), float(scale), float(inner))


@rule("selu.default", "selu_.default")
def selu(low: Lowering, x: Any) -> Value:
    return elu(low, x, 1.6732632423543772, 1.0507009873554805)


@rule("celu.default", "celu_.default")
def celu(low: Lowering, x: Any, alpha: float = 1.0) -> Value:
    return elu(low, x, alpha, 1.0, 1.0 / float(alpha))


@rule("gelu.default", "gelu_.default")
def gelu(low: Lowering, x: Any, *, approximate: str = "none") -> Value:
    return activate(low, x, Function.GELU_TANH if approximate == "tanh" else Function.GELU)


@rule("softplus.default")
def softplus(low: Lowering, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Value:
    return activate(low, x, Function.SOFTPLUS, float(beta), float(threshold))


@rule("log_sigmoid.default")
def log_sigmoid(low: Lowering, x: Any) -> Value:
    return affine(low, softplus(low, affine(low, low.value(x), -1.0, 0.0), 1.0, math.inf), -1.0, 0.0)


@rule("softshrink.default")
def softshrink(low: Lowering, x: Any, width: float = 0.5) -> Value:
    return activate(low, x, Function.SOFTSHRINK, float(width))


@rule("hardshrink.default")
def hardshrink(low: Lowering, x: Any, width: float = 0.5) -> Value:
    return activate(low, x, Function.HARDSHRINK, float(width))


@rule("threshold.default", "threshold_.default")
def threshold(low: Lowering, x: Any, most: float, value: float) -> Value:
    return activate(low, x, Function.THRESHOLD, float(most), float(value))


@rule("clamp.default", "clamp_.default", "clip.default")
def clamp(low: Lowering, x: Any, least: float | None = None, most: float | None = None) -> Value:
    bounds = -math.inf if least is None else float(least), math.inf if most is None else float(most)
    if bounds[0] > bounds[1]:
        raise low.refuse("a lower bound above the upper one")
    return activate(low, x, Function.CLAMP, *bounds)


@rule("clamp_min.default", "clamp_min_.default")
def clamp_min(low: Lowering, x: Any, least: float) -> Value:
    return clamp(low, x, least)


@rule("clamp_max.default", "clamp_max_.default")
def clamp_max(low: Lowering, x: Any, most: float) -> Value:
    return clamp(low, x, None, most)


@rule("pow.Tensor_Scalar", "pow_.Scalar")
def power(low: Lowering, x: Any, exponent: float) -> Value:
    known = {
        1.0: Function.IDENTITY, 2.0: Function.SQUARE, 3.0: Function.CUBE, 0.5: Function.SQRT, -0.5: Function.RSQRT,
        -1.0: Function.RECIPROCAL,
    }  # fmt: skip
    if exponent == 0:
        raise low.refuse("an exponent that is 0")
    if exponent in known:
        return activate(low, x, known[float(exponent)])
    if exponent == 4:
        return power(low, power(low, x, 2), 2)
    sign = math.nan if exponent % 1 else -1.0 if exponent % 2 else 1.0
    return activate(low, x, Function.POWER, float(exponent), sign)


@rule("pow.Scalar")
def power_of_number(low: Lowering, base: float, x: Any) -> Value:
    if base <= 0:
        raise low.refuse("powers of a number that is not positive")
    return activate(low, affine(low, low.value(x), math.log(base), 0.0), Function.EXP)


_LOGARITHMS = {"log2": 1.0 / math.log(2.0), "log10": 1.0 / math.log(10.0)}


def _register_logarithm(name: str, factor: float) -> None:
    def logarithm(low: Lowering, x: Any) -> Value:
        return affine(low, activate(low, x, Function.LOG), factor, 0.0)

    rule(f"{name}.default")(logarithm)


for _name, _factor in _LOGARITHMS.items():
    _register_logarithm(_name, _factor)


@rule("exp2.default", "special_exp2.default")
def exp2(low: Lowering, x: Any) -> Value:
    return activate(low, affine(low, low.value(x), math.log(2.0), 0.0), Function.EXP)


@rule("rrelu.default")
def rrelu(low: Lowering, x: Any, least: float = 1 / 8, most: float = 1 / 3, training: bool = False) -> Value:
    if training:
        raise low.refuse("random slopes")
    return leaky_relu(low, x, (least + most) / 2)


@rule("glu.default")
def glu(low: Lowering, x: Any, dim: int = -1) -> Value:
    dim = dim % len(x.shape)
    half = x.shape[dim] // 2
    return mul(low, slice_(low, x, dim, 0, half), activate(low, slice_(low, x, dim, half, 2 * half), Function.SIGMOID))


@rule("prelu.default")
def prelu(low: Lowering, x: Any, weight: Any) -> Value:
    (count,) = weight.shape
    w = low.weight(weight, count)
    x = low.value(x) if count == 1 else low.leading(x)
    if count > 1 and x.features[0] != count:
        raise low.refuse(f"{count} slopes for {x.features[0]} channels")
    y, sizes = low.like(x), (count, x.size // count)
    low.emit(Operation.PRELU, x.rows, w.place, y.rows, sizes=sizes)

    def backward(g: Rows) -> None:
        g = low.own(g)
        low.emit(Operation.PRELU_BACKWARD, x.rows, w.place, g, low.grad_of(w), sizes=sizes)
        low.give(x, g)

    return low.result(y, backward, x, w)


def _softmax(low: Lowering, x: Any, dim: int, *, log: bool) -> Value:
    x = low.value(x)
    dim = dim % len(x.shape)
    if dim == x.axis:
        raise low.refuse("a softmax over the examples of a batch")
    y, sizes = low.like(x), (math.prod(x.dims[:dim]), x.dims[dim], math.prod(x.dims[dim + 1 :]))
    low.emit(Operation.SOFTMAX, x.rows, y.rows, sizes=sizes, flag=log)

    def backward(g: Rows) -> None:
        g = low.own(g)
        low.emit(Operation.SOFTMAX_BACKWARD, y.rows, g, sizes=sizes, flag=log)
        low.give(x, g)

    return low.result(y, backward, x)


@rule("softmax.int", "_softmax.default")
def softmax(low: Lowering, x: Any, dim: int, dtype: Any = None) -> Value:
    if dtype not in (None, False, torch.float32):
        raise low.refuse(f"a softmax in {dtype}")
    return _softmax(low, x, dim, log=False)


@rule("log_softmax.int", "_log_softmax.default")
def log_softmax(low: Lowering, x: Any, dim: int, dtype: Any = None) -> Value:
    if dtype not in (None, False, torch.float32):
        raise low.refuse(f"a softmax in {dtype}")
    return _softmax(low, x, dim, log=True)


# -- normalizations ----------------------------------------------------------------------------------------------------

_Simple = tuple[Function, tuple[float, ...]]
_NOTHING: Final[_Simple] = (Function.IDENTITY, ())


def _optional(low: Lowering, x: object, *shape: int) -> Weight | None:
    return None if x is None else low.weight(x, *shape)


def _place(x: Weight | None) -> Place | None:
    return None if x is None else x.place


def _batch_norm(low: Lowering, given: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
                eps: float, simple: _Simple = _NOTHING, other: Value | None = None) -> Value:  # fmt: skip
    """f(bn(x) + other)."""
    x = low.value(given)
    if x.axis == 0 and not x.leads:
        return _with_parts(
            low, x, lambda h: _batch_norm(low, h, weight, bias, mean, var, training, momentum, eps, simple)
        )
    x = low.leading(x)
    channels, (function, numbers) = x.features[0], simple
    if isinstance(weight, Value) or isinstance(bias, Value):
        assert other is None, "fused without computed weights"
        plain = _batch_norm(low, x, None, None, mean, var, training, momentum, eps)
        return activate(low, _affine_channels(low, plain, weight, bias), function, *numbers)
    sizes, numbers = (channels, x.size // channels), (eps, momentum, *numbers)
    w, b = _optional(low, weight, channels), _optional(low, bias, channels)
    running = _place(_optional(low, mean, channels)), _place(_optional(low, var, channels))
    y, residual = low.like(x), None if other is None else other.rows
    of_x = x.rows, _place(w), _place(b)
    stats: tuple[Place | None, Place | None]
    if training:
        stats = low.a.numbers(channels), low.a.numbers(channels)
        low.a.normalizes(x.features, groups=channels)
        low.emit(Operation.BATCH_NORM, *of_x, *running, *stats, y.rows, residual, sizes=sizes, flag=function,
                 numbers=numbers)  # fmt: skip
    else:
        low.emit(Operation.BATCH_NORM_FIXED, *of_x, *running, y.rows, residual, sizes=sizes, flag=function,
                 numbers=numbers)  # fmt: skip

    def backward(g: Rows) -> None:
        g = low.own(g)
        apart = other is not None and other.needs
        grads = low.rows(x.size) if apart else g, low.grad_of(w), low.grad_of(b)
        of_y = None if other is None else y.rows
        if training:
            low.emit(Operation.BATCH_NORM_BACKWARD, *of_x, *stats, low.a.numbers(2 * channels), g, of_y, *grads,
                     sizes=sizes, flag=function, numbers=numbers)  # fmt: skip
        else:
            low.emit(Operation.BATCH_NORM_FIXED_BACKWARD, *of_x, *running, g, of_y, *grads, sizes=sizes,
                     flag=function, numbers=numbers)  # fmt: skip
        low.give(x, grads[0])
        if other is not None:
            low.give(other, g)

    return low.result(y, backward, x, w, b, other)


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


@rule("batch_norm.default")
def batch_norm(low: Lowering, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
               eps: float, _: bool) -> Value:  # fmt: skip
    return _batch_norm(low, x, weight, bias, mean, var, training, momentum, eps)


def fused_batch_norm() -> None:
    """Batch normalization, perhaps the addition of a residual, then an activation function."""


@rule_of(fused_batch_norm)
def _fused_batch_norm(low: Lowering, function: int, numbers: tuple[float, ...], other: Any, *arguments: Any) -> Value:
    x, weight, bias, mean, var, training, momentum, eps, _ = arguments
    given, simple = (x, weight, bias, mean, var, training, momentum, eps), (Function(function), tuple(numbers))
    computed = isinstance(weight, Value) or isinstance(bias, Value)
    alike = isinstance(other, Value) and other.leads and other.shape == x.shape
    if other is None or (alike and not computed):
        return _batch_norm(low, *given, simple, other)
    return activate(low, RULES[aten.add.Tensor](low, _batch_norm(low, *given), other), *_spread(simple))


def _spread(simple: _Simple) -> tuple[Any, ...]:
    return (simple[0], *simple[1])


def _normalize(low: Lowering, x: Value, groups: Dims, weight: Any, bias: Any, shape: Dims, eps: float, *,
               centered: bool = True, simple: _Simple = _NOTHING, gamma: Weight | None = None) -> Value:  # fmt: skip
    """Factor gamma times f((x - mean) / deviation * weight + bias); `groups` as in layers.h, weights have a shape."""
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

    def backward(g: Rows) -> None:
        g = low.own(g)
        grads = low.grad_of(w), low.grad_of(b), low.grad_of(gamma)
        scratch = low.a.scratch(weights * 3 * _WIDEST)
        low.emit(Operation.GROUP_NORM_BACKWARD, *of_x, g, *grads, scratch, sizes=groups, flag=function,
                 numbers=numbers)  # fmt: skip
        low.give(x, g)

    return low.result(y, backward, x, w, b, gamma)


_WIDEST = 16
"""Numbers of the longest vectors of a processor."""


def _group_norm(low: Lowering, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
                _: bool = True, **after: Any) -> Value:  # fmt: skip
    x = low.value(x)
    if x.axis != 0:
        raise low.refuse("features whose first axis is not that of the examples")
    channels = x.shape[1]
    if x.leads:
        low.a.normalizes(x.features, groups=groups)
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
    rule_of(_target)(_found)


def fused_normalization() -> None:
    """Normalization of each example, perhaps an activation function, perhaps a factor for each channel."""


@rule_of(fused_normalization)
def _fused_normalization(low: Lowering, target: Any, function: int, numbers: tuple[float, ...], gamma: Any,
                         *arguments: Any) -> Value:  # fmt: skip
    normalize, simple = _NORMALIZATIONS[target], (Function(function), tuple(numbers))
    if gamma is None:
        return normalize(low, *arguments, simple=simple)
    if isinstance(gamma, Weight):
        return normalize(low, *arguments, simple=simple, gamma=gamma)
    return mul(low, normalize(low, *arguments, simple=simple), gamma)


# -- extremes and other statistics -------------------------------------------------------------------------------------


_LARGEST, _SMALLEST, _LOG_SUM = range(3)
"""Kinds of REDUCE."""


def _reduce(low: Lowering, x: Any, dim: Any, keepdim: bool, kind: int, *, first: bool = False) -> Value:
    """Over axes that follow each other."""
    x = low.value(x)
    every = range(len(x.shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    gone = sorted({d % len(x.shape) for d in every})
    if x.axis in gone:
        raise low.refuse("numbers of several examples as one")
    if any(x.dims[d] != 1 for d in range(gone[0], gone[-1] + 1) if d not in gone):
        raise low.refuse("extremes over axes that do not follow each other")
    sizes = tuple(math.prod(x.dims[a:b]) for a, b in ((0, gone[0]), (gone[0], gone[-1] + 1), (gone[-1] + 1, None)))
    y = replace(x, rows=Rows(0, 0), shape=tuple(1 if d in gone else n for d, n in enumerate(x.shape)), needs=False)
    y = replace(y, rows=low.rows(y.size))
    low.emit(Operation.REDUCE, x.rows, y.rows, sizes=sizes, flag=kind)

    def backward(g: Rows) -> None:
        operands, numbers = (x.rows, y.rows, g), (float(first),)
        low.into(
            x,
            lambda grad: low.emit(Operation.REDUCE_BACKWARD, *operands, grad, sizes=sizes, flag=kind, numbers=numbers),
        )

    found = low.result(y, backward, x)
    if keepdim:
        return found
    shape = tuple(n for d, n in enumerate(y.shape) if d not in gone)
    return low.view(found, shape, None if x.axis is None else x.axis - sum(d < x.axis for d in gone), x.outer)


@rule("amax.default")
def amax(low: Lowering, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return _reduce(low, x, dim, keepdim, _LARGEST)


@rule("amin.default")
def amin(low: Lowering, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    return _reduce(low, x, dim, keepdim, _SMALLEST)


@rule("max.dim")
def max_dim(low: Lowering, x: Any, dim: int, keepdim: bool = False) -> tuple[Value, None]:
    return _reduce(low, x, dim, keepdim, _LARGEST, first=True), None


@rule("min.dim")
def min_dim(low: Lowering, x: Any, dim: int, keepdim: bool = False) -> tuple[Value, None]:
    return _reduce(low, x, dim, keepdim, _SMALLEST, first=True), None


@rule("logsumexp.default")
def logsumexp(low: Lowering, x: Any, dim: Any, keepdim: bool = False) -> Value:
    return _reduce(low, x, dim, keepdim, _LOG_SUM)


def _of_two(low: Lowering, a: Any, b: Any, kind: int) -> Value:
    a, b, like = broadcast(low, low.value(a), low.value(b))
    both = [RULES[aten.unsqueeze.default](low, RULES[aten.expand.default](low, x, like.shape), 0) for x in (a, b)]
    return _reduce(low, cat(low, both, 0), 0, False, kind)


@rule("maximum.default", "max.other")
def maximum(low: Lowering, a: Any, b: Any) -> Value:
    return _of_two(low, a, b, _LARGEST)


@rule("minimum.default", "min.other")
def minimum(low: Lowering, a: Any, b: Any) -> Value:
    return _of_two(low, a, b, _SMALLEST)


@rule("linalg_vector_norm.default")
def vector_norm(low: Lowering, x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *,
                dtype: Any = None) -> Value:  # fmt: skip
    if order not in (1, 2) or dtype is not None:
        raise low.refuse(f"the norm of order {order}")
    if order == 1:
        return total(low, activate(low, x, Function.ABS), dim, keepdim, mean=False)
    return activate(low, total(low, activate(low, x, Function.SQUARE), dim, keepdim, mean=False), Function.ROOT)


@rule("norm.ScalarOpt_dim", "norm.Scalar")
def norm(low: Lowering, x: Any, order: float | None = 2, dim: Any = None, keepdim: bool = False) -> Value:
    return vector_norm(low, x, 2 if order is None else order, dim, keepdim)


def _var_mean(low: Lowering, x: Any, dim: Any, correction: float | None, keepdim: bool) -> tuple[Value, Value]:
    x = low.value(x)
    center = total(low, x, dim, True, mean=True)
    squares = activate(low, RULES[aten.sub.Tensor](low, x, center), Function.SQUARE)
    count = x.size // center.size
    free = count - (1.0 if correction is None else correction)
    if free <= 0:
        raise low.refuse(f"the variance of {count} numbers")
    variance = affine(low, total(low, squares, dim, keepdim, mean=False), 1.0 / free, 0.0)
    return variance, center if keepdim else total(low, center, dim, False, mean=False)


@rule("var.correction")
def var(low: Lowering, x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return _var_mean(low, x, dim, correction, keepdim)[0]


@rule("std.correction")
def std(low: Lowering, x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return activate(low, _var_mean(low, x, dim, correction, keepdim)[0], Function.ROOT)


def _corrected(unbiased: bool) -> float:
    return 1.0 if unbiased else 0.0


@rule("var.dim")
def var_dim(low: Lowering, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Value:
    return _var_mean(low, x, dim, _corrected(unbiased), keepdim)[0]


@rule("std.dim")
def std_dim(low: Lowering, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Value:
    return activate(low, var_dim(low, x, dim, unbiased, keepdim), Function.ROOT)


@rule("var_mean.dim")
def var_mean_dim(low: Lowering, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> tuple[Value, Value]:
    return _var_mean(low, x, dim, _corrected(unbiased), keepdim)


@rule("var_mean.correction")
def var_mean(low: Lowering, x: Any, dim: Any = None, *, correction: float | None = None,
             keepdim: bool = False) -> tuple[Value, Value]:  # fmt: skip
    return _var_mean(low, x, dim, correction, keepdim)


# -- fusions -----------------------------------------------------------------------------------------------------------

_BOUNDED = (aten.hardtanh.default, aten.hardtanh_.default)
_SIMPLE: Final[dict[Any, _Simple]] = {
    **dict.fromkeys((aten.relu.default, aten.relu_.default), (Function.RELU, ())),
    **dict.fromkeys((aten.relu6.default, aten.relu6_.default), (Function.HARDTANH, (0.0, 6.0))),
    **dict.fromkeys(_BOUNDED, (Function.HARDTANH, (-1.0, 1.0))),
    **dict.fromkeys((aten.silu.default, aten.silu_.default), (Function.SILU, ())),
    **dict.fromkeys((aten.hardswish.default, aten.hardswish_.default), (Function.HARDSWISH, ())),
}


def _simple_after(node: fx.Node) -> tuple[fx.Node, _Simple] | None:
    """The activation function that alone reads a node, if it can be part of a normalization."""
    found = only_user(node, tuple(_SIMPLE))
    if found is None or found.kwargs:
        return None
    function, numbers = _SIMPLE[found.target]
    if found.target in _BOUNDED:
        bounds: list[Any] = [*found.args[1:], *numbers[len(found.args) - 1 :]]
        numbers = float(bounds[0]), float(bounds[1])
    return found, (function, numbers)


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

# -- pooling -----------------------------------------------------------------------------------------------------------


def _numbers_of(x: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    found = (x,) if isinstance(x, int) else tuple(x)
    return found * axes if len(found) == 1 else found


def _planes(low: Lowering, x: Any, axes: int) -> Value:
    """A value whose last axes are of space."""
    x = low.value(x)
    if x.axis is not None and x.axis >= len(x.shape) - axes:
        raise low.refuse("windows over the examples of a batch")
    return low.value(x)


def _with_space(low: Lowering, x: Value, out: Sequence[int]) -> Value:
    """New rows with other sizes of the last axes."""
    y = replace(x, rows=Rows(0, 0), shape=(*x.shape[: -len(out)], *out), needs=False)
    return replace(y, rows=low.rows(y.size))


def _windows(x: Value, out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], adaptive: bool = False) -> Dims:  # fmt: skip
    """Sizes of an instruction: Windows of layers.h; one axis of space is a row of an image."""
    axes = len(out)
    more = (1,) * (2 - axes)
    space = x.dims[-axes:]
    of_axes = [(*more, *sizes) for sizes in (space, out, kernel, stride)]
    of_axes += [(*(0 for _ in more), *padding), (*more, *dilation)]
    return (x.size // math.prod(space), *(size for sizes in of_axes for size in sizes), int(adaptive))


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Windows along an axis."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - ((count - 1) * stride >= size + padding)  # the last window begins inside


def _max_pool(low: Lowering, x: Value, sizes: Dims, out: Sequence[int]) -> Value:
    y = _with_space(low, x, out)
    winners = low.rows(y.size) if low.trains(x) else None
    low.emit(Operation.MAX_POOL, x.rows, y.rows, winners, sizes=sizes)

    def backward(g: Rows) -> None:
        low.into(x, lambda grad: low.emit(Operation.MAX_POOL_BACKWARD, winners, g, grad, sizes=sizes))

    return low.result(y, backward, x)


def _average_pool(low: Lowering, x: Value, sizes: Dims, out: Sequence[int], padded: bool, divisor: int | None) -> Value:
    y, numbers = _with_space(low, x, out), (float(divisor or 0),)
    low.emit(Operation.AVERAGE_POOL, x.rows, y.rows, sizes=sizes, flag=padded, numbers=numbers)

    def backward(g: Rows) -> None:
        operation = Operation.AVERAGE_POOL_BACKWARD
        low.into(x, lambda grad: low.emit(operation, g, grad, sizes=sizes, flag=padded, numbers=numbers))

    return low.result(y, backward, x)


def _register_pools(axes: int) -> None:
    def max_pool(low: Lowering, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                 ceil: bool = False) -> Value:  # fmt: skip
        x = _planes(low, x, axes)
        kernel = _numbers_of(kernel, axes)
        stride, padding, dilation = (
            _numbers_of(stride or kernel, axes),
            _numbers_of(padding, axes),
            _numbers_of(dilation, axes),
        )
        out = [_pooled(*of, ceil) for of in zip(x.dims[-axes:], kernel, stride, padding, dilation, strict=True)]
        return _max_pool(low, x, _windows(x, out, kernel, stride, padding, dilation), out)

    def avg_pool(low: Lowering, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
                 padded: bool = True, divisor: int | None = None) -> Value:  # fmt: skip
        x = _planes(low, x, axes)
        kernel, ones = _numbers_of(kernel, axes), (1,) * axes
        stride, padding = _numbers_of(stride or kernel, axes), _numbers_of(padding, axes)
        out = [_pooled(*of, ceil) for of in zip(x.dims[-axes:], kernel, stride, padding, ones, strict=True)]
        return _average_pool(low, x, _windows(x, out, kernel, stride, padding, ones), out, padded, divisor)

    def adaptive(low: Lowering, x: Any, given: Any) -> tuple[Value, Dims, list[int]]:
        x = _planes(low, x, axes)
        sizes = x.dims[-axes:]
        out = [size if k is None else k for size, k in zip(sizes, _numbers_of(given, axes), strict=True)]
        ones, nothing = (1,) * axes, (0,) * axes
        return x, _windows(x, out, ones, ones, nothing, ones, adaptive=True), out

    def adaptive_avg_pool(low: Lowering, x: Any, given: Any) -> Value:
        x, sizes, out = adaptive(low, x, given)
        if set(out) == {1}:
            return total(low, x, list(range(-axes, 0)), True, mean=True)
        return _average_pool(low, x, sizes, out, False, None)

    def adaptive_max_pool(low: Lowering, x: Any, given: Any) -> tuple[Value, None]:
        return _max_pool(low, *adaptive(low, x, given)), None

    def max_pool_with_indices(low: Lowering, *arguments: Any) -> tuple[Value, None]:
        return max_pool(low, *arguments), None

    rule(f"max_pool{axes}d.default")(max_pool)
    rule(f"max_pool{axes}d_with_indices.default")(max_pool_with_indices)
    rule(f"avg_pool{axes}d.default")(avg_pool)
    rule(f"adaptive_avg_pool{axes}d.default")(adaptive_avg_pool)
    rule(f"adaptive_max_pool{axes}d.default")(adaptive_max_pool)


for _axes in (1, 2):
    _register_pools(_axes)


def _apart(low: Lowering, x: Any, pool: Callable[..., Value], *by_axis: Any) -> Value:
    """Volumes are pooled as images, then along their depth; arguments have one number, or one for each axis."""
    x = _planes(low, x, 3)
    of = [_numbers_of(numbers, 3) for numbers in by_axis]
    flat = pool(low, x, *(numbers[1:] for numbers in of))
    depth, area = flat.shape[-3], flat.shape[-2] * flat.shape[-1]
    lines = low.value(reshaped(low, flat, (*flat.shape[:-3], depth, area)))
    deep = pool(low, lines, *((numbers[0], one) for numbers, one in zip(of, (1, 1, 0, 1), strict=False)))
    return low.value(reshaped(low, deep, (*flat.shape[:-3], deep.shape[-2], *flat.shape[-2:])))


@rule("max_pool3d.default")
def max_pool3d(low: Lowering, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
               ceil: bool = False) -> Value:  # fmt: skip
    def pool(*arguments: Any) -> Value:
        found: Value = RULES[aten.max_pool2d.default](*arguments, ceil)
        return found

    return _apart(low, x, pool, kernel, stride or kernel, padding, dilation)


@rule("avg_pool3d.default")
def avg_pool3d(low: Lowering, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
               padded: bool = True, divisor: int | None = None) -> Value:  # fmt: skip
    if divisor is not None:
        raise low.refuse("a divisor of its own")

    def pool(*arguments: Any) -> Value:
        found: Value = RULES[aten.avg_pool2d.default](*arguments, ceil, padded)
        return found

    return _apart(low, x, pool, kernel, stride or kernel, padding)


@rule("adaptive_avg_pool3d.default")
def adaptive_avg_pool3d(low: Lowering, x: Any, given: Any) -> Value:
    if set(_numbers_of(given, 3)) != {1}:
        raise low.refuse("volumes that are shared out")
    return total(low, _planes(low, x, 3), [-3, -2, -1], True, mean=True)


# -- moving pixels -----------------------------------------------------------------------------------------------------


@rule("pixel_shuffle.default")
def pixel_shuffle(low: Lowering, x: Any, factor: int) -> Any:
    x = _planes(low, x, 3)
    batch, channels, height, width = x.shape
    apart = low.value(reshaped(low, x, (batch, channels // factor**2, factor, factor, height, width)))
    moved = permute(low, apart, [0, 1, 4, 2, 5, 3])
    return reshaped(low, moved, (batch, channels // factor**2, height * factor, width * factor))


@rule("pixel_unshuffle.default")
def pixel_unshuffle(low: Lowering, x: Any, factor: int) -> Any:
    x = _planes(low, x, 3)
    batch, channels, height, width = x.shape
    apart = low.value(reshaped(low, x, (batch, channels, height // factor, factor, width // factor, factor)))
    moved = permute(low, apart, [0, 1, 3, 5, 2, 4])
    return reshaped(low, moved, (batch, channels * factor**2, height // factor, width // factor))


@rule("channel_shuffle.default", "native_channel_shuffle.default")
def channel_shuffle(low: Lowering, x: Any, groups: int) -> Any:
    x = _planes(low, x, 3)
    batch, channels, *space = x.shape
    apart = low.value(reshaped(low, x, (batch, groups, channels // groups, math.prod(space))))
    return reshaped(low, permute(low, apart, [0, 2, 1, 3]), x.shape)


@rule("flip.default")
def flip(low: Lowering, x: Any, dims: Sequence[int]) -> Value:
    x = low.value(x)
    turned = {d % len(x.shape) for d in dims}
    if x.axis in turned:
        raise low.refuse("examples of a batch in another order")
    strides = strides_of(x.dims)
    backwards = [-s if d in turned else s for d, s in enumerate(strides)]
    first = sum(strides[d] * (x.dims[d] - 1) for d in turned)
    return rearranged(low, x, low.like(x), backwards, strides, x.dims, first=first)


@rule("roll.default")
def roll(low: Lowering, x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if len(shifts) != len(dims):
        raise low.refuse("a roll over all axes at once")
    for shift, d in zip(shifts, dims, strict=True):
        d = d % len(x.shape)
        if start := -shift % x.shape[d]:
            x = cat(low, [slice_(low, x, d, start, x.shape[d]), slice_(low, x, d, 0, start)], d)
    return x


@rule("constant_pad_nd.default")
def constant_pad(low: Lowering, x: Any, pads: Sequence[int], value: float = 0.0) -> Value:
    x = low.value(x)
    axes = len(x.shape)
    of = [(0, 0)] * axes
    for k in range(len(pads) // 2):
        of[axes - 1 - k] = pads[2 * k], pads[2 * k + 1]
    for d, (before, after) in enumerate(of):
        if (before or after) and d == x.axis:
            raise low.refuse("more or fewer examples")
        if before < 0 or after < 0:
            x = slice_(low, x, d, max(-before, 0), x.shape[d] - max(-after, 0))
    shape = tuple(size + max(before, 0) + max(after, 0) for size, (before, after) in zip(x.shape, of, strict=True))
    if shape == x.shape:
        return low.value(x)
    y = replace(x, rows=Rows(0, 0), shape=shape, needs=False)
    y = replace(y, rows=low.rows(y.size))
    low.emit(Operation.FILL, y.rows, sizes=(y.size,), numbers=(float(value),))
    strides = strides_of(y.dims)
    into = sum(max(before, 0) * strides[d] for d, (before, _) in enumerate(of))
    return rearranged(low, x, y, strides_of(x.dims), strides, x.dims, into=into)


def _extended(low: Lowering, x: Value, dim: int, before: int, after: int, mode: str) -> Value:
    """Padded along one axis with numbers of its own."""
    size = x.dims[dim]
    shape = (*x.shape[:dim], size + before + after, *x.shape[dim + 1 :])
    y = replace(x, rows=Rows(0, 0), shape=shape, needs=False)
    y = replace(y, rows=low.rows(y.size))
    # (to, from, step, count): `count` places of y take those of x at some step
    parts = [(before, 0, 1, size)]
    if mode == "reflect":
        parts += [(0, before, -1, before), (before + size, size - 2, -1, after)]
    elif mode == "replicate":
        parts += [(0, 0, 0, before), (before + size, size - 1, 0, after)]
    else:
        parts += [(0, size - before, 1, before), (before + size, 0, 1, after)]
    inner = math.prod(x.dims[dim + 1 :])

    def copy(rows: Rows, target: Rows, back: bool) -> None:
        for to, start, step, count in parts:
            dims = (math.prod(x.dims[:dim]), count, inner)
            of_x, of_y = (size * inner, step * inner, 1), (y.dims[dim] * inner, inner, 1)
            if not count:
                continue
            at_x, at_y = start * inner, to * inner
            if back:
                low.emit(Operation.COPY, _from(rows, at_y), _from(target, at_x), sizes=loop(dims, of_x, of_y), flag=1)
            else:
                low.emit(Operation.COPY, _from(rows, at_x), _from(target, at_y), sizes=loop(dims, of_y, of_x))

    def backward(g: Rows) -> None:
        def write(grad: Rows) -> None:
            low.emit(Operation.FILL, grad, sizes=(x.size,), numbers=(0.0,))
            copy(g, grad, True)

        low.into(x, write)

    copy(x.rows, y.rows, False)
    return low.result(y, backward, x)


def _from(rows: Rows, begin: int) -> Rows:
    return Rows(rows.first + begin, rows.size - begin)


@rule("pad.default")
def pad(low: Lowering, x: Any, pads: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    if mode == "constant":
        return constant_pad(low, x, pads, value or 0.0)
    x = low.value(x)
    for k in range(len(pads) // 2):
        dim, (before, after) = len(x.shape) - 1 - k, pads[2 * k : 2 * k + 2]
        if dim == x.axis:
            raise low.refuse("more or fewer examples")
        if before < 0 or after < 0:
            raise low.refuse(f"a {mode} padding of less than nothing")
        if before or after:
            x = _extended(low, x, dim, before, after, mode)
    return low.value(x)


_NEAREST, _NEAREST_EXACT, _LINEAR, _ALIGNED = range(4)
"""Rules of RESIZE."""


def _resize(low: Lowering, x: Any, axes: int, kind: int, size: Sequence[int] | None,
            factors: Sequence[float] | None) -> Value:  # fmt: skip
    x = _planes(low, x, axes)
    space = x.dims[-axes:]
    if size is None:
        assert factors is not None
        out = [math.floor(n * f) for n, f in zip(space, factors, strict=True)]
    else:
        out = [int(n) for n in size]
    steps = [1.0] * (2 - axes)
    for n, m, factor in zip(space, out, factors or (None,) * axes, strict=True):
        if kind == _ALIGNED:
            steps.append((n - 1) / (m - 1) if m > 1 else 0.0)
        elif kind == _NEAREST and m in (n, 2 * n):  # as PyTorch does, whatever the factor
            steps.append(n / m)
        else:
            steps.append(1.0 / factor if factor else n / m)
    more = (1,) * (2 - axes)
    sizes = (x.size // math.prod(space), *more, *space, *more, *out)
    y, numbers = _with_space(low, x, out), tuple(steps)
    low.emit(Operation.RESIZE, x.rows, y.rows, sizes=sizes, flag=kind, numbers=numbers)

    def backward(g: Rows) -> None:
        operation = Operation.RESIZE_BACKWARD
        low.into(x, lambda grad: low.emit(operation, g, grad, sizes=sizes, flag=kind, numbers=numbers))

    return low.result(y, backward, x)


@rule("upsample_nearest1d.vec", "upsample_nearest2d.vec")
def nearest(low: Lowering, x: Any, size: Any, factors: Any) -> Value:
    return _resize(low, x, len(size or factors), _NEAREST, size, factors)


@rule("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec")
def nearest_exact(low: Lowering, x: Any, size: Any, factors: Any) -> Value:
    return _resize(low, x, len(size or factors), _NEAREST_EXACT, size, factors)


@rule("upsample_linear1d.vec", "upsample_bilinear2d.vec")
def linear(low: Lowering, x: Any, size: Any, aligned: bool, factors: Any) -> Value:
    return _resize(low, x, len(size or factors), _ALIGNED if aligned else _LINEAR, size, factors)
