"""Rules of pooling, padding and resizing, whose kernels are in pooling.h."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from esper.tolaria.executors.native.lowering import Dims, Lowering, Value, loop, rule, strides_of
from esper.tolaria.executors.native.program import Operation, Rows
from esper.tolaria.executors.native.rules import cat, rearranged, slice_, total

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
    return low.like(x, (*x.shape[: -len(out)], *out))


def _windows(x: Value, out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], adaptive: bool = False) -> Dims:  # fmt: skip
    """Sizes of an instruction: Windows of pooling.h; one axis of space is a row of an image."""
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
    return low.result(y, low.afresh(x, Operation.MAX_POOL_BACKWARD, winners, sizes=sizes), x)


def _average_pool(low: Lowering, x: Value, sizes: Dims, out: Sequence[int], padded: bool, divisor: int | None) -> Value:
    options: dict[str, Any] = {"sizes": sizes, "flag": padded, "numbers": (float(divisor or 0),)}
    return _mapped(low, x, out, Operation.AVERAGE_POOL, Operation.AVERAGE_POOL_BACKWARD, **options)


def _mapped(low: Lowering, x: Value, out: Sequence[int], there: Operation, back: Operation, **options: Any) -> Value:
    """What is linear in x: `there` writes it, and `back` the gradient of x from that of the result."""
    y = _with_space(low, x, out)
    low.emit(there, x.rows, y.rows, **options)
    return low.result(y, low.afresh(x, back, **options), x)


def _register_pools(axes: int) -> None:
    def max_pool(low: Lowering, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                 ceil: bool = False) -> Value:  # fmt: skip
        x = _planes(low, x, axes)
        kernel = _numbers_of(kernel, axes)
        stride, padding, dilation = (_numbers_of(of, axes) for of in (stride or kernel, padding, dilation))
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


# -- moving pixels -----------------------------------------------------------------------------------------------------


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
    y = low.like(x, shape)
    low.emit(Operation.FILL, y.rows, sizes=(y.size,), numbers=(float(value),))
    strides = strides_of(y.dims)
    into = sum(max(before, 0) * strides[d] for d, (before, _) in enumerate(of))
    return rearranged(low, x, y, strides_of(x.dims), strides, x.dims, into=into)


def _extended(low: Lowering, x: Value, dim: int, before: int, after: int, mode: str) -> Value:
    """Padded along one axis with numbers of its own."""
    size = x.dims[dim]
    shape = (*x.shape[:dim], size + before + after, *x.shape[dim + 1 :])
    y = low.like(x, shape)
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
            ends = [(start * inner, (size * inner, step * inner, 1)), (to * inner, (y.dims[dim] * inner, inner, 1))]
            if count:
                (first, read), (into, written) = reversed(ends) if back else ends
                sizes = loop((math.prod(x.dims[:dim]), count, inner), written, read)
                low.emit(Operation.COPY, rows.after(first), target.after(into), sizes=sizes, flag=back)

    def backward(g: Rows) -> None:
        def write(grad: Rows) -> None:
            low.emit(Operation.FILL, grad, sizes=(x.size,), numbers=(0.0,))
            copy(g, grad, True)

        low.into(x, write)

    copy(x.rows, y.rows, False)
    return low.result(y, backward, x)


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


def _resize(low: Lowering, x: Any, size: Sequence[int] | None, factors: Sequence[float] | None, *, kind: int) -> Value:
    axes = len(size or factors or ())
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
    return _mapped(low, x, out, Operation.RESIZE, Operation.RESIZE_BACKWARD, sizes=sizes, flag=kind,
                   numbers=tuple(steps))  # fmt: skip


rule("upsample_nearest1d.vec", "upsample_nearest2d.vec")(partial(_resize, kind=_NEAREST))
rule("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec")(partial(_resize, kind=_NEAREST_EXACT))


@rule("upsample_linear1d.vec", "upsample_bilinear2d.vec")
def linear(low: Lowering, x: Any, size: Any, aligned: bool, factors: Any) -> Value:
    return _resize(low, x, size, factors, kind=_ALIGNED if aligned else _LINEAR)
