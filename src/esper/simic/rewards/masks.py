"""Comparisons, masks, and choices by masks, in the form that is fast where they run.

Compiled, a mask is a bool tensor and a choice `torch.where`. Eager a mask is a float64 tensor of ones and zeros, and a
choice is arithmetic: `torch.where` jumps for every element, and where a mask changes from row to row the processor
guesses half of the jumps wrong, so that a choice takes several times as long as a product (`benchmarks/choices.py
--only masks`).

So what is chosen between is finite on both sides, also where it is not chosen: `without_nan` comes first.
"""

import operator
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import TypeAlias

import torch
from torch import Tensor

Mask: TypeAlias = Tensor
"""Where something holds: bool when compiled, else float64, 1 or 0. Only the functions of this file make or read one."""

Number: TypeAlias = Tensor | float | int


def above(value: Tensor, limit: Number) -> Mask:
    """Where value > limit, which NaN never is."""
    return _compared(torch.gt, operator.gt, value, limit)


def at_least(value: Tensor, limit: Number) -> Mask:
    """Where value >= limit."""
    return _compared(torch.ge, operator.ge, value, limit)


def below(value: Tensor, limit: Number) -> Mask:
    """Where value < limit, which NaN never is."""
    return _compared(torch.lt, operator.lt, value, limit)


def equal(value: Tensor, other: Number) -> Mask:
    """Where the two are equal."""
    return _compared(torch.eq, operator.eq, value, other)


def differ(value: Tensor, other: Number) -> Mask:
    """Where the two are not equal."""
    return _compared(torch.ne, operator.ne, value, other)


def is_known(value: Tensor) -> Mask:
    """Where value is not NaN, which alone differs from itself."""
    return equal(value, value)


def both(*masks: Mask) -> Mask:
    """Where all masks hold.

    Compiled for a CPU, `&` between masks of comparisons of doubles is done element by element (the cast of such a mask
    to 32 bits is not vectorized). Chosen as numbers and compared once they stay 64 bits wide.
    """
    if torch.compiler.is_compiling():
        one = torch.ones((), dtype=torch.float64, device=masks[0].device)
        return reduce(lambda held, mask: torch.where(mask, held, 0.0), masks, one) > 0
    return reduce(torch.mul, masks)


def either(one: Mask, other: Mask) -> Mask:
    """Where at least one mask holds."""
    if torch.compiler.is_compiling():
        return no(both(no(one), no(other)))
    return torch.maximum(one, other)


def no(mask: Mask) -> Mask:
    """Where the mask does not hold."""
    if torch.compiler.is_compiling():
        return ~mask
    return torch.sub(_constant(1.0, mask.device), mask)


def as_mask(truth: Tensor) -> Mask:
    """The mask of a bool tensor."""
    return truth if torch.compiler.is_compiling() else truth.to(torch.float64)


def as_bool(mask: Mask) -> Tensor:
    """The bool tensor of a mask."""
    return mask if mask.dtype == torch.bool else mask.to(torch.bool)


def choose(mask: Mask, value: Number, other: Number) -> Tensor:
    """Value where the mask holds, other elsewhere; both finite.

    `torch.lerp` returns its end points exactly at the weights 0 and 1, a zero perhaps with another sign.
    """
    if torch.compiler.is_compiling():
        return torch.where(mask, value, other)
    return torch.lerp(_tensor(other, mask), _tensor(value, mask), mask)


def only(value: Tensor, *masks: Mask) -> Tensor:
    """The value where all masks hold, 0 elsewhere; finite."""
    if torch.compiler.is_compiling():  # a choice per mask, because a choice takes any mask without a cast
        return reduce(lambda kept, mask: torch.where(mask, kept, 0.0), masks, value)
    return reduce(torch.mul, masks, value)


def without_nan(value: Tensor) -> Tensor:
    """The value with 0 in the place of NaN; compiled for a CPU, `nan_to_num` is done element by element."""
    if torch.compiler.is_compiling():
        return torch.where(value == value, value, 0.0)
    return torch.nan_to_num(value, nan=0.0)


def _compared(
    eager: Callable[..., Tensor], compiled: Callable[[Tensor, Number], Tensor], value: Tensor, limit: Number
) -> Mask:
    if torch.compiler.is_compiling():
        return compiled(value, limit)
    limit = _tensor(limit, value)
    return eager(value, limit, out=torch.empty_like(value if value.dim() >= limit.dim() else limit))


def _tensor(value: Number, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else _constant(float(value), like.device)


@lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number as a float64 scalar, made once: an operator would make it anew in every call."""
    return torch.tensor(value, dtype=torch.float64, device=device)
