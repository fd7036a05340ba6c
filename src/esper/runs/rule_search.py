"""The best rule with one threshold, chosen in hindsight.

Schedules that begin in step s leave the hosts alone before, so a host that waits until s shows there what it would have
shown under any of them. One pass of waiting gives the features, one pass per schedule gives J, on the same hosts; then
J of every rule is known without running it: J of `below` on the hosts below the threshold and of `above` on the others.

Shape legend: N = hosts, K = schedules, H = all hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.runs.search_hosts import TrainingHosts
from esper.tamiyo.baselines import WaitOnly
from esper.tamiyo.plans import Plan
from esper.tamiyo.rules import FEATURES, ThresholdRule
from esper.tamiyo.scripted import NoMemory
from esper.tolaria.runtime import host_read

QUANTILES = tuple(i / 8 for i in range(1, 8))
"""Thresholds that are tried, so that at least an eighth of the hosts is on each side, and never fewer than four."""
_LEAST_HOSTS = 4
Features = dict[tuple[int, str], np.ndarray]


@dataclass(frozen=True)
class PlannedRule:
    """A rule between two plans: `below` where the feature is below the threshold, else `above`."""

    feature: str
    step: int
    threshold: float
    below: Plan
    above: Plan

    def rule(self, spec: EngineSpec) -> ThresholdRule:
        """The rule with its schedules."""
        return ThresholdRule(
            feature=self.feature,
            step=self.step,
            threshold=self.threshold,
            below=self.below.schedule(spec),
            above=self.above.schedule(spec),
        )

    def words(self, spec: EngineSpec) -> str:
        """The rule in two sentences."""
        return (
            f"in step {self.step}, if {self.feature} < {self.threshold:.4g}: {self.below.words(spec)}. "
            f"Else: {self.above.words(spec)}."
        )


@final
class Watching:
    """Waits, and keeps the features of the hosts in some steps."""

    def __init__(self, spec: EngineSpec, steps: Sequence[int]) -> None:
        self._wait, self._steps = WaitOnly(spec), steps
        self.seen: dict[tuple[int, str], Tensor] = {}

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> NoMemory:
        """No memory: what was seen is no input of a decision."""
        return self._wait.begin(episode, hosts)

    def decide(self, obs: Observation, memory: NoMemory) -> Int[Tensor, "N 8"]:
        """WAIT."""
        if obs.t in self._steps:
            self.seen |= {(obs.t, name): read(obs).to(torch.float64) for name, read in FEATURES.items()}
        return self._wait.decide(obs, memory)

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """No memory."""
        return self._wait.remember(memory, step)


def observed(
    hosts: TrainingHosts, plans: Sequence[Plan], steps: Sequence[int], episodes: int
) -> tuple[np.ndarray, Features]:
    """J [1 + K, H] of waiting and of each plan on the same new hosts, and the features [H] of these hosts.

    It takes (1 + K) x `episodes` passes.
    """
    values, features = [], list[Features]()
    for episode in [hosts.new_episode() for _ in range(episodes)]:
        watching = Watching(hosts.spec, steps)
        waited = hosts.measure(watching, episode)
        values.append(np.stack([waited, *(hosts.follow(plan, episode) for plan in plans)]))
        features.append(dict(zip(watching.seen, host_read(*watching.seen.values()), strict=True)))
    joined = {place: np.concatenate([found[place] for found in features]) for place in features[0]}
    return np.concatenate(values, axis=1), joined


def best_rules(plans: Sequence[Plan], values: np.ndarray, features: Features, count: int) -> list[PlannedRule]:
    """The best rules in hindsight, best first: one for each feature and step, of those that decide alike only one.

    Args:
        plans: waiting and others, in the order of `values`.
        values: J [K, H].
        features: [H] by step and name; those that are missing (NaN) for a host are left out.
        count: how many rules.
    """
    found: dict[object, tuple[float, PlannedRule]] = {}
    for (step, name), feature in features.items():
        usable = [k for k, plan in enumerate(plans) if plan.delayed(step) == plan]
        sides = list(_sides(feature, usable, values))
        if sides:
            mean, threshold, below, above = max(sides)
            decision = ((feature < threshold).tobytes(), below, above)
            found.setdefault(decision, (mean, PlannedRule(name, step, threshold, plans[below], plans[above])))
    best = sorted(found.values(), key=lambda pair: -pair[0])
    return [rule for _, rule in best[:count]]


def _sides(feature: np.ndarray, usable: Sequence[int], values: np.ndarray) -> Iterator[tuple[float, float, int, int]]:
    """Mean J, threshold, and the plans below and above it, for each threshold that divides the hosts."""
    if not np.isfinite(feature).all():
        return
    for threshold in np.unique(np.quantile(feature, QUANTILES)).tolist():
        below = feature < threshold
        if min(below.sum(), (~below).sum()) < _LEAST_HOSTS or len(usable) < 2:
            continue
        low, high = values[usable][:, below].sum(axis=1), values[usable][:, ~below].sum(axis=1)
        total = low[:, None] + high[None, :]
        np.fill_diagonal(total, -np.inf)  # the same plan on both sides is no rule
        k, m = np.unravel_index(int(total.argmax()), total.shape)
        yield float(total[k, m]) / feature.size, threshold, usable[int(k)], usable[int(m)]
