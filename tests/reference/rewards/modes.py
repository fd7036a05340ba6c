"""The rewards in plain floats, one host and one step at a time: the definition that the kernel is held to.

One function per mode; `shaped` and `escrow` share theirs (`scalar_contribution`). `reward_of_row` dispatches.
"""

import math
from collections.abc import Callable, Mapping

from esper.leyline.lifecycle import STAGE_POTENTIAL, LifecycleOp, SeedStage
from esper.simic.rewards.reward_config import GAMMA, MIN_CONTRIBUTION, RewardConfig
from reference.rewards.contribution import contribution_reward
from reference.rewards.row import (
    HostRow,
    RowReward,
    Terms,
    clip,
    combine,
    dwell_potential,
    entangled,
    legit,
    occupied,
    ok,
    shaping,
)


def reward_of_row(x: HostRow, config: RewardConfig) -> RowReward:
    """Reward of one host for one step, without the terms that depend on the past."""
    return SCALAR_REWARDS[config.mode](x, config)


def _plain(x: HostRow, terms: Terms, **more: float) -> RowReward:
    return RowReward(terms=terms, escrow_next=x.account, flags=(False, entangled(x)), **more)


def basic_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """Stage potential, rent, a bonus for fossilizing, and in `basic_plus` instalments of that bonus."""
    terms: Terms = {"rent": -w.param_penalty_weight * occupied(x) / w.param_budget}
    if x.has_seed and not w.disable_pbrs:
        repaid = -w.pbrs_weight * dwell_potential(x.stage, x.epochs_in_stage, w)
        terms["potential"] = repaid if x.action == LifecycleOp.PRUNE else shaping(x, w)
    opened = 0.0
    if x.action == LifecycleOp.FOSSILIZE and x.has_seed:
        terms["action"], opened = basic_fossilization(x, w)
    if x.last_step and not w.disable_terminal_reward:
        terms["terminal"] = w.basic_acc_delta_weight * x.acc_delta / 100
    if w.mode == "basic_plus":
        most, least = w.max_deferred_per_epoch, -w.negative_deferred_ratio * w.max_deferred_per_epoch
        measured = [pool for pool in x.deferred_pools if ok(pool.contribution)]
        instalments = [clip(pool.scale * pool.contribution, least, most) for pool in measured]
        terms["deferred_bonus"] = sum(instalments, start=0.0)
    return _plain(x, terms, deferred_opened=opened)


def basic_fossilization(x: HostRow, w: RewardConfig) -> tuple[float, float]:
    """Immediate reward of FOSSILIZE, and the scale of the pool it opens (0 = none)."""
    c = x.seed_contribution
    g = x.counterfactual_improvement if ok(x.counterfactual_improvement) else 0.0
    if x.stage != SeedStage.HOLDING:
        return w.basic_fossilize_invalid_penalty, 0.0
    if g > 0 and c >= MIN_CONTRIBUTION:
        share = w.resolved("deferred_fraction")
        merged = combine(g, c, w)
        full = (w.basic_fossilize_base_bonus + w.basic_contribution_scale * merged) * legit(x.epochs_in_stage)
        return (1 - share) * full, share * full / max(x.max_epochs - x.epoch, w.min_deferred_epochs)
    if g <= 0 and c > 0.1:
        return w.basic_fossilize_invalid_penalty, 0.0
    return w.basic_fossilize_noncontributing_penalty, 0.0


def sparse_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """Committed accuracy minus the price of fossilized parameters, in the last step only."""
    price = w.param_penalty_weight * x.fossilized_params / w.param_budget
    committed = x.committed_acc if ok(x.committed_acc) else 0.0
    value = w.sparse_reward_scale * clip(committed / 100 - price, -1.0, 1.0)
    return _plain(x, {"terminal": value if x.last_step else 0.0})


def minimal_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """Sparse, with a price for premature prunes."""
    early = x.action == LifecycleOp.PRUNE and x.has_seed and x.seed_age < w.early_prune_threshold
    terms = {**sparse_reward(x, w).terms, "early_prune": w.early_prune_penalty if early else 0.0}
    return _plain(x, terms)


def simplified_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """Stage potential, a price per op, and success in the last step."""
    terms: Terms = {"action": 0.0 if x.action == LifecycleOp.WAIT else -0.01}
    if x.has_seed and not w.disable_pbrs:
        terms["potential"] = shaping(x, w)
    if x.last_step and not w.disable_terminal_reward:
        terms["terminal"] = 3 * x.val_acc / 100 + 2 * x.num_contributing
    return _plain(x, terms)


def loss_reward(x: HostRow, config: RewardConfig) -> RowReward:
    """Fall of the validation loss, rent, stage shaping, and the last loss."""
    w, total, host = config.loss, x.total_params, x.host_params
    n = clip(x.loss_delta / w.typical_loss_delta_std, -w.max_loss_delta, w.max_loss_delta)
    terms: Terms = {"loss_delta": -w.loss_delta_weight * (n * w.regression_penalty_scale if n > 0 else n)}
    if total > host > 0 and not (x.has_seed and x.seed_age < w.grace_epochs):
        terms["rent"] = -min(w.compute_rent_weight * math.log1p((total - host) / host), w.max_rent_penalty)
    if x.has_seed:
        now, before = STAGE_POTENTIAL[x.stage], STAGE_POTENTIAL[x.previous_stage]
        terms["potential"] = w.stage_potential_weight * (GAMMA * now - before)
    if x.last_step and ok(x.val_loss):
        span = (w.baseline_loss - w.target_loss) or 1.0
        terms["terminal"] = w.terminal_loss_weight * clip((w.baseline_loss - x.val_loss) / span, 0.0, 1.0)
    return _plain(x, terms)


def objective_worth(x: HostRow, w: RewardConfig, accuracy: float, params: float) -> float:
    """Worth = weight * accuracy / 100 - weight * ln(1 + relative parameters) - weight * log2(relative FLOPs) / 100."""
    relative = params / max(x.host_params, w.rent_host_params_floor)
    of_network = w.objective_acc_weight * accuracy / 100 - w.objective_growth_weight * math.log1p(relative)
    return of_network - w.objective_flops_weight * math.log2(x.compute) / 100


def objective_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """What a user wants of an episode, J, in its last step; before, shaping that telescopes to 0."""
    added = max(x.total_params - x.host_params, 0.0)
    potential = 0.0 if x.last_step else objective_worth(x, w, x.val_acc, added)
    terms: Terms = {"potential": GAMMA * potential - x.potential_prev, "terminal": 0.0}
    if x.last_step:
        committed = x.committed_acc if ok(x.committed_acc) else 0.0
        terms["terminal"] = objective_worth(x, w, committed, x.fossilized_params)
    return _plain(x, terms, potential=potential)


SCALAR_REWARDS: Mapping[str, Callable[[HostRow, RewardConfig], RowReward]] = {
    "shaped": contribution_reward,
    "escrow": contribution_reward,
    "basic": basic_reward,
    "basic_plus": basic_reward,
    "sparse": sparse_reward,
    "minimal": minimal_reward,
    "simplified": simplified_reward,
    "loss": loss_reward,
    "objective": objective_reward,
}
