"""A rule with one threshold: look at one feature of the host once, then follow one of two schedules.

    steps before 3   WAIT
    step 3           val_acc < 24.5  ->  schedule `below`, else schedule `above`
    from step 3 on   the chosen schedule; entries that were due earlier are due at once

It is the simplest controller that treats hosts differently, so a learned controller should beat it.

Shape legend: N = hosts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.leyline.tensor_dataclass import replace
from esper.tamiyo.schedules import Remaining, Schedule, ScheduleTable
from esper.tamiyo.scripted import canonical_actions

Feature = Callable[[Observation], Tensor]

FEATURES: dict[str, Feature] = {
    "val_acc": lambda obs: obs.hosts.val_acc,
    "val_loss": lambda obs: obs.hosts.val_loss,
    "train_acc": lambda obs: obs.hosts.train_acc,
    "train_loss": lambda obs: obs.hosts.train_loss,
    "acc_gap": lambda obs: obs.hosts.train_acc - obs.hosts.val_acc,
    "loss_gap": lambda obs: obs.hosts.val_loss - obs.hosts.train_loss,
    "acc_slope": lambda obs: obs.hosts.val_acc - obs.hosts.prev_val_acc,
    "loss_slope": lambda obs: obs.hosts.val_loss - obs.hosts.prev_val_loss,
    "best_acc": lambda obs: obs.hosts.best_acc,
}
"""Features [N] by name: accuracies in percentage points, losses in the unit of the task, slopes since the step before.
NaN where a value is not measured: slopes in step 1, training accuracy in tasks without one."""


@dataclass(frozen=True, kw_only=True)
class ThresholdRule:
    """In step `step` follow `below` where the feature is below the threshold, else `above` (also where it is NaN)."""

    feature: str
    step: int
    threshold: float
    below: Schedule
    above: Schedule

    def check(self, spec: EngineSpec) -> None:
        """Raise ConfigError for an unknown feature, a step outside the episode, or a schedule that does not fit."""
        if self.feature not in FEATURES:
            raise ConfigError(f"the rule reads the unknown feature {self.feature!r}; {nearest(self.feature, FEATURES)}")
        if not 1 <= self.step <= spec.episode_length:
            raise ConfigError(
                f"the rule decides in step {self.step}; it must be one of the steps 1 to {spec.episode_length} of an "
                "episode."
            )
        for schedule in (self.below, self.above):
            schedule.check(spec)


@final
class FollowRule:
    """Follows a rule; raises ConfigError if it does not fit the engine.

    The memory's `which` is 0 for hosts that follow `below` and 1 for `above`; it is 1 before the step of the rule.
    """

    def __init__(self, rule: ThresholdRule, spec: EngineSpec) -> None:
        rule.check(spec)
        self.rule = rule
        self._read = FEATURES[rule.feature]
        self._table = ScheduleTable([rule.below, rule.above], spec)
        self._wait = canonical_actions(spec.device)[LifecycleOp.WAIT]

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Remaining:
        """Nothing is decided yet."""
        del episode
        return self._table.begin(torch.ones_like(hosts))

    def decide(self, obs: Observation, memory: Remaining) -> Int[Tensor, "N 8"]:
        """WAIT before the step of the rule, then the next action of the schedule."""
        if obs.t < self.rule.step:
            return self._wait.expand(obs.num_envs, -1).clone()
        return self._table.decide(obs, self._decided(obs, memory))

    def remember(self, memory: Remaining, step: StoredStep) -> Remaining:
        """Keep the schedule that was chosen, and remove the entry that was executed."""
        if step.t < self.rule.step:
            return memory
        return self._table.remember(self._decided(step.obs, memory), step)

    def _decided(self, obs: Observation, memory: Remaining) -> Remaining:
        if obs.t != self.rule.step:
            return memory
        return replace(memory, which=1 - is_below(self._read(obs), self.rule.threshold).to(torch.int64))


def is_below(feature: Float[Tensor, " N"], threshold: float) -> Bool[Tensor, " N"]:
    """Whether each host is below the threshold; False where the feature is NaN. Compared in float64."""
    return feature.to(torch.float64) < threshold
