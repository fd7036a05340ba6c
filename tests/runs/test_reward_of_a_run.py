"""The reward of a run: who pays, and whether it can be compiled."""

import uuid

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.presets import resolve
from esper.simic.rewards import ObjectiveReward, RewardConfig, make_reward, register_reward
from esper.simic.rewards.objective import Potentials

CPU = torch.device("cpu")


class Wrapped:
    """A reward of a user: the objective, and nothing that could be compiled."""

    def __init__(self, config: RewardConfig) -> None:
        self.inner = ObjectiveReward(config.with_mode("objective"))
        self.terms = self.inner.terms

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Potentials:
        return self.inner.initial_state(n, slots, steps, device)

    def step(self, inputs: RewardInputs, state: Potentials) -> tuple[RewardOutput, Potentials]:
        return self.inner.step(inputs, state)

    def rollback_reward(self, state: Potentials) -> torch.Tensor:
        return self.inner.rollback_reward(state)

    def reset_hosts(self, state: Potentials, mask: torch.Tensor) -> Potentials:
        return self.inner.reset_hosts(state, mask)


def test_a_reward_that_cannot_be_compiled_says_so_where_that_was_asked_for():
    name = f"wrapped-{uuid.uuid4().hex}"
    register_reward(name)(Wrapped)
    told = {"task": "null", "num_envs": 2, "reward": {"mode": name}}
    eager = resolve(told)
    spec = engine_of(eager, None, CPU).spec
    assert isinstance(reward_of(eager, spec), Wrapped)
    with pytest.raises(ConfigError, match="leave compile out"):
        reward_of(resolve(told | {"compile": "on"}), spec)
    assert isinstance(make_reward(name), Wrapped)
