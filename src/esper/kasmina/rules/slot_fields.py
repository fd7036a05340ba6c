"""Fields of slots and hosts: their empty values, writes under a mask, and the measurements of a step (`ingest`)."""

from collections.abc import Collection, Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import FIRST_RAMP_STEEPNESS, Algorithm, AlphaCurve, AlphaMode, LifecycleOp, SeedStage
from esper.leyline.messages import HostState, Measurements, SlotState
from esper.leyline.tensor_dataclass import replace, where

_NAN = float("nan")
_IDENTITY = {
    "stage": int(SeedStage.DORMANT),
    "prev_stage": int(SeedStage.DORMANT),
    "epochs_in_stage": 0,
    "prev_epochs": 0,
    "age": 0,
    "serial": -1,
    "blueprint": -1,
    "algorithm": 0,
    "tempo": 0,
    "germ_curve": int(AlphaCurve.NONE),
    "acc_at_stage_start": _NAN,
}
"""Fields that stay when the module is removed, until the slot is DORMANT again."""
_RELEASED = {
    # the module and its blend weight
    "has_gate": False,
    "params": 0,
    **dict.fromkeys(("alpha", "alpha_start", "alpha_target"), 0.0),
    "alpha_mode": int(AlphaMode.HOLD),
    "alpha_curve": int(AlphaCurve.NONE),
    "alpha_steepness": FIRST_RAMP_STEEPNESS,
    **dict.fromkeys(("alpha_total", "alpha_done"), 0),
    # measurements of the seed
    **dict.fromkeys(("acc_at_germination", "acc_at_blending_start", "contribution", "contribution_velocity"), _NAN),
    "contribution_step": -1,
    **dict.fromkeys(("interaction_sum", "boost_received"), _NAN),
    **dict.fromkeys(("grad_norm", "grad_health", "grad_health_prev", "grad_ratio_ema"), _NAN),
    **dict.fromkeys(("grad_vanishing", "grad_exploding"), False),
}
EMPTY = {**_IDENTITY, **_RELEASED}
"""The value of each field of an empty slot, of the type of the field."""
_HOST_EMPTY = {
    **dict.fromkeys(("val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss"), _NAN),
    **dict.fromkeys(("committed_acc", "cf_total", "best_acc"), _NAN),
    **dict.fromkeys(("n_germinated", "n_pruned", "n_fossilized", "n_contributing"), 0),
    **dict.fromkeys(("plateau_count", "stable_count", "segment"), 0),
    "compute": 0.0,
    "last_op": int(LifecycleOp.WAIT),
    "last_success": True,
    "stabilized": False,
}


def empty_slots(num_envs: int, num_slots: int, device: torch.device) -> SlotState:
    """DORMANT slots [N, S]."""
    return SlotState(**{name: torch.full((num_envs, num_slots), v, device=device) for name, v in EMPTY.items()})


def new_hosts(num_envs: int, host_params: int, device: torch.device) -> HostState:
    """N hosts before their first step."""
    values = _HOST_EMPTY | {"host_params": host_params}
    fields = {name: torch.full((num_envs,), value, device=device) for name, value in values.items()}
    missing = torch.full((num_envs, 5), _NAN, device=device)
    return HostState(**fields, acc_hist=missing, loss_hist=missing.clone())


@lru_cache(maxsize=16)
def _empty_by_dtype(names: tuple[str, ...], device: torch.device) -> list[tuple[list[str], Tensor]]:
    """The names of each dtype, and their empty values [F, 1, 1]."""
    groups = [[name for name in names if type(EMPTY[name]) is kind] for kind in (int, float, bool)]
    return [(of, torch.tensor([EMPTY[name] for name in of], device=device)[:, None, None]) for of in groups]


def _fill_empty(slots: SlotState, where_NS: Tensor, names: tuple[str, ...]) -> SlotState:
    """Write the empty value of the named fields under the mask, with three operators per type of field."""
    changes: dict[str, Tensor] = {}
    for group, empty in _empty_by_dtype(names, where_NS.device):
        filled = torch.where(where_NS, empty, torch.stack([getattr(slots, name) for name in group]))
        changes.update(zip(group, filled.unbind(0), strict=True))
    return replace(slots, **changes)


def release(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """Remove the module from the marked slots: its fields, its blend weight and its measurements become empty."""
    return _fill_empty(slots, where, tuple(_RELEASED))


def vacate(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """Set every field of the marked slots to its empty value."""
    return _fill_empty(slots, where, tuple(EMPTY))


def require_known_values(slots: SlotState, num_blueprints: int) -> None:
    """Raise CheckpointError for a loaded state with values that are never stored: a field is outside its table.

    It reads the device, so it does not belong in the loop.
    """
    tables: dict[str, Collection[int]] = {
        **dict.fromkeys(("stage", "prev_stage"), frozenset(SeedStage) - {SeedStage.UNKNOWN}),
        **dict.fromkeys(("alpha_curve", "germ_curve"), frozenset(AlphaCurve)),
        "alpha_mode": set(AlphaMode),
        "algorithm": set(Algorithm),
        "blueprint": range(-1, num_blueprints),
    }
    for name, table in tables.items():
        found = getattr(slots, name).unique().tolist()
        if unknown := [value for value in found if value not in table]:
            known = ", ".join(str(int(value)) for value in sorted(table))
            raise CheckpointError(
                f"slots have the {name} {unknown}; stored values are {known}. The state was changed or is of another "
                "version: use an older checkpoint."
            )


def select(where: Bool[Tensor, "N S"], chosen: Mapping[str, Tensor | float | int], slots: SlotState) -> SlotState:
    """`slots` with new values of the named fields under the mask: tensors that broadcast to [N, S], or numbers."""
    changes = {}
    for name, value in chosen.items():
        old = getattr(slots, name)
        changes[name] = torch.where(where, value, old) if isinstance(value, Tensor) else old.masked_fill(where, value)
    return replace(slots, **changes)


_PLATEAU = 0.5
"""Percentage points below which a step counts as no progress."""
_STABLE_STEPS = 3


def ingest(
    slots: SlotState, hosts: HostState, seen: Measurements, t: int | Int[Tensor, ""], healthy: Bool[Tensor, " N"]
) -> tuple[SlotState, HostState]:
    """Write the measurements of step `t`; hosts with `healthy` False (rolled back in this step) are unchanged."""
    new_slots = _ingest_slots(slots, seen, t)
    new_hosts = _ingest_hosts(hosts, seen)
    return where(healthy, new_slots, slots), where(healthy, new_hosts, hosts)


def _ingest_slots(slots: SlotState, seen: Measurements, t: int | Tensor) -> SlotState:
    measured = ~torch.isnan(seen.contribution)
    interactions = torch.nan_to_num(seen.interactions, nan=0.0)
    no_pair = torch.isnan(seen.interactions).all(dim=2)
    return replace(
        slots,
        contribution=torch.where(measured, seen.contribution, slots.contribution),
        contribution_step=torch.where(measured, t, slots.contribution_step),
        contribution_velocity=_velocity(slots, seen.contribution, measured),
        interaction_sum=interactions.sum(dim=2).masked_fill(no_pair, torch.nan),
        boost_received=interactions.amax(dim=2).clamp(min=0.0).masked_fill(no_pair, torch.nan),
        grad_norm=seen.grad_norm,
        grad_health=seen.grad_health,
        grad_vanishing=seen.grad_vanishing,
        grad_exploding=seen.grad_exploding,
        grad_health_prev=slots.grad_health,
        grad_ratio_ema=_ema(slots.grad_ratio_ema, seen.grad_ratio),
    )


def _velocity(slots: SlotState, new_NS: Tensor, measured_NS: Tensor) -> Tensor:
    """0.7 velocity + 0.3 (c - c_last) from the second measurement on, starting at 0; NaN before."""
    again = measured_NS & (slots.contribution_step >= 0)
    before = torch.nan_to_num(slots.contribution_velocity, nan=0.0)
    moved = 0.7 * before + 0.3 * (new_NS - slots.contribution)
    return torch.where(again, moved, slots.contribution_velocity)


def _ema(old_NS: Tensor, new_NS: Tensor) -> Tensor:
    """0.9 old + 0.1 new; the first value starts it, and a missing one changes nothing."""
    smoothed = torch.where(torch.isnan(old_NS), new_NS, 0.9 * old_NS + 0.1 * new_NS)
    return torch.where(torch.isnan(new_NS), old_NS, smoothed)


def _ingest_hosts(hosts: HostState, seen: Measurements) -> HostState:
    no_progress = seen.val_acc - hosts.val_acc < _PLATEAU  # False where the previous value is missing
    stable_count, stabilized = _stabilization(hosts, seen.val_loss)
    return replace(
        hosts,
        val_acc=seen.val_acc,
        val_loss=seen.val_loss,
        train_acc=seen.train_acc,
        train_loss=seen.train_loss,
        prev_val_acc=hosts.val_acc,
        prev_val_loss=hosts.val_loss,
        acc_hist=torch.cat((hosts.acc_hist[:, 1:], seen.val_acc[:, None]), dim=1),
        loss_hist=torch.cat((hosts.loss_hist[:, 1:], seen.val_loss[:, None]), dim=1),
        committed_acc=seen.committed_acc,
        cf_total=seen.cf_total,
        best_acc=torch.fmax(hosts.best_acc, seen.val_acc),
        plateau_count=(hosts.plateau_count + 1) * no_progress,
        stable_count=stable_count,
        stabilized=stabilized,
    )


def _stabilization(hosts: HostState, val_loss: Float[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Bool[Tensor, " N"]]:
    """Count of steps in a row whose loss fell by -5 % to +3 %, and whether it ever reached three."""
    previous = hosts.val_loss
    usable = (previous > 1e-8) & (previous < torch.inf) & ~hosts.stabilized
    relative = (previous - val_loss) / previous
    stable = (relative > -0.05) & (relative < 0.03)
    count = torch.where(usable, (hosts.stable_count + 1) * stable, hosts.stable_count)
    return count, hosts.stabilized | (count >= _STABLE_STEPS)
