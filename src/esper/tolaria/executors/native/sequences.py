"""Rules of sequences: embeddings, attention, products of values, sums of the past, masks, keyed dropout."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor, fx

from esper.kasmina.parameters.dropout import Moment
from esper.leyline.random import Stream, words
from esper.tolaria.executors.native.convolutions import by_weight, linear
from esper.tolaria.executors.native.layers import softmax
from esper.tolaria.executors.native.lowering import Dims, Lowering, Value, Weight, rule, rule_of
from esper.tolaria.executors.native.program import Operation, Place, Rows
from esper.tolaria.executors.native.rules import (
    add,
    batched,
    expand,
    mul,
    permute,
    reshaped,
    squeeze,
    total,
    transpose,
    unsqueeze,
)
from esper.tolaria.executors.native.trace import BATCH, FUSIONS, aten, part

_PART: Final = 32
"""Queries that share a mask of dropout, as in kasmina/parameters/dropout.py."""
_WIDEST: Final = 16
"""Lanes that a kernel treats at once."""
_EXACT: Final = 2**24
"""Whole numbers up to here are exact in float32."""


# -- embeddings --------------------------------------------------------------------------------------------------------


@rule("embedding.default")
def embedding(low: Lowering, weight: Any, tokens: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> Value | Weight:  # fmt: skip
    """Rows of a table; tokens are whole numbers."""
    if scale_grad_by_freq or sparse:
        raise low.refuse("an embedding whose gradient is sparse or depends on how often a token occurs")
    x = low.value(tokens)
    entries, each = weight.shape
    if entries > _EXACT:
        raise low.refuse(f"a table of {entries} entries")
    if isinstance(tokens, Tensor) and isinstance(weight, Weight) and padding_idx < 0 and tokens.numel():
        first = int(tokens.flatten()[0])
        if first >= 0 and torch.equal(tokens.flatten(), torch.arange(first, first + tokens.numel())):
            if first + tokens.numel() > entries:
                raise low.refuse("a token that the table lacks")
            return weight.part(first * each, (*tokens.shape, each))  # such as positions
    w = low.weight(weight, entries, each)
    y = replace(x, rows=low.rows(x.size * each), shape=(*x.shape, each), needs=False)
    sizes = (x.size, entries, each)
    low.emit(Operation.EMBED, x.rows, w.place, y.rows, sizes=sizes)

    def backward(g: Rows) -> None:
        low.emit(Operation.EMBED_WEIGHT_GRAD, x.rows, g, low.grad_of(w), sizes=sizes, flag=padding_idx)

    return low.result(y, backward, w)


@rule("one_hot.default")
def one_hot(low: Lowering, tokens: Any, classes: int = -1) -> Value:
    """A row of an identity matrix for each token."""
    if classes < 0:
        raise low.refuse("a number of classes that depends on the tokens")
    return low.value(embedding(low, torch.eye(classes), tokens))


# -- attention ---------------------------------------------------------------------------------------------------------


def _draw_of(p: float) -> tuple[float, float]:
    """The smallest number of 16 bits that is kept, and the factor of what is kept; as in `Draws.kept`."""
    return float(min(round(p * 2**16), 2**16 - 1) - 2**15), 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _attend(low: Lowering, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None,
            p: float = 0.0) -> Value:  # fmt: skip
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if scale <= 0.0:  # PyTorch takes its root, or does not
        raise low.refuse(f"attention with a scale of {scale}")
    values = [low.value(x) for x in (q, k, v)]
    q, k, v = (batched(low, x, values) for x in values)
    if any(x.axis is not None and x.axis >= len(x.shape) - 2 for x in (q, k, v)):
        raise low.refuse("attention between examples")
    alike = len({(x.axis, x.outer, x.shape[:-2], x.shape[-1]) for x in (q, k, v)}) == 1 and k.shape == v.shape
    if not alike or isinstance(mask, Value | Weight):
        if p > 0.0:
            raise low.refuse(f"attention with dropout of {q.shape} to {k.shape}")
        return _written_out(low, q, k, v, mask, causal, scale)
    queries, keys, size = q.shape[-2], k.shape[-2], q.shape[-1]
    heads = math.prod(q.dims[:-2])
    own_masks, place = False, None
    if mask is not None:
        mask, own_masks = _score_mask(low, mask, q, (queries, keys), heads)
        place = low.constants.place(mask)
    masks = low.next_masks(-(-queries // _PART)) if p > 0.0 else None
    numbers = (scale, *_draw_of(p))
    y, sizes = low.like(q), (heads, queries, keys, size)
    trains = low.trains(q, k, v)
    stats = low.rows(2 * heads * queries) if trains else None
    # rows of q, k, v, y; or of q, k, v, g and three gradients, and a number for each query
    packed = (2 * queries + 2 * keys) * size if not trains else ((3 * queries + 4 * keys) * size + queries)
    scratch = low.a.scratch(packed * _WIDEST)
    options: dict[str, Any] = {"sizes": sizes, "flag": int(causal) + 2 * own_masks, "numbers": numbers}
    low.emit(Operation.ATTEND, q.rows, k.rows, v.rows, place, masks, y.rows, stats, scratch, **options)

    def backward(g: Rows) -> None:
        grads = [low.rows(x.size) for x in (q, k, v)]
        low.emit(Operation.ATTEND_BACKWARD, q.rows, k.rows, v.rows, y.rows, g, stats, place, masks, *grads,
                 scratch, **options)  # fmt: skip
        for x, grad in zip((q, k, v), grads, strict=True):
            low.give(x, grad)

    return low.result(y, backward, q, k, v)


def _written_out(low: Lowering, q: Value, k: Value, v: Value, mask: Any, causal: bool, scale: float) -> Value:
    """Attention by a product, softmax, and another product."""
    scores = mul(low, matmul(low, q, transpose(low, k, -1, -2)), scale)
    if causal:
        scores = _select(low, torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), scores, -math.inf)
    if isinstance(mask, Mask) or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        scores = _select(low, mask, scores, -math.inf)
    elif mask is not None:
        scores = add(low, scores, mask)
    weights = softmax(low, scores, -1)
    if mask is not None:  # a query without keys gets zeros
        seen = total(low, _compared(low, scores, -math.inf, 1), -1, True, mean=False)
        weights = _select(low, _compared(low, seen, 0.0, 0), 0.0, weights)
    return matmul(low, weights, v)


def _score_mask(low: Lowering, mask: Tensor, q: Value, shape: Dims, heads: int) -> tuple[Tensor, bool]:
    """What is added to the scores, [T, S] or [heads, T, S]; and whether it is of each head."""
    if mask.dtype == torch.bool:
        if not mask.any(dim=-1).all():
            raise low.refuse("a mask of attention that leaves a query no key")
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    elif bool((mask == -math.inf).all(dim=-1).any()):
        raise low.refuse("a mask of attention that leaves a query no key")
    lead = mask.shape[:-2]
    if math.prod(lead) == 1:
        return mask.reshape(mask.shape[-2:]).expand(shape).contiguous(), False
    padded = (*(1,) * (len(q.shape) - 2 - len(lead)), *lead)
    if q.axis is not None and padded[q.axis] != 1:
        raise low.refuse("a mask of attention for each example")
    full = tuple(q.dims[:-2])
    return mask.reshape(*padded, *mask.shape[-2:]).expand(*full, *shape).reshape(heads, *shape).contiguous(), True


@rule("scaled_dot_product_attention.default")
def attention(low: Lowering, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Value:  # fmt: skip
    """[..., T, D], with the axis of the examples anywhere before."""
    if dropout_p > 0.0:
        raise low.refuse("attention with dropout from the global generator")
    if enable_gqa:
        raise low.refuse("attention whose queries share keys")
    return _attend(low, q, k, v, attn_mask, is_causal, scale)


# -- products ----------------------------------------------------------------------------------------------------------


def _product_rows(low: Lowering, a: Value, b: Value, y: Value, sizes: tuple[int, int, int, int]) -> Value:
    """Y = a b, as `sizes[0]` matrices of rows."""
    count, rows, columns, inner = sizes
    low.emit(Operation.PRODUCT, a.rows, b.rows, y.rows, sizes=sizes)

    def backward(g: Rows) -> None:
        low.into(a, lambda grad: low.emit(
            Operation.PRODUCT, g, b.rows, grad, sizes=(count, rows, inner, columns), flag=2
        ))  # fmt: skip
        low.into(b, lambda grad: low.emit(
            Operation.PRODUCT, a.rows, g, grad, sizes=(count, inner, columns, rows), flag=1
        ))  # fmt: skip

    return low.result(y, backward, a, b)


def _is_weight(x: object) -> bool:
    return isinstance(x, Weight | Tensor)


@rule("matmul.default", "bmm.default", "mm.default", "mv.default", "dot.default")
def matmul(low: Lowering, a: Any, b: Any) -> Value:
    """As torch.matmul; the examples lie along rows or matrices, or along columns."""
    if len(a.shape) == 1:
        return low.value(squeeze(low, matmul(low, unsqueeze(low, low.value(a), 0), b), -1 if len(b.shape) == 1 else -2))
    if len(b.shape) == 1:
        if _is_weight(b):
            return low.value(squeeze(low, linear(low, a, _shaped(low, b, (1, *b.shape))), -1))
        return low.value(squeeze(low, matmul(low, a, unsqueeze(low, b, 1)), -1))
    if _is_weight(b) and len(b.shape) == 2:
        return by_weight(low, low.value(a), b)
    if _is_weight(a) and len(a.shape) == 2 and b.axis != len(b.shape) - 2:
        order = [*range(len(b.shape) - 2), len(b.shape) - 1, len(b.shape) - 2]
        return permute(low, linear(low, permute(low, b, order), a), order)
    a, b = low.value(a), low.value(b)
    if b.axis is None and len(b.shape) == 2:
        if a.axis == len(a.shape) - 1:
            raise low.refuse("a sum over the examples of a batch")
        y = Value(low.rows(a.size // a.dims[-1] * b.shape[1]), (*a.shape[:-1], b.shape[1]), a.axis, a.outer)
        return _product_rows(low, a, b, y, (1, a.size // a.dims[-1], b.shape[1], b.shape[0]))
    count = max(len(a.shape), len(b.shape))
    while len(a.shape) < count:
        a = unsqueeze(low, a, 0)
    while len(b.shape) < count:
        b = unsqueeze(low, b, 0)
    a, b = batched(low, a, [b]), batched(low, b, [a])
    lead = tuple(max(m, n) for m, n in zip(a.shape[:-2], b.shape[:-2], strict=True))
    a, b = expand(low, a, (*lead, *a.shape[-2:])), expand(low, b, (*lead, *b.shape[-2:]))
    axis = a.axis if b.axis is None else b.axis
    if axis is not None:
        of_rows, of_columns = a.axis == count - 2 and b.axis is None, b.axis == count - 1 and a.axis is None
        of_matrices = axis < count - 2 and (a.axis, a.outer, a.shape[axis]) == (b.axis, b.outer, b.shape[axis])
        if not (of_rows or of_columns or of_matrices):
            raise low.refuse(f"a product of {a.shape} and {b.shape} whose examples lie along other axes")
    if a.dims[:-2] != b.dims[:-2]:
        raise low.refuse(f"a product of {a.shape} and {b.shape}")
    y = Value(Rows(0, 0), (*lead, a.shape[-2], b.shape[-1]), axis, a.outer if b.axis is None else b.outer)
    y = replace(y, rows=low.rows(y.size))
    return _product_rows(low, a, b, y, (math.prod(a.dims[:-2]), a.dims[-2], b.dims[-1], a.dims[-1]))


@rule("addmm.default", "baddbmm.default", "addmv.default")
def addmm(low: Lowering, start: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Value:
    """The sum of beta * start and alpha * a b."""
    y = matmul(low, a, b)
    y = y if alpha == 1 else mul(low, y, float(alpha))
    if beta == 0:
        return y
    return add(low, y, start if beta == 1 else mul(low, low.value(start), float(beta)))


@rule("einsum.default")
def einsum(low: Lowering, equation: str, operands: Sequence[Any], path: object = None) -> Value:
    """Of one or two tensors, without ellipses and diagonals."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if "." in equation or len(terms) > 2 or any(len(set(term)) < len(term) for term in (*terms, out)):
        raise low.refuse(f"the sum {equation!r}")
    if not arrow:
        out = "".join(sorted(letter for letter in set(given) - {","} if given.count(letter) == 1))
    if len(terms) == 1:
        return _arranged(low, operands[0], terms[0], out)
    (first, second), (a, b) = terms, operands
    if any(a.shape[first.index(x)] != b.shape[second.index(x)] for x in set(first) & set(second)):
        raise low.refuse(f"the sum {equation!r} of {a.shape} and {b.shape}")  # PyTorch broadcasts sizes of 1
    batch = "".join(x for x in first if x in second and x in out)
    inner = "".join(x for x in first if x in second and x not in out)
    rows, columns = ("".join(x for x in term if x in out and x not in batch) for term in terms)
    if _is_weight(b) and rows and not batch and second in (inner + columns, columns + inner):
        a = _arranged(low, a, first, rows + inner)
        size, outputs = math.prod(a.shape[len(rows) :]), [b.shape[second.index(x)] for x in columns]
        x, of_rows = _shaped(low, a, (*a.shape[: len(rows)], size)), second == columns + inner
        w = _shaped(low, b, (math.prod(outputs), size) if of_rows else (size, math.prod(outputs)))
        y = linear(low, x, w) if of_rows else by_weight(low, x, w)
        return _arranged(low, _shaped(low, y, (*a.shape[: len(rows)], *outputs)), rows + columns, out)
    a, b = _arranged(low, a, first, batch + rows + inner), _arranged(low, b, second, batch + inner + columns)
    letters = batch + rows + columns
    ends = {(batch + rows + inner)[a.axis]: a.outer} if a.axis is not None else {}
    if b.axis is not None:
        letter = (batch + inner + columns)[b.axis]
        if ends not in ({}, {letter: b.outer}) or bool(ends) != (letter in batch):
            raise low.refuse(f"the sum {equation!r} over examples of {a.shape} and {b.shape}")
        ends = {letter: b.outer}
    elif ends and next(iter(ends)) in batch:
        raise low.refuse(f"the sum {equation!r} over examples of {a.shape} and {b.shape}")
    if ends.keys() & set(inner):
        raise low.refuse("a sum over the examples of a batch")
    axis, outer = next(((letters.index(x), k) for x, k in ends.items()), (None, 1))
    shape = *a.shape[: len(batch + rows)], *b.shape[len(batch + inner) :]
    y = Value(Rows(0, 0), shape, axis, outer)
    y = replace(y, rows=low.rows(y.size))
    at = len(batch), len(batch + rows)
    sizes = math.prod(a.dims[: at[0]]), math.prod(a.dims[at[0] : at[1]]), math.prod(b.dims[len(batch + inner) :])
    return _arranged(low, _product_rows(low, a, b, y, (*sizes, math.prod(a.dims[at[1] :]))), letters, out)


def _shaped(low: Lowering, x: Any, shape: Dims) -> Any:
    return x.reshape(shape) if isinstance(x, Tensor) else reshaped(low, x, shape)


def _arranged(low: Lowering, x: Any, given: str, wanted: str) -> Value:
    """Sums over the letters that are not wanted, and the others in their order."""
    x = low.value(x)
    if len(given) != len(x.shape):
        raise low.refuse(f"the axes {given!r} of {x.shape}")
    gone = [d for d, letter in enumerate(given) if letter not in wanted]
    if gone:
        x, given = total(low, x, gone, False, mean=False), "".join(letter for letter in given if letter in wanted)
    return permute(low, x, [given.index(letter) for letter in wanted])


@rule("tensordot.default")
def tensordot(low: Lowering, a: Any, b: Any, dims_a: Sequence[int], dims_b: Sequence[int]) -> Value:
    """As a sum of products."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    of_a = [next(letters) for _ in a.shape]
    of_b = [next(letters) for _ in b.shape]
    for i, j in zip(dims_a, dims_b, strict=True):
        of_b[j % len(of_b)] = of_a[i % len(of_a)]
    out = [x for x in of_a if x not in of_b] + [x for x in of_b if x not in of_a]
    return einsum(low, f"{''.join(of_a)},{''.join(of_b)}->{''.join(out)}", [a, b])


_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int, aten.permute.default}
_VIEWS = {part, aten.view.default, aten.reshape.default, aten.split_with_sizes.default, operator.getitem}


def _transposed_weight(node: object) -> fx.Node | None:
    """The matrix of parameters that a node transposes; None if it does something else."""
    if not (isinstance(node, fx.Node) and node.target in _TRANSPOSES):
        return None
    found = source = node.args[0]
    assert isinstance(found, fx.Node)
    if len(found.meta["val"].shape) != 2 or node.meta["val"].shape != found.meta["val"].shape[::-1]:
        return None
    order: Any = node.args[1] if node.target is aten.permute.default else node.args[1:]
    if order and [d % 2 for d in order] in ([0, 0], [1, 1], *([[0, 1]] if node.target is aten.permute.default else [])):
        return None
    while isinstance(source, fx.Node) and source.target in _VIEWS:
        source = source.args[0]
    return found if isinstance(source, fx.Node) and source.op == "placeholder" else None


def _fuse_products(graph: fx.Graph) -> None:
    """Products with a transposed weight are linear layers, and the other way round."""
    for node in graph.nodes:
        if node.target in (aten.matmul.default, aten.mm.default) and (weight := _transposed_weight(node.args[1])):
            node.target, node.args = aten.linear.default, (node.args[0], weight)
        elif node.target is aten.addmm.default and not node.kwargs and (weight := _transposed_weight(node.args[2])):
            if len(node.args[0].meta["val"].shape) == 1:
                node.target, node.args = aten.linear.default, (node.args[1], weight, node.args[0])
        elif node.target is aten.linear.default and len(node.args) == 2 and (w := _transposed_weight(node.args[1])):
            node.target, node.args = aten.matmul.default, (node.args[0], w)


FUSIONS.append(_fuse_products)


# -- sums of the past, constant masks ----------------------------------------------------------------------------------


@rule("cumsum.default")
def cumsum(low: Lowering, x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    """Sums over one axis up to each place."""
    x = low.value(x)
    dim = dim % len(x.shape)
    if dtype not in (None, torch.float32):
        raise low.refuse(f"a conversion to {dtype}")
    if x.axis == dim:
        raise low.refuse("a sum over the examples of a batch")
    sizes = (math.prod(x.dims[:dim]), x.dims[dim], math.prod(x.dims[dim + 1 :]))
    y = low.like(x)
    low.emit(Operation.RUNNING_SUM, x.rows, y.rows, sizes=sizes)
    return low.result(
        y, lambda g: low.into(x, lambda grad: low.emit(Operation.RUNNING_SUM, g, grad, sizes=sizes, flag=1)), x
    )


@dataclass(frozen=True, eq=False)
class Mask(Value):
    """A value that PyTorch sees as true or false: 1 or 0."""


def _select(low: Lowering, mask: Any, a: Any, b: Any) -> Value:
    """`a` where a mask is True, else `b`; one of them may be a number."""
    if not isinstance(mask, Tensor | Mask):
        raise low.refuse("a mask that is no comparison")
    numbers = [None if isinstance(x, Value | Weight) else low.number(x) for x in (a, b)]
    if None not in numbers:
        raise low.refuse("a choice between two numbers")
    given = [None if number is not None else low.value(x) for x, number in zip((a, b), numbers, strict=True)]
    shape, values = _together(low, [*given, mask if isinstance(mask, Mask) else None], mask.shape)
    *values, rows = values
    first = next(x for x in values if x is not None)
    if isinstance(mask, Tensor):
        own = mask.reshape(*(1,) * (len(shape) - len(mask.shape)), *mask.shape)
        if first.axis is not None and own.shape[first.axis] != 1:
            raise low.refuse("a mask with an entry for each example of a batch")
        place: Place | Rows = low.constants.place(own.expand(first.dims).contiguous())
    else:
        assert rows is not None
        place = rows.rows
    y, number = low.like(first), next((n for n in numbers if n is not None), 0.0)

    def emit(x: Rows | None, z: Rows | None, to: Rows, number: float) -> None:
        low.emit(Operation.SELECT, place, x, z, to, sizes=(first.size,), flag=rows is not None, numbers=(number,))

    one, other = (None if x is None else x.rows for x in values)
    emit(one, other, y.rows, number)

    def backward(g: Rows) -> None:
        if values[0] is not None:
            low.into(values[0], lambda grad: emit(g, None, grad, 0.0))
        if values[1] is not None:
            low.into(values[1], lambda grad: emit(None, g, grad, 0.0))

    return low.result(y, backward, *values)


def _together(
    low: Lowering, values: Sequence[Value | None], shape: Sequence[int] = ()
) -> tuple[Dims, list[Value | None]]:
    """All values, and a constant of this shape, broadcast to one shape."""
    full = tuple(torch.broadcast_shapes(shape, *(x.shape for x in values if x is not None)))
    like = next((x for x in values if x is not None and x.axis is not None), None)
    padded = None if like is None else low.view(
        like, (*(1,) * (len(full) - len(like.shape)), *like.shape), len(full) - len(like.shape) + like.axis, like.outer  # type: ignore[operator]
    )  # fmt: skip
    found = [x and expand(low, x if padded is None else _with_axis(low, x, padded), full) for x in values]
    first, *others = [x for x in found if x is not None]
    if any((x.shape, x.axis, x.outer) != (first.shape, first.axis, first.outer) for x in others) or first.shape != full:
        raise low.refuse("tensors whose examples lie along other axes")
    return full, found


def _with_axis(low: Lowering, x: Value, like: Value) -> Value:
    """With as many axes as another value, if it is the same for all examples."""
    while x.axis is None and len(x.shape) < len(like.shape):
        x = unsqueeze(low, x, 0)
    return batched(low, x, [like])


@rule("where.self", "where.ScalarOther", "where.ScalarSelf")
def where(low: Lowering, mask: Any, a: Any, b: Any) -> Value:
    """`a` where the mask is True, else `b`."""
    return _select(low, mask, a, b)


@rule("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
def masked_fill(low: Lowering, x: Any, mask: Any, value: Any) -> Value:
    """A number where the mask is True."""
    number = low.number(value)
    if number is None:
        raise low.refuse("a number that is computed in the forward pass")
    return _select(low, mask, number, low.value(x))


_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")
"""In the order of `Comparison` in sequences.h."""


def _compared(low: Lowering, a: Value, b: Value | float, kind: int) -> Mask:
    y = Mask(low.rows(a.size), a.shape, a.axis, a.outer)
    other = b.rows if isinstance(b, Value) else None
    low.emit(Operation.COMPARE, a.rows, other, y.rows, sizes=(a.size,), flag=kind,
             numbers=(0.0 if isinstance(b, Value) else b,))  # fmt: skip
    return y


def _comparison(kind: int) -> Callable[[Lowering, Any, Any], Value]:
    def compare(low: Lowering, a: Any, b: Any) -> Value:
        number = low.number(b)
        if number is not None:
            return _compared(low, low.value(a), number, kind)
        _, (first, second) = _together(low, [low.value(a), low.value(b)])
        assert first is not None
        assert second is not None
        return _compared(low, first, second, kind)

    return compare


for _kind, _name in enumerate(_COMPARISONS):
    rule(f"{_name}.Scalar", f"{_name}.Tensor")(_comparison(_kind))


@rule("bitwise_not.default", "logical_not.default")
def negated(low: Lowering, x: Any) -> Value:
    """Where a mask is False."""
    if not isinstance(x, Mask):
        raise low.refuse("a mask that is no comparison")
    return _compared(low, x, 0.0, 0)


def _triangle(low: Lowering, x: Any, mask: Tensor) -> Value:
    return _select(low, mask, low.value(x), 0.0)


@rule("tril.default")
def tril(low: Lowering, x: Any, diagonal: int = 0) -> Value:
    """The lower triangles of matrices."""
    return _triangle(low, x, torch.ones(x.shape[-2:], dtype=torch.bool).tril(diagonal))


@rule("triu.default")
def triu(low: Lowering, x: Any, diagonal: int = 0) -> Value:
    """The upper triangles of matrices."""
    return _triangle(low, x, torch.ones(x.shape[-2:], dtype=torch.bool).triu(diagonal))


def _filled(low: Lowering, x: Any, size: Sequence[int], number: float, dtype: torch.dtype | None) -> Value:
    """A number everywhere, in the shape of a value or one that begins with the same examples."""
    x = low.value(x)
    if dtype not in (None, torch.float32) or (dtype is None and isinstance(x, Mask)):
        raise low.refuse(f"numbers of type {dtype}")
    same = tuple(size) == x.shape
    if not same and not (x.leads and size and size[0] == BATCH):
        raise low.refuse(f"a tensor of shape {tuple(size)} that is made for {x.shape}")
    y = Value(Rows(0, 0), tuple(size), x.axis if same else 0, x.outer if same else 1)
    y = replace(y, rows=low.rows(y.size))
    low.emit(Operation.FILL, y.rows, sizes=(y.size,), numbers=(float(number),))
    return y


@rule("zeros_like.default", "new_zeros.default")
def zeros(low: Lowering, x: Any, size: Sequence[int] | None = None, *, dtype: Any = None, **_: object) -> Value:
    """Zeros in the shape of a value, or in a given one."""
    return _filled(low, x, x.shape if size is None else size, 0.0, dtype)


@rule("ones_like.default", "new_ones.default")
def ones(low: Lowering, x: Any, size: Sequence[int] | None = None, *, dtype: Any = None, **_: object) -> Value:
    """Ones in the shape of a value, or in a given one."""
    return _filled(low, x, x.shape if size is None else size, 1.0, dtype)


@rule("full_like.default")
def full_like(low: Lowering, x: Any, number: float, *, dtype: Any = None, **_: object) -> Value:
    """A number in the shape of a value."""
    return _filled(low, x, x.shape, number, dtype)


@rule("repeat.default")
def repeat(low: Lowering, x: Any, repeats: Sequence[int]) -> Value:
    """Copies along axes of size 1."""
    x = low.value(x)
    while len(x.shape) < len(repeats):
        x = unsqueeze(low, x, 0)
    if any(times > 1 and size > 1 for times, size in zip(repeats, x.shape, strict=True)):
        raise low.refuse(f"a repetition of {x.shape}, {tuple(repeats)} times")
    return expand(low, x, [times * size for times, size in zip(repeats, x.shape, strict=True)])


# -- dropout -----------------------------------------------------------------------------------------------------------


@rule("dropout.default", "dropout_.default", "feature_dropout.default")
def unkeyed_dropout(low: Lowering, x: Any, p: float, training: bool) -> Any:
    """Dropout that does nothing."""
    if training and p > 0.0:
        raise low.refuse("dropout from the global generator")
    return x


@rule_of(torch.ops.esper.dropout.default)
def dropout(low: Lowering, x: Any, p: float, channels: bool) -> Value:
    """`Dropout.forward` in training."""
    x = low.value(x)
    if x.axis != 0 or x.outer != 1:
        raise low.refuse("dropout of features whose first axis is not that of the examples")
    each = math.prod(x.dims[:2]) if channels else x.size
    y, key = low.like(x), low.next_masks()
    options: dict[str, Any] = {"sizes": (each, x.size // each), "numbers": _draw_of(p)}
    low.emit(Operation.DROP, x.rows, key, y.rows, **options)
    return low.result(
        y,
        lambda g: low.into(x, lambda grad: low.emit(Operation.DROP, g, key, grad, **options)),
        x,
    )


@rule_of(torch.ops.esper.dropped_attention.default)
def dropped_attention(low: Lowering, q: Any, k: Any, v: Any, p: float) -> Value:
    """`Dropout.attend` of [B, heads, T, D]: causal attention with dropped weights."""
    if q.shape != k.shape or low.value(q).axis != 0 or low.value(q).outer != 1:
        raise low.refuse(f"attention with dropout of {q.shape} to {k.shape}")
    return _attend(low, q, k, v, None, True, None, p)


def mask_keys(moment: Moment, hosts: Int[Tensor, " N"], slot: int, count: int) -> Int[Tensor, "N K"]:
    """The keys of the first `count` masks of a pass of some hosts, as `Draws` draws them."""
    drawn = words(moment.run_seed, Stream.DROPOUT, hosts[:, None], episode=moment.episode, t=moment.t, slot=slot,
                  block=torch.arange(count))  # fmt: skip
    return drawn[..., 0] | drawn[..., 1] << 32


def pass_keys(
    moment: Moment, hosts: Int[Tensor, " N"], masks: Sequence[int], batches: int, each: int | None = None
) -> Int[Tensor, "N K"]:
    """What KEYS holds for a program whose masks in one batch are those of these slots (`Lowering.masks`).

    A slot counts its masks from batch to batch. Each batch takes `each` numbers (None: one for each mask), so that
    hosts with other programs can run in the same pass.
    """
    each = len(masks) if each is None else each
    found = torch.zeros(len(hosts), batches, each, dtype=torch.int64)
    for slot in set(masks):
        columns = [i for i, other in enumerate(masks) if other == slot]
        keys = mask_keys(moment, hosts, slot, batches * len(columns))
        found[:, :, columns] = keys.view(len(hosts), batches, len(columns))
    return found.flatten(1).contiguous()
