"""One step in the rollout buffer.

An invalid row is neutral (it evaluates without error and enters no mean): only WAIT on slot 0 is legal, the actions are
canonical, everything else but `valid` and `reset` is 0.

Shape legend: N = hosts, D = features, S = slots.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import CANONICAL_ACTION, NUM_OPS, LifecycleOp
from esper.leyline.tensor_dataclass import lift, tensor_dataclass


@tensor_dataclass
class Row:
    """One step of all hosts. `reset` marks those whose recurrent state was zero before it."""

    state: Float[Tensor, "N D"]
    raw_state: Float[Tensor, "N D"]
    blueprint_index: Int[Tensor, "N S"]
    actions: Int[Tensor, "N 8"]
    effective_op: Int[Tensor, " N"]
    log_prob: Float[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    reward: Float[Tensor, " N"]
    bootstrap_value: Float[Tensor, " N"]
    terminal: Bool[Tensor, " N"]
    truncated: Bool[Tensor, " N"]
    valid: Bool[Tensor, " N"]
    reset: Bool[Tensor, " N"]
    forced: Bool[Tensor, " N"]
    legal: Bool[Tensor, "N 6 S"]
    has_gate: Bool[Tensor, "N S"]


_FINITE = ("state", "raw_state")
"""Fields that are always finite (`features.observe`)."""
_UNMASKED = ("valid", "reset")


def neutral_unless(valid: Bool[Tensor, "*N"], entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries by field of `Row`, in the dtypes of the buffer; neutral where not `valid`.

    Features are wide, so they are multiplied by 0, which is much faster than `where`.
    """
    neutral = neutral_row(entries["has_gate"].shape[-1], valid.device)
    weight = valid.to(torch.float32)[..., None]
    values = {}
    for name, nothing in neutral.items():
        entry = entries[name].to(nothing.dtype)
        if name in _FINITE:
            values[name] = entry * weight
        elif name in _UNMASKED:
            values[name] = entry
        else:
            values[name] = torch.where(lift(valid, entry), entry, nothing)
    return values


@lru_cache
def neutral_row(num_slots: int, device: torch.device) -> dict[str, Tensor]:
    """A neutral row, by field of `Row`; broadcasts against one step of one host."""
    dtypes = {"blueprint_index": torch.int64, "effective_op": torch.int64}
    flags = ("terminal", "truncated", "valid", "reset", "forced", "has_gate")
    dtypes.update(dict.fromkeys(flags, torch.bool))
    neutral = {
        name: torch.zeros((), dtype=dtypes.get(name, torch.float32), device=device) for name in Row.__annotations__
    }
    neutral["actions"] = torch.tensor(CANONICAL_ACTION, device=device)
    neutral["legal"] = torch.zeros(NUM_OPS, num_slots, dtype=torch.bool, device=device)
    neutral["legal"][LifecycleOp.WAIT, 0] = True
    return neutral
