"""Flat dictionaries of tensors with dotted names, the content of checkpoints."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.tensor_dataclass import is_tensor_dataclass, named_tensors, replace

R = TypeVar("R")
StateTree = dict[str, Tensor]
"""Tensors by dotted name."""


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


def with_prefix(prefix: str, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tree with `prefix.` before every name."""
    return {f"{prefix}.{name}": value for name, value in tree.items()}


def below(prefix: str, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a tree under `prefix.`, without the prefix."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tree.items() if name.startswith(f"{prefix}.")}


def rows_of(tree: Mapping[str, Tensor], num_envs: int, begin: int, end: int, owner: str) -> StateTree:
    """Copies of the rows of the hosts from `begin` to before `end`, of `num_envs`; scalars belong to all hosts.

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
        part[name] = (value[begin * per_host : end * per_host] if value.dim() else value).clone()
    return part


def tensors_by_name(rec: object) -> dict[str, Tensor]:
    """The tensors of a dataclass by dotted path."""
    return dict(named_tensors(rec))


def restored(rec: R, tree: Mapping[str, Tensor], owner: str) -> R:
    """`rec` with the tensors of `tree`, which must have the same names and shapes; raises CheckpointError."""
    check_same_shapes(tree, tensors_by_name(rec), owner)
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
