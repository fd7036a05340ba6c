"""A controller that does not learn, joined with a reward: drives the engine in comparisons."""

from typing import Any, final

from esper.leyline.messages import KeptNetwork, PolicyProtocol, RewardProtocol


@final
class ScriptedClient:
    """Any policy and any reward behind `ClientProtocol`; every method is that of one of the two."""

    def __init__(self, policy: PolicyProtocol, reward: RewardProtocol[Any]) -> None:
        self.policy, self.reward = policy, reward

        self.initial_hidden, self.begin_rollout = policy.initial_hidden, policy.begin_rollout
        self.act, self.store, self.bootstrap = policy.act, policy.store, policy.bootstrap
        self.rollback, self.update = policy.rollback, policy.update
        self.state_dict, self.load_state_dict = policy.state_dict, policy.load_state_dict

        self.terms, self.initial_state, self.step = reward.terms, reward.initial_state, reward.step
        self.rollback_reward, self.reset_hosts = reward.rollback_reward, reward.reset_hosts

    def finish(self, kept: KeptNetwork) -> None:
        """Nothing: a script has no rollout to correct."""
