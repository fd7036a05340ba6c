"""Trees of tensors as lists of tensors, and the tensors of an example as one tensor.

    (Hidden(h, c), None, [x])                        <-- flatten, unflatten -->  [h, c, x] and the form of the tree
    {"tokens": int64 [B, 5], "mask": bool [B, 5]}    <-- pack, unpack ------->   int64 [B, 6]: tokens, masks as bytes
    (a: float32 [B, 3], b: float32 [B, 2, 2])        <-- pack, unpack ------->   float32 [B, 7]

Inner nodes are dataclasses of tensors, tuples (also named ones), lists and dictionaries. Other leaves are None, bools
or strings and belong to the form; plain numbers are refused, because a compiled function would keep the first one.
Data sets, batches and executors know the packed tensor only. Tensors of float32 lie side by side as numbers, so that
gradients pass; others as bytes, in words of int64.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
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


_WORD = 8
"""Bytes of an int64."""


@final
@dataclass(frozen=True)
class Structure:
    """The form of a tree of tensors, and shape and dtype of each tensor for one example."""

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, tree: object, axes: int = 1) -> "Structure":
        """That of tensors which have the same `axes` in front, such as the batch.

        Raises:
            TypeError: the tree holds something that is not a tensor.
            ConfigError: its tensors differ in the axes in front.
        """
        tensors, form = flatten(tree)
        if not tensors or any(x.dim() < axes or x.shape[:axes] != tensors[0].shape[:axes] for x in tensors):
            raise ConfigError(f"{described(tree)} does not hold the same number of examples along each first axis.")
        return cls(form, tuple(tuple(x.shape[axes:]) for x in tensors), tuple(x.dtype for x in tensors))

    def pack(self, tree: object) -> Tensor:
        """One tensor [..., K] of a tree of tensors [..., *shape]; raises ConfigError if it has another structure."""
        tensors, _ = flatten(tree)
        axes = max(1, tensors[0].dim() - len(self.shapes[0])) if tensors else 1
        if (found := Structure.of(tree, axes)) != self:
            raise ConfigError(f"found {found}, but the first examples were {self}; make all of one structure.")
        flat = [x.reshape(*x.shape[:axes], -1) for x in tensors]
        return torch.cat(flat if self._as_numbers else [_words(x) for x in flat], dim=-1)

    def unpack(self, packed: Tensor) -> Any:  # noqa: ANN401 -- the type of the packed tree
        """The tree of a tensor [..., K]; its tensors are contiguous."""
        tensors, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            end = start + (size if self._as_numbers else -(-size * dtype.itemsize // _WORD))
            part = packed[..., start:end]
            part = part if self._as_numbers else part.view(dtype)[..., :size]
            tensors.append(part.reshape(*packed.shape[:-1], *shape).contiguous())
            start = end
        return unflatten(self.form, tensors)

    @property
    def _as_numbers(self) -> bool:
        return all(dtype is torch.float32 for dtype in self.dtypes)

    def __str__(self) -> str:
        """E.g. "{tokens: int64 [n, 5], mask: bool [n, 5]}"."""
        words = [
            f"{str(dtype).removeprefix('torch.')} [{', '.join(('n', *map(str, shape)))}]"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return str(unflatten(self.form, words)).replace("'", "")


def _words(flat: Tensor) -> Tensor:
    """Numbers [..., n] as words of 8 bytes, the last one filled up with zeros."""
    missing = -flat.shape[-1] % (_WORD // flat.dtype.itemsize)
    return torch.cat((flat, flat.new_zeros(*flat.shape[:-1], missing)), dim=-1).view(torch.int64)


def described(value: object) -> str:
    """What a value is, for messages: "a Result with .logits and .past", "a tuple with [0] and [1]"."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    *places, last = ["", *(place for place, part in _parts(value) if part is not None)]
    name = f"a {type(value).__name__}"
    return f"{name} with {', '.join(places[1:])}{' and ' if places[1:] else ''}{last}" if last else name


def selection(value: object) -> str:
    """What takes the one tensor that most people mean out of `out`: logits, or the first one of floats."""
    floats = [f"out{place}" for place, part in _parts(value) if isinstance(part, Tensor) and part.is_floating_point()]
    return next((place for place in floats if "logits" in place), floats[0] if floats else "...")


def _parts(value: Any) -> list[tuple[str, object]]:  # noqa: ANN401 -- whatever a network returns
    """The parts of a dataclass, a dictionary or a tuple, with how they are reached."""
    if is_tensor_dataclass(value):
        return [(f".{name}", getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    return [(f"[{i}]", part) for i, part in enumerate(value)] if isinstance(value, tuple | list) else []
