"""Modes `shaped` and `escrow`: reward for the measured contribution of the target seed.

    contribution c --(ratio penalty, discount, timing)--> attribution     rewarded at once (shaped)
                                                     `--> escrow account  rewarded by the change of the account

Contributions, gate signals and progress are percentage points.
"""

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards.masks import above, at_least, below, choose, equal, no
from esper.simic.rewards.reward_config import MIN_CONTRIBUTION, MIN_PRUNE_AGE
from esper.simic.rewards.row import NEW_SEED_POTENTIAL, Row, at_the_end, combine, legitimacy, number, shaping

UNKNOWN_PROGRESS_SHARE = 0.5
"""Share of a contribution credited while progress since germination is unknown."""
SUSPICIOUS_CONTRIBUTION = 1.0
"""Contribution above which it is compared with the gate signal."""
RATIO_PENALTY_STEP = 0.1
RATIO_PENALTY_CAP = 0.3
UNSUPPORTED_PENALTY = -0.03
"""Ratio penalty per point of contribution without a positive gate signal, up to the cap."""


@tensor_dataclass
class Credit:
    """Credit of the target slot in this step.

    `attribution` before shaping and costs; `discount` factor of a harmful seed; `ratio_penalty` <= 0 of a contribution
    that the gate signal does not support; `timing` factor of the germination; `progress` since germination, NaN where
    unknown; `account` before the step, its `target` and its `change` (0 in `shaped`). Masks: `trusted` where
    discount >= 0.5, `harmful` where a live seed has a negative gate signal.
    """

    attribution: Tensor
    discount: Tensor
    trusted: Tensor
    harmful: Tensor
    ratio_penalty: Tensor
    timing: Tensor
    progress: Tensor
    account: Tensor
    target: Tensor
    change: Tensor


def timing(x: Row, epochs: Tensor) -> Tensor:
    """Factor for a germination at step `epochs`; below 1 while the host itself is untrained."""
    warmup = x.w["germination_warmup_epochs"]
    missing = above(warmup, 0) * x.on("timing_discount") * no(x.w["germination_discount_floor"])
    return torch.clamp(missing / torch.clamp(warmup, min=1.0) * epochs + no(missing), max=1.0)


def ratio_penalty(x: Row, trusted: Tensor) -> Tensor:
    """Penalty for a contribution that is large against the gate signal, or that no positive gate signal supports."""
    limit, safe = x.w["hacking_ratio_threshold"], x.w["improvement_safe_threshold"]
    excess = torch.relu(x.c / torch.maximum(x.g, safe) - limit)
    penalty = choose(above(x.g, safe), (-RATIO_PENALTY_STEP / limit) * excess, UNSUPPORTED_PENALTY * x.c)
    suspicious = x.seed * x.g_known * trusted * above(x.c, SUSPICIOUS_CONTRIBUTION)
    return torch.clamp(penalty, min=-RATIO_PENALTY_CAP) * suspicious * x.on("anti_gaming")


def raw_attribution(x: Row, progress: Tensor) -> Tensor:
    """Contribution c >= 0 limited by progress p, which includes host drift; 0 where c < 0 or p <= 0.

    min(c, mean(c, p)): the mean where p < c, else c.
    """
    c, p = torch.relu(x.c), torch.relu(progress.nan_to_num(nan=0.0))
    return choose(equal(progress, progress), torch.minimum(c, combine(x, p, c)), UNKNOWN_PROGRESS_SHARE * c)


def credit_of(x: Row) -> Credit:
    """Credit of a step in mode `x.mode`."""
    harmful, escrow = x.seed * below(x.g, 0), x.mode == "escrow"
    growing = no(x.fossil)
    one = torch.ones_like(x.c)
    discount = one
    if not escrow:
        discount = choose(harmful * x.c_known, torch.sigmoid(x.g * x.w["attribution_sigmoid_steepness"]), one)
    trusted = at_least(discount, 0.5)
    penalty = ratio_penalty(x, trusted)
    progress, account = number(x.given, "total_improvements"), x.known("escrow_credits")
    if escrow:  # without the unstable part of the gain
        progress = progress - (x.known("val_accs") - number(x.given, "stable_val_accs"))
    raw, harm, credited = (
        raw_attribution(x, progress),
        torch.clamp(x.c, max=0.0),
        x.c_known * at_least(x.c, 0) * growing,
    )
    target = change = x.zero
    factor = one
    if escrow:
        target, change = _account(x, raw, penalty, account, credited, growing)
        earned = change + x.w["contribution_weight"] * harm * growing * no(x.prune)
        earned = earned * no(x.fossilize * harmful)
    else:
        factor = choose(credited * x.seed, timing(x, x.epoch - x.age), one)
        earned = x.w["contribution_weight"] * (harm + raw * discount * factor + _proxy(x))
        earned = (earned * no(x.fossilize * harmful + 2 * x.prune) + penalty) * growing
    return Credit(
        attribution=earned, discount=discount, trusted=trusted, harmful=harmful, ratio_penalty=penalty, timing=factor,
        progress=progress, account=account, target=target, change=change,
    )  # fmt: skip


def _proxy(x: Row) -> Tensor:
    """Mode shaped: a share of the stage's gain while c is not measured."""
    blended = x.seed * at_least(x.stage, int(SeedStage.BLENDING)) * no(x.c_known)
    return x.w["proxy_confidence_factor"] * torch.relu(x.known("stage_improvements")) * blended


def _account(
    x: Row, raw: Tensor, penalty: Tensor, account: Tensor, credited: Tensor, growing: Tensor
) -> tuple[Tensor, Tensor]:
    """Mode escrow: target balance and change; gains are bounded by the clip, losses are not."""
    clip = x.w["escrow_delta_clip"]
    target = choose(growing, torch.relu(x.w["contribution_weight"] * raw + penalty), account) * no(x.prune)
    gap, bound = target - account, torch.where(clip > 0, clip, torch.inf)
    bounded = torch.minimum(torch.maximum(gap, -bound), bound)
    change = choose(credited, bounded, gap * below(x.c, 0) * growing)
    return target, choose(x.prune, -account, change)


def contribution_terms(x: Row, credit: Credit) -> dict[str, Tensor]:
    """All terms of a step."""
    w, e, earning = x.w, x.dwell, above(credit.attribution, 0)
    waiting = x.held * at_least(e, 2) * earning * no(x.fossilize + x.prune)
    dwell_price = torch.clamp(-0.05 * e, min=-0.3)
    help_given = torch.relu(x.known("interaction_sums"))
    rent = torch.maximum(-w["rent_weight"] * torch.log1p(torch.relu(x.growth)), -w["max_rent"])
    moved = torch.relu(x.known("alpha_delta_sq_sums"))
    shock = torch.maximum(-w["alpha_shock_coef"] * moved, -w["alpha_shock_cap"])
    num_fossilized = x.known("num_fossilized")
    crowd = torch.relu(x.known("num_active") + num_fossilized - w["free_slots"])
    return {
        "attribution": credit.attribution,
        "blending_warning": (dwell_price - 0.1) * credit.harmful * x.in_stage(SeedStage.BLENDING),
        "holding_warning": dwell_price * waiting,
        "potential": shaping(x),
        "synergy": (0.2 * torch.sigmoid(help_given) - 0.1) * x.seed * credit.trusted * earning,
        "rent": rent * above(x.host_params, 0),
        "alpha_shock": shock * x.on("anti_gaming"),
        "occupancy": -w["seed_occupancy_cost"] * crowd,
        "fossil_upkeep": -w["fossilized_maintenance_cost"] * num_fossilized,
        "action": _action(x),
        "terminal": at_the_end(x, w["terminal_acc_weight"] * x.known("val_accs")),
    }


def _action(x: Row) -> Tensor:
    """Cost or bonus of the operation."""
    hasty = x.is_op(LifecycleOp.ADVANCE) * x.in_stage(SeedStage.TRAINING)
    return (
        x.w["advance_from_training_penalty"] * hasty
        + x.w["set_alpha_target_cost"] * x.is_op(LifecycleOp.SET_ALPHA_TARGET)
        + _germination(x) * x.is_op(LifecycleOp.GERMINATE)
        + _fossilization(x) * x.fossilize
        + _pruning(x) * x.prune
    )


def _germination(x: Row) -> Tensor:
    """GERMINATE: its cost, plus the potential of the new seed, discounted to the next observation."""
    worth = x.w["pbrs_weight"] * x.w["gamma"] * NEW_SEED_POTENTIAL * timing(x, x.epoch)
    worth = worth * above(x.steps_left, 0) * x.on("pbrs")
    return x.w["germinate_cost"] + choose(x.seed, x.w["germinate_with_seed_penalty"], worth)


def _fossilization(x: Row) -> Tensor:
    """FOSSILIZE: a bonus that grows with contribution and time in HOLDING, or a penalty."""
    w = x.w
    quality = w["fossilize_terminal_scale"] * torch.tanh(1 / w["fossilize_quality_ceiling"])
    base = w["fossilize_base_bonus"] + quality * x.on("terminal_reward")
    bonus = (base + w["fossilize_contribution_scale"] * x.c) * legitimacy(x)
    harm = torch.clamp(0.2 * x.g, min=-1.0) - 0.5 - 0.3 * x.ransoming
    value = choose(at_least(x.c, MIN_CONTRIBUTION), bonus, w["fossilize_noncontributing_penalty"])
    value = choose(below(x.g, 0), harm, value)
    return w["fossilize_cost"] + choose(x.held * x.g_known, value, w["invalid_fossilize_penalty"])


def _pruning(x: Row) -> Tensor:
    """PRUNE: minus the seed's potential; a bonus for a harmful seed, a penalty for a helpful or very young one."""
    w, c, worst = x.w, x.c, x.w["prune_good_seed_penalty"]
    hasty = below(x.age, w["min_prune_bonus_age"])
    hurting = w["prune_hurting_bonus"] * no(hasty) - 0.1 * hasty
    judged = choose(below(c, w["prune_hurting_threshold"]), hurting, w["prune_acceptable_bonus"])
    judged = choose(below(c, 0), judged, torch.maximum(worst - 0.05 * c, 3 * worst)) * x.c_known
    judged = choose(below(x.age, MIN_PRUNE_AGE), -worst * (x.age - MIN_PRUNE_AGE), judged)
    judged = choose(x.fossil, w["prune_fossilized_penalty"], judged)
    return w["prune_cost"] - x.shaping_weight * x.potential + judged * x.seed - 0.2 * no(x.seed)


def suspected_ratio(x: Row, credit: Credit) -> Tensor:
    """The contribution is out of proportion to a positive gate signal."""
    beyond = at_least(x.c, x.w["hacking_ratio_threshold"] * x.g)
    return above(x.g, 0) * beyond * below(credit.ratio_penalty, 0)


FLAGS = ("attribution_ratio", "ransomware")
"""Columns of `RewardOutput.flags`: suspicions for telemetry, without effect on the reward."""
