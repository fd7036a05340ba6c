"""Rules of operators that move numbers to other places.

Where the places are known, the operator is run on codes; where an index names them that is known only when the program
runs, the program chooses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.simic.lanes.pointwise import select
from esper.simic.lanes.program import Kind, Value
from esper.simic.lanes.recorder import Codes, Recorder, RecordingError, Rule, is_shared


def _tensor(codes: Codes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes))


def _concatenated(r: Recorder, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> Codes:
    codes: Codes = torch.cat([_tensor(r.as_kind(x, r.kind(out))) for x in parts], dim).numpy()
    return codes


def _stacked(r: Recorder, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> Codes:
    codes: Codes = torch.stack([_tensor(r.as_kind(x, r.kind(out))) for x in parts], dim).numpy()
    return codes


def _copied(r: Recorder, out: Tensor, x: Tensor, **_: object) -> Codes:
    return r.operand(x, r.kind(out), out.shape)


def _written(r: Recorder, out: Tensor, _: Tensor, source: Tensor, *__: object) -> Codes:
    return r.operand(source, r.kind(out), out.shape)


def _rolled(r: Recorder, out: Tensor, x: Tensor, shifts: list[int], dims: Sequence[int] = ()) -> Codes:
    codes: Codes = torch.roll(_tensor(r.codes(x)), shifts, tuple(dims)).numpy()
    return codes


def _padded(r: Recorder, out: Tensor, x: Tensor, pad: list[int], value: Value = 0.0) -> Codes:
    filling = r.draft.constant(r.kind(out), value)
    codes: Codes = torch.constant_pad_nd(_tensor(r.codes(x)), pad, filling).numpy()
    return codes


def _constant(r: Recorder, out: Tensor, *_: object, **__: object) -> Codes:
    """Made in the likeness of a tensor, not of its numbers."""
    return r.constants(out)


# -- chosen by an index ----------------------------------------------------------------------------------------------


def _chosen(r: Recorder, kind: Kind, index: Codes, choices: Codes) -> Codes:
    """The choice [..., D] that each index [...] names."""
    wanted, of_each = index.reshape(-1), choices.reshape(-1, choices.shape[-1])
    result = np.empty(len(wanted), dtype=np.int64)
    known = wanted < 0
    for e in np.flatnonzero(known).tolist():
        result[e] = of_each[e, int(r.draft.value_of(int(wanted[e])))]
    shared = is_shared(of_each).all(axis=1)
    for operation, here in (("LOOK_UP", ~known & shared), ("GATHER", ~known & ~shared)):
        if here.any():
            columns = np.concatenate((wanted[here, None], of_each[here]), axis=1)
            result[here] = r.emit(f"{operation}_{kind}", kind, columns, (choices.shape[-1],))
    return result.reshape(index.shape)


def _gathered(r: Recorder, out: Tensor, x: Tensor, dim: int, index: Tensor, **_: object) -> Codes:
    wanted, codes = np.moveaxis(r.codes(index), dim, -1), np.moveaxis(r.codes(x), dim, -1)
    codes = codes[tuple(slice(0, size) for size in wanted.shape[:-1])]
    choices = np.broadcast_to(codes[..., None, :], (*wanted.shape, codes.shape[-1]))
    return np.moveaxis(_chosen(r, r.kind(out), wanted, choices), -1, dim)


def _rows(r: Recorder, out: Tensor, x: Tensor, dim: int, index: Tensor) -> Codes:
    """`x` with one axis replaced by those of an index."""
    axis = dim % x.dim()
    codes = np.moveaxis(r.codes(x), axis, -1)
    before, after = codes.shape[:axis], codes.shape[axis:-1]
    shape = (*before, *index.shape, *after)
    wanted = r.codes(index).reshape((1,) * len(before) + tuple(index.shape) + (1,) * len(after))
    lines = codes.reshape(*before, *(1,) * index.dim(), *after, codes.shape[-1])
    choices = np.broadcast_to(lines, (*shape, codes.shape[-1]))
    return _chosen(r, r.kind(out), np.broadcast_to(wanted, shape), choices)


def _embedded(r: Recorder, out: Tensor, weight: Tensor, index: Tensor, *_: object, **__: object) -> Codes:
    return _rows(r, out, weight, 0, index)


def _indexed(r: Recorder, out: Tensor, x: Tensor, indices: Sequence[Tensor | None]) -> Codes:
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype != torch.int64:
        raise RecordingError("indexing by several tensors, or by a mask")
    return _rows(r, out, x, *given[0])


def _scattered(r: Recorder, out: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor | Value) -> Codes:
    kind = r.kind(out)
    result, wanted = np.moveaxis(r.codes(x).copy(), dim, -1), np.moveaxis(r.codes(index), dim, -1)
    given = np.moveaxis(r.operand(source, kind, source.shape if isinstance(source, Tensor) else index.shape), dim, -1)
    here: list[Any] = [slice(0, size) for size in wanted.shape[:-1]]
    for i in range(wanted.shape[-1]):
        for j in range(result.shape[-1]):
            hit = r.apply("EQ_I", "B", wanted[..., i], r.operand(j, "I", wanted.shape[:-1]))
            result[(*here, j)] = select(r, kind, hit, given[(*here, i)], result[(*here, j)])
    return np.moveaxis(result, -1, dim)


_MADE_ALIKE = ("full_like", "zeros_like", "ones_like", "new_zeros", "new_full", "new_ones", "empty_like", "new_empty")

RULES: dict[str, Rule] = {
    "cat": _concatenated,
    "stack": _stacked,
    "clone": _copied,
    "_to_copy": _copied,
    "copy": _written,
    "roll": _rolled,
    "constant_pad_nd": _padded,
    **dict.fromkeys((*_MADE_ALIKE, "fill", "zero"), _constant),
    "gather": _gathered,
    "index_select": _rows,
    "embedding": _embedded,
    "index": _indexed,
    "scatter": _scattered,
}
