"""The terms of every mode: small functions from facts to [N], and the one table that says which mode pays which.

Signs are those of the reward: costs are negative, and the total is the plain sum of the terms.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import STAGE_POTENTIAL, SeedStage
from esper.simic.rewards.config import GAMMA, MIN_CONTRIBUTION, MIN_PRUNE_AGE
from esper.simic.rewards.credit import CreditFacts
from esper.simic.rewards.masks import (
    Mask,
    above,
    at_least,
    below,
    both,
    choose,
    either,
    equal,
    is_known,
    no,
    only,
    without_nan,
)

NEW_SEED_POTENTIAL = STAGE_POTENTIAL[SeedStage.GERMINATED]
"""What GERMINATE is paid for, before weight, discount and timing."""

REWARD_TERMS = (
    "attribution", "blending_warning", "holding_warning", "potential", "synergy", "rent", "alpha_shock",
    "occupancy", "fossil_upkeep", "action", "terminal", "drip", "loss_delta",
    "escrow_forfeit", "germination_clawback", "auto_prune", "hindsight", "rollback",
    "early_prune",
)  # fmt: skip
"""Columns of a breakdown. Escrow_forfeit to rollback need memory and are written by `reward_step`."""

REWARD_INFO = (
    "discount", "ratio_penalty", "timing", "progress", "growth",
    "escrow_prev", "escrow_target", "escrow_delta", "escrow_next", "objective_potential",
)  # fmt: skip
"""Quantities that are reported and not summed; progress may be NaN."""


# Shaped and escrow


def attribution(x: CreditFacts) -> Tensor:
    """What the target slot contributed."""
    return x.attribution


def blending_warning(x: CreditFacts) -> Tensor:
    """A harmful seed that is being blended in costs more with every step."""
    return only(x.dwell_price - 0.1, x.harmful, x.is_stage(SeedStage.BLENDING))


def holding_warning(x: CreditFacts) -> Tensor:
    """A paying seed must be decided upon; parking it in HOLDING costs -0.1 - 0.05 (e - 2) = -0.05 e from e = 2 on."""
    waiting = x.holding, at_least(x.dwell_epochs, 2), x.earning
    return only(x.dwell_price, *waiting, no(either(x.fossilize, x.prune)))


def stage_shaping(x: CreditFacts) -> Tensor:
    """Potential-based shaping along the stages of the target seed."""
    return x.shaping


def synergy(x: CreditFacts) -> Tensor:
    """A seed that helps others is paid a little for it."""
    interaction = torch.relu(x.known("interaction_sums"))
    share = 0.2 * torch.sigmoid(interaction) - 0.1  # 0.1 tanh(interaction / 2), in a cheaper form; 0 at 0
    return only(share, x.seed, x.trusted, x.earning)


def growth_rent(x: CreditFacts) -> Tensor:
    """Occupied parameters pay rent, so that a seed must earn its place."""
    price = torch.maximum(-x.weights["rent_weight"] * torch.log1p(torch.relu(x.growth)), -x.weights["max_rent"])
    return only(price, above(x.host_params, 0))


def alpha_shock(x: CreditFacts) -> Tensor:
    """Sudden changes of alpha disturb the host in proportion to the parameters that are moved."""
    w, moved = x.weights, torch.relu(x.known("alpha_delta_sq_sums"))
    shock = torch.maximum(-w["alpha_shock_coef"] * moved, -w["alpha_shock_cap"])
    return only(shock, x.anti_gaming_on)


def occupancy(x: CreditFacts) -> Tensor:
    """Every seed beyond the free ones costs a little per step."""
    seeds = x.known("num_active") + x.num_fossilized
    return -x.weights["seed_occupancy_cost"] * torch.relu(seeds - x.weights["free_slots"])


def fossil_upkeep(x: CreditFacts) -> Tensor:
    """Fossils cost a little for ever."""
    return -x.weights["fossilized_maintenance_cost"] * x.num_fossilized


def germination(x: CreditFacts) -> Tensor:
    """GERMINATE: its cost, plus the potential of the new seed, discounted to the next observation."""
    w = x.weights
    worth = w["pbrs_weight"] * w["gamma"] * NEW_SEED_POTENTIAL
    worth = only(worth * x.timing(x.epoch), below(x.epoch, x.max_epochs), x.shaping_on)
    return w["germinate_cost"] + choose(x.seed, w["germinate_with_seed_penalty"], worth)


def fossilization(x: CreditFacts) -> Tensor:
    """FOSSILIZE: a bonus that grows with contribution and time in HOLDING; penalties where it was not earned."""
    w, c, g = x.weights, x.contribution, x.gate_signal
    quality = w["fossilize_terminal_scale"] * torch.tanh(1 / w["fossilize_quality_ceiling"])
    base = w["fossilize_base_bonus"] + quality * x.terminal_on
    bonus = (base + w["fossilize_contribution_scale"] * c) * x.legitimacy
    harm = torch.clamp(0.2 * g, min=-1.0) - 0.5
    harm = torch.sub(harm, x.ransoming, alpha=0.3)
    value = choose(at_least(c, MIN_CONTRIBUTION), bonus, w["fossilize_noncontributing_penalty"])
    value = choose(below(g, 0), harm, value)
    return w["fossilize_cost"] + choose(both(x.holding, x.has_gate_signal), value, w["invalid_fossilize_penalty"])


def pruning(x: CreditFacts) -> Tensor:
    """PRUNE: the seed's potential is paid back; removing harm is welcome, removing help or a newborn is not."""
    w, c = x.weights, x.contribution
    worst, clearly_harmful = w["prune_good_seed_penalty"], below(c, w["prune_hurting_threshold"])
    hurting = choose(below(x.age, w["min_prune_bonus_age"]), -0.1, w["prune_hurting_bonus"])
    judged = choose(clearly_harmful, hurting, w["prune_acceptable_bonus"])
    judged = choose(x.negative_contribution, judged, torch.maximum(worst - 0.05 * c, 3 * worst))
    judged = only(judged, x.has_contribution)
    judged = choose(below(x.age, MIN_PRUNE_AGE), worst * (MIN_PRUNE_AGE - x.age), judged)
    judged = choose(x.fossil, w["prune_fossilized_penalty"], judged)
    return w["prune_cost"] - x.potential_repaid + choose(x.seed, judged, -0.2)


def action(x: CreditFacts) -> Tensor:
    """Price or bonus of the operation."""
    w = x.weights
    hasty = x.is_op(LifecycleOp.ADVANCE), x.seed, x.is_stage(SeedStage.TRAINING)
    value = only(w["advance_from_training_penalty"], *hasty)
    value = choose(x.is_op(LifecycleOp.SET_ALPHA_TARGET), w["set_alpha_target_cost"], value)
    value = choose(x.germinate, germination(x), value)
    value = choose(x.fossilize, fossilization(x), value)
    return choose(x.prune, pruning(x), value)


def _at_the_end(x: CreditFacts, value: Tensor) -> Tensor:
    return only(value, both(x.last_step, x.terminal_on))


def final_accuracy(x: CreditFacts) -> Tensor:
    """Accuracy of the whole model in the last step."""
    return _at_the_end(x, x.weights["terminal_acc_weight"] * x.val_acc)


# Basic and basic_plus


def repaid_shaping(x: CreditFacts) -> Tensor:
    """Stage shaping in which PRUNE pays the potential back in the place of the shaping of its step."""
    return choose(x.prune, -x.potential_repaid, x.shaping)


def budget_rent(x: CreditFacts) -> Tensor:
    """Occupied parameters as a share of a fixed budget."""
    return -x.weights["param_penalty_weight"] * x.occupancy / x.weights["param_budget"]


def earns_basic_bonus(x: CreditFacts) -> Mask:
    """A contributing seed with a positive gate signal leaves HOLDING for good."""
    return both(x.fossilize, x.holding, x.positive_gate_signal, at_least(x.contribution, MIN_CONTRIBUTION))


def full_basic_bonus(x: CreditFacts) -> Tensor:
    """Fossilization bonus before instalments."""
    merged = x.combine(x.gate_signal, x.contribution)
    w = x.weights
    return (w["basic_fossilize_base_bonus"] + w["basic_contribution_scale"] * merged) * x.legitimacy


def basic_fossilization(x: CreditFacts) -> Tensor:
    """FOSSILIZE of a live seed: the bonus that is paid at once, or a penalty."""
    w = x.weights
    invalid = either(both(no(x.positive_gate_signal), above(x.contribution, 0.1)), no(x.holding))
    wrong = choose(invalid, w["basic_fossilize_invalid_penalty"], w["basic_fossilize_noncontributing_penalty"])
    value = choose(earns_basic_bonus(x), (1 - w["drip_fraction"]) * full_basic_bonus(x), wrong)
    return only(value, x.fossilize, x.seed)


def last_gain(x: CreditFacts) -> Tensor:
    """Change of accuracy in the last step."""
    return _at_the_end(x, x.weights["basic_acc_delta_weight"] * x.known("acc_deltas") / 100)


def drip(x: CreditFacts) -> Tensor:
    """Instalments of open pools, each in proportion to what its fossil contributes now and bounded."""
    scales, contributions = x.arguments["drip_scales"], x.arguments["drip_contributions"]
    if scales is None or contributions is None:
        return x.zero
    paid = scales.to(torch.float64) * without_nan(contributions.to(torch.float64))
    most = x.weights["max_drip_per_epoch"]
    return torch.minimum(torch.maximum(paid, -x.weights["negative_drip_ratio"] * most), most).sum(-1)


def drip_opened(x: CreditFacts) -> Tensor:
    """Scale of the pool that this step opens; 0 where none."""
    w = x.weights
    steps = torch.maximum(x.max_epochs - x.epoch, w["min_drip_epochs"])
    return only(w["drip_fraction"] * full_basic_bonus(x) / steps, earns_basic_bonus(x))


# Sparse, minimal, simplified


def frugal_accuracy(x: CreditFacts) -> Tensor:
    """Committed accuracy minus the price of fossilized parameters, in the last step only."""
    w = x.weights
    price = w["param_penalty_weight"] * x.known("fossilized_params") / w["param_budget"]
    value = torch.clamp(x.known("committed_accs") / 100 - price, min=-1.0, max=1.0)
    return only(w["sparse_reward_scale"] * value, x.last_step)


def early_prune(x: CreditFacts) -> Tensor:
    """Pruning a seed that had no time to show its value."""
    w = x.weights
    return only(w["early_prune_penalty"], x.prune, x.seed, below(x.age, w["early_prune_threshold"]))


def flat_price(x: CreditFacts) -> Tensor:
    """Every operation costs the same."""
    return choose(x.is_op(LifecycleOp.WAIT), x.zero, -0.01)


def simple_success(x: CreditFacts) -> Tensor:
    """Accuracy and number of contributing fossils in the last step."""
    return _at_the_end(x, 3 * x.val_acc / 100 + 2 * x.known("num_contributing"))


# Loss


def loss_delta(x: CreditFacts) -> Tensor:
    """Normalized fall of the validation loss; a rise counts with a smaller weight."""
    w = x.weights
    bound = w["max_loss_delta"]
    scaled = x.known("loss_deltas") / w["typical_loss_delta_std"]
    scaled = torch.minimum(torch.maximum(scaled, -bound), bound)
    return -w["loss_delta_weight"] * choose(above(scaled, 0), scaled * w["regression_penalty_scale"], scaled)


def loss_rent(x: CreditFacts) -> Tensor:
    """Added parameters pay rent, except while the target seed is new."""
    w = x.weights
    added = x.added_params
    price = torch.log1p(added / choose(above(x.host_params, 0), x.host_params, 1.0))
    price = torch.maximum(-w["compute_rent_weight"] * price, -w["max_rent_penalty"])
    return only(price, above(x.host_params, 0), no(both(x.seed, below(x.age, w["grace_epochs"]))))


def loss_potential(x: CreditFacts) -> Tensor:
    """Shaping by stage alone, without the time spent in it."""
    change = GAMMA * x.stage_potential - x.previous_potential
    return only(x.weights["stage_potential_weight"] * change, x.seed)


def final_loss(x: CreditFacts) -> Tensor:
    """Where the last loss lies between baseline (0) and target (1); a missing loss earns nothing."""
    w = x.weights
    span = w["baseline_loss"] - w["target_loss"]
    raw_loss = x.number("val_losses", torch.nan)
    loss = without_nan(raw_loss)
    share = torch.clamp((w["baseline_loss"] - loss) / choose(equal(span, 0), 1.0, span), min=0.0, max=1.0)
    return only(w["terminal_loss_weight"] * share, x.last_step, is_known(raw_loss))


# Objective


def worth(x: CreditFacts, accuracy: Tensor, params: Tensor) -> Tensor:
    """Worth = weight * accuracy / 100 - weight * ln(1 + parameters relative to the host)."""
    w = x.weights
    growth = torch.log1p(params / x.host_floor)
    return w["objective_acc_weight"] * accuracy / 100 - w["objective_growth_weight"] * growth


def objective_potential(x: CreditFacts) -> Tensor:
    """The model as it stands, estimated before the end; 0 at the end, so that the shaping telescopes."""
    return only(worth(x, x.val_acc, x.added_params), no(x.last_step))


def objective_shaping(x: CreditFacts) -> Tensor:
    """Shaping = gamma * potential now - potential of the previous step."""
    return x.weights["gamma"] * objective_potential(x) - x.known("potentials_prev")


def objective_success(x: CreditFacts) -> Tensor:
    """J: committed accuracy minus growth, paid in the last step."""
    return only(worth(x, x.known("committed_accs"), x.known("fossilized_params")), x.last_step)


Term = Callable[[CreditFacts], Tensor]

_DENSE: Mapping[str, Term] = {
    "attribution": attribution, "blending_warning": blending_warning, "holding_warning": holding_warning,
    "potential": stage_shaping, "synergy": synergy, "rent": growth_rent, "alpha_shock": alpha_shock,
    "occupancy": occupancy, "fossil_upkeep": fossil_upkeep, "action": action, "terminal": final_accuracy,
}  # fmt: skip
_BASIC: Mapping[str, Term] = {
    "potential": repaid_shaping, "rent": budget_rent, "action": basic_fossilization, "terminal": last_gain,
}  # fmt: skip

TERMS: Mapping[str, Mapping[str, Term]] = {
    "shaped": _DENSE,
    "escrow": _DENSE,
    "basic": _BASIC,
    "basic_plus": {**_BASIC, "drip": drip},
    "sparse": {"terminal": frugal_accuracy},
    "minimal": {"terminal": frugal_accuracy, "early_prune": early_prune},
    "simplified": {"potential": stage_shaping, "action": flat_price, "terminal": simple_success},
    "loss": {"loss_delta": loss_delta, "rent": loss_rent, "potential": loss_potential, "terminal": final_loss},
    "objective": {"potential": objective_shaping, "terminal": objective_success},
}
"""The table: mode -> name of the column -> what is paid."""
