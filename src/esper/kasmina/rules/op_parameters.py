"""The parameters of an operation, looked up from the values of its heads."""

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
    LifecycleOp,
)
from esper.leyline.stages import SeedStage


class OpParameters(NamedTuple):
    """Columns [N, 1]. `to_stage` is the stage that the op leads to when it takes effect at once."""

    blueprint: Tensor
    algorithm: Tensor
    first_curve: Tensor
    tempo: Tensor
    ticks: Tensor
    curve: Tensor
    to_stage: Tensor
    target: Tensor
    steepness: Tensor


_STAGE_AFTER = {
    LifecycleOp.GERMINATE: SeedStage.GERMINATED,
    LifecycleOp.SET_ALPHA_TARGET: SeedStage.BLENDING,
    LifecycleOp.PRUNE: SeedStage.PRUNED,
    LifecycleOp.FOSSILIZE: SeedStage.FOSSILIZED,
}
_INTEGERS = (
    (Head.STYLE, STYLE_ALGORITHM),
    (Head.STYLE, STYLE_CURVE),
    (Head.TEMPO, TEMPO_TICKS),
    (Head.ALPHA_SPEED, ALPHA_SPEED_TICKS),
    (Head.ALPHA_CURVE, ALPHA_CURVES),
    (Head.OP, tuple(int(_STAGE_AFTER.get(op, SeedStage.UNKNOWN)) for op in LifecycleOp)),
)
_FLOATS = ((Head.ALPHA_TARGET, ALPHA_TARGETS), (Head.ALPHA_CURVE, ALPHA_CURVE_STEEPNESS))
_Column = tuple[Head, Sequence[int] | Sequence[float]]
_Table = tuple[Tensor, Tensor, Tensor]
"""The head of each parameter, its row, and the rows of values, padded with zeros."""


@lru_cache(maxsize=16)
def _table(columns: tuple[_Column, ...], dtype: torch.dtype, device: torch.device) -> _Table:
    width = max(len(values) for _, values in columns)
    rows = [[*values, *[0] * (width - len(values))] for _, values in columns]
    heads = torch.tensor([int(head) for head, _ in columns], device=device)
    return heads, torch.arange(len(rows), device=device), torch.tensor(rows, dtype=dtype, device=device)


def op_parameters(actions: Int[Tensor, "N 8"]) -> OpParameters:
    """The parameters of each host's op."""
    columns = [actions[:, Head.BLUEPRINT : Head.BLUEPRINT + 1]]
    for group, dtype in ((_INTEGERS, torch.int64), (_FLOATS, torch.float32)):
        heads, rows, values = _table(group, dtype, actions.device)
        columns.extend(values[rows, actions.index_select(1, heads)].split(1, dim=1))
    return OpParameters(*columns)
