"""Rows without a valid reward are refused."""

import pytest
import torch

from esper.leyline.errors import DataError
from esper.simic.rewards import RewardConfig
from reference.rewards.validate import validate_reward_inputs

NAN = float("nan")


def row(**changes):
    """Two healthy rows, the second one changed."""
    values = {"action": 0, "stage": 3, "previous_stage": 2, "val_acc": 50.0, "has_seed": True, "contribution": NAN,
              "last": False, "gate": NAN, "stable": 50.0, "committed": 40.0, "scale": 0.0, "paid": NAN}  # fmt: skip
    rows = [values, values | changes]

    def column(name, dtype=torch.float64):
        return torch.tensor([each[name] for each in rows], dtype=dtype)

    return {
        "actions": column("action", torch.int64),
        "stages": column("stage", torch.int64),
        "previous_stages": column("previous_stage", torch.int64),
        "val_accs": column("val_acc"),
        "has_seed_mask": column("has_seed", torch.bool),
        "seed_contributions": column("contribution"),
        "last_step": column("last", torch.bool),
        "counterfactual_improvements": column("gate"),
        "stable_val_accs": column("stable"),
        "committed_accs": column("committed"),
        "drip_scales": column("scale")[:, None],
        "drip_contributions": column("paid")[:, None],
    }


@pytest.mark.parametrize("mode", ["shaped", "escrow", "basic_plus", "sparse", "objective"])
def test_healthy_rows_pass(mode):
    validate_reward_inputs(RewardConfig(mode=mode), **row())


@pytest.mark.parametrize(
    ("mode", "changes", "problem"),
    [
        ("shaped", {"stage": 5}, "stage that does not exist"),
        ("shaped", {"stage": 11}, "stage that does not exist"),
        ("shaped", {"previous_stage": 5}, "previous stage that does not exist"),
        ("shaped", {"action": 6}, "operation outside 0 to 5"),
        ("objective", {"val_acc": NAN}, "no accuracy"),
        ("shaped", {"contribution": 1.0}, "without the gate signal"),
        ("escrow", {"contribution": 1.0}, "without the gate signal"),
        ("escrow", {"stable": NAN}, "no stable accuracy"),
        ("sparse", {"committed": NAN, "last": True}, "without a committed accuracy"),
        ("minimal", {"committed": NAN, "last": True}, "without a committed accuracy"),
        ("objective", {"committed": NAN, "last": True}, "without a committed accuracy"),
        ("basic_plus", {"scale": 0.1}, "open pool"),
    ],
)
def test_a_row_that_cannot_be_paid_is_named(mode, changes, problem):
    with pytest.raises(DataError, match=rf"row 1 .*{problem}"):
        validate_reward_inputs(RewardConfig(mode=mode), **row(**changes))


def test_missing_values_that_a_mode_does_not_read_are_no_problem():
    validate_reward_inputs(RewardConfig(mode="basic"), **row(contribution=1.0, stable=NAN, committed=NAN, last=True))
    validate_reward_inputs(RewardConfig(mode="sparse"), **row(committed=NAN))
