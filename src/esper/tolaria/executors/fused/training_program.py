"""What a fused train pass runs for one structure: forward and backward of a batch, and the optimizer step.

    train_batch   x, y --> loss and hits [N]; writes the gradients of all hosts and seeds into the working copies
    step          gradients --> weights, in the working copies

Both can be captured as CUDA graphs (`tolaria.capture`). They are separate because gradient statistics are computed
between them in the last batch, and because a short last batch can share the graph of the step.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.parameters.slab import Working
from esper.leyline.tensor_dataclass import named_tensors
from esper.tolaria.amp import LossScaler
from esper.tolaria.capture import CaptureBackend, Captured
from esper.tolaria.executors.fused.slots import Rows, SlotGroup, apply_groups
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, blend_order, trained_mask

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
    train_batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
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
    capture_backend: CaptureBackend | None,
) -> TrainingProgram:
    """The program on this memory; with a `capture_backend` its functions are captured when they are called again."""
    trained = [host, *(rows for of_slot in groups.values() for group in of_slot for rows in group.trained_rows())]

    def run_batch(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
        def apply(slot_id: str, h: Tensor) -> Tensor:
            of_slot = groups.get(slot_id)
            return h if of_slot is None else apply_groups(of_slot, h, y_NB.shape[0])

        outputs = train_batch(trained, apply, scaler, x_NB, y_NB)
        optimizer.unscale()
        return outputs

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
    trained: list[Rows], apply: Callable[[str, Tensor], Tensor], scaler: LossScaler, x_NB: Tensor, y_NB: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward and one backward of all hosts; `trained[0]` are the hosts. Returns loss and hits [N].

    `apply` is what a slot does to the features that pass it.
    """
    num_hosts, batch = y_NB.shape
    x = x_NB.transpose(0, 1).flatten(0, 1)
    y_BN = y_NB.t()
    with scaler.autocast():
        logits = trained[0](x, apply).float()
    loss_BN = F.cross_entropy(logits, y_BN.reshape(-1), reduction="none").view(batch, num_hosts)
    loss_N = loss_BN.mean(dim=0)
    leaves = [leaf for rows in trained for leaf in rows.parameters]
    # a blueprint may have parameters that it does not use
    grads = torch.autograd.grad((loss_N * scaler.scale).sum(), leaves, materialize_grads=True)
    torch._foreach_copy_([grad for rows in trained for grad in rows.grads], grads)
    hits = (logits.detach().argmax(dim=-1).view(batch, num_hosts) == y_BN).sum(dim=0)
    return loss_N.detach(), hits


def _copied(rows: Rows) -> Iterator[Tensor]:
    """What was copied out of the population for these rows: buffers, and weights that are not trained."""
    yield from rows.buffers
    if not rows.grads:
        yield from rows.parameters
