"""The numbers of the rewards: order, defaults of the modes, and what cannot be; rewards of users."""

import dataclasses
import math
import uuid

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.simic.rewards import (
    MODES,
    ObjectiveReward,
    RewardConfig,
    make_reward,
    register_reward,
    reward_names,
    reward_traits,
)
from esper.simic.rewards.reward_config import WEIGHT_NAMES


def packed(config):
    return dict(zip(WEIGHT_NAMES, config.pack().tolist(), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_every_number_reaches_its_place_in_the_packed_vector(mode):
    default = packed(RewardConfig(mode=mode))
    assert RewardConfig(mode=mode).pack().dtype == torch.float64
    for name in WEIGHT_NAMES:
        if (mode, name) == ("basic", "deferred_fraction"):
            continue
        value = default[name]
        typed = getattr(RewardConfig(), name)
        changed = not typed if isinstance(typed, bool) else 4 if isinstance(typed, int) else 0.75 * (value or 1)
        assert packed(RewardConfig(mode=mode, **{name: changed})) == default | {name: float(changed)}


def test_a_mode_brings_its_own_rollback_penalty_and_drip():
    numbers = {mode: packed(RewardConfig(mode=mode)) for mode in MODES}
    assert {mode for mode, p in numbers.items() if p["rollback_penalty"] == 0.0} == {"objective"}
    assert {mode for mode, p in numbers.items() if p["deferred_fraction"] == 0.7} == {"basic_plus"}
    assert packed(RewardConfig(rollback_penalty=-3.0))["rollback_penalty"] == -3.0
    assert packed(RewardConfig().with_mode("shaped"))["rollback_penalty"] == -10.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rent_host_params_floor", 0.5),
        ("param_budget", 0.0),
        ("contribution_weight", math.nan),
        ("max_rent", math.inf),
        ("escrow_stable_window", 0),
        ("escrow_stable_window", 6),
        ("escrow_delta_clip", -1.0),
        ("max_deferred_per_epoch", 0.0),
        ("min_deferred_epochs", 0),
        ("negative_deferred_ratio", 1.5),
        ("deferred_fraction", 1.1),
        ("rollback_penalty", math.nan),
        ("improvement_safe_threshold", 0.0),
        ("fossilize_quality_ceiling", 0.0),
        ("free_slots", -1),
        ("objective_flops_weight", -0.1),
    ],
)
def test_an_impossible_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"reward\.{name} is"):
        RewardConfig(**{name: value})


def test_basic_pays_its_bonus_at_once():
    with pytest.raises(ConfigError, match="basic_plus"):
        RewardConfig(mode="basic", deferred_fraction=0.5)


def test_a_configuration_never_changes_and_can_key_a_cache():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RewardConfig().max_rent = 2.0
    assert hash(RewardConfig()) == hash(RewardConfig())


def test_only_the_objective_ends_its_episodes_truly_and_only_basic_plus_watches_fossils():
    assert {mode for mode, traits in MODES.items() if traits.time_limit == "terminate"} == {"objective"}
    assert {mode for mode, traits in MODES.items() if traits.fossils_as_players} == {"basic_plus"}


def test_a_user_can_register_a_reward_and_say_what_it_needs():
    name = f"mine-{uuid.uuid4().hex}"

    @register_reward(name, summary="the objective with other numbers", time_limit="terminate")
    def build(config):
        return ObjectiveReward(config.with_mode("objective"))

    assert name in reward_names()
    assert reward_traits(name).time_limit == "terminate"
    assert make_reward(name, RewardConfig(objective_growth_weight=0.1)).config.objective_growth_weight == 0.1
