"""Records: frozen dataclasses of tensors, the only way parts of esper hand each other data.

A record is never compared (tensors have no truth value) and never changed; a step is `record -> record`.
Fields are tensors, other records, or plain static values (an `int` step number, for instance).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

R = TypeVar("R")


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def tensor_dataclass(cls: type[R]) -> type[R]:
    """Make `cls` a record: frozen, keyword-only, without `==`."""
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    _PLAIN_INITS.add(made.__init__)
    return made


_PLAIN_INITS: set[Callable[..., None]] = set()
"""Constructors that only store their arguments."""


def replace(rec: R, **changes: Any) -> R:  # noqa: ANN401 -- mirrors dataclasses.replace
    """A copy of `rec` with some fields exchanged.

    Records are replaced a hundred times a step, and constructing one of 34 fields takes as long as four operators; so
    the fields are copied at once, unless the constructor also checks them, as it does in tests.
    """
    cls, values = type(rec), vars(rec) | changes
    if cls.__init__ not in _PLAIN_INITS or len(values) > len(vars(rec)):
        return cls(**values)  # it names the field that is unknown
    copy = object.__new__(cls)
    vars(copy).update(values)
    return copy


def rebuilt(cls: type[R], names: Iterable[str], values: Iterable[Any]) -> R:
    """A record of all its fields, in the way of `replace`; the caller knows that the names are those of the class."""
    fields = dict(zip(names, values, strict=False))
    if cls.__init__ not in _PLAIN_INITS:
        return cls(**fields)
    made = object.__new__(cls)
    vars(made).update(fields)
    return made


def is_tensor_dataclass(value: object) -> bool:
    """Whether `value` is an instance of a record class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tree_map(f: Callable[..., Tensor], rec: R, *others: R) -> R:
    """Apply `f` to each tensor of `rec` (and to the tensors at the same place in `others`)."""
    changes: dict[str, Any] = {}
    for name, value in vars(rec).items():
        if isinstance(value, Tensor):
            changes[name] = f(value, *[getattr(other, name) for other in others])
        elif is_tensor_dataclass(value):
            changes[name] = tree_map(f, value, *[getattr(other, name) for other in others])
    return replace(rec, **changes)


def named_tensors(rec: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a record with its dotted path, in field order."""
    for field in dataclasses.fields(rec):  # type: ignore[arg-type]
        value = getattr(rec, field.name)
        if isinstance(value, Tensor):
            yield prefix + field.name, value
        elif is_tensor_dataclass(value):
            yield from named_tensors(value, f"{prefix}{field.name}.")


def lift(mask: Tensor, like: Tensor) -> Tensor:
    """Give `mask` trailing axes of size 1 until it broadcasts against `like` from the left."""
    missing = like.dim() - mask.dim()
    return mask.reshape(mask.shape + (1,) * missing) if missing else mask


_WORTH_STACKING = 5


def where(mask: Tensor, yes: R, no: R) -> R:
    """Take the record `yes` on the rows that `mask` marks and `no` on the others; what both share costs nothing.

    Many fields of one shape and type are chosen together: four operators instead of one per field.
    """
    groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    chosen: dict[str, Any] = {}
    for name, value in vars(yes).items():
        if is_tensor_dataclass(value):
            chosen[name] = where(mask, value, getattr(no, name))
        elif value is not getattr(no, name):
            groups.setdefault((value.shape, value.dtype), []).append(name)
    for names in groups.values():
        pairs = [(getattr(yes, name), getattr(no, name)) for name in names]
        rows = lift(mask, pairs[0][0])
        if len(names) < _WORTH_STACKING:
            chosen.update((name, torch.where(rows, *pair)) for name, pair in zip(names, pairs, strict=True))
        else:
            first, second = (torch.stack(fields) for fields in zip(*pairs, strict=True))
            chosen.update(zip(names, torch.where(rows, first, second).unbind(0), strict=True))
    return replace(no, **chosen)


def row(rec: R, index: int) -> R:
    """One host of a record, kept as a batch of one."""
    return tree_map(lambda a: a[index : index + 1], rec)


_DTYPES = {"bool": torch.bool, "int64": torch.int64}


def blank(kind: type[R], sizes: Mapping[str, int], device: torch.device) -> R:
    """A record of zeros; shapes and dtypes are those of its annotations, with the axes in `sizes`."""
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        annotation: Any = field.type
        shape = [sizes[axis] if axis in sizes else int(axis) for axis in annotation.dim_str.split()]
        dtype = next((d for name, d in _DTYPES.items() if name in annotation.dtypes), torch.float32)
        values[field.name] = torch.zeros(shape, dtype=dtype, device=device)
    return kind(**values)
