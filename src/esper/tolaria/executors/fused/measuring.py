"""Measure many states of the network for several hosts in one forward pass; used by the fused executor.

Shape legend: B = examples, P = states, g = hosts, K = coalitions.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.objective import Objective
from esper.tolaria.executors.fused.slots import Rows
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.scoring import SummedScores


def measure_states(
    data: HostData,
    objective: Objective,
    host: Rows,
    apply: Callable[[int, str, Tensor], Tensor],
    state_of: Int[Tensor, "g K"],
    num_states: int,
    x: Tensor,
    y: Tensor,
    *,
    num_first: int = 1,
    own: bool = False,
) -> Iterator[SummedScores]:
    """Scores of each coalition, for one part of the examples after another.

    Args:
        data: precision.
        objective: that of the split.
        host: the hosts.
        apply: B, slot id and features [B * P * g, ...] before a slot --> the features [B * P' * g, ...] after it.
        state_of: the final state of each coalition.
        num_states: P after the last slot.
        num_first: P before the first slot.
        x: the examples [B, ...], the same for all hosts, or [g, B, ...] of each with `own`.
        y: their targets, likewise.
        own: whether each host has its own examples.
    """
    num_hosts = len(state_of)
    size = data.examples_at_once(num_hosts * num_states)
    column = torch.arange(num_hosts, device=state_of.device)
    x_B1g, y_B1g = (of.transpose(0, 1)[:, None] if own else of[:, None, None] for of in (x, y))
    for part_x, part_y in zip(x_B1g.split(size), y_B1g.split(size), strict=True):
        batch = len(part_y)
        rows = part_x.expand(batch, num_first, num_hosts, *x_B1g.shape[3:]).flatten(0, 2)
        with data.scaler.autocast():
            outputs = host(rows, partial(apply, batch))
        targets = part_y.expand(batch, num_states, num_hosts, *y_B1g.shape[3:]).flatten(0, 2)
        of_rows = objective.scores(outputs.float(), targets)
        loss_Pg, score_Pg, weight_Pg = (
            of.view(batch, num_states, num_hosts).sum(dim=0, dtype=torch.float64) for of in of_rows
        )
        yield SummedScores(score_Pg.t().gather(1, state_of), loss_Pg[state_of[:, 0], column], weight_Pg[0])
