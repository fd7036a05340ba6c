"""What a fused train pass runs for one structure: forward and backward of a batch, and the optimizer step.

    train_batch   x, y --> scores [N]; writes the gradients of all hosts and seeds into the working copies
    step          gradients --> weights, in the working copies

Both can be captured as CUDA graphs (`tolaria.capture`). They are separate because gradient statistics are computed
between them in the last batch, and because a short last batch can share the graph of the step.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.slab import Working
from esper.leyline.objective import Objective, Scores
from esper.leyline.tensor_dataclass import named_tensors
from esper.tolaria.amp import LossScaler
from esper.tolaria.capture import CaptureBackend, Captured
from esper.tolaria.executors.fused.slots import Rows, SlotGroup, apply_groups
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, blend_order, trained_mask
from esper.tolaria.executors.scoring import mean_factor

Groups = dict[str, list[SlotGroup]]


@final
@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """Functions and memory of the train passes of one structure.

    Attributes:
        hosts: the working copies of all hosts. rows: those of seeds and gates. groups: what runs in each slot.
        train_batch, step: see the module docstring; captured if `capture` is on.
    """

    hosts: Working
    rows: TrainedRows
    groups: Groups
    train_batch: Callable[[Tensor, Tensor], Scores]
    step: Callable[[], None]

    def tensors(self) -> list[Tensor]:
        """All memory that a pass reads or writes, except indices, which follow from the structure."""
        found: list[Tensor] = []
        for working in (self.hosts, self.rows.seeds, self.rows.gates):
            found += (working.params, working.grad, *(x for _, x in named_tensors(working.optimizer)))
        for group in (group for of_slot in self.groups.values() for group in of_slot):
            found += (group.running, *(piece.alpha for piece in group.pieces))
            found += (x for rows in (group.seed, group.gate) if rows is not None for x in _copied(rows))
        return found


def training_program(
    host: Rows,
    hosts: Working,
    rows: TrainedRows,
    groups: Groups,
    optimizer: StackedOptimizer,
    scaler: LossScaler,
    objective: Objective,
    capture_backend: CaptureBackend | None,
) -> TrainingProgram:
    """The program on this memory; with a `capture_backend` its functions are captured when they are called again."""
    trained = [host, *(rows for of_slot in groups.values() for group in of_slot for rows in group.trained_rows())]

    def run_batch(x_NB: Tensor, y_NB: Tensor) -> Scores:
        def apply(slot_id: str, h: Tensor) -> Tensor:
            of_slot = groups.get(slot_id)
            return h if of_slot is None else apply_groups(of_slot, h, y_NB.shape[0])

        scores = train_batch(trained, apply, scaler, objective, x_NB, y_NB)
        optimizer.unscale()
        return scores

    functions: dict[str, Any] = {"train_batch": run_batch, "step": optimizer.step}
    if capture_backend is not None:
        functions = {name: Captured(f, capture_backend, name=f"{name} of training") for name, f in functions.items()}
    return TrainingProgram(hosts=hosts, rows=rows, groups=groups, **functions)


def structure_key(structure: Structure) -> Hashable:
    """Determines the operations of a train pass and their shapes: programs of equal keys are interchangeable."""
    trainable, active = trained_mask(structure), structure.alpha > 0.0
    runs = trainable | active
    of_running = (structure.blueprint, blend_order(structure), structure.has_gate)
    masks = (trainable.tobytes(), active.tobytes())
    return (*masks, *(np.where(runs, values, 0).astype(np.int64).tobytes() for values in of_running))


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


def _copied(rows: Rows) -> Iterator[Tensor]:
    """What was copied out of the population for these rows: buffers, and weights that are not trained."""
    yield from rows.buffers
    if not rows.grads:
        yield from rows.parameters
