"""The reward as the engine sees it, and the registry of rewards."""

import uuid

import pytest
import torch

from esper.leyline.errors import ConfigError, RegistryError
from esper.simic.rewards import (
    MODES,
    ObjectiveReward,
    RewardConfig,
    make_reward,
    register_reward,
    reward_names,
    reward_traits,
)

CPU = torch.device("cpu")


def test_numbers_are_handed_to_the_reward():
    config = RewardConfig(mode="escrow", escrow_delta_clip=1.0)
    assert make_reward("escrow", config).config == config
    with pytest.raises(ConfigError, match=r"with_mode\('shaped'\)"):
        make_reward("shaped", config)


def test_a_user_can_register_a_reward_and_say_what_it_needs():
    name = f"mine-{uuid.uuid4().hex}"

    @register_reward(name, summary="the objective with other numbers", time_limit="terminate")
    def build(config):
        return ObjectiveReward(config.with_mode("objective"))

    assert name in reward_names()
    assert reward_traits(name).time_limit == "terminate"
    assert make_reward(name, RewardConfig(objective_growth_weight=0.1)).config.mode == "objective"
    with pytest.raises(RegistryError, match="registered already"):
        register_reward(name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(RegistryError, match="did you mean 'objective'"):
        make_reward("objectiv")
    with pytest.raises(RegistryError, match="known names"):
        reward_traits("nothing like it")


def test_nine_modes_are_built_in():
    assert set(MODES) <= set(reward_names())
    assert len(MODES) == 9
