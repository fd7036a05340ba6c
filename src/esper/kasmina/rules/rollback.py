"""Rollback: what becomes of slots and hosts when the governor takes a host back to its snapshot."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.guards import in_stages
from esper.kasmina.rules.lifecycle import transition
from esper.kasmina.rules.slot_fields import release, select
from esper.leyline.messages import HostState, SlotState
from esper.leyline.stages import GROWING, SeedStage
from esper.leyline.tensor_dataclass import replace, tensor_dataclass, where

_FORGOTTEN = (
    "val_acc",
    "val_loss",
    "train_acc",
    "train_loss",
    "prev_val_acc",
    "prev_val_loss",
    "committed_acc",
    "cf_total",
)
"""What a host no longer remembers after a rollback."""


@tensor_dataclass
class FossilMemory:
    """Measurements of fossilized seeds at the time of their host's snapshot: they belong to the weights kept there."""

    contribution: Float[Tensor, "N S"]
    contribution_step: Int[Tensor, "N S"]
    contribution_velocity: Float[Tensor, "N S"]
    interaction_sum: Float[Tensor, "N S"]
    boost_received: Float[Tensor, "N S"]


def memory_of(slots: SlotState) -> FossilMemory:
    """What a snapshot taken now would remember."""
    return FossilMemory(
        contribution=slots.contribution,
        contribution_step=slots.contribution_step,
        contribution_velocity=slots.contribution_velocity,
        interaction_sum=slots.interaction_sum,
        boost_received=slots.boost_received,
    )


def remember(memory: FossilMemory, slots: SlotState, taken: Bool[Tensor, "N S"]) -> FossilMemory:
    """The memory with the marked slots as they are now."""
    return where(taken, memory_of(slots), memory)


def rollback(
    slots: SlotState, hosts: HostState, panic: Bool[Tensor, " N"], kept: FossilMemory
) -> tuple[SlotState, HostState, Bool[Tensor, "N S"]]:
    """Take the masked hosts back to their snapshot: growing seeds are pruned, fossils keep what the snapshot knew.

    Clocks and alpha of a fossil go on: only the tick writes clocks. What the host remembered of its past is forgotten
    (a new segment begins). Slots in cooldown are untouched.

    Returns:
        Slots, hosts, and the slots that were pruned [N, S].
    """
    pruned = in_stages(slots.stage, GROWING) & panic[:, None]
    slots = release(transition(slots, pruned, int(SeedStage.PRUNED), torch.nan), pruned)
    fossil = (slots.stage == SeedStage.FOSSILIZED) & panic[:, None]
    slots = select(fossil, dict(vars(kept)), slots)

    # x + NaN is NaN and x + 0 is x, for all fields in one call
    gone = torch.zeros_like(hosts.val_acc).masked_fill(panic, torch.nan)
    forgotten = torch._foreach_add([getattr(hosts, name) for name in _FORGOTTEN], [gone] * len(_FORGOTTEN))
    changes = dict(zip(_FORGOTTEN, forgotten, strict=True))
    for name in ("acc_hist", "loss_hist"):
        changes[name] = getattr(hosts, name) + gone[:, None]
    changes["plateau_count"] = hosts.plateau_count * ~panic
    changes["segment"] = hosts.segment + panic
    return slots, replace(hosts, **changes), pruned
