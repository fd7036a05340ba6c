"""The hosts on which a search measures schedules: one engine, and J of each host after a pass.

A *pass* is one episode of all N hosts. Passes with the same episode number have the same hosts: equal initial weights
and data order. So candidates of one pass have different hosts, and candidates of several passes of one episode can have
the same ones.

Shape legend: N = hosts, C = candidates, H = hosts of each candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from esper.runs.assembly.assemble import dataset_of, device_of, engine_of, reward_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.report import objective_of
from esper.simic.client import ScriptedClient
from esper.tamiyo.schedules import FixedSchedules, Plan, ScheduleTable
from esper.tamiyo.scripted import Script, ScriptedPolicy

CONTROL_FROM = 4
"""Passes from which one of them is spent on waiting hosts, whose J explains part of the others' (at most a quarter)."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A candidate with its mean 100·J over `hosts` hosts, and the standard error of that mean (NaN for one host)."""

    plan: Plan
    objective: float
    error: float
    hosts: int

    @classmethod
    def of(cls, plan: Plan, values: np.ndarray) -> "Result":
        """From 100·J of each host [H]."""
        return cls(plan=plan, objective=float(values.mean()), error=standard_error(values), hosts=values.size)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")


@final
class TrainingHosts:
    """Fresh hosts of the run's own seed, which evaluation never uses.

    Args:
        config: of the run whose hosts these are.
        num_envs: N.
        on_pass: called after each control step with its share of a pass.
    """

    def __init__(self, config: RunConfig, num_envs: int, on_pass: Callable[[float], None] = lambda share: None) -> None:
        config = replace(config, compile="off", num_envs=num_envs)  # many short episodes, no learner
        device = device_of(config)
        self.engine = engine_of(
            config, dataset_of(config, device), device, on_step=lambda _: on_pass(1.0 / config.episode_length)
        )
        self.spec, self.num_envs = self.engine.spec, num_envs
        self._config, self._reward = config, reward_of(config, self.spec)
        self.passes = 0
        self._episodes = 0

    @property
    def env_steps(self) -> int:
        """Hosts x control steps so far."""
        return self.passes * self.num_envs * self.spec.episode_length

    def new_episode(self) -> int:
        """The number of an episode whose hosts no candidate has had."""
        self._episodes += 1
        return self._episodes - 1

    def measure(self, script: Script[Any], episode: int) -> np.ndarray:
        """100·J of each host [N] after one pass; an accuracy that is not a number counts as 0, as in the reward."""
        client = ScriptedClient(ScriptedPolicy(script, self.spec), self._reward)
        self.engine.reset(client, episode)
        stats = self.engine.rollout(client)
        assert stats is not None, "nothing stops a pass"
        self.passes += 1
        known = replace(stats, committed_acc=np.nan_to_num(stats.committed_acc, nan=0.0))
        return objective_of(known, self._config.reward)

    def follow(self, plan: Plan, episode: int) -> np.ndarray:
        """100·J of each host [N] where all follow one plan."""
        return self.measure(FixedSchedules(ScheduleTable([plan.schedule(self.spec)], self.spec)), episode)


def ranked(hosts: TrainingHosts, plans: Sequence[Plan], passes: int) -> list[Result]:
    """The plans by mean J on new hosts, best first, in at most `passes` passes.

    With as many passes as plans, every plan is measured on all hosts of the same episodes. With fewer, several plans
    share a pass: the hosts are divided into groups, and plans that follow each other in one group have the same hosts.
    """
    if passes >= len(plans):
        values = _on_equal_hosts(hosts, plans, passes // len(plans))
    else:
        values = _side_by_side(hosts, plans, passes)
    results = [Result.of(plan, row) for plan, row in zip(plans, values, strict=True)]
    return sorted(results, key=lambda result: -result.objective)


def _on_equal_hosts(hosts: TrainingHosts, plans: Sequence[Plan], episodes: int) -> np.ndarray:
    """J [C, H] of each plan on the same H = N x episodes hosts."""
    numbers = [hosts.new_episode() for _ in range(episodes)]
    return np.stack([np.concatenate([hosts.follow(plan, e) for e in numbers]) for plan in plans])


def _side_by_side(hosts: TrainingHosts, plans: Sequence[Plan], passes: int) -> np.ndarray:
    """J [C, H] of plans that share passes over the hosts of one episode, in groups of H."""
    episode, spec = hosts.new_episode(), hosts.spec
    control = hosts.follow(Plan(), episode) if passes >= CONTROL_FROM else None
    groups = -(-len(plans) // (passes - (control is not None)))
    size = hosts.num_envs // groups
    assert size >= 1, "at most N plans share a pass"
    table = ScheduleTable([plan.schedule(spec) for plan in plans], spec)
    members = np.arange(groups * size).reshape(groups, size)
    own = np.minimum(np.arange(hosts.num_envs) // size, groups - 1)
    rows = []
    for first in range(0, len(plans), groups):
        which = np.minimum(first + own, len(plans) - 1)  # plans that do not fill the last pass are repeated, unread
        measured = hosts.measure(FixedSchedules(table, torch.from_numpy(which).to(spec.device)), episode)
        rows += [measured[group] for group in members[: len(plans) - first]]
    values = np.stack(rows)
    if control is None:
        return values
    return adjusted(values, np.stack([control[members[c % groups]] for c in range(len(plans))]), control.mean())


def adjusted(values: np.ndarray, control: np.ndarray, mean: float) -> np.ndarray:
    """J [C, H] without the part that J of the same hosts under waiting, `control` [C, H], explains.

    The slope is estimated within candidates and kept between 0 (hosts have nothing in common but the task) and 1 (each
    host adds the same to all its candidates); `mean` is that of all waiting hosts.
    """
    x, y = control - control.mean(axis=1, keepdims=True), values - values.mean(axis=1, keepdims=True)
    spread = float((x * x).sum())
    slope = min(max(float((x * y).sum()) / spread, 0.0), 1.0) if spread > 0.0 else 0.0
    return values - slope * (control - mean)
