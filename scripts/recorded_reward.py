"""A reward that records its breakdowns, for scripts that explain an episode."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from esper.leyline.messages import RewardInputs, RewardOutput, RewardProtocol


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
