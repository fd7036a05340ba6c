"""Rules of activation functions, softmax, extremes and variances, whose kernels are in functions.h."""

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final

from esper.tolaria.executors.native.lowering import RULES, Lowering, Value, rule
from esper.tolaria.executors.native.program import Operation
from esper.tolaria.executors.native.rules import affine, axes_of, broadcast, cat, squeeze, total
from esper.tolaria.executors.native.trace import aten

Function = IntEnum(
    "Function",
    "IDENTITY RELU HARDTANH SILU HARDSWISH LEAKY_RELU ELU GELU GELU_TANH MISH HARDSIGMOID SIGMOID TANH SOFTPLUS EXP "
    "LOG SQRT RSQRT RECIPROCAL ABS SIGN SQUARE CUBE POWER CLAMP SIN COS ERF "
    "ROOT",
    start=0,
)
"""As in functions.h. The first five can be part of a normalization."""

_FROM_OUTPUT: Final = {
    Function.RELU, Function.HARDTANH, Function.SIGMOID, Function.TANH, Function.EXP, Function.SQRT,
    Function.RSQRT, Function.RECIPROCAL, Function.ROOT,
}  # fmt: skip
"""Functions whose derivative functions.h computes from their value; that of the others comes from their argument."""

# -- activation functions ----------------------------------------------------------------------------------------------


def activate(low: Lowering, x: object, function: Function, *numbers: float) -> Value:
    """f(x)."""
    x = low.value(x)
    if function is Function.IDENTITY:
        return x
    y, options = low.like(x), dict[str, Any](sizes=(x.size,), flag=function, numbers=numbers)
    low.emit(Operation.ACTIVATE, x.rows, y.rows, **options)
    # a leaky ReLU keeps the sign
    from_output = function in _FROM_OUTPUT or (function is Function.LEAKY_RELU and numbers[0] > 0.0)
    saved = y if from_output else x
    return low.result(y, low.in_place(x, Operation.ACTIVATE_BACKWARD, saved.rows, **options), x)


FUNCTIONS: Final[dict[str, tuple[Function, tuple[float, ...]]]] = {
    **{
        function.name.lower(): (function, ())
        for function in (
            Function.RELU, Function.SILU, Function.HARDSWISH, Function.MISH, Function.HARDSIGMOID, Function.SIGMOID,
            Function.TANH, Function.EXP, Function.LOG, Function.SQRT, Function.RSQRT, Function.RECIPROCAL,
            Function.ABS, Function.SIGN, Function.SQUARE, Function.SIN, Function.COS, Function.ERF,
        )
    },
    "sgn": (Function.SIGN, ()),
    "hardtanh": (Function.HARDTANH, (-1.0, 1.0)),
    "leaky_relu": (Function.LEAKY_RELU, (0.01,)),
}  # fmt: skip
"""Functions of one value by the name of their operation, and what its further arguments are if they are not given."""


def completed(given: Sequence[float], defaults: Sequence[float]) -> tuple[float, ...]:
    """The further arguments of a function, of which the last ones are those that it has by default."""
    return tuple(map(float, (*given, *defaults[len(given) :])))


def _with_defaults(low: Lowering, x: Any, *given: float, function: Function, defaults: Sequence[float]) -> Value:
    return activate(low, x, function, *completed(given, defaults))


for _name, (_function, _defaults) in FUNCTIONS.items():
    rule(f"{_name}.default", f"{_name}_.default")(partial(_with_defaults, function=_function, defaults=_defaults))


@rule("elu.default", "elu_.default")
def elu(low: Lowering, x: Any, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Value:
    return activate(low, x, Function.ELU, float(alpha) * float(scale), float(scale), float(inner))


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


@rule("clamp.default", "clamp_.default", "clip.default")
def clamp(low: Lowering, x: Any, least: float | None = None, most: float | None = None) -> Value:
    bounds = -math.inf if least is None else float(least), math.inf if most is None else float(most)
    if bounds[0] > bounds[1]:
        raise low.refuse("a lower bound above the upper one")
    return activate(low, x, Function.CLAMP, *bounds)


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


@rule("prelu.default")
def prelu(low: Lowering, x: Any, weight: Any) -> Value:
    (count,) = weight.shape
    w = low.weight(weight, count)
    x = low.value(x) if count == 1 else low.leading(x)
    if count > 1 and x.features[0] != count:
        raise low.refuse(f"{count} slopes for {x.features[0]} channels")
    y, sizes = low.like(x), (count, x.size // count)
    low.emit(Operation.PRELU, x.rows, w.place, y.rows, sizes=sizes)
    backward = low.in_place(x, Operation.PRELU_BACKWARD, x.rows, w.place, after=(low.grad_of(w),), sizes=sizes)
    return low.result(y, backward, x, w)


def softmax(low: Lowering, x: Any, dim: int, half_to_float: bool = False, *, log: bool = False) -> Value:
    """Or its logarithm, along one axis."""
    del half_to_float
    x = low.value(x)
    dim = dim % len(x.shape)
    if dim == x.axis:
        raise low.refuse("a softmax over the examples of a batch")
    y, sizes = low.like(x), (math.prod(x.dims[:dim]), x.dims[dim], math.prod(x.dims[dim + 1 :]))
    low.emit(Operation.SOFTMAX, x.rows, y.rows, sizes=sizes, flag=log)
    return low.result(y, low.in_place(x, Operation.SOFTMAX_BACKWARD, y.rows, sizes=sizes, flag=log), x)


rule("_softmax.default")(softmax)
rule("_log_softmax.default")(partial(softmax, log=True))


# -- extremes and other statistics -------------------------------------------------------------------------------------


LARGEST, SMALLEST, _LOG_SUM = range(3)
"""Kinds of REDUCE."""


def reduce(low: Lowering, x: Any, dim: Any = None, keepdim: bool = False, *, kind: int, first: bool = False) -> Value:
    """Over axes that follow each other."""
    x = low.value(x)
    gone = axes_of(x, dim)
    if x.axis in gone:
        raise low.refuse("numbers of several examples as one")
    if any(x.dims[d] != 1 for d in range(gone[0], gone[-1] + 1) if d not in gone):
        raise low.refuse("extremes over axes that do not follow each other")
    sizes = tuple(math.prod(x.dims[a:b]) for a, b in ((0, gone[0]), (gone[0], gone[-1] + 1), (gone[-1] + 1, None)))
    y = low.like(x, tuple(1 if d in gone else n for d, n in enumerate(x.shape)))
    low.emit(Operation.REDUCE, x.rows, y.rows, sizes=sizes, flag=kind)
    options: dict[str, Any] = {"sizes": sizes, "flag": kind, "numbers": (float(first),)}
    found = low.result(y, low.afresh(x, Operation.REDUCE_BACKWARD, x.rows, y.rows, **options), x)
    return found if keepdim else low.value(squeeze(low, found, gone))


def _with_place(low: Lowering, x: Any, dim: int, keepdim: bool = False, *, kind: int) -> tuple[Value, None]:
    """Also where the extreme is, which nobody may read; the gradient belongs to the first of equal ones."""
    return reduce(low, x, dim, keepdim, kind=kind, first=True), None


def _of_two(low: Lowering, a: Any, b: Any, *, kind: int) -> Value:
    a, b, like = broadcast(low, low.value(a), low.value(b))
    both = [RULES[aten.unsqueeze.default](low, RULES[aten.expand.default](low, x, like.shape), 0) for x in (a, b)]
    return reduce(low, cat(low, both, 0), 0, kind=kind)


for _short, _long, _kind in (("max", "maximum", LARGEST), ("min", "minimum", SMALLEST)):
    rule(f"a{_short}.default")(partial(reduce, kind=_kind))
    rule(f"{_short}.dim")(partial(_with_place, kind=_kind))
    rule(f"{_long}.default", f"{_short}.other")(partial(_of_two, kind=_kind))
rule("logsumexp.default")(partial(reduce, kind=_LOG_SUM))


@rule("linalg_vector_norm.default")
def vector_norm(low: Lowering, x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *,
                dtype: Any = None) -> Value:  # fmt: skip
    if order not in (1, 2) or dtype is not None:
        raise low.refuse(f"the norm of order {order}")
    if order == 1:
        return total(low, activate(low, x, Function.ABS), dim, keepdim, mean=False)
    return activate(low, total(low, activate(low, x, Function.SQUARE), dim, keepdim, mean=False), Function.ROOT)


@rule("var_mean.correction")
def var_mean(low: Lowering, x: Any, dim: Any = None, *, correction: float | None = None,
             keepdim: bool = False) -> tuple[Value, Value]:  # fmt: skip
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
def var(low: Lowering, *arguments: Any, **options: Any) -> Value:
    return var_mean(low, *arguments, **options)[0]


@rule("std.correction")
def std(low: Lowering, *arguments: Any, **options: Any) -> Value:
    return activate(low, var(low, *arguments, **options), Function.ROOT)
