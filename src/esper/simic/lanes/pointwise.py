"""Rules of operators that compute each number by itself: arithmetic, comparisons, choices by a mask, conversions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.simic.lanes.program import Kind, Value
from esper.simic.lanes.recorder import Codes, Recorder, RecordingError, Rule, Rules

OF_TRUTHS = {"ADD": "OR", "MUL": "AND", "MIN": "AND", "MAX": "OR"}
"""What arithmetic is for truth values."""

Number = Tensor | Value


def select(r: Recorder, kind: Kind, mask: Codes, yes: Codes, no: Codes) -> Codes:
    """`yes` where the mask is, else `no`, all of one shape; nothing is chosen where both or the mask are known."""
    masks, first, second = (codes.reshape(-1) for codes in (mask, yes, no))
    result = second.copy()
    for code in np.unique(masks[masks < 0]).tolist():
        if r.draft.value_of(code):
            result = np.where(masks == code, first, result)
    unknown = np.flatnonzero((masks >= 0) & (first != second))
    if unknown.size:
        result[unknown] = r.apply(f"SELECT_{kind}", kind, masks[unknown], first[unknown], second[unknown])
    return result.reshape(mask.shape)


def _binary(operation: str) -> Rule:
    def rule(r: Recorder, out: Tensor, a: Number, b: Number) -> Codes:
        kind = r.kind(out)
        name = OF_TRUTHS.get(operation, operation) if kind == "B" else operation
        return r.apply(f"{name}_{kind}", kind, *(r.operand(x, kind, out.shape) for x in (a, b)), actual=out)

    return rule


def _scaled(operation: str) -> Rule:
    """Of `a` and `alpha b`."""
    plain = _binary(operation)

    def rule(r: Recorder, out: Tensor, a: Number, b: Number, alpha: Value = 1) -> Codes:
        if alpha == 1:
            return plain(r, out, a, b)
        kind = r.kind(out)
        scaled = r.apply(f"MUL_{kind}", kind, *(r.operand(x, kind, out.shape) for x in (b, alpha)))
        return r.apply(f"{operation}_{kind}", kind, r.operand(a, kind, out.shape), scaled)

    return rule


def _subtracted_from(r: Recorder, out: Tensor, a: Number, b: Number, alpha: Value = 1) -> Codes:
    if alpha != 1:
        raise RecordingError(f"rsub with alpha = {alpha}")
    return _binary("SUB")(r, out, b, a)


def _added_each(
    r: Recorder, out: list[Tensor] | Tensor, a: Sequence[Tensor], b: Sequence[Tensor], alpha: Value = 1
) -> Any:  # noqa: ANN401 -- codes, or a list of them
    outs = out if isinstance(out, list) else [out]
    codes = [_scaled("ADD")(r, o, x, y, alpha) for o, x, y in zip(outs, a, b, strict=True)]
    return codes if isinstance(out, list) else codes[0]


def _divided(r: Recorder, out: Tensor, a: Number, b: Number, rounding_mode: str | None = None) -> Codes:
    if rounding_mode is None:
        return _binary("DIV")(r, out, a, b)
    if rounding_mode != "floor":
        raise RecordingError(f"a division that is rounded by {rounding_mode!r}")
    return _whole("FLOOR_DIV")(r, out, a, b)


def _whole(operation: str) -> Rule:
    def rule(r: Recorder, out: Tensor, a: Number, b: Number) -> Codes:
        divisor = r.operand(b, "I", out.shape)
        if r.kind(out) != "I" or any(c >= 0 or r.draft.value_of(c) == 0 for c in np.unique(divisor).tolist()):
            raise RecordingError("a division of whole numbers by what is no constant, or is 0")
        return r.apply(f"{operation}_I", "I", r.operand(a, "I", out.shape), divisor, actual=out)

    return rule


def _power(r: Recorder, out: Tensor, base: Number, exponent: Number) -> Codes:
    if not isinstance(exponent, Tensor) and exponent == 2:
        return _binary("MUL")(r, out, base, base)
    return _binary("POW")(r, out, base, exponent)


def _compared(operation: str, *, swapped: bool = False) -> Rule:
    def rule(r: Recorder, out: Tensor, a: Number, b: Number) -> Codes:
        kind = r.kind(torch.empty(0, dtype=torch.result_type(a, b)))
        pair = [r.operand(x, kind, out.shape) for x in ((b, a) if swapped else (a, b))]
        truths = r.apply(f"{operation}_{kind}", "B", *pair, actual=out if out.dtype == torch.bool else None)
        return r.converted(truths, "B", r.kind(out))  # `out=` may ask for numbers

    return rule


def _unary(operation: str) -> Rule:
    def rule(r: Recorder, out: Tensor, x: Tensor) -> Codes:
        kind = r.kind(out)
        return r.apply(f"{operation}_{kind}", kind, r.operand(x, kind, out.shape), actual=out)

    return rule


def _is_nan(r: Recorder, out: Tensor, x: Tensor) -> Codes:
    return r.apply(f"NE_{r.kind(x)}", "B", r.codes(x), r.codes(x), actual=out)


def _is_infinite(r: Recorder, out: Tensor, x: Tensor) -> Codes:
    kind = r.kind(x)
    size = r.apply(f"ABS_{kind}", kind, r.codes(x))
    return r.apply(f"EQ_{kind}", "B", size, r.operand(math.inf, kind, out.shape))


def _where(r: Recorder, out: Tensor, mask: Tensor, yes: Number, no: Number) -> Codes:
    kind = r.kind(out)
    return select(r, kind, r.operand(mask, "B", out.shape), *(r.operand(x, kind, out.shape) for x in (yes, no)))


def _clamped(r: Recorder, out: Tensor, x: Tensor, min: Number | None = None, max: Number | None = None) -> Codes:
    kind = r.kind(out)
    codes = r.operand(x, kind, out.shape)
    for operation, bound in (("MAX", min), ("MIN", max)):
        if bound is not None:
            codes = r.apply(f"{operation}_{kind}", kind, codes, r.operand(bound, kind, out.shape))
    return codes


def _made_finite(
    r: Recorder,
    out: Tensor,
    x: Tensor,
    nan: Value | None = None,
    posinf: Value | None = None,
    neginf: Value | None = None,
) -> Codes:
    kind, given = r.kind(out), r.codes(x)
    if kind not in "FD":
        return given
    limits = torch.finfo(out.dtype)
    infinite = (
        (math.inf, limits.max if posinf is None else posinf),
        (-math.inf, limits.min if neginf is None else neginf),
    )
    codes = given
    for odd, instead in infinite:
        if odd != instead:
            there = r.apply(f"EQ_{kind}", "B", given, r.operand(odd, kind, out.shape))
            codes = select(r, kind, there, r.operand(instead, kind, out.shape), codes)
    missing = r.apply(f"NE_{kind}", "B", given, given)
    return select(r, kind, missing, r.operand(0.0 if nan is None else nan, kind, out.shape), codes)


def _plus_product(r: Recorder, out: Tensor, x: Tensor, a: Tensor, b: Tensor, value: Value = 1) -> Codes:
    kind = r.kind(out)
    product = r.apply(f"MUL_{kind}", kind, *(r.operand(factor, kind, out.shape) for factor in (a, b)))
    if value != 1:
        product = r.apply(f"MUL_{kind}", kind, product, r.operand(value, kind, out.shape))
    return r.apply(f"ADD_{kind}", kind, r.operand(x, kind, out.shape), product)


def _between(r: Recorder, out: Tensor, a: Tensor, b: Tensor, weight: Number) -> Codes:
    """From the nearer end, so that both ends are exact."""
    kind = r.kind(out)
    start, end, share, one, half = (r.operand(x, kind, out.shape) for x in (a, b, weight, 1.0, 0.5))

    def of(operation: str, *operands: Codes) -> Codes:
        return r.apply(f"{operation}_{kind}", kind, *operands)

    way = of("SUB", end, start)
    from_start = of("ADD", start, of("MUL", share, way))
    from_end = of("SUB", end, of("MUL", way, of("SUB", one, share)))
    near = r.apply(f"LT_{kind}", "B", of("ABS", share), half)
    return select(r, kind, near, from_start, from_end)


RULES: Rules = {
    "add": _scaled("ADD"),
    "sub": _scaled("SUB"),
    "rsub": _subtracted_from,
    "_foreach_add": _added_each,
    "mul": _binary("MUL"),
    "div": _divided,
    "floor_divide": _whole("FLOOR_DIV"),
    "remainder": _whole("REM"),
    "pow": _power,
    "reciprocal": lambda r, out, x: _binary("DIV")(r, out, 1.0, x),
    "maximum": _binary("MAX"),
    "minimum": _binary("MIN"),
    "fmax": _binary("FMAX"),
    "fmin": _binary("FMIN"),
    "bitwise_and": _binary("AND"),
    "bitwise_or": _binary("OR"),
    "bitwise_xor": _binary("XOR"),
    "bitwise_not": _unary("NOT"),
    "logical_and": _binary("AND"),
    "logical_or": _binary("OR"),
    "logical_not": _unary("NOT"),
    "eq": _compared("EQ"),
    "ne": _compared("NE"),
    "lt": _compared("LT"),
    "le": _compared("LE"),
    "gt": _compared("LT", swapped=True),
    "ge": _compared("LE", swapped=True),
    "neg": _unary("NEG"),
    "abs": _unary("ABS"),
    "sign": _unary("SIGN"),
    "sqrt": _unary("SQRT"),
    "exp": _unary("EXP"),
    "log": _unary("LOG"),
    "log1p": _unary("LOG1P"),
    "tanh": _unary("TANH"),
    "sigmoid": _unary("SIGMOID"),
    "cos": _unary("COS"),
    "round": _unary("ROUND"),
    "floor": _unary("FLOOR"),
    "relu": lambda r, out, x: _binary("MAX")(r, out, x, 0),
    "isnan": _is_nan,
    "isinf": _is_infinite,
    "where": _where,
    "masked_fill": lambda r, out, x, mask, value: _where(r, out, mask, value, x),
    "clamp": _clamped,
    "clamp_min": lambda r, out, x, bound: _clamped(r, out, x, bound),
    "clamp_max": lambda r, out, x, bound: _clamped(r, out, x, None, bound),
    "nan_to_num": _made_finite,
    "addcmul": _plus_product,
    "lerp": _between,
}
