"""Rules of sequences: embeddings, attention, products of values, sums of the past, masks, keyed dropout."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor, fx

from esper.kasmina.parameters.dropout import Moment
from esper.leyline.random import Stream, words
from esper.tolaria.executors.native.convolutions import by_weight, linear
from esper.tolaria.executors.native.functions import LARGEST, SMALLEST, reduce, softmax
from esper.tolaria.executors.native.lowering import Dims, Lowering, Mask, Value, Weight, rule
from esper.tolaria.executors.native.program import WIDEST, Operation, Place, Rows
from esper.tolaria.executors.native.rules import (
    add,
    batched,
    broadcast,
    expand,
    mul,
    padded,
    permute,
    reshaped,
    squeeze,
    sub,
    total,
    transpose,
    unsqueeze,
)
from esper.tolaria.executors.native.trace import FUSIONS, aten, part

_PART: Final = 32
"""Queries that share a mask of dropout, as in kasmina/parameters/dropout.py."""
EXACT: Final = 2**24
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
    if entries > EXACT:
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
    scratch = low.scratch(packed * WIDEST)
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
        scores = select(low, torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), scores, -math.inf)
    if isinstance(mask, Mask) or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        scores = select(low, mask, scores, -math.inf)
    elif mask is not None:
        scores = add(low, scores, mask)
    weights = softmax(low, scores, -1)
    if mask is not None:  # a query without keys gets zeros
        seen = total(low, compare(low, scores, -math.inf, 1), -1, True, mean=False)
        weights = select(low, compare(low, seen, 0.0, 0), 0.0, weights)
    return matmul(low, weights, v)


def _score_mask(low: Lowering, mask: Tensor, q: Value, shape: Dims, heads: int) -> tuple[Tensor, bool]:
    """What is added to the scores, [T, S] or [heads, T, S]; and whether it is of each head."""
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    if not seen.any(dim=-1).all():
        raise low.refuse("a mask of attention that leaves a query no key")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
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


@rule("matmul.default", "bmm.default", "mm.default")
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
        return transpose(low, linear(low, transpose(low, b, -1, -2), a), -1, -2)
    a, b = low.value(a), low.value(b)
    if b.axis is None and len(b.shape) == 2:
        if a.axis == len(a.shape) - 1:
            raise low.refuse("a sum over the examples of a batch")
        y = Value(low.rows(a.size // a.dims[-1] * b.shape[1]), (*a.shape[:-1], b.shape[1]), a.axis, a.outer)
        return _product_rows(low, a, b, y, (1, a.size // a.dims[-1], b.shape[1], b.shape[0]))
    count = max(len(a.shape), len(b.shape))
    a, b = padded(low, a, count), padded(low, b, count)
    of_matrices = [x for x in (a, b) if x.axis is not None and x.axis < count - 2]
    a, b = batched(low, a, of_matrices), batched(low, b, of_matrices)
    lead = tuple(max(sizes) for sizes in zip(a.shape[:-2], b.shape[:-2], strict=True))
    a, b = expand(low, a, (*lead, *a.shape[-2:])), expand(low, b, (*lead, *b.shape[-2:]))
    axis = a.axis if b.axis is None else b.axis
    if axis is not None:
        of_rows, of_columns = a.axis == count - 2 and b.axis is None, b.axis == count - 1 and a.axis is None
        alike = axis < count - 2 and (a.axis, a.outer, a.shape[axis]) == (b.axis, b.outer, b.shape[axis])
        if not (of_rows or of_columns or alike):
            raise low.refuse(f"a product of {a.shape} and {b.shape} whose examples lie along other axes")
    if a.dims[:-2] != b.dims[:-2]:
        raise low.refuse(f"a product of {a.shape} and {b.shape}")
    y = Value(Rows(0, 0), (*lead, a.shape[-2], b.shape[-1]), axis, a.outer if b.axis is None else b.outer)
    y = replace(y, rows=low.rows(y.size))
    return _product_rows(low, a, b, y, (math.prod(a.dims[:-2]), a.dims[-2], b.dims[-1], a.dims[-1]))


@rule("addmm.default", "baddbmm.default")
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
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))

    def shape(*letters: str) -> Dims:
        return tuple(math.prod(sizes[x] for x in some) for some in letters)

    a = reshaped(low, _arranged(low, a, first, batch + rows + inner), shape(*batch, rows, inner))
    if _is_weight(b) and not batch and second == columns + inner:
        y = linear(low, a, _shaped(low, b, shape(columns, inner)))
    else:
        if not _is_weight(b) or batch or second != inner + columns:
            b = _arranged(low, b, second, batch + inner + columns)
        y = matmul(low, a, _shaped(low, b, shape(*batch, inner, columns)))
    letters = batch + rows + columns
    return _arranged(low, reshaped(low, y, shape(*letters)), letters, out)


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


_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int, aten.permute.default}
_VIEWS = {part, aten.view.default, aten.reshape.default, aten.split_with_sizes.default, operator.getitem}


def _transposed_weight(node: object) -> fx.Node | None:
    """The matrix of parameters that a node transposes; None if it does something else."""
    if not (isinstance(node, fx.Node) and node.target in _TRANSPOSES):
        return None
    found = source = node.args[0]
    assert isinstance(found, fx.Node)
    before, after = found.meta["val"], node.meta["val"]
    if len(before.shape) != 2 or (*after.shape, *after.stride()) != (*before.shape[::-1], *before.stride()[::-1]):
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
    return low.result(y, low.afresh(x, Operation.RUNNING_SUM, sizes=sizes, flag=1), x)


def select(low: Lowering, mask: Any, a: Any, b: Any) -> Value:
    """`a` where a mask is True, else `b`; one of them may be a number."""
    if not isinstance(mask, Tensor | Mask):
        raise low.refuse("a mask that is no comparison")
    numbers = [None if isinstance(x, Value | Weight) else low.number(x) for x in (a, b)]
    if None not in numbers:
        raise low.refuse("a choice between two numbers")
    given = [low.value(x) for x, number in zip((a, b), numbers, strict=True) if number is None]
    *given, like = broadcast(low, *given, *([mask] if isinstance(mask, Mask) else []), shape=mask.shape)
    given = [expand(low, x, like.shape) for x in given]
    if isinstance(mask, Tensor):
        own = mask.reshape(*(1,) * (len(like.shape) - len(mask.shape)), *mask.shape)
        if like.axis is not None and own.shape[like.axis] != 1:
            raise low.refuse("a mask with an entry for each example of a batch")
        place: Place | Rows = low.constants.place(own.expand(like.dims).contiguous())
    else:
        place = given.pop().rows
    y, number = replace(like, rows=low.rows(like.size)), next((n for n in numbers if n is not None), 0.0)
    values = [None if n is not None else given.pop(0) for n in numbers]

    def emit(x: Rows | None, z: Rows | None, to: Rows, number: float) -> None:
        low.emit(Operation.SELECT, place, x, z, to, sizes=(y.size,), flag=isinstance(mask, Mask), numbers=(number,))

    one, other = (None if x is None else x.rows for x in values)
    emit(one, other, y.rows, number)

    def backward(g: Rows) -> None:
        if values[0] is not None:
            low.into(values[0], lambda grad: emit(g, None, grad, 0.0))
        if values[1] is not None:
            low.into(values[1], lambda grad: emit(None, g, grad, 0.0))

    return low.result(y, backward, *values)


rule("where.self", "where.ScalarOther", "where.ScalarSelf")(select)


@rule("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
def masked_fill(low: Lowering, x: Any, mask: Any, value: Any) -> Value:
    """A number where the mask is True."""
    number = low.number(value)
    if number is None:
        raise low.refuse("a number that is computed in the forward pass")
    return select(low, mask, number, low.value(x))


def compare(low: Lowering, a: Any, b: Any, kind: int) -> Mask:
    """1 or 0: whether `a` is equal to, not equal to, less than, at most, greater than or at least `b`."""
    number = low.number(b)
    *given, like = broadcast(low, low.value(a), *([] if number is not None else [low.value(b)]))
    first, *others = (expand(low, x, like.shape).rows for x in given)
    y = Mask(low.rows(like.size), like.shape, like.axis, like.outer)
    other = others[0] if others else None
    low.emit(Operation.COMPARE, first, other, y.rows, sizes=(y.size,), flag=kind, numbers=(number or 0.0,))
    return y


for _kind, _name in enumerate(("eq", "ne", "lt", "le", "gt", "ge")):
    rule(f"{_name}.Scalar", f"{_name}.Tensor")(partial(compare, kind=_kind))


@rule("isfinite.default")
def isfinite(low: Lowering, x: Any) -> Mask:
    """Where a number is neither infinite nor NaN: there alone the difference to itself is 0."""
    x = low.value(x)
    return compare(low, sub(low, x, x), 0.0, 0)


@rule("all.dim", "all.dims")
def every(low: Lowering, x: Any, dim: Any = None, keepdim: bool = False, *, kind: int = SMALLEST) -> Value:
    """Whether a mask is True everywhere along an axis."""
    if not isinstance(x, Mask):
        raise low.refuse("a mask that is no comparison")
    return reduce(low, x, dim, keepdim, kind=kind)


rule("any.dim", "any.dims")(partial(every, kind=LARGEST))


@rule(torch.ops.esper.whole.default)
def whole(low: Lowering, x: Any) -> Value:
    """Integers, which rows hold as they are; they have no gradient."""
    return replace(low.value(x), needs=False)


@rule("bitwise_not.default", "logical_not.default")
def negated(low: Lowering, x: Any) -> Value:
    """Where a mask is False."""
    if not isinstance(x, Mask):
        raise low.refuse("a mask that is no comparison")
    return compare(low, x, 0.0, 0)


@rule("full_like.default")
def full_like(low: Lowering, x: Any, number: float, *, dtype: Any = None, **_: object) -> Value:
    """A number in the shape of a value."""
    x = low.value(x)
    if dtype not in (None, torch.float32) or (dtype is None and isinstance(x, Mask)):
        raise low.refuse(f"numbers of type {dtype}")
    y = Value(low.rows(x.size), x.shape, x.axis, x.outer)
    low.emit(Operation.FILL, y.rows, sizes=(y.size,), numbers=(float(number),))
    return y


rule("zeros_like.default")(partial(full_like, number=0.0))
rule("ones_like.default")(partial(full_like, number=1.0))


@rule("repeat.default")
def repeat(low: Lowering, x: Any, repeats: Sequence[int]) -> Value:
    """Copies along axes of size 1."""
    x = padded(low, low.value(x), len(repeats))
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


@rule(torch.ops.esper.dropout.default)
def dropout(low: Lowering, x: Any, p: float, channels: bool) -> Value:
    """`Dropout.forward` in training."""
    x = low.value(x)
    if x.axis != 0 or x.outer != 1:
        raise low.refuse("dropout of features whose first axis is not that of the examples")
    each = math.prod(x.dims[:2]) if channels else x.size
    y, key = low.like(x), low.next_masks()
    options: dict[str, Any] = {"sizes": (each, x.size // each), "numbers": _draw_of(p)}
    low.emit(Operation.DROP, x.rows, key, y.rows, **options)
    return low.result(y, lambda g: low.into(x, lambda grad: low.emit(Operation.DROP, g, key, grad, **options)), x)


@rule(torch.ops.esper.dropped_attention.default)
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
