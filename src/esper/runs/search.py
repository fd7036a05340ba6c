"""The best constant schedule and the best rule with one threshold, found on training hosts with a stated budget.

    grid          successive halving over one blueprint in one slot, two slots or all slots, from several steps
    neighbours    the same over the winners and plans that differ from one of them in one choice
    rules         J of the winners on the same hosts, and the threshold that would have divided them best
    confirmation  the best schedules and rules on the same new hosts; the winners, and their J, are taken from here

The budget counts every env-step, also those of candidates that lose.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.files import replacing
from esper.leyline.messages import EngineSpec
from esper.leyline.random import Stream, local_generator
from esper.runs.config import RunConfig
from esper.runs.rule_search import PlannedRule, best_rules, observed
from esper.runs.search_hosts import Result, TrainingHosts, ranked, standard_error
from esper.runs.training import RUNS
from esper.tamiyo.plans import Plan, grid, neighbours
from esper.tamiyo.policy_files import script_of, write_policy
from esper.tasks.registry import task_by_name
from esper.telemetry.run_directory import plain_json

LEAST_PASSES = 10
SCHEDULE_FILE, RULE_FILE, REPORT_FILE = "best_schedule.json", "best_rule.json", "search.json"
_KEPT, _PARENTS = 8, 4
_FOR_RULES, _FOR_GRID = 0.3, 0.6
"""Share of the budget for rules and confirmation, and of the rest for the grid."""
_LEAST_FOR_RULES = 5  # passes: waiting, two schedules, and the confirmation of a schedule and a rule
_TWO_ROUNDS = 16  # passes from which neighbours of the improved winners are tried too
_POOLS = ((6, (1, 3, 5)), (4, (1, 3, 5)), (3, (1, 3)), (2, (1, 3)), (2, (1,)))
"""Schedules and steps of the rule search: the first that three quarters of its passes measure on `_ENOUGH` hosts."""
_ENOUGH = 64
_PLENTY, _MOST_SCRIPTED = 40, 256  # passes of a search on scripted hosts, and their number
_FINALISTS = (2, 3)  # schedules, rules


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A schedule or a rule with 100·J of every host of the confirmation."""

    policy: Plan | PlannedRule
    values: np.ndarray

    @property
    def objective(self) -> float:
        """Mean 100·J."""
        return float(self.values.mean())


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        schedule, rule: the winners; no rule if the hosts did not differ in any feature.
        waiting: mean 100·J of waiting hosts in the rule search. best: the best schedules of the last rung.
        rungs: all results by stage. env_steps: spent.
    """

    config: RunConfig
    spec: EngineSpec
    num_envs: int
    budget: int
    env_steps: int
    waiting: float
    schedule: Confirmed
    rule: Confirmed | None
    best: Sequence[Result]
    rungs: Sequence[tuple[str, Sequence[Result]]]

    def write(self, folder: Path) -> None:
        """Write the winners as policy files, and the report with all candidates."""
        folder.mkdir(parents=True, exist_ok=True)
        task, plan = self.config.task, self.schedule.policy
        assert isinstance(plan, Plan)
        write_policy(folder / SCHEDULE_FILE, plan.schedule(self.spec), task, self._found(self.schedule), self.spec)
        (folder / RULE_FILE).unlink(missing_ok=True)  # of an earlier search
        if self.rule is not None:
            assert isinstance(self.rule.policy, PlannedRule)
            rule = self.rule.policy.rule(self.spec)
            write_policy(folder / RULE_FILE, rule, task, self._found(self.rule), self.spec)
        with replacing(folder / REPORT_FILE) as file:
            json.dump(plain_json(self.report()), file, indent=2)

    def _found(self, winner: Confirmed) -> dict[str, Any]:
        """How a winner was found, for its file."""
        return {
            "budget": self.budget,
            "env_steps": self.env_steps,
            "episode_length": self.config.episode_length,
            "seed": self.config.seed,
            "objective": winner.objective,
            "objective_hosts": winner.values.size,
            "objective_of_waiting": self.waiting,
        }

    def report(self) -> dict[str, Any]:
        """All candidates with J as JSON values."""
        return {
            "task": self.config.task,
            "seed": self.config.seed,
            "budget": self.budget,
            "env_steps": self.env_steps,
            "num_envs": self.num_envs,
            "episode_length": self.config.episode_length,
            "waiting": self.waiting,
            "schedule": self._confirmed(self.schedule),
            "rule": self._confirmed(self.rule) if self.rule else None,
            "rungs": [
                {"stage": stage, "candidates": [self._candidate(result) for result in results]}
                for stage, results in self.rungs
            ],
        }

    def _confirmed(self, winner: Confirmed) -> dict[str, Any]:
        return {
            "name": winner.policy.words(self.spec),
            "objective": winner.objective,
            "standard_error": standard_error(winner.values),
            "hosts": winner.values.size,
        }

    def _candidate(self, result: Result) -> dict[str, Any]:
        return {
            "name": result.plan.words(self.spec),
            "objective": result.objective,
            "standard_error": result.error,
            "hosts": result.hosts,
        }


def default_budget(config: RunConfig) -> int:
    """The env-steps of a training run of this configuration."""
    return config.rounds * config.num_envs * config.episode_length


def default_num_envs(config: RunConfig, budget: int) -> int:
    """As in training. Scripted hosts cost nothing, so more of them share a pass while the passes suffice."""
    if task_by_name(config.task).script is None:
        return config.num_envs
    return min(max(budget // (_PLENTY * config.episode_length), config.num_envs), _MOST_SCRIPTED)


def free_name(config: RunConfig) -> Path:
    """The first free name of runs/<task>-search-s<seed>, ...-2, ...-3."""
    name = f"{config.task}-search-s{config.seed}"
    candidates = (RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())


def passes_of(budget: int, num_envs: int, episode_length: int) -> int:
    """Whole episodes of all hosts in a budget of env-steps; raises ConfigError if they are too few for a search."""
    passes = budget // (num_envs * episode_length)
    if passes < LEAST_PASSES:
        raise ConfigError(
            f"a budget of {budget:,} env-steps is {passes} episodes of {num_envs} hosts x {episode_length} steps; a "
            f"search needs {LEAST_PASSES}: give --budget {LEAST_PASSES * num_envs * episode_length}, or a smaller "
            "--num-envs."
        )
    return passes


def search(
    config: RunConfig,
    *,
    budget: int,
    num_envs: int,
    on_pass: Callable[[float], None] = lambda share: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Found:
    """Search for the best schedule and rule of a task.

    Args:
        config: task, seed, and weights of J.
        budget: env-steps.
        num_envs: hosts that run at once.
        on_pass: called after each control step with its share of a pass.
        on_stage: takes the name of each stage when it begins.

    Raises:
        ConfigError, DataError: the budget is too small, or the hosts cannot be built.
    """
    passes = passes_of(budget, num_envs, config.episode_length)
    hosts = TrainingHosts(config, num_envs, on_pass)
    spec, rungs = hosts.spec, list[tuple[str, list[Result]]]()

    def run(stage: str, plans: Sequence[Plan], share: int, keep: int) -> list[Result]:
        on_stage(stage)
        found = halve(hosts, plans, share, keep)
        rungs.extend((stage, results) for results in found)
        return found[-1]

    for_schedules = passes - max(int(passes * _FOR_RULES), _LEAST_FOR_RULES)
    for_grid = int(for_schedules * _FOR_GRID)
    for_neighbours = for_schedules - for_grid
    waiting, *others = grid(spec)
    results = run("grid", [waiting, *shuffled(others, config.seed, 0)], for_grid, _KEPT)
    rounds = 1 + (for_neighbours >= _TWO_ROUNDS)
    for number in range(1, rounds + 1):
        parents = [result.plan for result in results[:_PARENTS]]
        near = dict.fromkeys(other for plan in parents for other in neighbours(plan, spec))
        new = [plan for plan in near if plan not in parents]
        results = run("neighbours", [*parents, *shuffled(new, config.seed, number)], for_neighbours // rounds, _KEPT)
    winners = [result.plan for result in results]
    waited, schedules, rules = _confirmed(hosts, winners, passes - hosts.passes, on_stage)
    return Found(
        config=config,
        spec=spec,
        num_envs=num_envs,
        budget=budget,
        env_steps=hosts.env_steps,
        waiting=waited,
        schedule=max(schedules, key=lambda found: found.objective),
        rule=max(rules, key=lambda found: found.objective, default=None),
        best=results,
        rungs=rungs,
    )


def _confirmed(
    hosts: TrainingHosts, winners: Sequence[Plan], passes: int, on_stage: Callable[[str], None]
) -> tuple[float, list[Confirmed], list[Confirmed]]:
    """J of waiting, and the best schedules and rules on the same new hosts."""
    on_stage("rules")
    steps, plans = _pool(winners, passes, hosts.num_envs)
    values, features = observed(hosts, plans, steps, max(passes * 3 // 4 // (1 + len(plans)), 1))
    pool = [Plan(), *plans]
    passes = passes - values.shape[1] // hosts.num_envs * len(pool)
    by_value = [pool[k] for k in np.argsort(-values.mean(axis=1), kind="stable")]
    most_schedules, most_rules = _FINALISTS if passes >= sum(_FINALISTS) else (1, 1)
    finalists: list[Plan | PlannedRule] = [*by_value[:most_schedules], *best_rules(pool, values, features, most_rules)]
    on_stage("confirmation")
    episodes = [hosts.new_episode() for _ in range(passes // len(finalists))]
    found = [
        Confirmed(policy=policy, values=np.concatenate([_followed(hosts, policy, e) for e in episodes]))
        for policy in finalists
    ]
    of_plans = [one for one in found if isinstance(one.policy, Plan)]
    return float(values[0].mean()), of_plans, [one for one in found if isinstance(one.policy, PlannedRule)]


def _pool(winners: Sequence[Plan], passes: int, num_envs: int) -> tuple[tuple[int, ...], list[Plan]]:
    """Steps of observation, and the winners that begin in one of them or later; different seeds first."""
    by_seeds: dict[object, Plan] = {}
    for plan in winners:
        by_seeds.setdefault(plan.seeds, plan)
    ordered = list(dict.fromkeys((*by_seeds.values(), *winners)))
    for number, steps in _POOLS:
        plans = [plan.delayed(step) for plan in ordered[:number] for step in steps]
        plans = [plan for plan in dict.fromkeys(plans) if plan.seeds]
        if (1 + len(plans)) * -(-_ENOUGH // num_envs) <= passes * 3 // 4:
            break
    return steps, plans


def _followed(hosts: TrainingHosts, policy: Plan | PlannedRule, episode: int) -> np.ndarray:
    if isinstance(policy, Plan):
        return hosts.follow(policy, episode)
    return hosts.measure(script_of(policy.rule(hosts.spec), hosts.spec), episode)


SURVIVING = 4
"""One in how many survives a rung."""
LEAST_HOSTS = 2
"""Of a candidate in the first rung."""
_MOST_RUNGS = 3


def halve(hosts: TrainingHosts, plans: Sequence[Plan], passes: int, keep: int) -> list[list[Result]]:
    """Successive halving (Jamieson and Talwalkar, 2016): many candidates on few hosts, then the best ones on more.

    rung 1    128 plans,  2 hosts each
    rung 2     32 plans,  8 hosts each      a quarter survives; every rung has new hosts and costs about the same
    rung 3      8 plans, 32 hosts each

    Returns the results of each rung, best first; the last one has at least `keep` plans, if there are so many.

    Args:
        hosts: where the plans are measured.
        plans: more than the passes can measure are left out from the end, so those that matter most come first.
        passes: the budget.
        keep: plans whose order the last rung tells.
    """
    rungs = number_of_rungs(len(plans), passes, keep)
    side_by_side = max(hosts.num_envs // LEAST_HOSTS, 1)
    share, found = passes // rungs, list[list[Result]]()
    survivors = list(plans[: max(share - (share >= 4), 1) * side_by_side])
    for rung in range(rungs):
        last = rung == rungs - 1
        found.append(ranked(hosts, survivors, share + passes % rungs * last))
        survivors = [result.plan for result in found[-1][: max(-(-len(survivors) // SURVIVING), keep)]]
    return found


def number_of_rungs(plans: int, passes: int, keep: int) -> int:
    """Rungs that leave at least two passes to each, and end as soon as `keep` plans are left."""
    rungs = 1
    while rungs < _MOST_RUNGS and passes // (rungs + 1) >= 2 and plans > keep:
        rungs, plans = rungs + 1, -(-plans // SURVIVING)
    return rungs


def shuffled(plans: Sequence[Plan], seed: int, round_number: int) -> list[Plan]:
    """The plans in an order that is random, but equal for equal seeds."""
    own = local_generator(seed, Stream.SCHEDULE_SEARCH, episode=round_number)
    return [plans[i] for i in torch.randperm(len(plans), generator=own).tolist()]
