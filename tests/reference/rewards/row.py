"""One host in one step, in plain floats: the row that the scalar rewards read, and the functions they share.

c is the leave-one-out contribution of the target slot, g the gate signal (accuracy with all players minus accuracy
without any), p the progress since germination, all in percentage points; e is the number of steps in the stage.
NaN is "not measured", and comparing with it is False.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

from esper.leyline.lifecycle import STAGE_POTENTIAL
from esper.simic.rewards.reward_config import GAMMA, LEGITIMATE_HOLD, RewardConfig

NAN = math.nan
Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DeferredPool:
    """An open pool of one slot: instalments of `scale` per point that its fossil contributes."""

    scale: float
    contribution: float = NAN


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One row of the kernel's arguments in their order; same names, in the singular."""

    action: int
    seed_contribution: float = NAN
    val_acc: float
    acc_delta: float = 0.0
    has_seed: bool = False
    stage: int = 1
    total_improvement: float = NAN
    epochs_in_stage: int = 0
    seed_age: int = 0
    previous_stage: int = 1
    previous_epochs: int = 0
    epoch: int
    max_epochs: int
    counterfactual_improvement: float = NAN
    stage_improvement: float = NAN
    interaction_sum: float = NAN
    stable_val_acc: float = NAN
    escrow_credit: float = NAN
    total_params: float = 0.0
    host_params: float = 0.0
    effective_seed_params: float = NAN
    alpha_delta_sq_sum: float = NAN
    num_active: int = 0
    num_fossilized: int = 0
    num_contributing: int = 0
    committed_acc: float = NAN
    fossilized_params: float = 0.0
    compute: float = 1.0
    deferred_pools: tuple[DeferredPool, ...] = ()
    val_loss: float = NAN
    loss_delta: float = 0.0
    potential_prev: float = 0.0

    @property
    def last_step(self) -> bool:
        """The episode ends with this step."""
        return self.epoch == self.max_epochs

    @property
    def account(self) -> float:
        """Account K, the escrow account of the target slot; 0 where missing."""
        return self.escrow_credit if ok(self.escrow_credit) else 0.0


@dataclass(frozen=True, kw_only=True)
class RowReward:
    """Reward of a row, without terms that the mode does not use; `potential` is that of mode objective."""

    terms: Terms
    escrow_next: float = 0.0
    deferred_opened: float = 0.0
    flags: tuple[bool, bool] = (False, False)
    potential: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return sum(self.terms.values(), start=0.0)


def ok(x: float) -> bool:
    """Whether x was measured."""
    return not math.isnan(x)


def clip(x: float, low: float, high: float) -> float:
    """The number x moved into [low, high]."""
    return min(max(x, low), high)


# Shared functions


def dwell_potential(stage: int, epochs: int, w: RewardConfig) -> float:
    """Potential phi(s, e) of a stage and the steps spent in it."""
    return STAGE_POTENTIAL[stage] + min(w.epoch_progress_bonus * epochs, w.max_progress_bonus)


def shaping(x: HostRow, w: RewardConfig) -> float:
    """Shaping F: potential now, discounted, minus potential at the last observation."""
    s, e = x.stage, x.epochs_in_stage
    before = dwell_potential(x.previous_stage, x.previous_epochs, w) if e == 0 else dwell_potential(s, e - 1, w)
    return w.pbrs_weight * (GAMMA * dwell_potential(s, e, w) - before)


def combine(p: float, c: float, w: RewardConfig) -> float:
    """Mean of progress and contribution."""
    if w.mode == "escrow":
        return math.sqrt(max(p * c, 0.0))
    if p <= 0 and c <= 0:
        return 0.0
    return min(p, c) if w.attribution == "minimum" else 2 * p * c / max(p + c, 1e-8)


def legit(e: int) -> float:
    """Share of a fossilization bonus earned by holding for e steps."""
    return min(1.0, e / LEGITIMATE_HOLD)


def timing(k: int, w: RewardConfig) -> float:
    """Factor of something that starts in step k."""
    warmup, floor = w.germination_warmup_epochs, w.germination_discount_floor
    if warmup <= 0 or k >= warmup or w.disable_timing_discount:
        return 1.0
    return floor + (1 - floor) * k / warmup


def occupied(x: HostRow) -> float:
    """Occupancy o, parameters the slots occupy."""
    return x.effective_seed_params if ok(x.effective_seed_params) else max(x.total_params - x.host_params, 0.0)


def growth(x: HostRow, w: RewardConfig) -> float:
    """Occupancy relative to the host."""
    return occupied(x) / max(x.host_params, w.rent_host_params_floor)


def entangled(x: HostRow) -> bool:
    """Removing the seed hurts although the model would be better without seeds."""
    return x.has_seed and x.seed_contribution > 0.1 and x.counterfactual_improvement < -0.2


def as_kind(value: Any, kind: object) -> Any:
    """The value as a field of type `kind` holds it: files may give 200 for a float."""
    kinds = {kind, *get_args(kind)}  # of a union, or of an annotated type
    return float(value) if type(value) is int and any(k is float or float in get_args(k) for k in kinds) else value
