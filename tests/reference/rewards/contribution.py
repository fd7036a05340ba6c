"""Modes `shaped` and `escrow` for one host, in plain floats, written as the formulas are.

Letters as in `row`; d is the discount of a harmful seed, rho the ratio penalty.
"""

import math

from esper.leyline.lifecycle import STAGE_POTENTIAL, LifecycleOp, SeedStage
from esper.simic.rewards.reward_config import GAMMA, MIN_CONTRIBUTION, MIN_PRUNE_AGE, RewardConfig
from reference.rewards.row import (
    HostRow,
    RowReward,
    Terms,
    clip,
    combine,
    dwell_potential,
    entangled,
    growth,
    legit,
    occupied,
    ok,
    shaping,
    timing,
)


def discount(x: HostRow, w: RewardConfig) -> float:
    """Discount d < 1 where a seed is harmful in spite of its contribution."""
    c, g = x.seed_contribution, x.counterfactual_improvement
    if w.mode != "escrow" and x.has_seed and ok(c) and ok(g) and g < 0:
        return 1 / (1 + math.exp(-w.attribution_sigmoid_steepness * g))
    return 1.0


def ratio_penalty(x: HostRow, w: RewardConfig) -> float:
    """Penalty rho, the price of a contribution that the gate signal does not support."""
    c, g = x.seed_contribution, x.counterfactual_improvement
    if not (x.has_seed and ok(c) and ok(g) and c > 1 and discount(x, w) >= 0.5) or w.disable_anti_gaming:
        return 0.0
    if g <= w.improvement_safe_threshold:
        return -0.3 * min(1.0, c / 10)
    limit = w.hacking_ratio_threshold
    return -min(0.3, 0.1 * (c / g - limit) / limit) if c / g > limit else 0.0


def progress(x: HostRow, w: RewardConfig) -> float:
    """Progress p; in escrow measured at the stable accuracy."""
    return x.total_improvement - (x.val_acc - x.stable_val_acc) if w.mode == "escrow" else x.total_improvement


def raw_attribution(x: HostRow, w: RewardConfig) -> float:
    """Raw attribution A, for c >= 0."""
    c, p = x.seed_contribution, progress(x, w)
    if not ok(p):
        return 0.5 * c
    if p <= 0:
        return 0.0
    return combine(p, c, w) if c >= p else c


def shaped_attribution(x: HostRow, w: RewardConfig) -> float:
    """Attribution of mode shaped before the ratio penalty."""
    c, weight = x.seed_contribution, w.contribution_weight
    if x.has_seed and x.stage == SeedStage.FOSSILIZED:
        return 0.0
    if ok(c) and c < 0:
        return weight * c
    if ok(c):
        factor = timing(x.epoch - x.seed_age, w) if x.has_seed else 1.0
        return weight * raw_attribution(x, w) * discount(x, w) * factor
    if x.has_seed and x.stage >= SeedStage.BLENDING and x.stage_improvement > 0:
        return weight * w.proxy_confidence_factor * x.stage_improvement
    return 0.0


def escrow_attribution(x: HostRow, w: RewardConfig, rho: float) -> tuple[float, float]:
    """Attribution of mode escrow, and the change of the account."""
    c, account = x.seed_contribution, x.account
    if x.action == LifecycleOp.PRUNE:
        return -account, -account
    if x.has_seed and x.stage == SeedStage.FOSSILIZED:
        return 0.0, 0.0
    if ok(c) and c < 0:
        return w.contribution_weight * c - account, -account
    if not ok(c):
        return 0.0, 0.0
    target = max(0.0, w.contribution_weight * raw_attribution(x, w) + rho)
    bound = w.escrow_delta_clip or math.inf
    change = clip(target - account, -bound, bound)
    return change, change


def fossilize_value(x: HostRow, w: RewardConfig) -> float:
    """Value f, reward of FOSSILIZE beyond its cost."""
    c, g, held = x.seed_contribution, x.counterfactual_improvement, legit(x.epochs_in_stage)
    if not (x.has_seed and x.stage == SeedStage.HOLDING and ok(g)):
        return w.invalid_fossilize_penalty
    if g < 0:
        return -0.5 - min(0.2 * abs(g), 1.0) - (0.3 if c > 0.1 and g < -0.2 else 0.0)
    if c >= MIN_CONTRIBUTION:
        quality = w.fossilize_terminal_scale * math.tanh(1 / w.fossilize_quality_ceiling)
        bonus = (w.fossilize_base_bonus + w.fossilize_contribution_scale * c) * held
        return bonus + (0.0 if w.disable_terminal_reward else quality * held)
    return w.fossilize_noncontributing_penalty


def prune_value(x: HostRow, w: RewardConfig) -> float:
    """Value u, reward of PRUNE beyond its cost and the potential it gives back."""
    c, age, worst = x.seed_contribution, x.seed_age, w.prune_good_seed_penalty
    if not x.has_seed:
        return -0.2
    if x.stage == SeedStage.FOSSILIZED:
        return w.prune_fossilized_penalty
    if age < MIN_PRUNE_AGE:
        return worst * (MIN_PRUNE_AGE - age)
    if not ok(c):
        return 0.0
    if c < w.prune_hurting_threshold:
        return -0.1 if age < w.min_prune_bonus_age else w.prune_hurting_bonus
    return w.prune_acceptable_bonus if c < 0 else max(worst - 0.05 * c, 3 * worst)


def action_value(x: HostRow, w: RewardConfig) -> float:
    """Price or bonus of the operation."""
    shaped_seed = x.has_seed and not w.disable_pbrs
    match LifecycleOp(x.action):
        case LifecycleOp.WAIT:
            return 0.0
        case LifecycleOp.GERMINATE:
            if x.has_seed:
                return w.germinate_cost + w.germinate_with_seed_penalty
            allowed = x.epoch < x.max_epochs and not w.disable_pbrs
            worth = w.pbrs_weight * GAMMA * STAGE_POTENTIAL[SeedStage.GERMINATED] * timing(x.epoch, w)
            return w.germinate_cost + (worth if allowed else 0.0)
        case LifecycleOp.SET_ALPHA_TARGET:
            return w.set_alpha_target_cost
        case LifecycleOp.ADVANCE:
            return w.advance_from_training_penalty if x.has_seed and x.stage == SeedStage.TRAINING else 0.0
        case LifecycleOp.FOSSILIZE:
            return w.fossilize_cost + fossilize_value(x, w)
        case LifecycleOp.PRUNE:
            repaid = w.pbrs_weight * dwell_potential(x.stage, x.epochs_in_stage, w) if shaped_seed else 0.0
            return w.prune_cost - repaid + prune_value(x, w)


def contribution_reward(x: HostRow, w: RewardConfig) -> RowReward:
    """Modes shaped and escrow."""
    c, g, e, op = x.seed_contribution, x.counterfactual_improvement, x.epochs_in_stage, x.action
    escrow, seed = w.mode == "escrow", x.has_seed
    fossil = seed and x.stage == SeedStage.FOSSILIZED
    d, rho = discount(x, w), ratio_penalty(x, w)
    ba, change = escrow_attribution(x, w, rho) if escrow else (shaped_attribution(x, w), 0.0)
    if op == LifecycleOp.FOSSILIZE and seed and g < 0:
        ba = 0.0
    if not escrow and op == LifecycleOp.PRUNE:
        ba = -ba
    if not escrow and not fossil:
        ba += rho
    terms = {"attribution": ba, **costs(x, w)}
    if seed and x.stage == SeedStage.BLENDING and g < 0:
        terms["blending_warning"] = -0.1 - min(0.05 * e, 0.3)
    decided = op in (LifecycleOp.FOSSILIZE, LifecycleOp.PRUNE)
    if seed and x.stage == SeedStage.HOLDING and e >= 2 and ba > 0 and not decided:
        terms["holding_warning"] = -min(0.1 + 0.05 * max(0, e - 2), 0.3)
    if seed and d >= 0.5 and ba > 0 and x.interaction_sum > 0:
        terms["synergy"] = 0.1 * math.tanh(0.5 * x.interaction_sum)
    if seed and not w.disable_pbrs:
        terms["potential"] = shaping(x, w)
    terms["action"] = action_value(x, w)
    if x.last_step and not w.disable_terminal_reward:
        terms["terminal"] = w.terminal_acc_weight * x.val_acc
    extreme = seed and ok(c) and g > 0 and rho != 0 and c > 0 and c / g >= w.hacking_ratio_threshold
    return RowReward(terms=terms, escrow_next=x.account + change, flags=(extreme, entangled(x)))


def costs(x: HostRow, w: RewardConfig) -> Terms:
    """Rent, alpha shock, occupancy and upkeep."""
    terms: Terms = {}
    if x.host_params > 0 and occupied(x) > 0:
        terms["rent"] = -min(w.rent_weight * math.log1p(growth(x, w)), w.max_rent)
    if x.alpha_delta_sq_sum > 0 and not w.disable_anti_gaming:
        terms["alpha_shock"] = max(-w.alpha_shock_coef * x.alpha_delta_sq_sum, -w.alpha_shock_cap)
    terms["occupancy"] = -w.seed_occupancy_cost * max(0, x.num_active + x.num_fossilized - w.free_slots)
    terms["fossil_upkeep"] = -w.fossilized_maintenance_cost * x.num_fossilized
    return terms
