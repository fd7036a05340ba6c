"""Trees of tensors: flatten arguments and results into tensors, and rebuild them.

    (Hidden(h, c), None, [x])  <-- flatten, unflatten -->  tensors [h, c, x]  and the form of the tree

Inner nodes are dataclasses of tensors, tuples (also named ones), lists and dictionaries. Other leaves are None, bools
or strings and belong to the form. Plain numbers are refused: a compiled function would keep the number of
its first call.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.leyline.tensor_dataclass import build, is_tensor_dataclass

Form = Hashable


class _Plain(NamedTuple):
    """A leaf that is not a tensor, with its type, because True == 1."""

    kind: type
    value: Hashable


class _Node(NamedTuple):
    """An inner node: its type, names of fields or keys, and forms of its parts; `flat` if it only holds tensors."""

    kind: Any
    names: tuple[Any, ...]
    parts: tuple[Form, ...]
    flat: bool = False


_TENSOR: Form = "tensor"


def flatten(tree: object) -> tuple[list[Tensor], Form]:
    """The tensors of a tree in a fixed order, and its hashable form.

    Raises:
        TypeError: a plain number, or an object of another type.
    """
    tensors: list[Tensor] = []
    return tensors, _form(tree, tensors)


def unflatten(form: Form, tensors: Sequence[Any]) -> Any:  # noqa: ANN401 -- the type of the flattened tree
    """The tree of this form with these tensors, or with what stands for them."""
    rest = iter(tensors)
    tree = _built(form, rest)
    assert next(rest, None) is None, "more tensors than the form has leaves"
    return tree


def _form(value: object, tensors: list[Tensor]) -> Form:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None or isinstance(value, bool | str):
        return _Plain(type(value), value)
    kind: Any = type(value)
    if is_tensor_dataclass(value):
        fields, flat = _fields(kind)
        values = fields(value)
        if _TENSORS.issuperset(map(type, values)):  # the common case; a control step has two hundred tensors
            tensors.extend(values)
            return flat
        return _Node(kind, flat.names, tuple(_form(part, tensors) for part in values))
    if isinstance(value, tuple | list):
        return _Node(kind, (), tuple(_form(part, tensors) for part in value))
    if isinstance(value, dict):
        if _TENSORS.issuperset(map(type, value.values())):
            tensors.extend(value.values())
            return _flat_dict(kind, tuple(value))
        return _Node(kind, tuple(value), tuple(_form(part, tensors) for part in value.values()))
    if isinstance(value, int | float):
        raise TypeError(
            f"the tree contains the plain number {value!r}, which a compiled function would keep; pass it as a tensor."
        )
    raise TypeError(
        f"a tree of tensors cannot contain {kind.__name__}; use dataclasses, tuples, lists and dictionaries of tensors."
    )


_TENSORS = {Tensor, nn.Parameter}


@lru_cache(maxsize=256)
def _fields(kind: type) -> tuple[Callable[[object], tuple[Any, ...]], _Node]:
    """A function that reads all fields of a dataclass, and its form if all of them are tensors."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    read = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    return read, _Node(kind, names, (_TENSOR,) * len(names), flat=True)


@lru_cache(maxsize=256)
def _flat_dict(kind: type, names: tuple[Hashable, ...]) -> _Node:
    """The form of a dictionary of tensors."""
    return _Node(kind, names, (_TENSOR,) * len(names))


def _built(form: Form, rest: Iterator[Any]) -> Any:  # noqa: ANN401
    if form == _TENSOR:  # another process has a copy of its own
        return next(rest)
    if isinstance(form, _Plain):
        return form.value
    assert isinstance(form, _Node)
    if form.flat:
        return build(form.kind, dict(zip(form.names, rest, strict=False)))
    parts = [_built(part, rest) for part in form.parts]
    if form.kind is list:
        return parts
    if form.kind is tuple:
        return tuple(parts)
    if issubclass(form.kind, tuple):
        return form.kind(*parts)
    if issubclass(form.kind, dict) and not dataclasses.is_dataclass(form.kind):
        return dict(zip(form.names, parts, strict=True))
    return build(form.kind, dict(zip(form.names, parts, strict=True)))
