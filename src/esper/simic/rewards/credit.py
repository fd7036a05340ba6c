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
from esper.simic.rewards.config import MIN_PRUNE_AGE
from esper.simic.rewards.row import (
    NEW_SEED_POTENTIAL,
    Row,
    at_the_end,
    combine,
    contributes,
    held,
    host_floor,
    is_op,
    legitimacy,
    occupancy,
    potential_repaid,
    ransoming,
    shaping,
)

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
    unknown; `account` before the step, its `target` and its `change` (0 in `shaped`). `trusted`: discount >= 0.5.
    """

    attribution: Tensor
    discount: Tensor
    trusted: Tensor
    ratio_penalty: Tensor
    timing: Tensor
    progress: Tensor
    account: Tensor
    target: Tensor
    change: Tensor


def timing(x: Row, epochs: Tensor) -> Tensor:
    """Factor for a germination at step `epochs`; below 1 while the host itself is untrained."""
    warmup, floor = x.w["germination_warmup_epochs"], x.w["germination_discount_floor"]
    rising = floor + (1 - floor) / torch.clamp(warmup, min=1.0) * epochs
    return torch.where((warmup > 0) & x.off("disable_timing_discount"), torch.clamp(rising, max=1.0), 1.0)


def ratio_penalty(x: Row, trusted: Tensor) -> Tensor:
    """Penalty for a contribution that is large against the gate signal, or that no positive gate signal supports."""
    w, limit = x.w, x.w["hacking_ratio_threshold"]
    excess = torch.relu(x.c / x.g - limit)
    of_ratio = torch.clamp((-RATIO_PENALTY_STEP / limit) * excess, min=-RATIO_PENALTY_CAP)
    unsupported = torch.clamp(UNSUPPORTED_PENALTY * x.c, min=-RATIO_PENALTY_CAP)
    penalty = torch.where(x.g > w["improvement_safe_threshold"], of_ratio, unsupported)
    suspicious = x.seed & (x.c > SUSPICIOUS_CONTRIBUTION) & ~x.g.isnan() & trusted
    return torch.where(suspicious & x.off("disable_anti_gaming"), penalty, 0.0)


def raw_attribution(x: Row, progress: Tensor) -> Tensor:
    """Contribution c limited by progress p, which includes host drift; used where c >= 0.

    min(c, mean(c, p)): the mean where p < c, else c; 0 where p <= 0.
    """
    moderated = torch.minimum(x.c, combine(x, torch.relu(progress), x.c))
    return torch.where(progress.isnan(), UNKNOWN_PROGRESS_SHARE * x.c, moderated)


def credit_of(x: Row) -> Credit:
    """Credit of a step in mode `x.mode`."""
    harmful = x.seed & (x.g < 0)
    fossil = x.seed & (x.stage == int(SeedStage.FOSSILIZED))
    escrow, one = x.mode == "escrow", torch.ones_like(x.val_acc)
    discount = one
    if not escrow:
        share = torch.sigmoid(x.g * x.w["attribution_sigmoid_steepness"])
        discount = torch.where(harmful & ~x.c.isnan(), share, 1.0)
    trusted = discount >= 0.5
    penalty = ratio_penalty(x, trusted)
    progress, account = x.number("total_improvements"), x.known("escrow_credits")
    if escrow:  # without the unstable part of the gain
        progress = progress - (x.val_acc - x.number("stable_val_accs"))
    raw, credited = raw_attribution(x, progress), (x.c >= 0) & ~fossil
    target = change = torch.zeros_like(one)
    factor = one
    if escrow:
        target, change = _account(x, raw, penalty, account, credited, fossil)
        harm = torch.where((x.c < 0) & ~is_op(x, LifecycleOp.PRUNE) & ~fossil, x.c, 0.0)
        earned = change + x.w["contribution_weight"] * harm
    else:
        factor = torch.where(credited & x.seed, timing(x, x.epoch - x.age), 1.0)
        earned = x.w["contribution_weight"] * _shaped(x, raw * discount * factor)
    earned = torch.where(is_op(x, LifecycleOp.FOSSILIZE) & harmful, 0.0, earned)
    if not escrow:
        earned = torch.where(is_op(x, LifecycleOp.PRUNE), -earned, earned)
        earned = torch.where(fossil, 0.0, earned + penalty)
    return Credit(
        attribution=earned, discount=discount, trusted=trusted, ratio_penalty=penalty, timing=factor, progress=progress,
        account=account, target=target, change=change,
    )  # fmt: skip


def _shaped(x: Row, helpful: Tensor) -> Tensor:
    """Mode shaped: c where negative, else `helpful`; a share of the stage's gain while c is not measured."""
    gain = x.number("stage_improvements")
    blended = x.seed & (x.stage >= int(SeedStage.BLENDING)) & (gain > 0)
    proxy = torch.where(blended, x.w["proxy_confidence_factor"] * gain, 0.0)
    return torch.where(x.c < 0, x.c, torch.where(x.c.isnan(), proxy, helpful))


def _account(
    x: Row, raw: Tensor, penalty: Tensor, account: Tensor, credited: Tensor, fossil: Tensor
) -> tuple[Tensor, Tensor]:
    """Mode escrow: target balance and change; gains are bounded by the clip, losses are not."""
    prune, clip = is_op(x, LifecycleOp.PRUNE), x.w["escrow_delta_clip"]
    target = torch.where(credited, torch.relu(x.w["contribution_weight"] * raw + penalty), 0.0)
    target = torch.where(prune, 0.0, torch.where(fossil, account, target))
    gap, bound = target - account, torch.where(clip > 0, clip, torch.inf)
    bounded = torch.minimum(torch.maximum(gap, -bound), bound)
    change = torch.where(credited, bounded, torch.where(x.c.isnan() | fossil, 0.0, gap))
    return target, torch.where(prune, -account, change)


def contribution_terms(x: Row, credit: Credit) -> dict[str, Tensor]:
    """All terms of a step."""
    w, e, earning = x.w, x.dwell, credit.attribution > 0
    decided = is_op(x, LifecycleOp.FOSSILIZE) | is_op(x, LifecycleOp.PRUNE)
    waiting = held(x) & (e >= 2) & earning & ~decided
    dwell_price = torch.clamp(-0.05 * e, min=-0.3)
    blending = x.seed & (x.stage == int(SeedStage.BLENDING)) & (x.g < 0)
    help_given = x.known("interaction_sums")
    helping = x.seed & credit.trusted & earning & (help_given > 0)
    growth = torch.relu(occupancy(x) / host_floor(x))
    rent = torch.maximum(-w["rent_weight"] * torch.log1p(growth), -w["max_rent"])
    moved = torch.relu(x.known("alpha_delta_sq_sums"))
    shock = torch.maximum(-w["alpha_shock_coef"] * moved, -w["alpha_shock_cap"])
    num_fossilized = x.known("num_fossilized")
    crowd = torch.relu(x.known("num_active") + num_fossilized - w["free_slots"])
    return {
        "attribution": credit.attribution,
        "blending_warning": torch.where(blending, dwell_price - 0.1, 0.0),
        "holding_warning": torch.where(waiting, dwell_price, 0.0),
        "potential": shaping(x),
        "synergy": torch.where(helping, 0.1 * torch.tanh(0.5 * help_given), 0.0),
        "rent": torch.where(x.known("host_params") > 0, rent, 0.0),
        "alpha_shock": torch.where(x.off("disable_anti_gaming"), shock, 0.0),
        "occupancy": -w["seed_occupancy_cost"] * crowd,
        "fossil_upkeep": -w["fossilized_maintenance_cost"] * num_fossilized,
        "action": _action(x),
        "terminal": at_the_end(x, w["terminal_acc_weight"] * x.val_acc),
    }


def _action(x: Row) -> Tensor:
    """Cost or bonus of the operation."""
    w = x.w
    hasty = x.seed & is_op(x, LifecycleOp.ADVANCE) & (x.stage == int(SeedStage.TRAINING))
    value = torch.where(hasty, w["advance_from_training_penalty"], 0.0)
    value = torch.where(is_op(x, LifecycleOp.SET_ALPHA_TARGET), w["set_alpha_target_cost"], value)
    value = torch.where(is_op(x, LifecycleOp.GERMINATE), _germination(x), value)
    value = torch.where(is_op(x, LifecycleOp.FOSSILIZE), _fossilization(x), value)
    return torch.where(is_op(x, LifecycleOp.PRUNE), _pruning(x), value)


def _germination(x: Row) -> Tensor:
    """GERMINATE: its cost, plus the potential of the new seed, discounted to the next observation."""
    worth = x.w["pbrs_weight"] * x.w["gamma"] * NEW_SEED_POTENTIAL * timing(x, x.epoch)
    worth = torch.where((x.steps_left > 0) & x.off("disable_pbrs"), worth, 0.0)
    return x.w["germinate_cost"] + torch.where(x.seed, x.w["germinate_with_seed_penalty"], worth)


def _fossilization(x: Row) -> Tensor:
    """FOSSILIZE: a bonus that grows with contribution and time in HOLDING, or a penalty."""
    w = x.w
    quality = w["fossilize_terminal_scale"] * torch.tanh(1 / w["fossilize_quality_ceiling"])
    base = w["fossilize_base_bonus"] + torch.where(x.off("disable_terminal_reward"), quality, 0.0)
    bonus = (base + w["fossilize_contribution_scale"] * x.c) * legitimacy(x)
    harm = torch.clamp(0.2 * x.g, min=-1.0) - 0.5 - 0.3 * ransoming(x).to(torch.float64)
    value = torch.where(contributes(x), bonus, w["fossilize_noncontributing_penalty"])
    value = torch.where(x.g < 0, harm, value)
    return w["fossilize_cost"] + torch.where(held(x) & ~x.g.isnan(), value, w["invalid_fossilize_penalty"])


def _pruning(x: Row) -> Tensor:
    """PRUNE: minus the seed's potential; a bonus for a harmful seed, a penalty for a helpful or very young one."""
    w, c, worst = x.w, x.c, x.w["prune_good_seed_penalty"]
    hurting = torch.where(x.age < w["min_prune_bonus_age"], -0.1, w["prune_hurting_bonus"])
    judged = torch.where(c < w["prune_hurting_threshold"], hurting, w["prune_acceptable_bonus"])
    judged = torch.where(c < 0, judged, torch.maximum(worst - 0.05 * c, 3 * worst))
    judged = torch.where(c.isnan(), 0.0, judged)
    judged = torch.where(x.age < MIN_PRUNE_AGE, worst * (MIN_PRUNE_AGE - x.age), judged)
    judged = torch.where(x.stage == int(SeedStage.FOSSILIZED), w["prune_fossilized_penalty"], judged)
    return w["prune_cost"] - potential_repaid(x) + torch.where(x.seed, judged, -0.2)


def suspected_ratio(x: Row, credit: Credit) -> Tensor:
    """The contribution is out of proportion to a positive gate signal."""
    beyond = (x.c > 0) & (x.c / x.g >= x.w["hacking_ratio_threshold"])
    return x.seed & (x.g > 0) & beyond & (credit.ratio_penalty < 0)


FLAGS = ("attribution_ratio", "ransomware")
"""Columns of `RewardOutput.flags`: suspicions for telemetry, without effect on the reward."""
