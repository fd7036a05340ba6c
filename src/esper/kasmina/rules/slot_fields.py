"""Empty values of slot and host fields, and writes of many fields under one mask."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from esper.leyline.actions import FIRST_RAMP_STEEPNESS, LifecycleOp
from esper.leyline.errors import CheckpointError
from esper.leyline.messages import HostState, SlotState
from esper.leyline.stages import AlphaCurve, AlphaMode, SeedStage
from esper.leyline.tensor_dataclass import replace

_NAN = float("nan")
_INT, _FLOAT, _BOOL = torch.int64, torch.float32, torch.bool

IDENTITY: dict[str, tuple[torch.dtype, float]] = {
    "stage": (_INT, SeedStage.DORMANT),
    "prev_stage": (_INT, SeedStage.DORMANT),
    "epochs_in_stage": (_INT, 0),
    "prev_epochs": (_INT, 0),
    "age": (_INT, 0),
    "serial": (_INT, -1),
    "blueprint": (_INT, -1),
    "algorithm": (_INT, 0),
    "tempo": (_INT, 0),
    "germ_curve": (_INT, AlphaCurve.NONE),
    "acc_at_stage_start": (_FLOAT, _NAN),
}
"""Fields that stay when the module is removed, until the slot is DORMANT again."""

MODULE: dict[str, tuple[torch.dtype, float]] = {
    "has_gate": (_BOOL, False),
    "params": (_INT, 0),
    "alpha": (_FLOAT, 0.0),
    "alpha_start": (_FLOAT, 0.0),
    "alpha_target": (_FLOAT, 0.0),
    "alpha_mode": (_INT, AlphaMode.HOLD),
    "alpha_curve": (_INT, AlphaCurve.NONE),
    "alpha_steepness": (_FLOAT, FIRST_RAMP_STEEPNESS),
    "alpha_total": (_INT, 0),
    "alpha_done": (_INT, 0),
}
"""Fields of the module and its blend weight."""

MEASURED: dict[str, tuple[torch.dtype, float]] = {
    "acc_at_germination": (_FLOAT, _NAN),
    "acc_at_blending_start": (_FLOAT, _NAN),
    "contribution": (_FLOAT, _NAN),
    "contribution_step": (_INT, -1),
    "contribution_velocity": (_FLOAT, _NAN),
    "interaction_sum": (_FLOAT, _NAN),
    "boost_received": (_FLOAT, _NAN),
    "grad_norm": (_FLOAT, _NAN),
    "grad_health": (_FLOAT, _NAN),
    "grad_vanishing": (_BOOL, False),
    "grad_exploding": (_BOOL, False),
    "grad_health_prev": (_FLOAT, _NAN),
    "grad_ratio_ema": (_FLOAT, _NAN),
}
"""Measurements of the seed."""

RELEASED = {**MODULE, **MEASURED}
EMPTY = {**IDENTITY, **RELEASED}

_HOST_EMPTY: dict[str, tuple[torch.dtype, float]] = {
    **dict.fromkeys(
        ("val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss"), (_FLOAT, _NAN)
    ),
    **dict.fromkeys(("committed_acc", "cf_total", "best_acc"), (_FLOAT, _NAN)),
    **dict.fromkeys(("n_germinated", "n_pruned", "n_fossilized", "n_contributing", "host_params"), (_INT, 0)),
    **dict.fromkeys(("plateau_count", "stable_count", "segment"), (_INT, 0)),
    "last_op": (_INT, LifecycleOp.WAIT),
    "last_success": (_BOOL, True),
    "stabilized": (_BOOL, False),
}


def empty_slots(num_envs: int, num_slots: int, device: torch.device) -> SlotState:
    """DORMANT slots [N, S]."""
    shape = (num_envs, num_slots)
    return SlotState(**{name: torch.full(shape, v, dtype=d, device=device) for name, (d, v) in EMPTY.items()})


def new_hosts(num_envs: int, host_params: int, device: torch.device) -> HostState:
    """N hosts before their first step."""
    fields = {name: torch.full((num_envs,), v, dtype=d, device=device) for name, (d, v) in _HOST_EMPTY.items()}
    fields["host_params"].fill_(host_params)
    missing = torch.full((num_envs, 5), _NAN, device=device)
    return HostState(**fields, acc_hist=missing, loss_hist=missing.clone())


@lru_cache(maxsize=16)
def _empty_by_dtype(names: tuple[str, ...], device: torch.device) -> list[tuple[list[str], Tensor]]:
    """The names of each dtype, and their empty values [F, 1, 1]."""
    groups = [(d, [name for name in names if EMPTY[name][0] is d]) for d in (_INT, _FLOAT, _BOOL)]
    return [(g, torch.tensor([EMPTY[n][1] for n in g], dtype=d, device=device)[:, None, None]) for d, g in groups]


def _fill_empty(slots: SlotState, where_NS: Tensor, names: tuple[str, ...]) -> SlotState:
    """Write the empty value of the named fields under the mask, with three operators per type of field."""
    changes: dict[str, Tensor] = {}
    for group, empty in _empty_by_dtype(names, where_NS.device):
        filled = torch.where(where_NS, empty, torch.stack([getattr(slots, name) for name in group]))
        changes.update(zip(group, filled.unbind(0), strict=True))
    return replace(slots, **changes)


def release(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """Remove the module from the marked slots: its fields, its blend weight and its measurements become empty."""
    return _fill_empty(slots, where, tuple(RELEASED))


def vacate(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """Set every field of the marked slots to its empty value."""
    return _fill_empty(slots, where, tuple(EMPTY))


def require_known_stages(slots: SlotState) -> None:
    """Refuse a loaded state with a stage that is never stored. Reads the device, so it does not belong in the loop.

    Raises:
        CheckpointError: a stage is UNKNOWN, the unused value 5, or outside the table.
    """
    stored = torch.tensor([stage for stage in SeedStage if stage is not SeedStage.UNKNOWN], device=slots.stage.device)
    unknown = slots.stage[~torch.isin(slots.stage, stored)].unique().tolist()
    if unknown:
        raise CheckpointError(
            f"slots have the stages {unknown}; stored stages are {', '.join(str(int(s)) for s in stored)}. "
            "The state was changed or is of another version: use an older checkpoint."
        )


def select(where: Bool[Tensor, "N S"], chosen: Mapping[str, Tensor | float | int], slots: SlotState) -> SlotState:
    """`slots` with new values of the named fields under the mask: tensors that broadcast to [N, S], or numbers."""
    changes = {}
    for name, value in chosen.items():
        old = getattr(slots, name)
        changes[name] = torch.where(where, value, old) if isinstance(value, Tensor) else old.masked_fill(where, value)
    return replace(slots, **changes)
