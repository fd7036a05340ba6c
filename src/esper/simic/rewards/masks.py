"""Masks joined, and missing numbers replaced, in the form that is fast where they run: eager or compiled."""

import operator
from functools import reduce

import torch
from torch import Tensor


def both(*masks: Tensor) -> Tensor:
    """Where all masks hold, bool.

    Compiled for a CPU, `&` between masks of comparisons of doubles is done element by element (the cast of such a mask
    to 32 bits is not vectorized). Chosen as numbers and compared once they stay 64 bits wide; eager that costs more.
    """
    if torch.compiler.is_compiling():
        one = torch.ones((), dtype=torch.float64, device=masks[0].device)
        return reduce(lambda held, mask: torch.where(mask, held, 0.0), masks, one) > 0
    return reduce(operator.and_, masks)


def either(one: Tensor, other: Tensor) -> Tensor:
    """Where at least one mask holds, bool; see `both`."""
    return ~both(~one, ~other) if torch.compiler.is_compiling() else one | other


def without_nan(value: Tensor) -> Tensor:
    """The value with 0 in the place of NaN; compiled for a CPU, `nan_to_num` is done element by element."""
    if torch.compiler.is_compiling():
        return torch.where(value == value, value, 0.0)
    return torch.nan_to_num(value, nan=0.0)
