"""Empty values of slot and host fields, and writing many fields under one mask."""

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
"""Fields that survive the removal of a module; they are emptied when the slot is DORMANT again."""

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
"""Fields that describe the module and its blend weight."""

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
"""Fields that hold measurements of the seed."""

RELEASED = {**MODULE, **MEASURED}
EMPTY = {**IDENTITY, **RELEASED}

_HOST_EMPTY: dict[str, tuple[torch.dtype, float]] = {
    "val_acc": (_FLOAT, _NAN),
    "val_loss": (_FLOAT, _NAN),
    "train_acc": (_FLOAT, _NAN),
    "train_loss": (_FLOAT, _NAN),
    "prev_val_acc": (_FLOAT, _NAN),
    "prev_val_loss": (_FLOAT, _NAN),
    "committed_acc": (_FLOAT, _NAN),
    "cf_total": (_FLOAT, _NAN),
    "host_params": (_INT, 0),
    "last_op": (_INT, LifecycleOp.WAIT),
    "last_success": (_BOOL, True),
    "n_germinated": (_INT, 0),
    "n_pruned": (_INT, 0),
    "n_fossilized": (_INT, 0),
    "n_contributing": (_INT, 0),
    "best_acc": (_FLOAT, _NAN),
    "plateau_count": (_INT, 0),
    "stable_count": (_INT, 0),
    "stabilized": (_BOOL, False),
    "segment": (_INT, 0),
}


def empty_slots(num_envs: int, num_slots: int, device: torch.device) -> SlotState:
    """N x S dormant slots."""
    shape = (num_envs, num_slots)
    return SlotState(**{name: torch.full(shape, v, dtype=d, device=device) for name, (d, v) in EMPTY.items()})


def new_hosts(num_envs: int, host_params: int, device: torch.device) -> HostState:
    """N hosts before their first step."""
    fields = {name: torch.full((num_envs,), v, dtype=d, device=device) for name, (d, v) in _HOST_EMPTY.items()}
    fields["host_params"].fill_(host_params)
    missing = torch.full((num_envs, 5), _NAN, device=device)
    return HostState(**fields, acc_hist=missing, loss_hist=missing.clone())


@lru_cache(maxsize=64)
def _columns(names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([EMPTY[name][1] for name in names], dtype=dtype, device=device)[:, None, None]


@lru_cache(maxsize=16)
def _by_dtype(names: tuple[str, ...]) -> tuple[tuple[torch.dtype, tuple[str, ...]], ...]:
    return tuple((d, tuple(n for n in names if EMPTY[n][0] is d)) for d in (_INT, _FLOAT, _BOOL))


_RELEASED_NAMES, _EMPTY_NAMES = tuple(RELEASED), tuple(EMPTY)


def _fill_empty(slots: SlotState, where_NS: Tensor, names: tuple[str, ...]) -> SlotState:
    """Write the empty value of the named fields where the mask is set.

    Fields of one type are stacked, so that the cost is three operations per type instead of one per field.
    """
    changes: dict[str, Tensor] = {}
    for dtype, group in _by_dtype(names):
        stacked = torch.stack([getattr(slots, name) for name in group])
        filled = torch.where(where_NS, _columns(group, dtype, where_NS.device), stacked)
        changes.update(zip(group, filled.unbind(0), strict=True))
    return replace(slots, **changes)


def release(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """The module leaves the slot: its parameters, blend weight and measurements are forgotten."""
    return _fill_empty(slots, where, _RELEASED_NAMES)


def vacate(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """The slot is DORMANT: every field takes its empty value."""
    return _fill_empty(slots, where, _EMPTY_NAMES)


def require_known_stages(slots: SlotState) -> None:
    """Refuse states from outside with a stage that cannot be stored. Reads the device: for loading, not for the loop.

    Raises:
        CheckpointError: a stage is UNKNOWN, the unused value 5, or outside the table.
    """
    stored = torch.tensor([stage for stage in SeedStage if stage is not SeedStage.UNKNOWN], device=slots.stage.device)
    strange = slots.stage[~torch.isin(slots.stage, stored)].unique().tolist()
    if strange:
        raise CheckpointError(
            f"slots have the stages {strange}; stored stages are {', '.join(str(int(s)) for s in stored)}. "
            "The state was changed or is of another version: use an older checkpoint."
        )


def select(where: Bool[Tensor, "N S"], chosen: Mapping[str, Tensor | float | int], slots: SlotState) -> SlotState:
    """`slots` with each named field replaced by its chosen value ([N,S], broadcastable, or a number) under the mask."""
    changes = {}
    for name, value in chosen.items():
        old = getattr(slots, name)
        changes[name] = torch.where(where, value, old) if isinstance(value, Tensor) else old.masked_fill(where, value)
    return replace(slots, **changes)
