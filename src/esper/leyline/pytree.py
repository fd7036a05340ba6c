"""Trees of tensors: arguments and answers taken apart into tensors and put together again.

    (Hidden(h, c), None, [x])  <-- flatten, unflatten -->  tensors [h, c, x]  and a form that says what goes where

Inner nodes are records, tuples (also named ones), lists and dictionaries. What is no tensor must be None, a truth value
or a string and belongs to the form. Plain numbers are refused: whoever records or compiles a function of a tree would
keep the number of the first call for good.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.leyline.tensor_dataclass import is_tensor_dataclass, rebuilt

Form = Hashable


class _Plain(NamedTuple):
    """A value that is no tensor; True is not 1."""

    kind: type
    value: Hashable


class _Node(NamedTuple):
    """An inner node: how it is built (names of a record or keys of a dictionary), and the forms of its parts.

    `flat`: it is a record, and all of its parts are tensors.
    """

    kind: Any
    names: tuple[Any, ...]
    parts: tuple[Form, ...]
    flat: bool = False


_TENSOR: Form = "tensor"


def flatten(tree: object) -> tuple[list[Tensor], Form]:
    """The tensors of a tree in a fixed order, and its form, which can be compared and hashed.

    Raises:
        TypeError: a plain number, or something that is no part of a tree.
    """
    tensors: list[Tensor] = []
    return tensors, _form(tree, tensors)


def unflatten(form: Form, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 -- whatever was taken apart
    """The tree of this form with these tensors."""
    rest = iter(tensors)
    tree = _built(form, rest)
    assert next(rest, None) is None, "more tensors than the form has places"
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
        if _TENSORS.issuperset(map(type, values)):  # most records; there are two hundred tensors in a control step
            tensors.extend(values)
            return flat
        return _Node(kind, flat.names, tuple(_form(part, tensors) for part in values))
    if isinstance(value, tuple | list):
        return _Node(kind, (), tuple(_form(part, tensors) for part in value))
    if isinstance(value, dict):
        return _Node(kind, tuple(value), tuple(_form(part, tensors) for part in value.values()))
    if isinstance(value, int | float):
        raise TypeError(
            f"the plain number {value!r} stands among tensors; it would be recorded for good, so pass it as a tensor."
        )
    raise TypeError(
        f"{kind.__name__} is no part of a tree of tensors; use records, tuples, lists and dictionaries of tensors."
    )


_TENSORS = {Tensor, nn.Parameter}


@lru_cache(maxsize=256)
def _fields(kind: type) -> tuple[Callable[[object], tuple[Any, ...]], _Node]:
    """What reads all fields of a record at once, and the form of such a record where all of them are tensors."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    read = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    return read, _Node(kind, names, (_TENSOR,) * len(names), flat=True)


def _built(form: Form, rest: Iterator[Tensor]) -> Any:  # noqa: ANN401
    if form is _TENSOR:
        return next(rest)
    if isinstance(form, _Plain):
        return form.value
    assert isinstance(form, _Node)
    if form.flat:
        return rebuilt(form.kind, form.names, islice(rest, len(form.parts)))
    parts = [_built(part, rest) for part in form.parts]
    if form.kind is list:
        return parts
    if form.kind is tuple:
        return tuple(parts)
    if issubclass(form.kind, tuple):
        return form.kind(*parts)
    if issubclass(form.kind, dict):
        return dict(zip(form.names, parts, strict=True))
    return rebuilt(form.kind, form.names, parts)
