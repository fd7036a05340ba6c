"""Write the measurements of the train and validation passes into the states of slots and hosts."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.messages import HostState, Measurements, SlotState
from esper.leyline.tensor_dataclass import replace, where

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
