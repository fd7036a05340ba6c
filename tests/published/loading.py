"""How networks are called and what they return, where there may be no esper."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def call(network: Callable[..., Any], x: object) -> Any:
    """What a network returns for x, which may be a tuple of inputs or a dictionary."""
    if isinstance(x, dict):
        return network(**x)
    return network(*x) if isinstance(x, tuple) else network(x)


def part(tree: Any, index: Tensor | slice) -> Any:
    """These examples of a tensor, or of tensors in tuples and dictionaries."""
    if isinstance(tree, dict):
        return {name: part(x, index) for name, x in tree.items()}
    return tuple(part(x, index) for x in tree) if isinstance(tree, tuple | list) else tree[index]


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a result: of tuples, dictionaries and dataclasses."""
    if isinstance(tree, Tensor):
        return [tree.detach()]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [leaf for value in tree for leaf in leaves(value)] if isinstance(tree, tuple | list) else []
