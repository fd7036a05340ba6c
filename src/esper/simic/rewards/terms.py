"""The terms of each mode: functions from the row to its terms, and their table.

Signs are those of the reward: costs are negative, and the total is the plain sum of the terms.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards.masks import above, at_least, below, choose, equal, no
from esper.simic.rewards.reward_config import GAMMA, MIN_CONTRIBUTION
from esper.simic.rewards.row import Row, at_the_end, combine, legitimacy, number, shaping

REWARD_TERMS = (
    "attribution", "blending_warning", "holding_warning", "potential", "synergy", "rent", "alpha_shock",
    "occupancy", "fossil_upkeep", "action", "terminal", "drip", "loss_delta",
    "escrow_forfeit", "germination_clawback", "auto_prune", "hindsight", "rollback",
    "early_prune",
)  # fmt: skip
"""Columns of a breakdown; escrow_forfeit to rollback depend on the past and are written by `reward_step`."""

REWARD_INFO = (
    "discount", "ratio_penalty", "timing", "progress", "growth",
    "escrow_prev", "escrow_target", "escrow_delta", "escrow_next", "objective_potential",
)  # fmt: skip
"""Reported quantities that are not part of the sum; progress may be NaN."""

Terms = dict[str, Tensor]


# Basic and basic_plus


def basic_terms(x: Row) -> Terms:
    """Stage potential (PRUNE gives its own back), rent, fossilization bonus, last change of accuracy."""
    w = x.w
    last_gain = w["basic_acc_delta_weight"] * x.known("acc_deltas") / 100
    return {
        "potential": choose(x.prune, -x.shaping_weight * x.potential, shaping(x)),
        "rent": -w["param_penalty_weight"] * x.occupancy / w["param_budget"],
        "action": _basic_fossilization(x),
        "terminal": at_the_end(x, last_gain),
    }


def basic_plus_terms(x: Row) -> Terms:
    """Basic, plus bounded instalments of open pools in proportion to the current contributions of their fossils."""
    terms, scales, contributions = basic_terms(x), x.given["drip_scales"], x.given["drip_contributions"]
    terms["drip"] = x.zero
    if scales is not None and contributions is not None:
        drip, most = scales.to(torch.float64) * contributions.to(torch.float64), x.w["max_drip_per_epoch"]
        drip = torch.minimum(torch.maximum(drip, -x.w["negative_drip_ratio"] * most), most)
        terms["drip"] = drip.nan_to_num(nan=0.0).sum(-1)
    return terms


def _earns_basic_bonus(x: Row) -> Tensor:
    """Mask: FOSSILIZE of a contributing seed in HOLDING with a positive gate signal."""
    return x.fossilize * x.held * above(x.g, 0) * at_least(x.c, MIN_CONTRIBUTION)


def _full_basic_bonus(x: Row) -> Tensor:
    """Fossilization bonus including instalments; valid where it is earned."""
    merged = combine(x, x.g, x.c)
    return (x.w["basic_fossilize_base_bonus"] + x.w["basic_contribution_scale"] * merged) * legitimacy(x)


def _basic_fossilization(x: Row) -> Tensor:
    """FOSSILIZE of a live seed: the immediate part of the bonus, or a penalty."""
    w = x.w
    valid = x.held * no(above(x.c, 0.1) * no(above(x.g, 0)))
    wrong = choose(valid, w["basic_fossilize_noncontributing_penalty"], w["basic_fossilize_invalid_penalty"])
    return choose(_earns_basic_bonus(x), no(w["drip_fraction"]) * _full_basic_bonus(x), wrong) * x.fossilize * x.seed


def drip_opened(x: Row) -> Tensor:
    """Scale of the pool opened in this step, or 0."""
    steps = torch.maximum(x.steps_left, x.w["min_drip_epochs"])
    return x.w["drip_fraction"] * _full_basic_bonus(x) / steps * _earns_basic_bonus(x)


# Sparse, minimal, simplified


def sparse_terms(x: Row) -> Terms:
    """Committed accuracy minus a price for fossilized parameters, in the last step only."""
    w = x.w
    price = w["param_penalty_weight"] * x.known("fossilized_params") / w["param_budget"]
    value = torch.clamp(x.known("committed_accs") / 100 - price, min=-1.0, max=1.0)
    return {"terminal": x.last * w["sparse_reward_scale"] * value}


def minimal_terms(x: Row) -> Terms:
    """Sparse, plus a penalty for pruning a young seed."""
    early = x.prune * x.seed * below(x.age, x.w["early_prune_threshold"])
    return sparse_terms(x) | {"early_prune": x.w["early_prune_penalty"] * early}


def simplified_terms(x: Row) -> Terms:
    """Stage potential, one cost for every operation, accuracy and contributing fossils in the last step."""
    return {
        "potential": shaping(x),
        "action": -0.01 * no(x.is_op(LifecycleOp.WAIT)),
        "terminal": at_the_end(x, 3 * x.known("val_accs") / 100 + 2 * x.known("num_contributing")),
    }


# Loss


def loss_terms(x: Row) -> Terms:
    """Normalized decrease of the loss, rent (not while the target seed is new), stage shaping, and the last loss."""
    w, bound, host, loss = x.w, x.w["max_loss_delta"], x.host_params, number(x.given, "val_losses")
    scaled = x.known("loss_deltas") / w["typical_loss_delta_std"]
    scaled = torch.minimum(torch.maximum(scaled, -bound), bound)
    scaled = torch.clamp(scaled, max=0.0) + w["regression_penalty_scale"] * torch.relu(scaled)
    growth = x.added_params / torch.where(host > 0, host, 1.0)
    rent = torch.maximum(-w["compute_rent_weight"] * torch.log1p(growth), -w["max_rent_penalty"])
    young = x.seed * below(x.age, w["grace_epochs"])
    span = w["baseline_loss"] - w["target_loss"]
    share = (w["baseline_loss"] - loss.nan_to_num(nan=0.0)) / (span + equal(span, 0))
    return {
        "loss_delta": -w["loss_delta_weight"] * scaled,
        "rent": rent * above(host, 0) * no(young),
        "potential": w["stage_potential_weight"]
        * (GAMMA * x.stage_potential - x.potential_of("previous_stages"))
        * x.seed,
        "terminal": w["terminal_loss_weight"] * torch.clamp(share, min=0.0, max=1.0) * x.last * equal(loss, loss),
    }


# Objective


def _worth(x: Row, accuracy: Tensor, params: Tensor) -> Tensor:
    """`objective_value` with the weights as tensors."""
    growth = torch.log1p(params / x.host_floor)
    return x.w["objective_acc_weight"] * accuracy / 100 - x.w["objective_growth_weight"] * growth


def objective_potential(x: Row) -> Tensor:
    """J of the current model; 0 in the last step, so that the shaping telescopes."""
    return _worth(x, x.known("val_accs"), x.added_params) * no(x.last)


def objective_terms(x: Row) -> Terms:
    """J in the last step, plus shaping that sums to zero; runs use the equivalent `ObjectiveReward`."""
    worth = _worth(x, x.known("committed_accs"), x.known("fossilized_params"))
    return {
        "potential": x.w["gamma"] * objective_potential(x) - x.known("potentials_prev"),
        "terminal": worth * x.last,
    }


PLAIN_MODES: Mapping[str, Callable[[Row], Terms]] = {
    "basic": basic_terms,
    "basic_plus": basic_plus_terms,
    "sparse": sparse_terms,
    "minimal": minimal_terms,
    "simplified": simplified_terms,
    "loss": loss_terms,
    "objective": objective_terms,
}
"""Modes without credit; `credit.py` has the others."""
