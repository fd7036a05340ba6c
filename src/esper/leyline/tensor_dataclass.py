"""Frozen dataclasses of tensors, the messages and states of esper, and their tensors by dotted name, for checkpoints.

Fields are tensors, other dataclasses of tensors, or plain values such as the number of a step. They are not compared
with `==`, because tensors have no truth value.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError

R = TypeVar("R")
StateTree = dict[str, Tensor]
"""Tensors by dotted name."""


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def tensor_dataclass(cls: type[R]) -> type[R]:
    """Make `cls` a dataclass of tensors: frozen, keyword-only, without `==`."""
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    _PLAIN_INITS.add(made.__init__)
    return made


_PLAIN_INITS: set[Callable[..., None]] = set()
"""Constructors that only store their arguments."""


def replace(rec: R, **changes: Any) -> R:  # noqa: ANN401 -- mirrors dataclasses.replace
    """A copy of `rec` with other values of some fields."""
    values = vars(rec) | changes
    return type(rec)(**values) if len(values) > len(vars(rec)) else build(type(rec), values)  # names unknown fields


def build(cls: type[R], fields: Mapping[str, Any]) -> R:
    """An instance from the values of all fields.

    A control step makes a hundred instances, and a constructor call with 34 fields takes as long as four operators. So
    the fields are stored directly, unless the constructor checks them, as it does in tests.
    """
    if cls.__init__ not in _PLAIN_INITS:
        return cls(**fields)
    made = object.__new__(cls)
    vars(made).update(fields)
    return made


def is_tensor_dataclass(value: object) -> bool:
    """Whether `value` is an instance of a dataclass."""
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
    """Every tensor of a dataclass with its dotted path, in field order."""
    for field in dataclasses.fields(rec):  # type: ignore[arg-type]
        value = getattr(rec, field.name)
        if isinstance(value, Tensor):
            yield prefix + field.name, value
        elif is_tensor_dataclass(value):
            yield from named_tensors(value, f"{prefix}{field.name}.")


def lift(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` with trailing axes of size 1, so that it broadcasts against `like` from the left."""
    missing = like.dim() - mask.dim()
    return mask.reshape(mask.shape + (1,) * missing) if missing else mask


@lru_cache(maxsize=64)
def numbers(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1."""
    return torch.arange(count, device=device)


_WORTH_STACKING = 5


def where(mask: Tensor, yes: R, no: R) -> R:
    """`yes` on the rows that `mask` marks, `no` on the others; fields that are the same object cost nothing.

    Many fields of one shape and dtype are stacked: four operators instead of one per field.
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


_DTYPES = {"bool": torch.bool, "int64": torch.int64}


def blank(kind: type[R], sizes: Mapping[str, int], device: torch.device) -> R:
    """Zeros in the shapes and dtypes of the annotations, with the axes in `sizes`."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        annotation: Any = field.type
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            values[field.name] = blank(annotation, sizes, device)
            continue
        shape = [sizes[axis] if axis in sizes else int(axis) for axis in annotation.dim_str.split()]
        dtype = next((d for name, d in _DTYPES.items() if name in annotation.dtypes), torch.float32)
        values[field.name] = torch.zeros(shape, dtype=dtype, device=device)
    return kind(**values)


def check_same_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], owner: str) -> None:
    """Raise CheckpointError with the first differences unless both trees have the same names, shapes and dtypes."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the state of the {owner} lacks {missing[:5]} and has unknown {unknown[:5]} "
            f"({len(missing)} and {len(unknown)} names); load a checkpoint of a run with the same configuration."
        )
    for name, own in expected.items():
        if found[name].shape != own.shape or found[name].dtype != own.dtype:
            raise CheckpointError(
                f"{owner}: {name!r} is {tuple(found[name].shape)} {found[name].dtype}, "
                f"expected {tuple(own.shape)} {own.dtype}; "
                "load a checkpoint of a run with the same hosts, slots and network widths."
            )


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_prefix(prefix: str, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tree with `prefix.` before every name."""
    return {f"{prefix}.{name}": value for name, value in tree.items()}


def below(prefix: str, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a tree under `prefix.`, without the prefix."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tree.items() if name.startswith(f"{prefix}.")}


def rows_of(tree: Mapping[str, Tensor], num_envs: int, hosts: Sequence[int], owner: str) -> StateTree:
    """Copies of the rows of some of `num_envs` hosts, in this order, also repeated; scalars belong to all hosts.

    Raises:
        CheckpointError: the hosts cannot share the rows of a tensor equally.
    """
    part = {}
    for name, value in tree.items():
        per_host, rest = divmod(len(value) if value.dim() else 0, num_envs)
        if rest:
            raise CheckpointError(
                f"{owner}: {name} has {len(value)} rows, which {num_envs} hosts cannot share equally; load a "
                "checkpoint of a run with as many hosts."
            )
        chosen = torch.tensor(hosts, device=value.device)
        part[name] = value.unflatten(0, (num_envs, per_host))[chosen].flatten(0, 1) if value.dim() else value.clone()
    return part


def restored(rec: R, tree: Mapping[str, Tensor], owner: str) -> R:
    """`rec` with the tensors of `tree`, which must have the same names and shapes; raises CheckpointError."""
    check_same_shapes(tree, dict(named_tensors(rec)), owner)
    return _filled(rec, tree)


def _filled(rec: R, tree: Mapping[str, Tensor]) -> R:
    changes: dict[str, object] = {}
    for name, value in vars(rec).items():
        if isinstance(value, Tensor):
            changes[name] = tree[name].to(value.device).clone()
        elif is_tensor_dataclass(value):
            changes[name] = _filled(value, below(name, tree))
    return replace(rec, **changes)


def copy_into(target: Mapping[str, Tensor], tree: Mapping[str, Tensor], owner: str) -> None:
    """Overwrite the tensors of `target` in place with those of `tree`; raises CheckpointError."""
    check_same_shapes(tree, target, owner)
    for name, tensor in target.items():
        tensor.copy_(tree[name])
