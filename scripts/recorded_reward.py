"""A reward that records its inputs, and what any mode pays for them, for scripts that explain an episode."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from esper.leyline.messages import RewardInputs, RewardOutput, RewardProtocol
from esper.simic.rewards import make_reward
from esper.simic.rewards.reward_config import RewardConfig


@final
class RecordedReward:
    """Wraps a reward; `paid` has the breakdown [N, M] of every step, `seen` the inputs."""

    def __init__(self, reward: RewardProtocol[Any]) -> None:
        self._reward = reward
        self.paid: list[Tensor] = []
        self.seen: list[RewardInputs] = []

    @property
    def terms(self) -> Sequence[str]:
        """Names of the columns of a breakdown."""
        return self._reward.terms

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Any:
        """Clear the records; see `RewardProtocol`."""
        self.paid, self.seen = [], []
        return self._reward.initial_state(n, slots, steps, device)

    def step(self, inputs: RewardInputs, state: Any) -> tuple[RewardOutput, Any]:
        """Reward one step and record it."""
        paid, state = self._reward.step(inputs, state)
        self.paid.append(paid.breakdown.to(torch.float64))
        self.seen.append(inputs)
        return paid, state

    def rollback_reward(self, state: Any) -> Tensor:
        """See `RewardProtocol`."""
        return self._reward.rollback_reward(state)

    def reset_hosts(self, state: Any, mask: Tensor) -> Any:
        """See `RewardProtocol`."""
        return self._reward.reset_hosts(state, mask)


def breakdowns(seen: Sequence[RewardInputs], config: RewardConfig) -> tuple[Sequence[str], np.ndarray]:
    """Names of the terms, and the breakdown [T, N, M] that a mode pays for the inputs of an episode."""
    reward = make_reward(config.mode, config)
    stage = seen[0].slots.stage
    state = reward.initial_state(*stage.shape, len(seen), stage.device)
    paid_T = []
    for inputs in seen:
        paid, state = reward.step(inputs, state)
        paid_T.append(paid.breakdown.to(torch.float64))
    return reward.terms, torch.stack(paid_T).cpu().numpy()
