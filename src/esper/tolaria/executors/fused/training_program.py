"""What a fused train pass runs for one structure: forward and backward of a batch, and the optimizer step.

    train_batch   x, y --> scores [N]; writes the gradients of all hosts and seeds into the working copies
    step          gradients --> weights, in the working copies

They are separate because gradient statistics are computed between them in the last batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from esper.kasmina.parameters.slab import Working
from esper.leyline.objective import Objective, Scores
from esper.tolaria.amp import LossScaler
from esper.tolaria.executors.fused.slots import Rows, SlotGroup, apply_groups
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.running_seeds import TrainedRows
from esper.tolaria.executors.scoring import mean_factor

Groups = dict[str, list[SlotGroup]]


@final
@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """Functions and memory of the train passes of one structure.

    Attributes:
        hosts: the working copies of all hosts. rows: those of seeds and gates. groups: what runs in each slot.
        train_batch, step: see the module docstring.
    """

    hosts: Working
    rows: TrainedRows
    groups: Groups
    train_batch: Callable[[Tensor, Tensor], Scores]
    step: Callable[[], None]


def training_program(
    host: Rows,
    hosts: Working,
    rows: TrainedRows,
    groups: Groups,
    optimizer: StackedOptimizer,
    scaler: LossScaler,
    objective: Objective,
) -> TrainingProgram:
    """The program on this memory."""
    trained = [host, *(rows for of_slot in groups.values() for group in of_slot for rows in group.trained_rows())]

    def run_batch(x_NB: Tensor, y_NB: Tensor) -> Scores:
        def apply(slot_id: str, h: Tensor) -> Tensor:
            of_slot = groups.get(slot_id)
            return h if of_slot is None else apply_groups(of_slot, h, y_NB.shape[0])

        scores = train_batch(trained, apply, scaler, objective, x_NB, y_NB)
        optimizer.unscale()
        return scores

    return TrainingProgram(hosts=hosts, rows=rows, groups=groups, train_batch=run_batch, step=optimizer.step)


def train_batch(
    trained: list[Rows],
    apply: Callable[[str, Tensor], Tensor],
    scaler: LossScaler,
    objective: Objective,
    x_NB: Tensor,
    y_NB: Tensor,
) -> Scores:
    """One forward and one backward of all hosts; `trained[0]` are the hosts. Returns scores [N], float64.

    `apply` is what a slot does to the features that pass it.
    """
    batch, num_hosts = y_NB.shape[1], y_NB.shape[0]
    x, y = (of_NB.transpose(0, 1).flatten(0, 1) for of_NB in (x_NB, y_NB))
    with scaler.autocast():
        outputs = trained[0](x, apply)
    rows = objective.scores(outputs.float(), y)
    loss_BN, score_BN, weight_BN = (of_rows.view(batch, num_hosts) for of_rows in rows)
    factor_N = mean_factor(weight_BN.sum(dim=0)) * scaler.scale
    leaves = [leaf for of_kind in trained for leaf in of_kind.parameters]
    if leaves:  # none where the whole host is frozen and nothing grows in it
        # a blueprint may have parameters that it does not use
        grads = torch.autograd.grad(loss_BN, leaves, factor_N.expand_as(loss_BN), materialize_grads=True)
        torch._foreach_copy_([grad for of_kind in trained for grad in of_kind.grads], grads)
    return Scores(*(of_BN.sum(dim=0, dtype=torch.float64) for of_BN in (loss_BN.detach(), score_BN, weight_BN)))
