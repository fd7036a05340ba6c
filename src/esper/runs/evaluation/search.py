"""The best constant schedule, rule with one threshold, heuristic, or portfolio, found with a stated budget.

`search`:
    grid          successive halving over one blueprint in one slot, two slots or all slots, from several steps
    neighbours    the same over the winners and plans that differ from one of them in one choice
    rules         J of the winners on the same hosts, and the threshold that would have divided them best
    confirmation  the best schedules and rules on the same new hosts; the winners, and their J, are taken from here
`tune`:
    random        different choices of `HeuristicRules`, each on all N hosts of the same episode
    neighbours    twice: the best, and rules that differ from one of them in one choice, on new hosts
    confirmation  the best on the same new hosts
`PlanSearch`:
    singles       no seed, and each blueprint in each slot from step 1, on the same hosts
    pairs         those whose seeds are best alone
    races         portfolios and halvings of all of them, computed from their curves (`races.best_plans`)

The budget counts every env-step, also those of candidates that lose. A *pass* is one episode of all N hosts. Passes
with the same episode number have the same hosts: equal initial weights and data order. So candidates of one pass have
different hosts, and candidates of several passes of one episode can have the same ones.

Shape legend: N = hosts, C = candidates, H = hosts of each candidate, K = schedules.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.architecture import Architecture
from esper.leyline.errors import ConfigError, command
from esper.leyline.files import replacing
from esper.leyline.lifecycle import TEMPO_NAMES
from esper.leyline.messages import EngineSpec, Observation
from esper.leyline.random import Stream, local_generator
from esper.leyline.ranks import group
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import fixed
from esper.runs.evaluation.outcomes import OutcomeStore, key_of, run_controller
from esper.runs.evaluation.races import Curves, Plans, best_plans, of_seeds, single_seeds, write_plans
from esper.runs.evaluation.results import Outcome, spent
from esper.runs.evaluation.tables import plain_table, short
from esper.runs.report import objective_of
from esper.simic.client import ScriptedClient
from esper.tamiyo.baselines import DEFAULT_RULES, HeuristicRules, WaitOnly
from esper.tamiyo.policy_files import Policy, script_of, write_policy
from esper.tamiyo.schedules import (
    FEATURES,
    FixedSchedules,
    NoMemory,
    Plan,
    Script,
    ScriptedPolicy,
    ThresholdRule,
    grid,
    neighbours,
)
from esper.tasks.registry import task_by_name
from esper.telemetry.progress import PassProgress, RunConsole
from esper.telemetry.run_directory import plain_json
from esper.tolaria.runtime import host_read

LEAST_PASSES = 10
SCHEDULE_FILE, RULE_FILE, HEURISTIC_FILE = "best_schedule.json", "best_rule.json", "best_heuristic.json"
SHOWN = 10
LEGEND = "100·J: mean over training hosts with its standard error"
_PLENTY, _MOST_SCRIPTED = 40, 256  # passes of a search on scripted hosts, and their number
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
        below, above = self.below.schedule(spec), self.above.schedule(spec)
        return ThresholdRule(feature=self.feature, step=self.step, threshold=self.threshold, below=below, above=above)

    def words(self, spec: EngineSpec) -> str:
        """The rule in two sentences."""
        return (
            f"in step {self.step}, if {self.feature} < {self.threshold:.4g}: {self.below.words(spec)}. "
            f"Else: {self.above.words(spec)}."
        )


def policy_of(candidate: Plan | PlannedRule | HeuristicRules, spec: EngineSpec) -> Policy:
    """What hosts follow, and what a file holds."""
    if isinstance(candidate, Plan):
        return candidate.schedule(spec)
    return candidate.rule(spec) if isinstance(candidate, PlannedRule) else candidate


P = TypeVar("P", Plan, PlannedRule, HeuristicRules)


@dataclass(frozen=True, kw_only=True)
class Tried(Generic[P]):
    """A candidate with 100·J of each host on which it was tried [H]."""

    policy: P
    values: np.ndarray

    @property
    def objective(self) -> float:
        """Mean 100·J."""
        return float(self.values.mean())

    @property
    def error(self) -> float:
        """Standard error of that mean; NaN for one host."""
        return float(self.values.std(ddof=1) / np.sqrt(self.values.size)) if self.values.size > 1 else math.nan

    def __str__(self) -> str:
        return f"{self.objective:.2f}" if math.isnan(self.error) else f"{self.objective:.2f} ± {self.error:.2f}"


AnyTried = Tried[Plan] | Tried[PlannedRule] | Tried[HeuristicRules]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        env_steps: spent. waiting: mean 100·J of waiting hosts in the rule search; None where the heuristic was tuned.
        schedule, rule, heuristic: the winners; no rule if the hosts did not differ in any feature.
        stages: all results by stage.
    """

    config: RunConfig
    spec: EngineSpec
    budget: int
    env_steps: int
    stages: Sequence[tuple[str, Sequence[AnyTried]]]
    waiting: float | None = None
    schedule: Tried[Plan] | None = None
    rule: Tried[PlannedRule] | None = None
    heuristic: Tried[HeuristicRules] | None = None

    @property
    def report_file(self) -> str:
        """Name of the report."""
        return "search.json" if self.heuristic is None else "heuristic_search.json"

    def winners(self) -> dict[str, AnyTried]:
        """The winners by the name of their file."""
        found = {SCHEDULE_FILE: self.schedule, RULE_FILE: self.rule, HEURISTIC_FILE: self.heuristic}
        return {name: winner for name, winner in found.items() if winner is not None}

    def write(self, folder: Path) -> None:
        """Write the winners as policy files, and the report with all candidates."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.schedule is not None:
            (folder / RULE_FILE).unlink(missing_ok=True)  # of an earlier search
        for name, winner in self.winners().items():
            found = self._size() | {"objective": winner.objective, "objective_hosts": winner.values.size}
            found |= {} if self.waiting is None else {"objective_of_waiting": self.waiting}
            write_policy(folder / name, policy_of(winner.policy, self.spec), self.config.task, found, self.spec)
        with replacing(folder / self.report_file) as file:
            json.dump(plain_json(self.report()), file, indent=2)

    def _size(self) -> dict[str, Any]:
        of_hosts = {"episode_length": self.config.episode_length, "seed": self.config.seed}
        return {"budget": self.budget, "env_steps": self.env_steps, **of_hosts}

    def report(self) -> dict[str, Any]:
        """All candidates with J as JSON values."""

        def candidate(tried: AnyTried) -> dict[str, Any]:
            return {
                "name": tried.policy.words(self.spec),
                "objective": tried.objective,
                "standard_error": tried.error,
                "hosts": tried.values.size,
            }

        found = {"schedule": self.schedule, "rule": self.rule, "heuristic": self.heuristic}
        winners = {name: candidate(winner) if winner else None for name, winner in found.items()}
        stages = [{"stage": name, "candidates": [candidate(one) for one in tried]} for name, tried in self.stages]
        size = {"task": self.config.task, "num_envs": self.config.num_envs, **self._size()}
        return {**size, "waiting": self.waiting, **winners, "stages": stages}

    def show(self, folder: Path, console: RunConsole) -> None:
        """Print the best candidates, the winners in words, and where the files are."""
        page = plain_table("schedule" if self.heuristic is None else "rules", "100·J", "hosts", fold=True)
        newest: dict[object, AnyTried] = {}  # later stages have more hosts, and only the best candidates
        for tried in (one for _, of_stage in reversed(self.stages) for one in of_stage):
            newest.setdefault(tried.policy, tried)
        for tried in list(newest.values())[:SHOWN]:
            page.add_row(tried.policy.words(self.spec), str(tried), str(tried.values.size))
        console.print("", page, sep="\n")
        console.say("\n".join(("", *self._sentences())))
        files = list(self.winners())
        console.say(f"written to {folder}: {', '.join((*files, self.report_file))}")
        of_task = (*(folder / name for name in files), "--task", self.config.task)
        console.say(f"compare on new hosts: {command('evaluate', *of_task, plugins=self.config.plugins)}")

    def _sentences(self) -> Iterator[str]:
        """What the table means, and the winners in words, with J of the confirmation."""
        if self.schedule is None:
            yield f"{LEGEND}."
            return
        yield f"{LEGEND}; a seed is fossilized as soon as legal, or held longer."
        yield f"wait_only: {self.waiting:.2f}"
        for name, winner in (("schedule", self.schedule), ("rule", self.rule)):
            if winner is not None:
                where = f"{winner} on {winner.values.size} new training hosts"
                yield f"best {name}, {where}: {winner.policy.words(self.spec)}"
        if self.rule is None:
            yield "no rule: the hosts do not differ in any feature, or too few schedules were compared"
        elif self.rule.objective <= self.schedule.objective:
            yield "The rule is not better than the schedule on these hosts."


def default_budget(config: RunConfig) -> int:
    """The env-steps of a training run of this configuration."""
    return config.rounds * config.num_envs * config.episode_length


def default_num_envs(config: RunConfig, budget: int) -> int:
    """As in training. Scripted hosts cost nothing, so more of them share a pass while the passes suffice."""
    if task_by_name(config.task).script is None:
        return config.num_envs
    return min(max(budget // (_PLENTY * config.episode_length), config.num_envs), _MOST_SCRIPTED)


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


@final
class TrainingHosts:
    """N fresh hosts of the run's own seed, which evaluation never uses; `progress` advances with each control step."""

    def __init__(self, config: RunConfig, num_envs: int, progress: PassProgress | None = None) -> None:
        self.config = config = replace(config, compile="off", num_envs=num_envs)  # many short episodes, no learner
        self.progress = shown = progress or PassProgress(RunConsole(quiet=True), 0)
        device = device_of(config)
        self.engine = engine_of(
            config, dataset_of(config, device), device, on_step=lambda _: shown.advance(1.0 / config.episode_length)
        )
        self.spec, self.num_envs = self.engine.spec, num_envs
        self._reward = reward_of(config, self.spec)
        self.passes = 0
        self._episodes = 0

    @property
    def env_steps(self) -> int:
        """Hosts x control steps so far."""
        return self.passes * self.num_envs * self.spec.episode_length

    def new_episodes(self, number: int) -> list[int]:
        """The numbers of episodes whose hosts no candidate has had."""
        self._episodes += number
        return list(range(self._episodes - number, self._episodes))

    def measure(self, script: Script[Any], episode: int) -> np.ndarray:
        """100·J of each host [N] after one pass; an accuracy that is not a number counts as 0, as in the reward."""
        client = ScriptedClient(ScriptedPolicy(script, self.spec), self._reward)
        self.engine.reset(client, episode)
        stats = self.engine.rollout(client)
        assert stats is not None, "nothing stops a pass"
        self.passes += 1
        known = replace(stats, committed_acc=np.nan_to_num(stats.committed_acc, nan=0.0))
        return objective_of(known, self.config.reward)

    def follow(self, policy: Plan | PlannedRule | HeuristicRules, episode: int) -> np.ndarray:
        """100·J of each host [N] where all follow one policy."""
        return self.measure(script_of(policy_of(policy, self.spec), self.spec), episode)

    def each(self, passes: Sequence[Callable[[], np.ndarray]]) -> list[np.ndarray]:
        """What each of some passes measures, which do not depend on each other: ranks share them."""
        own = {i: passes[i]() for i in range(group().rank, len(passes), group().size)}
        self.passes += len(passes) - len(own)
        found = {i: values for part in group().gathered(own) for i, values in part.items()}
        return [found[i] for i in range(len(passes))]

    def tried(self, policies: Sequence[P], episodes: Sequence[int]) -> list[Tried[P]]:
        """Each policy on all hosts of the same episodes, H = N x episodes; best first."""
        values = self.each([partial(self.follow, p, e) for p in policies for e in episodes])
        rows = [np.concatenate(values[i : i + len(episodes)]) for i in range(0, len(values), len(episodes))]
        return best_first(policies, rows)


def best_first(policies: Sequence[P], rows: Iterable[np.ndarray]) -> list[Tried[P]]:
    """The policies with J of their hosts [H], by mean J."""
    tried = [Tried(policy=policy, values=row) for policy, row in zip(policies, rows, strict=True)]
    return sorted(tried, key=lambda one: -one.objective)


# -- schedules ---------------------------------------------------------------------------------------------------------

CONTROL_FROM = 4
"""Passes from which one of them is spent on waiting hosts, whose J explains part of the others' (at most a quarter)."""
SURVIVING = 4
"""One in how many survives a rung."""
LEAST_HOSTS = 2
"""Of a candidate in the first rung."""
_MOST_RUNGS = 3
_KEPT, _PARENTS = 8, 4
_FOR_RULES, _FOR_GRID = 0.3, 0.6
"""Share of the budget for rules and confirmation, and of the rest for the grid."""
_LEAST_FOR_RULES = 5  # passes: waiting, two schedules, and the confirmation of a schedule and a rule
_TWO_ROUNDS = 16  # passes from which neighbours of the improved winners are tried too
_POOLS = ((6, (1, 3, 5)), (4, (1, 3, 5)), (3, (1, 3)), (2, (1, 3)), (2, (1,)))
"""Schedules and steps of the rule search: the first that three quarters of its passes measure on `_ENOUGH` hosts."""
_ENOUGH = 64
_FINALISTS = (2, 3)  # schedules, rules


def search(config: RunConfig, *, budget: int, num_envs: int, progress: PassProgress | None = None) -> Found:
    """Search for the best schedule and rule of a task with a `budget` of env-steps; `num_envs` hosts run at once.

    Raises:
        ConfigError, DataError: the budget is too small, or the hosts cannot be built.
    """
    passes = passes_of(budget, num_envs, config.episode_length)
    hosts = TrainingHosts(config, num_envs, progress)
    stages = _schedules(hosts, passes - max(int(passes * _FOR_RULES), _LEAST_FOR_RULES))
    winners = [tried.policy for tried in stages[-1][1]]
    waiting, schedule, rule = _with_rules(hosts, winners, passes - hosts.passes)
    return Found(
        config=hosts.config,
        spec=hosts.spec,
        budget=budget,
        env_steps=hosts.env_steps,
        stages=stages,
        waiting=waiting,
        schedule=schedule,
        rule=rule,
    )


def _schedules(hosts: TrainingHosts, passes: int) -> list[tuple[str, list[Tried[Plan]]]]:
    """The rungs of the grid, then those of the neighbours of its winners; the best schedules are in the last one."""
    stages = list[tuple[str, list[Tried[Plan]]]]()

    def run(stage: str, plans: Sequence[Plan], share: int) -> list[Plan]:
        hosts.progress.stage(stage)
        stages.extend((stage, rung) for rung in halve(hosts, plans, share, _KEPT))
        return [tried.policy for tried in stages[-1][1][:_PARENTS]]

    for_grid = int(passes * _FOR_GRID)
    left, seed = passes - for_grid, hosts.config.seed
    waiting, *others = grid(hosts.spec)
    parents = run("grid", [waiting, *shuffled(others, seed, 0)], for_grid)
    rounds = 1 + (left >= _TWO_ROUNDS)
    for number in range(1, rounds + 1):
        near = dict.fromkeys(other for plan in parents for other in neighbours(plan, hosts.spec))
        new = [plan for plan in near if plan not in parents]
        parents = run("neighbours", [*parents, *shuffled(new, seed, number)], left // rounds)
    return stages


def _with_rules(
    hosts: TrainingHosts, winners: Sequence[Plan], passes: int
) -> tuple[float, Tried[Plan], Tried[PlannedRule] | None]:
    """Mean J of waiting, the best schedule, and the best rule between two of the winners, if there is one."""
    hosts.progress.stage("rules")
    steps, plans = _pool(winners, passes, hosts.num_envs)
    values, features = observed(hosts, plans, steps, max(passes * 3 // 4 // (1 + len(plans)), 1))
    pool = [Plan(), *plans]
    passes -= values.shape[1] // hosts.num_envs * len(pool)
    by_value = [pool[k] for k in np.argsort(-values.mean(axis=1), kind="stable")]
    most_schedules, most_rules = _FINALISTS if passes >= sum(_FINALISTS) else (1, 1)
    rules = best_rules(pool, values, features, most_rules)
    hosts.progress.stage("confirmation")
    finalists = by_value[:most_schedules]
    episodes = hosts.new_episodes(passes // (len(finalists) + len(rules)))
    schedule, rule = hosts.tried(finalists, episodes)[0], next(iter(hosts.tried(rules, episodes)), None)
    return float(values[0].mean()), schedule, rule


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


def halve(hosts: TrainingHosts, plans: Sequence[Plan], passes: int, keep: int) -> list[list[Tried[Plan]]]:
    """Successive halving (Jamieson and Talwalkar, 2016): many candidates on few hosts, then the best ones on more.

    rung 1    128 plans,  2 hosts each
    rung 2     32 plans,  8 hosts each      a quarter survives; every rung has new hosts and costs about the same
    rung 3      8 plans, 32 hosts each

    Returns the results of each rung, best first; the last one has at least `keep` plans, if there are so many. Plans
    that the passes cannot measure are left out from the end, so those that matter most come first.
    """
    rungs = number_of_rungs(len(plans), passes, keep)
    side_by_side = max(hosts.num_envs // LEAST_HOSTS, 1)
    share, found = passes // rungs, list[list[Tried[Plan]]]()
    survivors = list(plans[: max(share - (share >= CONTROL_FROM), 1) * side_by_side])
    for rung in range(rungs):
        last = rung == rungs - 1
        found.append(ranked(hosts, survivors, share + passes % rungs * last))
        survivors = [tried.policy for tried in found[-1][: max(-(-len(survivors) // SURVIVING), keep)]]
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


def ranked(hosts: TrainingHosts, plans: Sequence[Plan], passes: int) -> list[Tried[Plan]]:
    """The plans by mean J on new hosts, best first, in at most `passes` passes.

    With as many passes as plans, every plan is measured on all hosts of the same episodes. With fewer, several plans
    share a pass: the hosts are divided into groups, and plans that follow each other in one group have the same hosts.
    """
    if passes >= len(plans):
        return hosts.tried(plans, hosts.new_episodes(passes // len(plans)))
    return best_first(plans, _side_by_side(hosts, plans, passes))


def _side_by_side(hosts: TrainingHosts, plans: Sequence[Plan], passes: int) -> np.ndarray:
    """J [C, H] of plans that share passes over the hosts of one episode, in groups of H."""
    (episode,), spec = hosts.new_episodes(1), hosts.spec
    control = hosts.follow(Plan(), episode) if passes >= CONTROL_FROM else None
    groups = -(-len(plans) // (passes - (control is not None)))
    size = hosts.num_envs // groups
    assert size >= 1, "at most N plans share a pass"
    schedules = FixedSchedules([plan.schedule(spec) for plan in plans], spec)
    members = np.arange(groups * size).reshape(groups, size)
    own = np.minimum(np.arange(hosts.num_envs) // size, groups - 1)

    def measured(first: int) -> np.ndarray:
        which = np.minimum(first + own, len(plans) - 1)  # plans that do not fill the last pass are repeated, unread
        return hosts.measure(schedules.following(torch.from_numpy(which).to(spec.device)), episode)

    begins = range(0, len(plans), groups)
    of_passes = zip(begins, hosts.each([partial(measured, first) for first in begins]), strict=True)
    rows = [values[group] for first, values in of_passes for group in members[: len(plans) - first]]
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


# -- rules -------------------------------------------------------------------------------------------------------------

QUANTILES = tuple(i / 8 for i in range(1, 8))
"""Thresholds that are tried, so that at least an eighth of the hosts is on each side, and never fewer than four."""
_LEAST_HOSTS = 4


@final
class Watching(WaitOnly):
    """Waits, and keeps the features of the hosts in some steps, which are not inputs of a decision."""

    def __init__(self, spec: EngineSpec, steps: Sequence[int]) -> None:
        super().__init__(spec)
        self._steps = steps
        self.seen: dict[tuple[int, str], Tensor] = {}

    def decide(self, obs: Observation, memory: NoMemory) -> Int[Tensor, "N 8"]:
        """WAIT."""
        if obs.t in self._steps:
            self.seen |= {(obs.t, name): read(obs).to(torch.float64) for name, read in FEATURES.items()}
        return super().decide(obs, memory)


def observed(
    hosts: TrainingHosts, plans: Sequence[Plan], steps: Sequence[int], episodes: int
) -> tuple[np.ndarray, Features]:
    """J [1 + K, H] of waiting and of each plan on the same new hosts, and the features [H] of these hosts.

    It takes (1 + K) x `episodes` passes.
    """
    values, features = [], list[Features]()
    for episode in hosts.new_episodes(episodes):
        watching = Watching(hosts.spec, steps)
        waited = hosts.measure(watching, episode)
        values.append(np.stack([waited, *(hosts.follow(plan, episode) for plan in plans)]))
        features.append(dict(zip(watching.seen, host_read(*watching.seen.values()), strict=True)))
    joined = {place: np.concatenate([found[place] for found in features]) for place in features[0]}
    return np.concatenate(values, axis=1), joined


def best_rules(plans: Sequence[Plan], values: np.ndarray, features: Features, count: int) -> list[PlannedRule]:
    """The best rules in hindsight, best first: one for each feature and step, of those that decide alike only one.

    `values` is J [K, H] of the plans. Features [H] that are missing (NaN) for a host are left out.
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
        np.fill_diagonal(total, -np.inf)  # the same plan on both sides is not a rule
        k, m = np.unravel_index(int(total.argmax()), total.shape)
        yield float(total[k, m]) / feature.size, threshold, usable[int(k)], usable[int(m)]


# -- the heuristic -----------------------------------------------------------------------------------------------------

_FIRST, _NEXT = 0.4, 0.2
"""Share of the passes for random choices, and for each round of neighbours; the rest confirms."""
_LAST = 5  # rules of the confirmation
_MOST_BLUEPRINTS = 3
_MOST_DRAWS = 20  # for each candidate; few are left where slots and blueprints are few
_NUMBERS: Mapping[str, Sequence[float]] = {
    "tempo": range(len(TEMPO_NAMES)),
    "first_step": (1, 2, 3, 5, 8),
    "patience": (0.0, 0.3, 0.4, 0.5, 0.6, 0.75),
    "price": (0.0, 1.5, 3.0, 6.0),
    "fossilize_above": (0.0, 0.5, 1.0, 2.0, 5.0),
}


def tune(config: RunConfig, *, budget: int, num_envs: int, progress: PassProgress | None = None) -> Found:
    """Tune the heuristic; arguments and errors are those of `search`."""
    passes = passes_of(budget, num_envs, config.episode_length)
    hosts = TrainingHosts(config, num_envs, progress)
    generator = local_generator(config.seed, Stream.HEURISTIC_SEARCH)
    stages = list[tuple[str, list[Tried[HeuristicRules]]]]()

    def run(stage: str, candidates: Sequence[HeuristicRules], episodes: int = 1) -> list[Tried[HeuristicRules]]:
        hosts.progress.stage(stage)
        stages.append((stage, hosts.tried(candidates, hosts.new_episodes(episodes))))
        return stages[-1][1]

    first, following = int(passes * _FIRST), int(passes * _NEXT)
    best = run("random", _different([DEFAULT_RULES], first, partial(random_rules, hosts.spec, generator)))
    for _ in range(2):
        parents = [tried.policy for tried in best[:_PARENTS]]
        best = run("neighbours", _different(parents, following, partial(neighbour, parents, hosts.spec, generator)))
    last = [tried.policy for tried in best[:_LAST]]
    (winner, *_) = run("confirmation", last, max((passes - hosts.passes) // len(last), 1))
    return Found(
        config=hosts.config, spec=hosts.spec, budget=budget, env_steps=hosts.env_steps, stages=stages, heuristic=winner
    )


def random_rules(spec: EngineSpec, generator: torch.Generator) -> HeuristicRules:
    """Each choice drawn uniformly."""
    drawn: dict[str, Any] = {name: values[_draw(len(values), generator)] for name, values in _NUMBERS.items()}
    return HeuristicRules(
        blueprints=_draw_some(spec.selectable, _MOST_BLUEPRINTS, generator),
        slots=_draw_some(range(spec.num_slots), spec.num_slots, generator),
        **drawn,
    )


def neighbour(parents: Sequence[HeuristicRules], spec: EngineSpec, generator: torch.Generator) -> HeuristicRules:
    """One of the parents with one choice drawn anew."""
    parent = parents[_draw(len(parents), generator)]
    names = ["blueprints", "slots", *_NUMBERS]
    name = names[_draw(len(names), generator)]
    return replace(parent, **{name: getattr(random_rules(spec, generator), name)})


def _different(first: Sequence[HeuristicRules], count: int, draw: Callable[[], HeuristicRules]) -> list[HeuristicRules]:
    """`first` and others, `count` in all if there are so many, none twice."""
    found = dict.fromkeys(first)
    for _ in range(_MOST_DRAWS * count):
        if len(found) >= count:
            break
        found.setdefault(draw())
    return list(found)[:count]


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def _draw_some(values: Sequence[int], most: int, generator: torch.Generator) -> tuple[int, ...]:
    """From one to `most` of the values in random order."""
    count = 1 + _draw(min(most, len(values)), generator)
    return tuple(values[i] for i in torch.randperm(len(values), generator=generator)[:count].tolist())


# -- portfolios and halvings -------------------------------------------------------------------------------------------

PLANS_FILE, STRUCTURES = "portfolio.json", "structures"
MOST_STRUCTURES, LEAST_PAIRS = 64, 16
"""Structures that are tried, unless the single seeds alone are more; and pairs of seeds in any case."""
LEAST_HOSTS_OF_PLANS = 8
"""On which each structure is tried; of fewer the best of several says little."""


@dataclass(frozen=True, kw_only=True)
class FoundPlans:
    """The result of `PlanSearch`.

    Attributes:
        hosts, env_steps, flops: of the search, with measurements in every step.
        tried: mean 100·J of each structure, and its FLOPs per host if it is measured at the end, best first.
    """

    config: RunConfig
    budget: int
    hosts: int
    env_steps: int
    flops: float
    tried: Sequence[tuple[Architecture, float, float]]
    plans: Plans

    def write(self, folder: Path) -> None:
        """Write the plans, and what every structure gave."""
        tried = [
            {"structure": structure.lines, "objective": objective, "flops": flops}
            for structure, objective, flops in self.tried
        ]
        size = {"budget": self.budget, "env_steps": self.env_steps, "flops": self.flops, "hosts": self.hosts}
        found = {**size, "seed": self.config.seed, "structures": tried}
        write_plans(folder / PLANS_FILE, self.plans, self.config.task, self.config.episode_length, found)

    def show(self, folder: Path, console: RunConsole) -> None:
        """Print the best structures, the plans, and where the file is."""
        pages = {"structure": [(" + ".join(one.lines) or "none", worth, flops) for one, worth, flops in self.tried]}
        pages |= {name: [(of.words, of.objective, of.flops) for of in plans] for name, plans in self.plans.items()}
        for name, found in pages.items():
            rows = [(words, f"{worth:.2f}", short(flops)) for words, worth, flops in found[:SHOWN]]
            console.print("", plain_table(name, "100·J", "FLOPs", fold=True, rows=rows), sep="\n")
        console.say(
            f"\n100·J: mean over the {self.hosts} training hosts on which the plans were chosen; FLOPs: to train and "
            f"measure a host. The search spent {self.env_steps:,} env-steps and {short(self.flops)} FLOPs."
        )
        console.say(f"written to {folder}: {PLANS_FILE}")
        of_task = (folder / PLANS_FILE, "--task", self.config.task)
        console.say(f"compare on new hosts: {command('evaluate', *of_task, plugins=self.config.plugins)}")


@final
class PlanSearch:
    """A search for portfolios and halvings with a budget of env-steps.

    Raises:
        ConfigError, DataError: the budget is too small, the task has no networks, or its data are missing.
    """

    def __init__(self, config: RunConfig, budget: int) -> None:
        self.config, self.budget = replace(config, compile="off"), budget
        self.device = device_of(config)
        dataset = dataset_of(config, self.device)
        if dataset is None:
            raise ConfigError(
                f"the hosts of task {config.task!r} are not networks, so nothing costs FLOPs; leave --portfolio out."
            )
        self.dataset = dataset
        spec = engine_of(self.config, dataset, self.device, engine_config=config.engine(num_envs=1)).spec
        singles = single_seeds(spec)
        self._first = [of_seeds(seeds, spec) for seeds in ((), *((seed,) for seed in singles))]
        pairs = len(spec.selectable) ** 2 * math.comb(spec.num_slots, 2)
        self._pairs = min(pairs, max(MOST_STRUCTURES - len(self._first), LEAST_PAIRS))
        self.structures = len(self._first) + self._pairs
        self.hosts = budget // (self.structures * config.episode_length)
        if self.hosts < LEAST_HOSTS_OF_PLANS:
            raise ConfigError(
                f"a budget of {budget:,} env-steps is {self.hosts} hosts x {self.structures} structures x "
                f"{config.episode_length} steps; a search of portfolios needs {LEAST_HOSTS_OF_PLANS} hosts: give "
                f"--budget {self.structures * config.episode_length * LEAST_HOSTS_OF_PLANS}."
            )

    def run(self, folder: Path, progress: PassProgress) -> FoundPlans:
        """Train every structure on the same training hosts, and find the races among them.

        `folder` keeps the outcome of each structure; a second search continues there.
        """
        store, weights = OutcomeStore(folder / STRUCTURES), self.config.reward

        def tried(structures: Sequence[Architecture]) -> dict[Architecture, Outcome]:
            return {structure: self._outcome(structure, store, progress) for structure in structures}

        progress.stage("singles")
        outcomes = tried(self._first)
        alone = {structure: Curves.of([one], weights).worth[0, -1].mean() for structure, one in outcomes.items()}
        progress.stage("pairs")
        pairs = sorted(combinations(self._first[1:], 2), key=lambda pair: -alone[pair[0]] - alone[pair[1]])
        together = [Architecture(a.slots + b.slots) for a, b in pairs if a.slots[0].slot != b.slots[0].slot]
        outcomes |= tried(together[: self._pairs])
        progress.stage("races")
        curves, structures = Curves.of(list(outcomes.values()), weights), list(outcomes)
        worth_K, spent_K = (of[:, 0].mean(axis=1) for of in curves.at(()))
        order = np.argsort(-worth_K, kind="stable").tolist()
        return FoundPlans(
            config=self.config,
            budget=self.budget,
            hosts=self.hosts,
            env_steps=len(structures) * self.hosts * self.config.episode_length,
            flops=sum(spent(one) for one in outcomes.values()) * self.hosts,
            tried=[(structures[k], float(worth_K[k]), float(spent_K[k])) for k in order],
            plans=best_plans(curves, structures),
        )

    def _outcome(self, structure: Architecture, store: OutcomeStore, progress: PassProgress) -> Outcome:
        config, controller = self.config, fixed([structure], self.config)
        hosts = {"run_seed": config.seed, "num_envs": self.hosts}
        key = key_of(config, self.dataset, controller, **hosts)
        if (found := store.get(key)) is not None:
            progress.advance()
            return found
        on_step = partial(progress.advance, 1.0 / config.episode_length)
        found = run_controller(config, self.dataset, self.device, controller, **hosts, on_step=on_step)
        store.put(key, found)
        return found
