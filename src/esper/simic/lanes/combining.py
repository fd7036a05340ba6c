"""Rules of operators that make one number of many: sums and extremes along axes, products of matrices, LayerNorm.

A matrix of weights is read where it lies, and so are biases; a matrix of constants is written out.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from esper.simic.lanes.pointwise import OF_TRUTHS, select
from esper.simic.lanes.program import Kind, Value, double_words
from esper.simic.lanes.recorder import Codes, Recorder, RecordingError, Rule, Rules, host_and_registers

Axes = int | Sequence[int] | None


def _lines(r: Recorder, x: Tensor, dims: Axes, kind: Kind) -> Codes:
    """The numbers that are combined [results, numbers]; the results in the order of the other axes."""
    codes = r.as_kind(x, kind)
    if dims is None or dims == []:
        return codes.reshape(1, -1)
    axes = [axis % x.dim() for axis in ([dims] if isinstance(dims, int) else dims)]
    others = [axis for axis in range(x.dim()) if axis not in axes]
    moved = codes.transpose(*others, *axes)
    lines: Codes = moved.reshape(math.prod(moved.shape[: len(others)]), math.prod(moved.shape[len(others) :]))
    return lines


def _chained(operation: str, *, truths: bool = False, once: bool = False) -> Rule:
    """One number after another; `once`: a number that comes again changes nothing."""

    def rule(r: Recorder, out: Tensor, x: Tensor, dim: Axes = None, keepdim: bool = False, **_: object) -> Codes:
        kind: Kind = "B" if truths else r.kind(out)
        name = OF_TRUTHS.get(operation, operation) if kind == "B" else operation
        lines = _lines(r, x, dim, kind)
        if not lines.size:
            return r.constants(out)
        total = lines[:, 0].copy()
        for k in range(1, lines.shape[1]):
            new = np.flatnonzero(~(lines[:, :k] == lines[:, k : k + 1]).any(axis=1)) if once else np.arange(len(total))
            total[new] = r.apply(f"{name}_{kind}", kind, total[new], lines[new, k])
        return r.converted(total, kind, r.kind(out)).reshape(tuple(out.shape))

    return rule


def _mean(r: Recorder, out: Tensor, x: Tensor, dim: Axes = None, keepdim: bool = False, **_: object) -> Codes:
    kind, total = r.kind(out), _chained("ADD")(r, out, x, dim, keepdim)
    return r.apply(f"DIV_{kind}", kind, total, r.operand(x.numel() // max(out.numel(), 1), kind, out.shape))


def _running_sum(r: Recorder, out: Tensor, x: Tensor, dim: int, **_: object) -> Codes:
    kind = r.kind(out)
    codes = np.moveaxis(r.as_kind(x, kind), dim, -1)
    sums = [codes[..., 0]]
    for k in range(1, codes.shape[-1]):
        sums.append(r.apply(f"ADD_{kind}", kind, sums[-1], codes[..., k]))
    return np.moveaxis(np.stack(sums, axis=-1), -1, dim)


def _first_largest(r: Recorder, out: Tensor, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Codes:
    kind = r.kind(x)
    lines = _lines(r, x, dim, kind)
    best, place = lines[:, 0], r.operand(0, "I", lines.shape[:1])
    for k in range(1, lines.shape[1]):
        better = r.apply(f"LT_{kind}", "B", best, lines[:, k])
        if kind in "FD":  # what is not a number is the largest, and the first of these
            missing = r.apply(f"NE_{kind}", "B", lines[:, k], lines[:, k])
            known = r.apply(f"EQ_{kind}", "B", best, best)
            better = r.apply("OR_B", "B", better, r.apply("AND_B", "B", missing, known))
        best = select(r, kind, better, lines[:, k], best)
        place = select(r, "I", better, r.operand(k, "I", place.shape), place)
    return place.reshape(tuple(out.shape))


# -- products --------------------------------------------------------------------------------------------------------


def _product(r: Recorder, out: Tensor, a: Tensor, b: Tensor) -> Codes:
    return _affine(r, out, None, a, b)


def _affine(
    r: Recorder, out: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, beta: Value = 1, alpha: Value = 1
) -> Codes:
    if beta != 1 or alpha != 1:
        raise RecordingError(f"addmm with beta = {beta}, alpha = {alpha}")
    kind = r.kind(out)
    start = r.operand(0.0 if bias is None else bias, kind, out.shape)
    if kind in "FD" and r.lies_in(b) is not None:
        return _linear(r, kind, start, r.codes(a), b)
    if kind in "FD" and r.lies_in(a) is not None:
        return _linear(r, kind, start.T, r.codes(b).T, a.t()).T
    products = _written_out(r, kind, r.codes(a), r.codes(b))
    return products if bias is None else r.apply(f"ADD_{kind}", kind, start, products)


def _linear(r: Recorder, kind: Kind, start: Codes, x: Codes, weight: Tensor) -> Codes:
    """`start` [R, J] plus the product of x [R, K] and a matrix [K, J] that lies in an argument all hosts share."""
    argument, (along, down), (size, outputs) = r.lies_in(weight), weight.stride(), weight.shape
    assert argument is not None
    place = (argument.number, int(weight.storage_offset()), down, along, size)
    result = np.empty((len(x), outputs), dtype=np.int64)
    for i, (row, first) in enumerate(zip(x, start, strict=True)):
        (host, inputs), (also, sums) = host_and_registers(row), host_and_registers(first)
        bias = r.row_of(sums)
        layer, head, begin = ("LINEAR", place, [sums]) if bias is None else ("AFFINE", (*place, *bias), [])
        registers = r.layer(f"{layer}_{kind}", head, inputs, begin, outputs, kind)
        result[i] = 4 * np.array(registers) + min(host, also)
    return result


def _written_out(r: Recorder, kind: Kind, a: Codes, b: Codes) -> Codes:
    """A product of small matrices, of which one is made of constants: only what is not zero is added."""
    one, nothing = r.draft.constant(kind, 1), (r.draft.constant(kind, 0.0), r.draft.constant(kind, -0.0))
    pairs = [
        [(x, y) for x, y in zip(row.tolist(), column.tolist(), strict=True) if x not in nothing and y not in nothing]
        for row in a
        for column in b.T
    ]
    total = np.full(len(pairs), nothing[0])
    for k in range(max(map(len, pairs))):
        here = [i for i, pair in enumerate(pairs) if len(pair) > k]
        left, right = (np.array([pairs[i][k][side] for i in here]) for side in (0, 1))
        left, right = np.minimum(left, right), np.maximum(left, right)  # constants are negative
        terms, scaled = right.copy(), np.flatnonzero(left != one)
        if scaled.size:
            terms[scaled] = r.apply(f"MUL_{kind}", kind, left[scaled], right[scaled])
        total[here] = terms if k == 0 else r.apply(f"ADD_{kind}", kind, total[here], terms)
    return total.reshape(len(a), b.shape[1])


def _layer_norm(
    r: Recorder,
    out: Sequence[Tensor],
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
) -> list[Codes]:
    whole, kind, (size,) = out[0], r.kind(out[0]), shape
    places: list[int] = []
    for part in (weight, bias):
        place = None if part is None else r.row_of(host_and_registers(r.codes(part))[1])
        if place is None:
            raise RecordingError("a LayerNorm whose weight and bias are not arguments")
        places += place
    head, rows = (*double_words(epsilon), *places), r.codes(x).reshape(-1, size)
    result = np.empty_like(rows)
    for i, row in enumerate(rows):
        host, inputs = host_and_registers(row)
        registers = r.layer(f"NORM_{kind}", head, (), [inputs], size, kind)
        result[i] = 4 * np.array(registers) + host
    missing = r.draft.constant(kind, math.nan)  # mean and scale are for a gradient, which nobody takes here
    return [result.reshape(tuple(whole.shape)), *(np.full(tuple(part.shape), missing) for part in out[1:])]


RULES: Rules = {
    "sum": _chained("ADD"),
    "prod": _chained("MUL"),
    "any": _chained("OR", truths=True, once=True),
    "all": _chained("AND", truths=True, once=True),
    "amax": _chained("MAX", once=True),
    "amin": _chained("MIN", once=True),
    "mean": _mean,
    "cumsum": _running_sum,
    "argmax": _first_largest,
    "mm": _product,
    "addmm": _affine,
    "native_layer_norm": _layer_norm,
}
