"""Rules of operations that move, combine and sum values: shapes, arithmetic, activation functions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from esper.tolaria.executors.native.lowering import (
    ADDED,
    DIVIDED,
    MULTIPLIED,
    SUBTRACTED,
    Dims,
    Lowering,
    Mask,
    Value,
    Weight,
    loop,
    rule,
    strides_of,
)
from esper.tolaria.executors.native.program import Operation, Rows
from esper.tolaria.executors.native.trace import BATCH

# -- shapes ------------------------------------------------------------------------------------------------------------


def reshaped(low: Lowering, x: Value | Weight, shape: Dims) -> Value | Weight:
    """The same numbers in another shape, which PyTorch has worked out."""
    if isinstance(x, Weight):
        return replace(x, shape=shape)
    if x.axis is None and math.prod(shape) == x.size:
        return low.view(x, shape, None)
    if x.axis is None:  # `expand` has left an axis of the examples at size 1
        ones = [d for d, size in enumerate(x.shape) if size == 1]
        if len(ones) != 1 or math.prod(shape) != x.size * BATCH:
            raise low.refuse(f"a reshape from {x.shape} to {shape}")
        x = low.view(x, (*x.shape[: ones[0]], BATCH, *x.shape[ones[0] + 1 :]), ones[0])
    assert x.axis is not None
    before, merged, sizes = math.prod(x.shape[: x.axis]) * x.outer, 1, list(shape)
    for axis, size in enumerate(sizes):
        outer, rest = divmod(before, merged)
        if rest == 0 and size % (outer * BATCH) == 0 and size // (outer * BATCH) >= 1:
            return low.view(x, shape, axis, outer)
        merged *= size
        if merged > before:
            break
    raise low.refuse(f"a reshape from {x.shape} to {shape} that cuts the axis of the examples")


def _sizes(count: int, shape: Sequence[int]) -> Dims:
    """A shape of `count` numbers in which -1 stands for the rest."""
    known = -math.prod(shape) if -1 in shape else 0
    return tuple(count // known if size == -1 else int(size) for size in shape)


@rule("view.default", "reshape.default", "_unsafe_view.default", "view_copy.default")
def view(low: Lowering, x: Any, shape: Sequence[int]) -> Any:
    return reshaped(low, x, _sizes(math.prod(x.shape), shape))


@rule("unsqueeze.default")
def unsqueeze(low: Lowering, x: Any, dim: int) -> Any:
    dim = dim % (len(x.shape) + 1)
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    if isinstance(x, Value) and x.axis is not None:
        return low.view(x, shape, x.axis + (dim <= x.axis), x.outer)
    return reshaped(low, x, shape)


@rule("squeeze.dim", "squeeze.dims", "squeeze.default")
def squeeze(low: Lowering, x: Any, dims: int | Sequence[int] | None = None) -> Any:
    every = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % len(x.shape) for d in every if x.shape[d] == 1}
    shape = tuple(size for d, size in enumerate(x.shape) if d not in gone)
    if isinstance(x, Value) and x.axis is not None:
        return low.view(x, shape, x.axis - sum(d < x.axis for d in gone), x.outer)
    return reshaped(low, x, shape)


def rearranged(low: Lowering, x: Value, y: Value, of_x: Sequence[int], of_y: Sequence[int], dims: Dims, first: int = 0,
               into: int = 0) -> Value:  # fmt: skip
    """A copy of the rows of `x` at strides `of_x` from row `first` on, to `y`; the backward pass copies them back."""
    low.emit(Operation.COPY, x.rows.after(first), y.rows.after(into), sizes=loop(dims, of_y, of_x))

    def back(g: Rows, grad: Rows, *, adds: bool) -> None:
        low.emit(Operation.COPY, g.after(into), grad.after(first), sizes=loop(dims, of_x, of_y), flag=adds)

    def backward(g: Rows) -> None:
        if math.prod(dims) == x.size:
            low.into(x, lambda grad: back(g, grad, adds=False))
        elif x.needs:  # the parts of a value add to one gradient
            back(g, low.gradient(x), adds=True)

    return low.result(y, backward, x)


@rule("permute.default")
def permute(low: Lowering, x: Any, order: Sequence[int]) -> Value:
    x = low.value(x)
    order = [d % len(x.shape) for d in order]
    shape = tuple(x.shape[d] for d in order)
    axis = None if x.axis is None else order.index(x.axis)
    dims, strides = x.dims, strides_of(x.dims)
    if [d for d in order if dims[d] > 1] == [d for d in range(len(dims)) if dims[d] > 1]:
        return low.view(x, shape, axis, x.outer)
    y = Value(low.rows(x.size), shape, axis, x.outer)
    return rearranged(low, x, y, [strides[d] for d in order], strides_of(y.dims), y.dims)


@rule("transpose.int")
def transpose(low: Lowering, x: Any, a: int, b: int) -> Value:
    order = list(range(len(x.shape)))
    a, b = a % len(order), b % len(order)
    order[a], order[b] = b, a
    return permute(low, x, order)


@rule("t.default", "numpy_T.default", "mT.default")
def matrix_transpose(low: Lowering, x: Any) -> Value:
    return x if len(x.shape) < 2 else transpose(low, x, -1, -2)


@rule("slice.Tensor")
def slice_(low: Lowering, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = dim % len(x.shape)
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    count = len(range(start, end, step))
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    if count == x.shape[dim] and step == 1:
        return x
    if isinstance(x, Weight) and step == 1 and math.prod(x.shape[:dim]) == 1:
        return x.part(start * math.prod(x.shape[dim + 1 :]), shape)
    x = low.value(x)
    if x.axis == dim:
        raise low.refuse("a part of the examples")
    y = Value(low.rows(math.prod(x.dims) // x.shape[dim] * count), shape, x.axis, x.outer)
    strides = strides_of(x.dims)
    return rearranged(
        low, x, y, [s * (step if d == dim else 1) for d, s in enumerate(strides)], strides_of(y.dims), y.dims,
        first=start * strides[dim],
    )  # fmt: skip


@rule("select.int")
def select(low: Lowering, x: Any, dim: int, index: int) -> Any:
    dim = dim % len(x.shape)
    index = index % x.shape[dim]
    return squeeze(low, slice_(low, x, dim, index, index + 1), dim)


def _pieces(low: Lowering, x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    found, start = [], 0
    for size in sizes:
        found.append(slice_(low, x, dim, start, start + size))
        start += size
    return found


@rule("split_with_sizes.default", "split.sizes")
def split_with_sizes(low: Lowering, x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    return _pieces(low, x, sizes, dim)


@rule("split.Tensor")
def split(low: Lowering, x: Any, size: int, dim: int = 0) -> list[Any]:
    whole = x.shape[dim]
    return _pieces(low, x, [min(size, whole - start) for start in range(0, whole, size)], dim)


@rule("unbind.int")
def unbind(low: Lowering, x: Any, dim: int = 0) -> list[Any]:
    return [select(low, x, dim, k) for k in range(x.shape[dim])]


@rule("cat.default", "concat.default", "concatenate.default")
def cat(low: Lowering, tensors: Sequence[Any], dim: int = 0) -> Value:
    values = [batched(low, low.value(x), tensors) for x in tensors]
    first = values[0]
    dim = dim % len(first.shape)
    if any((x.axis, x.outer) != (first.axis, first.outer) for x in values) or dim == first.axis:
        raise low.refuse("tensors whose examples lie along other axes")
    shape = (*first.shape[:dim], sum(x.shape[dim] for x in values), *first.shape[dim + 1 :])
    y = low.like(first, shape)
    strides, parts, first_row = strides_of(y.dims), [], 0
    for x in values:
        whole = [stride if size > 1 else 0 for stride, size in zip(strides, x.dims, strict=True)]
        parts.append((x, first_row, strides_of(x.dims), whole))
        low.emit(Operation.COPY, x.rows, y.rows.after(first_row), sizes=loop(x.dims, whole, strides_of(x.dims)))
        first_row += x.shape[dim] * math.prod(y.dims[dim + 1 :])

    def backward(g: Rows) -> None:
        for x, begin, own, whole in parts:
            if x.needs:
                grad = low.rows(x.size)
                low.emit(Operation.COPY, g.after(begin), grad, sizes=loop(x.dims, own, whole))
                low.give(x, grad)

    return low.result(y, backward, *values)


@rule("stack.default")
def stack(low: Lowering, tensors: Sequence[Any], dim: int = 0) -> Value:
    return cat(low, [unsqueeze(low, low.value(x), dim) for x in tensors], dim)


def padded(low: Lowering, x: Value, count: int) -> Value:
    """With so many axes, the new ones of size 1 in front."""
    more = count - len(x.shape)
    axis = None if x.axis is None else x.axis + more
    return low.view(x, (*(1,) * more, *x.shape), axis, x.outer) if more else x


def batched(low: Lowering, x: Value, others: Sequence[Any]) -> Value:
    """A value that is the same for all examples, with the axis of the examples of one that is not."""
    like = next((o for o in others if isinstance(o, Value) and o.axis is not None), None)
    if x.axis is not None or like is None or len(x.shape) != len(like.shape):
        return x
    assert like.axis is not None
    if x.shape[like.axis] == 1:
        return low.view(x, (*x.shape[: like.axis], BATCH, *x.shape[like.axis + 1 :]), like.axis)
    if x.shape[like.axis] == BATCH:
        raise low.refuse("a tensor with an entry for each example of a batch")
    return x


@rule("expand.default")
def expand(low: Lowering, x: Any, shape: Sequence[int], implicit: bool = False) -> Value:
    x = low.value(x)
    base = padded(low, x, len(shape))
    full = tuple(old if new == -1 else int(new) for old, new in zip(base.shape, shape, strict=True))
    if x.axis is None:
        # whether an axis of BATCH is that of the examples shows where it is combined with them; sizes of 1 broadcast
        full = tuple(1 if old != new == BATCH else new for old, new in zip(base.shape, full, strict=True))
    y = replace(base, rows=Rows(0, 0), shape=full, needs=False)
    if y.dims == base.dims:
        return replace(base, shape=full) if not base.needs else low.view(base, full, base.axis, base.outer)
    y = replace(y, rows=low.rows(math.prod(y.dims)))
    low.emit(Operation.COPY, base.rows, y.rows, sizes=loop(y.dims, strides_of(y.dims), strides_of(base.dims)))
    return low.result(y, lambda g: _reduce_to(low, base, g, y.dims), base)


@rule("contiguous.default", "clone.default", "alias.default", "lift_fresh_copy.default")
def same(low: Lowering, x: Any, **_: object) -> Any:
    return x


@rule("detach.default")
def detach(low: Lowering, x: Any) -> Any:
    if isinstance(x, Weight):
        return replace(x, grad=None)
    return replace(x, needs=False) if isinstance(x, Value) else x


@rule("to.dtype", "_to_copy.default", "to.dtype_layout", "to.device")
def to(low: Lowering, x: Any, *arguments: Any, **options: Any) -> Any:
    types = [a for a in (*arguments, *options.values()) if isinstance(a, torch.dtype)]
    if any(t != torch.float32 for t in types):
        raise low.refuse(f"a conversion to {types[0]}")
    return x


# -- arithmetic --------------------------------------------------------------------------------------------------------


def broadcast(low: Lowering, *values: Value, shape: Sequence[int] = ()) -> tuple[Value, ...]:
    """All with as many axes, the examples along the same one; and the shape that they have together, without rows."""
    count = max(len(shape), *(len(x.shape) for x in values))
    values = tuple(padded(low, x, count) for x in values)
    if len({(x.axis, x.outer, x.shape[x.axis]) for x in values if x.axis is not None}) > 1:
        raise low.refuse("tensors whose examples lie along other axes")
    values = tuple(batched(low, x, values) for x in values)
    like = next((x for x in values if x.axis is not None), values[0])
    if any(x.axis != like.axis for x in values):
        raise low.refuse("a tensor with an entry for each example of a batch")
    shapes = ((1,) * (count - len(shape)) + tuple(shape), *(x.shape for x in values))
    full = tuple(max(sizes) for sizes in zip(*shapes, strict=True))  # merged axes may have several times BATCH
    return *values, Value(Rows(0, 0), full, like.axis, like.outer)


def _broadcast_strides(x: Value, dims: Dims) -> list[int]:
    return [s if own > 1 else 0 for s, own, _ in zip(strides_of(x.dims), x.dims, dims, strict=True)]


def _reduce_to(low: Lowering, x: Value, g: Rows, dims: Dims, times: Value | None = None, factor: float = 1.0) -> None:
    """Give `x` the sum of factor * g (* times) over the axes along which it was broadcast to `dims`."""
    if times is None and factor == 1.0 and x.dims == dims:
        return low.give(x, g)

    def write(grad: Rows) -> None:
        full = strides_of(dims)
        if x.dims == dims:
            if times is None:
                low.emit(Operation.AFFINE, g, grad, sizes=(x.size,), numbers=(factor, 0.0))
                return
            sizes = loop(dims, full, full, _broadcast_strides(times, dims))
            low.emit(Operation.COMBINE, g, times.rows, grad, sizes=sizes, flag=MULTIPLIED)
            if factor != 1.0:
                low.emit(Operation.AFFINE, grad, grad, sizes=(x.size,), numbers=(factor, 0.0))
            return
        other = full if times is None else _broadcast_strides(times, dims)
        sizes = loop(dims, _broadcast_strides(x, dims), full, other)
        low.emit(Operation.SUM, g, None if times is None else times.rows, grad, sizes=sizes, flag=x.size,
                 numbers=(factor,))  # fmt: skip

    low.into(x, write)
    return None


def combine(low: Lowering, a: Any, b: Any, kind: int, alpha: float = 1.0) -> Value:
    """Elementwise, with broadcasting."""
    if isinstance(a, Mask) and isinstance(b, Mask) and kind != MULTIPLIED:
        raise low.refuse("a sum of truth values")
    a, b, like = broadcast(low, low.value(a), low.value(b))
    dims = like.dims
    y = replace(like, rows=low.rows(math.prod(dims)))
    of = strides_of(dims), _broadcast_strides(a, dims), _broadcast_strides(b, dims)
    low.emit(Operation.COMBINE, a.rows, b.rows, y.rows, sizes=loop(dims, *of), flag=kind, numbers=(alpha,))

    def backward(g: Rows) -> None:
        if kind in (ADDED, SUBTRACTED):
            _reduce_to(low, a, g, dims)
            _reduce_to(low, b, g, dims, factor=alpha if kind == ADDED else -alpha)
        elif kind == MULTIPLIED:
            _reduce_to(low, a, g, dims, times=b)
            _reduce_to(low, b, g, dims, times=a)
        else:
            quotient = low.rows(y.size)  # g / b
            sizes = loop(dims, of[0], of[0], of[2])
            low.emit(Operation.COMBINE, g, b.rows, quotient, sizes=sizes, flag=DIVIDED)
            _reduce_to(low, a, quotient, dims)
            _reduce_to(low, b, quotient, dims, times=y, factor=-1.0)

    return low.result(y, backward, a, b)


NOTHING = -0.0
"""What changes no sum, not even the sign of zero."""


def affine(low: Lowering, x: Value, factor: float, shift: float) -> Value:
    """Factor * x + shift."""
    y, sizes = low.like(x), (x.size,)
    low.emit(Operation.AFFINE, x.rows, y.rows, sizes=sizes, numbers=(factor, shift))

    def backward(g: Rows) -> None:
        if factor == 1.0:
            return low.give(x, g)
        return low.into(x, lambda grad: low.emit(Operation.AFFINE, g, grad, sizes=sizes, numbers=(factor, 0.0)))

    return low.result(y, backward, x)


def _arithmetic(low: Lowering, a: Any, b: Any, *, kind: int, alpha: float = 1) -> Value:
    first, second = low.number(a), low.number(b)
    if isinstance(a, Value | Weight) and second is not None:
        if kind in (ADDED, SUBTRACTED):
            return affine(low, low.value(a), 1.0, alpha * second if kind == ADDED else -alpha * second)
        return affine(low, low.value(a), second if kind == MULTIPLIED else 1.0 / second, NOTHING)
    if isinstance(b, Value | Weight) and first is not None and kind != DIVIDED:
        if kind == MULTIPLIED:
            return affine(low, low.value(b), first, NOTHING)
        return affine(low, low.value(b), alpha if kind == ADDED else -alpha, first)
    return combine(low, a, b, kind, float(alpha))


add, sub, mul, div = (partial(_arithmetic, kind=kind) for kind in (ADDED, SUBTRACTED, MULTIPLIED, DIVIDED))
for _rule, _name, _more in ((add, "add", ()), (sub, "sub", ("subtract.Tensor",)), (mul, "mul", ("multiply.Tensor",)),
                            (div, "div", ("divide.Tensor",))):  # fmt: skip
    rule(f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}_.Tensor", f"{_name}_.Scalar", *_more)(_rule)


@rule("neg.default")
def neg(low: Lowering, x: Any) -> Value:
    return affine(low, low.value(x), -1.0, NOTHING)


# -- sums --------------------------------------------------------------------------------------------------------------


def axes_of(x: Value, dim: int | Sequence[int] | None) -> list[int]:
    """The axes that an operation names, all if it names none."""
    every = range(len(x.shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted({d % len(x.shape) for d in every})


def total(low: Lowering, x: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, mean: bool,
          dtype: torch.dtype | None = None) -> Value:  # fmt: skip
    """The sum or mean over some axes."""
    x = low.value(x)
    if dtype not in (None, torch.float32):
        raise low.refuse(f"a conversion to {dtype}")
    gone, dims = axes_of(x, dim), x.dims
    if x.axis in gone:
        raise low.refuse("a sum over the examples of a batch")
    factor = 1.0 / math.prod(dims[d] for d in gone) if mean else 1.0
    y = low.like(x, tuple(1 if d in gone else size for d, size in enumerate(x.shape)))
    strides, narrow = strides_of(dims), _broadcast_strides(y, dims)
    low.emit(Operation.SUM, x.rows, None, y.rows, sizes=loop(dims, narrow, strides, strides), flag=y.size,
             numbers=(factor,))  # fmt: skip

    def backward(g: Rows) -> None:
        def write(grad: Rows) -> None:
            own = g
            if factor != 1.0:
                own = low.rows(y.size)
                low.emit(Operation.AFFINE, g, own, sizes=(y.size,), numbers=(factor, 0.0))
            low.emit(Operation.COPY, own, grad, sizes=loop(dims, strides, narrow))

        low.into(x, write)

    found = low.result(y, backward, x)
    return found if keepdim else low.value(squeeze(low, found, gone))


rule("sum.dim_IntList", "sum.default")(partial(total, mean=False))
rule("mean.dim", "mean.default")(partial(total, mean=True))
