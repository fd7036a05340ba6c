"""Comparisons, masks, and choices by masks: a mask is a float64 tensor, 1 where something holds and 0 elsewhere.

So `both` is a product, and a choice is arithmetic. `torch.where` jumps for every element: eager, where a mask changes
from row to row, the processor guesses half of the jumps wrong, and a choice takes several times as long as a product
(`benchmarks/choices.py --only masks`). Compiled for a CPU, bool masks cost more than the arithmetic between them.

What is chosen between is finite on both sides, also where it is not chosen: `without_nan` comes first.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import TypeAlias

import torch
from torch import Tensor

Mask: TypeAlias = Tensor
"""Float64 [N], 1 or 0; a scalar where it is the same for all hosts."""

Number: TypeAlias = Tensor | float | int


def above(value: Tensor, limit: Number) -> Mask:
    """Where value > limit, which NaN never is."""
    return _compared(torch.gt, value, limit)


def at_least(value: Tensor, limit: Number) -> Mask:
    """Where value >= limit, which NaN never is."""
    return _compared(torch.ge, value, limit)


def below(value: Tensor, limit: Number) -> Mask:
    """Where value < limit, which NaN never is."""
    return _compared(torch.lt, value, limit)


def equal(value: Tensor, other: Number) -> Mask:
    """Where the two are equal, which NaN is not even with itself."""
    return _compared(torch.eq, value, other)


def is_known(value: Tensor) -> Mask:
    """Where value is not NaN."""
    return equal(value, value)


def both(*masks: Mask) -> Mask:
    """Where all masks hold."""
    return reduce(torch.mul, masks)


def either(one: Mask, other: Mask) -> Mask:
    """Where at least one mask holds."""
    return torch.maximum(one, other)


def no(mask: Mask) -> Mask:
    """Where the mask does not hold."""
    result: Tensor = _number(1.0, mask) - mask
    return result


def only(value: Tensor, *masks: Mask) -> Tensor:
    """The value where all masks hold, 0 elsewhere; finite."""
    return reduce(torch.mul, masks, value)


def choose(mask: Mask, value: Number, other: Number) -> Tensor:
    """The value where the mask holds, the other elsewhere; both finite, and returned exactly but for the sign of zero.

    `torch.lerp` is one operator and exact at the weights 0 and 1; compiled it would be two choices.
    """
    if torch.compiler.is_compiling():
        return mask * value + no(mask) * other
    return torch.lerp(_tensor(other, mask), _tensor(value, mask), mask)


def without_nan(value: Tensor) -> Tensor:
    """The value with 0 in the place of NaN; compiled for a CPU, `nan_to_num` is done element by element."""
    if torch.compiler.is_compiling():
        return torch.where(value == value, value, 0.0)
    return torch.nan_to_num(value, nan=0.0)


def _compared(compare: Callable[..., Tensor], value: Tensor, limit: Number) -> Mask:
    """The comparison as numbers; eager it writes them itself, compiled the choice becomes part of it."""
    if torch.compiler.is_compiling():
        return torch.where(compare(value, limit), 1.0, torch.zeros((), dtype=torch.float64, device=value.device))
    limit = _tensor(limit, value)
    return compare(value, limit, out=torch.empty_like(value if value.dim() >= limit.dim() else limit))


def _number(value: Number, like: Tensor) -> Number:
    return value if torch.compiler.is_compiling() else _tensor(value, like)


def _tensor(value: Number, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else _constant(float(value), like.device)


@lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number as a float64 scalar, made once: an operator would make it anew in every call."""
    return torch.tensor(value, dtype=torch.float64, device=device)
