"""Several tensors of an example as one: what a network takes, returns or is compared with.

    {"tokens": int64 [B, 5], "mask": bool [B, 5]}    <-- pack, unpack -->    int64 [B, 6]: 5 tokens, 5 masks in 8 bytes
    (a: float32 [B, 3], b: float32 [B, 2, 2])        <-- pack, unpack -->    float32 [B, 7]

Data sets, batches and executors know the one tensor only. Tensors of float32 lie side by side as numbers, so that
gradients pass; others as bytes, in words of int64.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.pytree import Form, flatten, unflatten
from esper.leyline.tensor_dataclass import is_tensor_dataclass

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
    def of(cls, tree: object) -> "Structure":
        """That of a batch, whose tensors are [B, ...].

        Raises:
            TypeError: the tree holds something that is not a tensor.
            ConfigError: its tensors do not have the batch as first axis.
        """
        tensors, form = flatten(tree)
        if not tensors or any(x.dim() == 0 or len(x) != len(tensors[0]) for x in tensors):
            raise ConfigError(f"{described(tree)} does not hold the same number of examples along each first axis.")
        return cls(form, tuple(tuple(x.shape[1:]) for x in tensors), tuple(x.dtype for x in tensors))

    def pack(self, tree: object) -> Tensor:
        """One tensor [..., K] from the tensors [..., *shape] of a tree; any number of axes in front.

        Raises:
            ConfigError: the tree is of another structure.
        """
        tensors, form = flatten(tree)
        fits = form == self.form and all(
            (tuple(x.shape[x.dim() - len(shape) :]), x.dtype) == (shape, dtype)
            for x, shape, dtype in zip(tensors, self.shapes, self.dtypes, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"found {described(tree)}, but the first examples were {self}; make all of one structure."
            )
        lead = tensors[0].shape[: tensors[0].dim() - len(self.shapes[0])]
        flat = [x.reshape(*lead, -1) for x in tensors]
        if not self._as_numbers:
            flat = [_words(x) for x in flat]
        return torch.cat(flat, dim=-1)

    def unpack(self, packed: Tensor) -> Any:  # noqa: ANN401 -- the type of the packed tree
        """The tree of a tensor [..., K]; its tensors are contiguous."""
        lead, tensors = packed.shape[:-1], []
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        widths = (
            sizes
            if self._as_numbers
            else [-(-n * t.itemsize // _WORD) for n, t in zip(sizes, self.dtypes, strict=True)]
        )
        places = pairwise(accumulate(widths, initial=0))
        for (start, end), size, shape, dtype in zip(places, sizes, self.shapes, self.dtypes, strict=True):
            part = packed[..., start:end]
            if not self._as_numbers:
                part = part.view(dtype)[..., :size]
            tensors.append(part.reshape(*lead, *shape).contiguous())
        return unflatten(self.form, tensors)

    @property
    def _as_numbers(self) -> bool:
        return all(dtype is torch.float32 for dtype in self.dtypes)

    def __str__(self) -> str:
        """E.g. "{'tokens': int64 [n, 5], 'mask': bool [n, 5]}"."""
        return str(unflatten(self.form, [_Words(*of) for of in zip(self.shapes, self.dtypes, strict=True)]))


@final
class _Words:
    """Stands for a tensor in the words of a structure."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._words = f"{str(dtype).removeprefix('torch.')} [{', '.join(('n', *map(str, shape)))}]"

    def __repr__(self) -> str:
        return self._words


def _words(flat: Tensor) -> Tensor:
    """Numbers [..., n] as words of 8 bytes, the last one filled up with zeros."""
    missing = -flat.shape[-1] % (_WORD // flat.dtype.itemsize)
    return torch.cat((flat, flat.new_zeros(*flat.shape[:-1], missing)), dim=-1).view(torch.int64)


def described(value: object) -> str:
    """What a value is, for messages: "a CausalLMOutput with .logits and .past", "a tuple of 2", "a tensor [4, 3]"."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    name = f"a {type(value).__name__}"
    if is_tensor_dataclass(value) or hasattr(value, "_fields"):
        parts = [f".{field}" for field, part in _fields(value) if part is not None]
    elif isinstance(value, dict):
        parts = [repr(key) for key in value]
    elif isinstance(value, tuple | list):
        return f"{name} of {len(value)}: {', '.join(described(part) for part in value)}"
    else:
        return name
    return (
        f"{name} with {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"
        if parts
        else f"{name} without values"
    )


def selection(value: object) -> str | None:
    """The expression that takes the one tensor of floats out of `out` that most people mean: logits, or the first."""
    if is_tensor_dataclass(value) or hasattr(value, "_fields"):
        parts = [(f"out.{field}", part) for field, part in _fields(value)]
    elif isinstance(value, dict):
        parts = [(f"out[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"out[{i}]", part) for i, part in enumerate(value)]
    else:
        return None
    floats = [
        place for place, part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1
    ]
    return next((place for place in floats if "logits" in place), floats[0] if floats else None)


def _fields(value: Any) -> list[tuple[str, object]]:  # noqa: ANN401 -- a dataclass or a named tuple
    names = value._fields if hasattr(value, "_fields") else [field for field in value.__dataclass_fields__]
    return [(name, getattr(value, name)) for name in names]
