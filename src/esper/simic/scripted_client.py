"""A controller that does not learn, with a reward beside it: what drives the engine in comparisons."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from esper.leyline.messages import ActResult, Hidden, KeptNetwork, Observation, RewardInputs, RewardOutput, StoredStep
from esper.leyline.protocols import PolicyProtocol, RewardProtocol, StateTree


@final
class ScriptedClient:
    """Any policy and any reward as one client; every call is handed on to one of the two."""

    def __init__(self, policy: PolicyProtocol, reward: RewardProtocol[Any]) -> None:
        self.policy, self.reward = policy, reward

    def initial_hidden(self, n: int) -> Hidden:
        """See `PolicyProtocol`."""
        return self.policy.initial_hidden(n)

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        """See `PolicyProtocol`."""
        self.policy.begin_rollout(episode, hosts)

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """See `PolicyProtocol`."""
        return self.policy.act(obs, deterministic=deterministic)

    def store(self, step: StoredStep) -> None:
        """See `PolicyProtocol`."""
        self.policy.store(step)

    def bootstrap(self, obs: Observation) -> Tensor:
        """See `PolicyProtocol`."""
        return self.policy.bootstrap(obs)

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        """See `PolicyProtocol`."""
        self.policy.rollback(mask, reward)

    def finish(self, kept: KeptNetwork) -> None:
        """See `ClientProtocol`; a script has nothing to correct."""

    def update(self) -> Mapping[str, float]:
        """See `PolicyProtocol`."""
        return self.policy.update()

    def state_dict(self) -> StateTree:
        """See `PolicyProtocol`."""
        return self.policy.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """See `PolicyProtocol`."""
        self.policy.load_state_dict(state)

    @property
    def terms(self) -> Sequence[str]:
        """See `RewardProtocol`."""
        return self.reward.terms

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Any:  # noqa: ANN401
        """See `RewardProtocol`."""
        return self.reward.initial_state(n, slots, steps, device)

    def step(self, inputs: RewardInputs, state: Any) -> tuple[RewardOutput, Any]:  # noqa: ANN401
        """See `RewardProtocol`."""
        return self.reward.step(inputs, state)

    def rollback_reward(self, state: Any) -> Tensor:  # noqa: ANN401
        """See `RewardProtocol`."""
        return self.reward.rollback_reward(state)

    def reset_hosts(self, state: Any, mask: Tensor) -> Any:  # noqa: ANN401
        """See `RewardProtocol`."""
        return self.reward.reset_hosts(state, mask)
