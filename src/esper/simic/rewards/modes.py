"""The reward of a control step as plain functions, one row per host, looking only at each host's target slot.

    compute_reward_batched   named tensors of all hosts --> reward, in every mode but `objective`
    credit_of                modes `shaped` and `escrow`: the measured contribution of the target seed

    contribution c --(ratio penalty, discount, timing)--> attribution     rewarded at once (shaped)
                                                     `--> escrow account  rewarded by the change of the account

Tensor code without branches on data or host reads; compiles to one graph, because `mode` and `attribution` are static
and every number is in `config_weights`. A missing number enters as NaN and is replaced by 0; where that matters, a mask
says which numbers were given. Signs are those of the reward: costs are negative, and the total is the plain sum.

Masks are numbers: float64, 1 where something holds and 0 elsewhere. A product with a mask takes a third of the time of
`torch.where`, whose kernel on the CPU branches in each row. What is masked must be finite on all rows, because 0 * NaN
is NaN; comparisons with NaN give 0.

Shape legend: N = hosts, S = slots, M = len(REWARD_TERMS), W = packed numbers. Inside, tensors are [N] float64 unless
said otherwise; numbers of the configuration are scalar tensors.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, nearest
from esper.leyline.lifecycle import STAGE_POTENTIAL, LifecycleOp, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards.reward_config import (
    GAMMA,
    LEGITIMATE_HOLD,
    LOSS_FIELDS,
    MIN_CONTRIBUTION,
    MIN_PRUNE_AGE,
    WEIGHT_NAMES,
    Attribution,
)


def select(mask: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """`value` where the mask is 1, `other` where it is 0, without rounding."""
    return torch.lerp(other, value, mask)


def not_(mask: Tensor) -> Tensor:
    """Where the mask does not hold."""
    return torch.sub(_constant(1.0, mask.device), mask)


def _compared(compare: Callable[..., Tensor], value: Tensor, limit: Tensor | float | int) -> Tensor:
    limit = limit if isinstance(limit, Tensor) else _constant(float(limit), value.device)
    return compare(value, limit, out=torch.empty_like(value))


gt, ge, lt, eq = (partial(_compared, compare) for compare in (torch.gt, torch.ge, torch.lt, torch.eq))
"""Comparisons as masks; `eq(x, x)` is 0 where x is NaN."""


@lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    """A scalar, cached because an operator would convert a Python number in each call."""
    return torch.tensor(value, dtype=torch.float64, device=device)


NEW_SEED_POTENTIAL = STAGE_POTENTIAL[SeedStage.GERMINATED]
"""Potential rewarded to GERMINATE, before weight, discount and timing."""
ENTANGLED_CONTRIBUTION, ENTANGLED_GATE_SIGNAL = 0.1, -0.2
"""Thresholds (points) of `entangled`: the seed's contribution is above the first, the gate signal below the second."""

if TYPE_CHECKING:
    computed_once = property
else:

    def computed_once(compute: Callable[["TargetRow"], Tensor]) -> property:
        """As `functools.cached_property` without its lock, which `torch.compile` cannot trace."""
        name = f"_{compute.__name__}"

        def found(row: "TargetRow") -> Tensor:
            if name not in row.__dict__:
                row.__dict__[name] = compute(row)
            return row.__dict__[name]

        return property(found, doc=compute.__doc__)


@lru_cache
def potential_table(device: torch.device) -> Tensor:
    """Stage potentials by stage value, float64 [11]."""
    return torch.tensor(STAGE_POTENTIAL, dtype=torch.float64, device=device)


@tensor_dataclass
class TargetRow:
    """Arguments of one kernel call, and what several terms share, computed on first use.

    Attributes:
        given: the kernel's tensors by name; None = missing in every row.
        w: the packed numbers by name. mode, attribution: static choices of the configuration.
        epoch, last: step from 1, and mask of the last step; [N] or scalars. steps_left: after this one.
        op, stage, seed: effective operation; stage of the target slot before it, and mask of a live seed there.
        dwell, age: steps the target seed was in its stage, and since germination.
        c, g: leave-one-out contribution of the target slot and gain of all players together, points, 0 where missing;
            c_known, g_known: masks of those that were measured.
    """

    given: Mapping[str, Tensor | None]
    w: Mapping[str, Tensor]
    mode: str
    attribution: str
    epoch: Tensor
    last: Tensor
    steps_left: Tensor
    op: Tensor
    stage: Tensor
    seed: Tensor
    dwell: Tensor
    age: Tensor
    c: Tensor
    c_known: Tensor
    g: Tensor
    g_known: Tensor

    def known(self, name: str) -> Tensor:
        """Argument `name`, 0 where it is missing."""
        value = self.given[name]
        if value is None:
            return self.zero
        return value.to(torch.float64).nan_to_num(nan=0.0) if value.is_floating_point() else value.to(torch.float64)

    def on(self, switch: str) -> Tensor:
        """1 unless the configuration sets `disable_<switch>`; a scalar."""
        return not_(self.w["disable_" + switch])

    def is_op(self, op: LifecycleOp) -> Tensor:
        """Mask of rows whose effective operation is `op`."""
        return eq(self.op, int(op))

    def in_stage(self, stage: SeedStage) -> Tensor:
        """Mask of a live target seed in `stage`."""
        return eq(self.stage, int(stage)) * self.seed

    @computed_once
    def zero(self) -> Tensor:
        """0 in every row."""
        return torch.zeros_like(self.c)

    @computed_once
    def prune(self) -> Tensor:
        """Mask of PRUNE."""
        return self.is_op(LifecycleOp.PRUNE)

    @computed_once
    def fossilize(self) -> Tensor:
        """Mask of FOSSILIZE."""
        return self.is_op(LifecycleOp.FOSSILIZE)

    @computed_once
    def fossil(self) -> Tensor:
        """Mask of a target seed that is fossilized."""
        return self.in_stage(SeedStage.FOSSILIZED)

    @computed_once
    def held(self) -> Tensor:
        """Mask of a target seed in HOLDING."""
        return self.in_stage(SeedStage.HOLDING)

    @computed_once
    def host_params(self) -> Tensor:
        """Parameters of the host."""
        return self.known("host_params")

    @computed_once
    def growth(self) -> Tensor:
        """Occupied parameters in shares of the host's, or of the configured floor where that is larger."""
        return self.occupancy / torch.maximum(self.host_params, self.w["rent_host_params_floor"])

    @computed_once
    def added_params(self) -> Tensor:
        """Parameters beyond the host's."""
        return torch.relu(self.known("total_params") - self.host_params)

    @computed_once
    def occupancy(self) -> Tensor:
        """Seed parameters weighted by alpha; all added parameters where that is missing."""
        measured = number(self.given, "effective_seed_params")
        return select(eq(measured, measured), measured.nan_to_num(nan=0.0), self.added_params)

    def potential_of(self, name: str) -> Tensor:
        """Potential of the stages in argument `name`; IndexError for an unknown stage."""
        stages = self.given[name]
        assert stages is not None
        return potential_table(stages.device).index_select(0, stages)

    @computed_once
    def stage_potential(self) -> Tensor:
        """Potential of the target's stage."""
        return self.potential_of("stages")

    @computed_once
    def shaping_weight(self) -> Tensor:
        """Weight of stage shaping; 0 without a seed or with `disable_pbrs`."""
        return self.on("pbrs") * self.w["pbrs_weight"] * self.seed

    @computed_once
    def potential(self) -> Tensor:
        """Potential phi(s, e) of the seed as it is, s = stage, e = steps in it."""
        return self.stage_potential + _waiting(self, self.dwell)

    @computed_once
    def entangled(self) -> Tensor:
        """Mask: removing this seed alone hurts, but removing all seeds would help."""
        return self.seed * gt(self.c, ENTANGLED_CONTRIBUTION) * lt(self.g, ENTANGLED_GATE_SIGNAL)


def row_of(
    given: Mapping[str, Tensor | None],
    config_weights: Tensor,
    epoch: int | Tensor,
    max_epochs: int | Tensor,
    mode: str,
    attribution: str,
) -> TargetRow:
    """The row of a call; `given` has the names of the kernel's other arguments."""
    w = _by_name(config_weights.to(torch.float64), mode == "loss")
    epoch, max_epochs = (_clock(number, config_weights.device) for number in (epoch, max_epochs))
    c, g = number(given, "seed_contributions"), number(given, "counterfactual_improvements")
    return TargetRow(
        given=given,
        w=w,
        mode=mode,
        attribution=attribution,
        epoch=epoch,
        last=(epoch == max_epochs).to(torch.float64),
        steps_left=max_epochs - epoch,
        op=number(given, "actions"),
        stage=number(given, "stages"),
        seed=number(given, "has_seed_mask"),
        dwell=number(given, "epochs_in_stage"),
        age=number(given, "seed_ages"),
        c=c.nan_to_num(nan=0.0),
        c_known=eq(c, c),
        g=g.nan_to_num(nan=0.0),
        g_known=eq(g, g),
    )


def number(given: Mapping[str, Tensor | None], name: str) -> Tensor:
    """Argument `name` as float64, NaN where it is missing."""
    value = given[name]
    if value is None:
        value = given["seed_contributions"]
        assert value is not None
        return torch.full_like(value, torch.nan, dtype=torch.float64)
    return value.to(torch.float64)


# Shared formulas


def combine(x: TargetRow, progress: Tensor, contribution: Tensor) -> Tensor:
    """Mean of two nonnegative signals; small where either is small, 0 where one is 0."""
    if x.mode == "escrow":
        return torch.sqrt(torch.relu(progress * contribution))
    if x.attribution == "minimum":
        return torch.minimum(progress, contribution)
    return 2 * progress * contribution / torch.clamp(progress + contribution, min=1e-8)


def _waiting(x: TargetRow, epochs: Tensor) -> Tensor:
    """Part of the potential that grows with the steps in a stage: min(bonus * e, cap)."""
    return torch.minimum(epochs * x.w["epoch_progress_bonus"], x.w["max_progress_bonus"])


def shaping(x: TargetRow) -> Tensor:
    """F = weight * (gamma * phi(now) - phi(before)), potential-based (Ng, Harada and Russell, ICML 1999)."""
    entered = eq(x.dwell, 0)
    before = select(entered, x.potential_of("previous_stages"), x.stage_potential)
    before = before + _waiting(x, select(entered, x.known("previous_epochs"), x.dwell - 1))
    return x.shaping_weight * (GAMMA * x.potential - before)


def legitimacy(x: TargetRow) -> Tensor:
    """Share of the fossilization bonus, by time in HOLDING."""
    return torch.clamp(x.dwell * (1 / LEGITIMATE_HOLD), max=1.0)


def at_the_end(x: TargetRow, value: Tensor) -> Tensor:
    """`value` in the last step, unless `disable_terminal_reward`."""
    return x.last * x.on("terminal_reward") * value


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

    `attribution` before shaping and costs; `ratio_penalty` <= 0 of a contribution that the gate signal does not
    support; `account` after the step. Masks: `trusted` where the discount of a harmful seed is at least 0.5, `harmful`
    where a live seed has a negative gate signal.
    """

    attribution: Tensor
    trusted: Tensor
    harmful: Tensor
    ratio_penalty: Tensor
    account: Tensor


def timing(x: TargetRow, epochs: Tensor) -> Tensor:
    """Factor for a germination at step `epochs`; below 1 while the host itself is untrained."""
    warmup = x.w["germination_warmup_epochs"]
    missing = gt(warmup, 0) * x.on("timing_discount") * not_(x.w["germination_discount_floor"])
    return torch.clamp(missing / torch.clamp(warmup, min=1.0) * epochs + not_(missing), max=1.0)


def ratio_penalty(x: TargetRow, trusted: Tensor) -> Tensor:
    """Penalty for a contribution that is large against the gate signal, or that no positive gate signal supports."""
    limit, safe = x.w["hacking_ratio_threshold"], x.w["improvement_safe_threshold"]
    excess = torch.relu(x.c / torch.maximum(x.g, safe) - limit)
    penalty = select(gt(x.g, safe), (-RATIO_PENALTY_STEP / limit) * excess, UNSUPPORTED_PENALTY * x.c)
    suspicious = x.seed * x.g_known * trusted * gt(x.c, SUSPICIOUS_CONTRIBUTION)
    return torch.clamp(penalty, min=-RATIO_PENALTY_CAP) * suspicious * x.on("anti_gaming")


def raw_attribution(x: TargetRow, progress: Tensor) -> Tensor:
    """Contribution c >= 0 limited by progress p, which includes host drift; 0 where c < 0 or p <= 0.

    min(c, mean(c, p)): the mean where p < c, else c.
    """
    c, p = torch.relu(x.c), torch.relu(progress.nan_to_num(nan=0.0))
    return select(eq(progress, progress), torch.minimum(c, combine(x, p, c)), UNKNOWN_PROGRESS_SHARE * c)


def credit_of(x: TargetRow) -> Credit:
    """Credit of a step in mode `x.mode`."""
    harmful, escrow = x.seed * lt(x.g, 0), x.mode == "escrow"
    growing = not_(x.fossil)
    discount = one = torch.ones_like(x.c)
    if not escrow:
        discount = select(harmful * x.c_known, torch.sigmoid(x.g * x.w["attribution_sigmoid_steepness"]), one)
    trusted = ge(discount, 0.5)
    penalty = ratio_penalty(x, trusted)
    progress, account = number(x.given, "total_improvements"), x.known("escrow_credits")
    if escrow:  # without the unstable part of the gain
        progress = progress - (x.known("val_accs") - number(x.given, "stable_val_accs"))
    raw, harm = raw_attribution(x, progress), torch.clamp(x.c, max=0.0)
    credited = x.c_known * ge(x.c, 0) * growing
    if escrow:
        change = _account_change(x, raw, penalty, account, credited, growing)
        account = account + change
        earned = change + x.w["contribution_weight"] * harm * growing * not_(x.prune)
        earned = earned * not_(x.fossilize * harmful)
    else:
        factor = select(credited * x.seed, timing(x, x.epoch - x.age), one)
        earned = x.w["contribution_weight"] * (harm + raw * discount * factor + _proxy(x))
        earned = (earned * not_(x.fossilize * harmful + 2 * x.prune) + penalty) * growing
    return Credit(attribution=earned, trusted=trusted, harmful=harmful, ratio_penalty=penalty, account=account)


def _proxy(x: TargetRow) -> Tensor:
    """Mode shaped: a share of the stage's gain while c is not measured."""
    blended = x.seed * ge(x.stage, int(SeedStage.BLENDING)) * not_(x.c_known)
    return x.w["proxy_confidence_factor"] * torch.relu(x.known("stage_improvements")) * blended


def _account_change(
    x: TargetRow, raw: Tensor, penalty: Tensor, account: Tensor, credited: Tensor, growing: Tensor
) -> Tensor:
    """Mode escrow: change of the account towards its target; gains are bounded by the clip, losses are not."""
    clip = x.w["escrow_delta_clip"]
    target = select(growing, torch.relu(x.w["contribution_weight"] * raw + penalty), account) * not_(x.prune)
    gap, bound = target - account, torch.where(clip > 0, clip, torch.inf)
    bounded = torch.minimum(torch.maximum(gap, -bound), bound)
    change = select(credited, bounded, gap * lt(x.c, 0) * growing)
    return select(x.prune, -account, change)


def contribution_terms(x: TargetRow, credit: Credit) -> dict[str, Tensor]:
    """All terms of a step."""
    w, e, earning = x.w, x.dwell, gt(credit.attribution, 0)
    waiting = x.held * ge(e, 2) * earning * not_(x.fossilize + x.prune)
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
        "rent": rent * gt(x.host_params, 0),
        "alpha_shock": shock * x.on("anti_gaming"),
        "occupancy": -w["seed_occupancy_cost"] * crowd,
        "fossil_upkeep": -w["fossilized_maintenance_cost"] * num_fossilized,
        "action": _action(x),
        "terminal": at_the_end(x, w["terminal_acc_weight"] * x.known("val_accs")),
    }


def _action(x: TargetRow) -> Tensor:
    hasty = x.is_op(LifecycleOp.ADVANCE) * x.in_stage(SeedStage.TRAINING)
    return (
        x.w["advance_from_training_penalty"] * hasty
        + x.w["set_alpha_target_cost"] * x.is_op(LifecycleOp.SET_ALPHA_TARGET)
        + _germination(x) * x.is_op(LifecycleOp.GERMINATE)
        + _fossilization(x) * x.fossilize
        + _pruning(x) * x.prune
    )


def _germination(x: TargetRow) -> Tensor:
    """GERMINATE: its cost, plus the potential of the new seed, discounted to the next observation."""
    worth = x.w["pbrs_weight"] * GAMMA * NEW_SEED_POTENTIAL * timing(x, x.epoch)
    worth = worth * gt(x.steps_left, 0) * x.on("pbrs")
    return x.w["germinate_cost"] + select(x.seed, x.w["germinate_with_seed_penalty"], worth)


def _fossilization(x: TargetRow) -> Tensor:
    """FOSSILIZE: a bonus that grows with contribution and time in HOLDING, or a penalty."""
    w = x.w
    quality = w["fossilize_terminal_scale"] * torch.tanh(1 / w["fossilize_quality_ceiling"])
    base = w["fossilize_base_bonus"] + quality * x.on("terminal_reward")
    bonus = (base + w["fossilize_contribution_scale"] * x.c) * legitimacy(x)
    harm = torch.clamp(0.2 * x.g, min=-1.0) - 0.5 - 0.3 * x.entangled
    value = select(ge(x.c, MIN_CONTRIBUTION), bonus, w["fossilize_noncontributing_penalty"])
    value = select(lt(x.g, 0), harm, value)
    return w["fossilize_cost"] + select(x.held * x.g_known, value, w["invalid_fossilize_penalty"])


def _pruning(x: TargetRow) -> Tensor:
    """PRUNE: minus the seed's potential; a bonus for a harmful seed, a penalty for a helpful or very young one."""
    w, c, worst = x.w, x.c, x.w["prune_good_seed_penalty"]
    hasty = lt(x.age, w["min_prune_bonus_age"])
    hurting = w["prune_hurting_bonus"] * not_(hasty) - 0.1 * hasty
    judged = select(lt(c, w["prune_hurting_threshold"]), hurting, w["prune_acceptable_bonus"])
    judged = select(lt(c, 0), judged, torch.maximum(worst - 0.05 * c, 3 * worst)) * x.c_known
    judged = select(lt(x.age, MIN_PRUNE_AGE), -worst * (x.age - MIN_PRUNE_AGE), judged)
    judged = select(x.fossil, w["prune_fossilized_penalty"], judged)
    return w["prune_cost"] - x.shaping_weight * x.potential + judged * x.seed - 0.2 * not_(x.seed)


def suspected_ratio(x: TargetRow, credit: Credit) -> Tensor:
    """The contribution is out of proportion to a positive gate signal."""
    beyond = ge(x.c, x.w["hacking_ratio_threshold"] * x.g)
    return gt(x.g, 0) * beyond * lt(credit.ratio_penalty, 0)


FLAGS = ("attribution_ratio", "entangled")
"""Columns of `RewardOutput.flags`: suspicions for telemetry, without effect on the reward."""


REWARD_TERMS = (
    "attribution", "blending_warning", "holding_warning", "potential", "synergy", "rent", "alpha_shock",
    "occupancy", "fossil_upkeep", "action", "terminal", "deferred_bonus", "loss_delta",
    "escrow_forfeit", "germination_refund", "auto_prune", "hindsight", "rollback",
    "early_prune",
)  # fmt: skip
"""Columns of a breakdown; escrow_forfeit to rollback depend on the past and are written by `reward_step`."""

Terms = dict[str, Tensor]


# Basic and basic_plus


def basic_terms(x: TargetRow) -> Terms:
    """Stage potential (PRUNE gives its own back), rent, fossilization bonus, last change of accuracy."""
    w = x.w
    last_gain = w["basic_acc_delta_weight"] * x.known("acc_deltas") / 100
    return {
        "potential": select(x.prune, -x.shaping_weight * x.potential, shaping(x)),
        "rent": -w["param_penalty_weight"] * x.occupancy / w["param_budget"],
        "action": _basic_fossilization(x),
        "terminal": at_the_end(x, last_gain),
    }


def basic_plus_terms(x: TargetRow) -> Terms:
    """Basic, plus bounded instalments of open pools in proportion to the current contributions of their fossils."""
    terms, scales, contributions = basic_terms(x), x.given["deferred_scales"], x.given["deferred_contributions"]
    terms["deferred_bonus"] = x.zero
    if scales is not None and contributions is not None:
        deferred, most = scales.to(torch.float64) * contributions.to(torch.float64), x.w["max_deferred_per_epoch"]
        deferred = torch.minimum(torch.maximum(deferred, -x.w["negative_deferred_ratio"] * most), most)
        terms["deferred_bonus"] = deferred.nan_to_num(nan=0.0).sum(-1)
    return terms


def _earns_basic_bonus(x: TargetRow) -> Tensor:
    """Mask: FOSSILIZE of a contributing seed in HOLDING with a positive gate signal."""
    return x.fossilize * x.held * gt(x.g, 0) * ge(x.c, MIN_CONTRIBUTION)


def _full_basic_bonus(x: TargetRow) -> Tensor:
    """Fossilization bonus including instalments; valid where it is earned."""
    merged = combine(x, x.g, x.c)
    return (x.w["basic_fossilize_base_bonus"] + x.w["basic_contribution_scale"] * merged) * legitimacy(x)


def _basic_fossilization(x: TargetRow) -> Tensor:
    """FOSSILIZE of a live seed: the immediate part of the bonus, or a penalty."""
    w = x.w
    valid = x.held * not_(gt(x.c, 0.1) * not_(gt(x.g, 0)))
    wrong = select(valid, w["basic_fossilize_noncontributing_penalty"], w["basic_fossilize_invalid_penalty"])
    return (
        select(_earns_basic_bonus(x), not_(w["deferred_fraction"]) * _full_basic_bonus(x), wrong) * x.fossilize * x.seed
    )


def deferred_opened(x: TargetRow) -> Tensor:
    """Scale of the pool opened in this step, or 0."""
    steps = torch.maximum(x.steps_left, x.w["min_deferred_epochs"])
    return x.w["deferred_fraction"] * _full_basic_bonus(x) / steps * _earns_basic_bonus(x)


# Sparse, minimal, simplified


def sparse_terms(x: TargetRow) -> Terms:
    """Committed accuracy minus a price for fossilized parameters, in the last step only."""
    w = x.w
    price = w["param_penalty_weight"] * x.known("fossilized_params") / w["param_budget"]
    value = torch.clamp(x.known("committed_accs") / 100 - price, min=-1.0, max=1.0)
    return {"terminal": x.last * w["sparse_reward_scale"] * value}


def minimal_terms(x: TargetRow) -> Terms:
    """Sparse, plus a penalty for pruning a young seed."""
    early = x.prune * x.seed * lt(x.age, x.w["early_prune_threshold"])
    return sparse_terms(x) | {"early_prune": x.w["early_prune_penalty"] * early}


def simplified_terms(x: TargetRow) -> Terms:
    """Stage potential, one cost for every operation, accuracy and contributing fossils in the last step."""
    return {
        "potential": shaping(x),
        "action": -0.01 * not_(x.is_op(LifecycleOp.WAIT)),
        "terminal": at_the_end(x, 3 * x.known("val_accs") / 100 + 2 * x.known("num_contributing")),
    }


# Loss


def loss_terms(x: TargetRow) -> Terms:
    """Normalized decrease of the loss, rent (not while the target seed is new), stage shaping, and the last loss."""
    w, bound, host, loss = x.w, x.w["max_loss_delta"], x.host_params, number(x.given, "val_losses")
    scaled = x.known("loss_deltas") / w["typical_loss_delta_std"]
    scaled = torch.minimum(torch.maximum(scaled, -bound), bound)
    scaled = torch.clamp(scaled, max=0.0) + w["regression_penalty_scale"] * torch.relu(scaled)
    growth = x.added_params / torch.where(host > 0, host, 1.0)
    rent = torch.maximum(-w["compute_rent_weight"] * torch.log1p(growth), -w["max_rent_penalty"])
    young = x.seed * lt(x.age, w["grace_epochs"])
    span = w["baseline_loss"] - w["target_loss"]
    share = (w["baseline_loss"] - loss.nan_to_num(nan=0.0)) / (span + eq(span, 0))
    return {
        "loss_delta": -w["loss_delta_weight"] * scaled,
        "rent": rent * gt(host, 0) * not_(young),
        "potential": w["stage_potential_weight"]
        * (GAMMA * x.stage_potential - x.potential_of("previous_stages"))
        * x.seed,
        "terminal": w["terminal_loss_weight"] * torch.clamp(share, min=0.0, max=1.0) * x.last * eq(loss, loss),
    }


PLAIN_MODES: Mapping[str, Callable[[TargetRow], Terms]] = {
    "basic": basic_terms,
    "basic_plus": basic_plus_terms,
    "sparse": sparse_terms,
    "minimal": minimal_terms,
    "simplified": simplified_terms,
    "loss": loss_terms,
}
"""Modes without credit."""


FloatN = Float[Tensor, " N"]
IntN = Int[Tensor, " N"]

_INTEGERS = frozenset(
    {
        "actions", "stages", "epochs_in_stage", "seed_ages", "previous_stages", "previous_epochs",
        "num_active", "num_fossilized", "num_contributing",
    }
)  # fmt: skip
_POOLS = ("deferred_scales", "deferred_contributions")
CREDIT_MODES = ("shaped", "escrow")
KERNEL_MODES = (*CREDIT_MODES, *PLAIN_MODES)


class RewardOutput(NamedTuple):
    """Rewards of one step in the dtype of `val_accs`; `total` is the sum of `breakdown`."""

    total: Float[Tensor, " N"]
    breakdown: Float[Tensor, "N M"]
    escrow_next: Float[Tensor, " N"]
    deferred_opened: Float[Tensor, " N"]
    flags: Bool[Tensor, "N 2"]


Kernel = Callable[..., RewardOutput]
"""`compute_reward_batched`, or a compiled form of it."""


def compute_reward_batched(  # noqa: D417 -- arguments that belong together are described together
    actions: IntN,
    seed_contributions: FloatN,
    val_accs: FloatN,
    acc_deltas: FloatN,
    has_seed_mask: Bool[Tensor, " N"],
    stages: IntN,
    total_improvements: FloatN,
    epochs_in_stage: IntN,
    seed_ages: IntN,
    previous_stages: IntN,
    previous_epochs: IntN,
    epoch: int | Int[Tensor, "*#N"],
    max_epochs: int | Int[Tensor, "*#N"],
    config_weights: Float[Tensor, " W"],
    *,
    mode: str = "shaped",
    attribution: str = "harmonic",
    counterfactual_improvements: FloatN | None = None,
    stage_improvements: FloatN | None = None,
    interaction_sums: FloatN | None = None,
    stable_val_accs: FloatN | None = None,
    escrow_credits: FloatN | None = None,
    total_params: FloatN | None = None,
    host_params: FloatN | None = None,
    effective_seed_params: FloatN | None = None,
    alpha_delta_sq_sums: FloatN | None = None,
    num_active: IntN | None = None,
    num_fossilized: IntN | None = None,
    num_contributing: IntN | None = None,
    committed_accs: FloatN | None = None,
    fossilized_params: FloatN | None = None,
    deferred_scales: Float[Tensor, "N S"] | None = None,
    deferred_contributions: Float[Tensor, "N S"] | None = None,
    val_losses: FloatN | None = None,
    loss_deltas: FloatN | None = None,
) -> RewardOutput:
    """Reward one step of N hosts.

    Args:
        actions: effective operations (WAIT where the sampled one took no effect).
        seed_contributions: leave-one-out contribution of the target slot in points, NaN unless measured now.
        val_accs, acc_deltas: accuracy of the whole model and its change (0 at the first step), points.
        has_seed_mask: the target slot holds a live seed; without one the seed's fields are ignored.
        stages, epochs_in_stage, seed_ages, previous_stages, previous_epochs: clocks of the slot before the op.
        total_improvements, stage_improvements: accuracy gained since germination and since stage entry, or NaN.
        epoch, max_epochs: step from 1 and length of the episode.
        config_weights: `RewardConfig.pack()`, in mode `loss` `LossRewardConfig.pack()`; float32 is taken as float64.
        counterfactual_improvements: gate signal (all players off), NaN without players.
        interaction_sums, stable_val_accs, escrow_credits: of the target slot, NaN where missing.
        total_params, host_params, effective_seed_params, fossilized_params, alpha_delta_sq_sums: parameters and
            alpha movement of the host.
        num_active, num_fossilized, num_contributing: seeds of the host before the op.
        committed_accs: accuracy with every seed off that is not fossilized.
        deferred_scales, deferred_contributions: open pools (0 = none) and contributions of their fossils.
        val_losses, loss_deltas: mode `loss`; a positive change is a regression.

    Returns:
        `RewardOutput` in the dtype of `val_accs`; an argument left out counts as missing in every row.

    Raises:
        ConfigError: unknown mode or attribution. ValueError, TypeError: wrong shape or dtype.
    """
    given: dict[str, Tensor | None] = {
        "actions": actions, "seed_contributions": seed_contributions, "val_accs": val_accs, "acc_deltas": acc_deltas,
        "has_seed_mask": has_seed_mask, "stages": stages, "total_improvements": total_improvements,
        "epochs_in_stage": epochs_in_stage, "seed_ages": seed_ages, "previous_stages": previous_stages,
        "previous_epochs": previous_epochs, "counterfactual_improvements": counterfactual_improvements,
        "stage_improvements": stage_improvements, "interaction_sums": interaction_sums,
        "stable_val_accs": stable_val_accs, "escrow_credits": escrow_credits, "total_params": total_params,
        "host_params": host_params, "effective_seed_params": effective_seed_params,
        "alpha_delta_sq_sums": alpha_delta_sq_sums, "num_active": num_active, "num_fossilized": num_fossilized,
        "num_contributing": num_contributing, "committed_accs": committed_accs,
        "fossilized_params": fossilized_params, "deferred_scales": deferred_scales,
        "deferred_contributions": deferred_contributions, "val_losses": val_losses, "loss_deltas": loss_deltas,
    }  # fmt: skip
    check_static(mode, attribution, config_weights)
    check_arguments(given)
    for name, clock in (("epoch", epoch), ("max_epochs", max_epochs)):
        check_clock(name, clock, len(actions))
    x = row_of(given, config_weights, epoch, max_epochs, mode, attribution)
    escrow_next, opened, suspected = x.known("escrow_credits"), x.zero, x.zero
    if mode in CREDIT_MODES:
        credit = credit_of(x)
        terms, suspected = contribution_terms(x, credit), suspected_ratio(x, credit)
        escrow_next = credit.account
    else:
        terms = PLAIN_MODES[mode](x)
        opened = deferred_opened(x) if mode == "basic_plus" else x.zero
    out = RewardOutput(
        total=reduce(add, terms.values()),
        breakdown=torch.stack([terms.get(name, x.zero) for name in REWARD_TERMS]).T,
        escrow_next=escrow_next,
        deferred_opened=opened,
        flags=torch.stack((suspected, x.entangled)).to(torch.float32).to(torch.bool).T,  # compiled: by vectors
    )
    return RewardOutput._make(x.to(val_accs.dtype) if x.is_floating_point() else x for x in out)


@lru_cache(maxsize=16)  # every step of a run has the same vector, and its views cost as much as thirty operators
def _by_name(config_weights: Tensor, loss: bool) -> Mapping[str, Tensor]:
    """Each packed number as a view of the vector."""
    return dict(zip(LOSS_FIELDS if loss else WEIGHT_NAMES, config_weights.unbind(), strict=True))


def _clock(value: int | Tensor, device: torch.device) -> Tensor:
    """A step number as float64 on the device; `full` does not wait as a copy would."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def check_static(mode: str, attribution: str, config_weights: Tensor) -> None:
    """Reject an unknown mode or attribution (ConfigError) and a wrong vector of weights (ValueError)."""
    if mode not in KERNEL_MODES:
        raise ConfigError(
            f"reward mode {mode!r} has no formula here; {nearest(mode, KERNEL_MODES)} "
            "Mode 'objective' is `make_reward('objective')`."
        )
    if attribution not in get_args(Attribution):
        raise ConfigError(f"attribution {attribution!r} is unknown; it must be 'harmonic' or 'minimum'.")
    expected = len(LOSS_FIELDS if mode == "loss" else WEIGHT_NAMES)
    if config_weights.shape != (expected,) or config_weights.dtype not in (torch.float64, torch.float32):
        raise ValueError(
            f"config_weights is {config_weights.dtype} {tuple(config_weights.shape)}; mode {mode!r} takes floats "
            f"({expected},), as RewardConfig.pack() (LossRewardConfig.pack() in mode 'loss') gives it."
        )


def check_arguments(given: Mapping[str, Tensor | None]) -> None:
    """Reject wrong shapes (ValueError) and dtypes (TypeError) by name; no value is read."""
    actions = given["actions"]
    assert actions is not None
    for name, value in given.items():
        if value is None:
            continue
        expected_dim = 2 if name in _POOLS else 1
        if value.dim() != expected_dim or value.shape[0] != actions.shape[0]:
            shape = f"({actions.shape[0]}, S)" if name in _POOLS else f"({actions.shape[0]},)"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}, one row per host.")
        if name in _INTEGERS or name == "has_seed_mask":
            expected = torch.int64 if name in _INTEGERS else torch.bool
            if value.dtype != expected:
                raise TypeError(f"{name} is {value.dtype}; it must be {expected}.")
        elif not value.dtype.is_floating_point:
            raise TypeError(f"{name} is {value.dtype}; it must be a floating type, with NaN where not measured.")
    scales, contributions = (given.get(name) for name in _POOLS)
    if scales is not None and contributions is not None and scales.shape != contributions.shape:
        raise ValueError(
            f"deferred_contributions has shape {tuple(contributions.shape)} but deferred_scales {tuple(scales.shape)}; "
            "both must be (N, S), one column per slot."
        )


def check_clock(name: str, value: int | Tensor, num_hosts: int) -> None:
    """Reject a step number that is neither one for all hosts nor one for each."""
    if not isinstance(value, Tensor):
        return
    if value.shape not in ((), (1,), (num_hosts,)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be one number for all hosts, or one per host: "
            f"({num_hosts},)."
        )
    if value.dtype != torch.int64:
        raise TypeError(f"{name} is {value.dtype}; it must be torch.int64.")
