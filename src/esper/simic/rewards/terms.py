"""What each mode pays: a function from the row to its terms, and the table of them.

Signs are those of the reward: costs are negative, and the total is the plain sum of the terms.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.simic.rewards.config import GAMMA
from esper.simic.rewards.row import (
    Row,
    added_params,
    at_the_end,
    combine,
    contributes,
    held,
    host_floor,
    is_op,
    legitimacy,
    occupancy,
    potential_repaid,
    potential_table,
    shaping,
)

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

Terms = dict[str, Tensor]


# Basic and basic_plus


def basic_terms(x: Row) -> Terms:
    """Stage potential, of which PRUNE pays its part back instead, rent, the bonus, and the change of accuracy."""
    w = x.w
    last_gain = w["basic_acc_delta_weight"] * x.known("acc_deltas") / 100
    return {
        "potential": torch.where(is_op(x, LifecycleOp.PRUNE), -potential_repaid(x), shaping(x)),
        "rent": -w["param_penalty_weight"] * occupancy(x) / w["param_budget"],
        "action": _basic_fossilization(x),
        "terminal": at_the_end(x, last_gain),
    }


def basic_plus_terms(x: Row) -> Terms:
    """Basic, and instalments of open pools, each in proportion to what its fossil contributes now and bounded."""
    terms, scales, contributions = basic_terms(x), x.given["drip_scales"], x.given["drip_contributions"]
    terms["drip"] = torch.zeros_like(x.val_acc)
    if scales is not None and contributions is not None:
        paid, most = scales.to(torch.float64) * contributions.to(torch.float64), x.w["max_drip_per_epoch"]
        paid = torch.minimum(torch.maximum(paid, -x.w["negative_drip_ratio"] * most), most)
        terms["drip"] = paid.nan_to_num(nan=0.0).sum(-1)
    return terms


def _earns_basic_bonus(x: Row) -> Tensor:
    """A contributing seed with a positive gate signal leaves HOLDING for good."""
    return is_op(x, LifecycleOp.FOSSILIZE) & held(x) & (x.g > 0) & contributes(x)


def _full_basic_bonus(x: Row) -> Tensor:
    """Fossilization bonus before instalments; has a meaning where it is earned."""
    merged = combine(x, x.g, x.c)
    return (x.w["basic_fossilize_base_bonus"] + x.w["basic_contribution_scale"] * merged) * legitimacy(x)


def _basic_fossilization(x: Row) -> Tensor:
    """FOSSILIZE of a live seed: the bonus that is paid at once, or a penalty."""
    w = x.w
    invalid = ~held(x) | (~(x.g > 0) & (x.c > 0.1))
    wrong = torch.where(invalid, w["basic_fossilize_invalid_penalty"], w["basic_fossilize_noncontributing_penalty"])
    value = torch.where(_earns_basic_bonus(x), (1 - w["drip_fraction"]) * _full_basic_bonus(x), wrong)
    return torch.where(is_op(x, LifecycleOp.FOSSILIZE) & x.seed, value, 0.0)


def drip_opened(x: Row) -> Tensor:
    """Scale of the pool that this step opens; 0 where none."""
    steps = torch.maximum(x.steps_left, x.w["min_drip_epochs"])
    return torch.where(_earns_basic_bonus(x), x.w["drip_fraction"] * _full_basic_bonus(x) / steps, 0.0)


# Sparse, minimal, simplified


def sparse_terms(x: Row) -> Terms:
    """Committed accuracy minus the price of fossilized parameters, in the last step only."""
    w = x.w
    price = w["param_penalty_weight"] * x.known("fossilized_params") / w["param_budget"]
    value = torch.clamp(x.known("committed_accs") / 100 - price, min=-1.0, max=1.0)
    return {"terminal": torch.where(x.last, w["sparse_reward_scale"] * value, 0.0)}


def minimal_terms(x: Row) -> Terms:
    """Sparse, and a price for pruning a seed that had no time to show its value."""
    early = is_op(x, LifecycleOp.PRUNE) & x.seed & (x.age < x.w["early_prune_threshold"])
    return sparse_terms(x) | {"early_prune": torch.where(early, x.w["early_prune_penalty"], 0.0)}


def simplified_terms(x: Row) -> Terms:
    """Stage potential, one price for every operation, accuracy and contributing fossils in the last step."""
    return {
        "potential": shaping(x),
        "action": -0.01 * (~is_op(x, LifecycleOp.WAIT)).to(torch.float64),
        "terminal": at_the_end(x, 3 * x.val_acc / 100 + 2 * x.known("num_contributing")),
    }


# Loss


def loss_terms(x: Row) -> Terms:
    """Normalized fall of the loss, rent except while the target seed is new, shaping by stage, and the last loss."""
    w, bound, host, previous_stage = x.w, x.w["max_loss_delta"], x.known("host_params"), x.given["previous_stages"]
    assert previous_stage is not None
    scaled = x.known("loss_deltas") / w["typical_loss_delta_std"]
    scaled = torch.minimum(torch.maximum(scaled, -bound), bound)
    scaled = torch.where(scaled > 0, scaled * w["regression_penalty_scale"], scaled)
    rent = torch.maximum(-w["compute_rent_weight"] * torch.log1p(added_params(x) / host), -w["max_rent_penalty"])
    young = x.seed & (x.age < w["grace_epochs"])
    table = potential_table(x.stage.device)
    step = GAMMA * table.index_select(0, x.stage) - table.index_select(0, previous_stage)
    loss, span = x.number("val_losses"), w["baseline_loss"] - w["target_loss"]
    share = torch.clamp((w["baseline_loss"] - loss) / torch.where(span == 0, 1.0, span), min=0.0, max=1.0)
    return {
        "loss_delta": -w["loss_delta_weight"] * scaled,
        "rent": torch.where((host > 0) & ~young, rent, 0.0),
        "potential": torch.where(x.seed, w["stage_potential_weight"] * step, 0.0),
        "terminal": torch.where(x.last & ~loss.isnan(), w["terminal_loss_weight"] * share, 0.0),
    }


# Objective


def _worth(x: Row, accuracy: Tensor, params: Tensor) -> Tensor:
    """J of such an accuracy and so many parameters of seeds, `objective_value` with the numbers as tensors."""
    growth = torch.log1p(params / host_floor(x))
    return x.w["objective_acc_weight"] * accuracy / 100 - x.w["objective_growth_weight"] * growth


def objective_potential(x: Row) -> Tensor:
    """The model as it stands, estimated before the end; 0 at the end, so that the shaping telescopes."""
    return torch.where(x.last, 0.0, _worth(x, x.val_acc, added_params(x)))


def objective_terms(x: Row) -> Terms:
    """J in the last step, and shaping that sums to zero; a run is paid by `ObjectiveReward`, which agrees."""
    worth = _worth(x, x.known("committed_accs"), x.known("fossilized_params"))
    return {
        "potential": x.w["gamma"] * objective_potential(x) - x.known("potentials_prev"),
        "terminal": torch.where(x.last, worth, 0.0),
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
"""The modes without credit, see `credit.py` for the others."""
