"""The numbers of the rewards: order, defaults of the modes, and what cannot be."""

import dataclasses
import math

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.simic.rewards import LOSS_PRESETS, MODES, LossRewardConfig, RewardConfig
from esper.simic.rewards.reward_config import LOSS_FIELDS, WEIGHT_NAMES


def test_the_packed_numbers_are_sixty_five_in_a_fixed_order():
    packed = RewardConfig().pack()
    assert packed.shape == (65,)
    assert packed.dtype == torch.float64
    sample = {0: 1.0, 3: 2.0, 9: 200.0, 11: 0.1958, 16: -0.15, 22: -0.2, 25: -0.3, 31: 0.05, 34: 0.995, 40: 0.0,
              43: 500_000.0, 46: 5.0, 51: 1.0, 54: 0.4, 56: 0.0, 59: 0.5, 61: 0.03, 62: -10.0, 64: 0.2}  # fmt: skip
    assert {index: packed[index].item() for index in sample} == sample
    names = {1: "proxy_confidence_factor", 13: "invalid_fossilize_penalty", 29: "hacking_ratio_threshold",
             38: "basic_fossilize_invalid_penalty", 50: "seed_occupancy_cost", 63: "hindsight_weight"}  # fmt: skip
    assert {index: WEIGHT_NAMES[index] for index in names} == names


def test_every_number_reaches_its_place_in_the_packed_vector():
    for index, name in enumerate(WEIGHT_NAMES):
        if name == "gamma":
            continue
        default = getattr(RewardConfig(), name)
        changed = (
            (not default) if isinstance(default, bool) else 4 if isinstance(default, int) else 0.75 * (default or 1)
        )
        packed = RewardConfig(**{name: changed}).pack()
        assert packed[index].item() == float(changed)
        assert (packed != RewardConfig().pack()).sum().item() == 1


def test_a_mode_brings_its_own_rollback_penalty_and_drip():
    packed = {mode: RewardConfig(mode=mode).pack() for mode in MODES}
    assert {mode for mode, p in packed.items() if p[62] == 0.0} == {"objective"}
    assert {mode for mode, p in packed.items() if p[56] == 0.7} == {"basic_plus"}
    assert RewardConfig(mode="objective", rollback_penalty=-3.0).pack()[62] == -3.0
    assert RewardConfig(mode="objective").with_mode("shaped").pack()[62] == -10.0


def test_the_loss_presets_differ_where_their_tasks_do():
    assert len(LOSS_FIELDS) == 11
    assert LOSS_PRESETS["cifar10"] == LossRewardConfig(typical_loss_delta_std=0.05)
    assert LOSS_PRESETS["tinystories"].pack().tolist() == [5.0, 5.0, 0.5, 0.15, 0.01, 5.0, 3.0, 0.1, 10.8, 3.5, 1.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.99),
        ("rent_host_params_floor", 0.5),
        ("param_budget", 0.0),
        ("contribution_weight", math.nan),
        ("max_rent", math.inf),
        ("escrow_stable_window", 0),
        ("escrow_stable_window", 6),
        ("escrow_delta_clip", -1.0),
        ("max_drip_per_epoch", 0.0),
        ("min_drip_epochs", 0),
        ("negative_drip_ratio", 1.5),
        ("drip_fraction", 1.1),
        ("rollback_penalty", math.nan),
        ("improvement_safe_threshold", 0.0),
        ("fossilize_quality_ceiling", 0.0),
        ("free_slots", -1),
    ],
)
def test_an_impossible_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"reward\.{name} is"):
        RewardConfig(**{name: value})


def test_an_impossible_loss_number_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"reward\.loss\.typical_loss_delta_std is 0\.0; it must be above 0"):
        LossRewardConfig(typical_loss_delta_std=0.0)
    with pytest.raises(ConfigError, match=r"reward\.loss\.baseline_loss is nan"):
        LossRewardConfig(baseline_loss=math.nan)


def test_basic_pays_its_bonus_at_once():
    with pytest.raises(ConfigError, match="basic_plus"):
        RewardConfig(mode="basic", drip_fraction=0.5)


def test_a_configuration_never_changes_and_can_key_a_cache():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RewardConfig().max_rent = 2.0
    assert hash(RewardConfig()) == hash(RewardConfig())


def test_only_the_objective_ends_its_episodes_truly_and_only_basic_plus_watches_fossils():
    assert {mode for mode, traits in MODES.items() if traits.time_limit == "terminate"} == {"objective"}
    assert {mode for mode, traits in MODES.items() if traits.fossils_as_players} == {"basic_plus"}
