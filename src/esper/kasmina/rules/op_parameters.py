"""The parameters of an operation: what the values of the heads stand for."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.actions import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGETS,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_TICKS,
    Head,
)


class OpParameters(NamedTuple):
    """What the values of the heads stand for, as columns [N, 1]."""

    blueprint: Tensor
    algorithm: Tensor
    first_curve: Tensor
    tempo: Tensor
    ticks: Tensor
    curve: Tensor
    target: Tensor
    steepness: Tensor


_INTEGERS = (
    (Head.STYLE, STYLE_ALGORITHM),
    (Head.STYLE, STYLE_CURVE),
    (Head.TEMPO, TEMPO_TICKS),
    (Head.ALPHA_SPEED, ALPHA_SPEED_TICKS),
    (Head.ALPHA_CURVE, ALPHA_CURVES),
)
_FLOATS = ((Head.ALPHA_TARGET, ALPHA_TARGETS), (Head.ALPHA_CURVE, ALPHA_CURVE_STEEPNESS))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """For the integers and the floats: the head of each, its row, and the rows of values, filled up with zeros."""

    def table(
        columns: Sequence[tuple[Head, Sequence[int] | Sequence[float]]], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = torch.tensor([int(head) for head, _ in columns], device=device)
        width = max(len(values) for _, values in columns)
        rows = [[*values, *[0] * (width - len(values))] for _, values in columns]
        return heads, torch.arange(len(rows), device=device), torch.tensor(rows, dtype=dtype, device=device)

    return table(_INTEGERS, torch.int64), table(_FLOATS, torch.float32)


def op_parameters(actions: Int[Tensor, "N 8"]) -> OpParameters:
    """The parameters of each host's op."""
    columns = [actions[:, Head.BLUEPRINT, None]]
    for heads, rows, values in _tables(actions.device):
        columns.extend(values[rows, actions.index_select(1, heads)].t()[..., None].unbind(0))
    return OpParameters(*columns)
