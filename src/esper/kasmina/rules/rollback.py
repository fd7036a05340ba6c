"""Rollback: slots and hosts when the governor restores the snapshot of a host."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.guards import in_stages
from esper.kasmina.rules.lifecycle import transition
from esper.kasmina.rules.slot_fields import release, select
from esper.leyline.messages import HostState, SlotState
from esper.leyline.stages import GROWING, SeedStage
from esper.leyline.tensor_dataclass import replace, tensor_dataclass, where

_MEASURED = (
    "val_acc",
    "val_loss",
    "train_acc",
    "train_loss",
    "prev_val_acc",
    "prev_val_loss",
    "committed_acc",
    "cf_total",
)
"""Fields of a host that a rollback clears, besides the histories."""


@tensor_dataclass
class FossilMemory:
    """Measurements of seeds at the time of their host's snapshot, which holds the weights that were measured."""

    contribution: Float[Tensor, "N S"]
    contribution_step: Int[Tensor, "N S"]
    contribution_velocity: Float[Tensor, "N S"]
    interaction_sum: Float[Tensor, "N S"]
    boost_received: Float[Tensor, "N S"]


def memory_of(slots: SlotState) -> FossilMemory:
    """The memory of a snapshot that is taken now."""
    return FossilMemory(**{name: getattr(slots, name) for name in FossilMemory.__annotations__})


def remember(memory: FossilMemory, slots: SlotState, taken: Bool[Tensor, "N S"]) -> FossilMemory:
    """`memory` with the present measurements of the marked slots."""
    return where(taken, memory_of(slots), memory)


def rollback(
    slots: SlotState, hosts: HostState, panic: Bool[Tensor, " N"], memory: FossilMemory
) -> tuple[SlotState, HostState, Bool[Tensor, "N S"]]:
    """Prune the growing seeds of the masked hosts and restore the measurements of their fossils from the snapshot.

    The clocks and the alpha of a fossil stay, because only the tick writes clocks. The measurements and histories of
    the host are cleared, and a new segment begins. Slots in cooldown are untouched.

    Returns:
        Slots, hosts, and the slots that were pruned [N, S].
    """
    pruned = in_stages(slots.stage, GROWING) & panic[:, None]
    slots = release(transition(slots, pruned, int(SeedStage.PRUNED), torch.nan), pruned)
    fossil = (slots.stage == SeedStage.FOSSILIZED) & panic[:, None]
    slots = select(fossil, dict(vars(memory)), slots)

    # x + NaN is NaN and x + 0 is x: one call clears all fields
    gone = torch.zeros_like(hosts.val_acc).masked_fill(panic, torch.nan)
    cleared = torch._foreach_add([getattr(hosts, name) for name in _MEASURED], [gone] * len(_MEASURED))
    changes = dict(zip(_MEASURED, cleared, strict=True))
    for name in ("acc_hist", "loss_hist"):
        changes[name] = getattr(hosts, name) + gone[:, None]
    changes["plateau_count"] = hosts.plateau_count * ~panic
    changes["segment"] = hosts.segment + panic
    return slots, replace(hosts, **changes), pruned
