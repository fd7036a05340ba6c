"""Several trainings of one host, of which validation keeps one: what a loop over them reaches, and what it spends.

    portfolio      some structures, each trained to the end
    halving        all of them start; at each rung the worse half of those that are left stops (Li et al., "Hyperband",
                   2018)
    random_search  a portfolio of random structures, others on each host
    best of k      a portfolio of k runs of one controller

Each is a *race*: candidates, rungs (steps), and the best one that reaches the end, by 100·J with validation. Test is
read for that one alone. Hosts do not influence each other and every draw is keyed by the host, so a candidate that
stops at a rung is one that was run to its end and is read as far as the rung. So every candidate is run once, and any
race over it is computed from its curve. Its FLOPs are those of training until it stops, and of measuring it where the
race looks at it: at the rungs and at the end. A controller is measured in every step, because it looks at every one.
The price of compute in J is that of the whole race; what it chooses by has none, because all is spent by then.

Hill climbing (`Climb`) is repeated growth steps, each kept if validation improves:

    first           the host alone
    each climb      it goes on beside copies of it that have one seed more, at random in an empty slot; the next climb
                    begins with the best of them, the host as it was included, by 100·J with validation
    then            the best one alone, to the end of the episode

After Elsken et al., "Simple and efficient architecture search for convolutional neural networks" (2017, arXiv
1711.04528). What came before a copy is paid once, which no training from the start can do. Copies are rows of one
engine: row c N + n is copy c of host n, with the same data and, at the start of its climb, the same weights. As in a
race, they are measured at the end of a climb only, and what is spent has no price in J until the end.

Shape legend: N = hosts, T = steps, K = all candidates, C = those of a race or climb, R = rungs and the end, B = races,
S = slots.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field

from esper.kasmina.parameters.flops import BACKWARD
from esper.leyline.architecture import Architecture, PlacedSeed, architectures_of
from esper.leyline.errors import ConfigError, in_words
from esper.leyline.files import read_json, read_text, replacing
from esper.leyline.lifecycle import Algorithm
from esper.leyline.messages import EngineSpec
from esper.leyline.random import Stream, permutation
from esper.leyline.settings import AtLeast1, Finite, Positive
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import baseline_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import parse
from esper.runs.evaluation.costs import CostMeter
from esper.runs.evaluation.results import (
    HALVING,
    HILL_CLIMBING,
    PORTFOLIO,
    REFERENCE,
    SEARCHED,
    Outcome,
    TrainingCost,
    spent,
)
from esper.runs.evaluation.tables import counted, short
from esper.simic.rewards.objective import objective_value
from esper.simic.rewards.reward_config import RewardConfig
from esper.tasks.datasets import Dataset
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutCost, StepReport


@final
@dataclass(frozen=True, eq=False)
class Curves:
    """Structures on the same hosts that are there from step 1 on.

    100·J by validation, without the price of compute, after each step (after the last one of the network that is kept),
    the FLOPs of training in each step, and those of measuring once: in step 1, because in the last step every subset of
    seeds is measured too.
    """

    worth: Float[np.ndarray, "K T N"]
    training: Float[np.ndarray, "K T N"]
    measuring: Float[np.ndarray, "K N"]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], weights: RewardConfig) -> "Curves":
        """The curves of networks; an accuracy that is not a number counts as 0, as in the reward."""
        worth, costs = [], []
        for outcome in outcomes:
            stats = outcome.stats
            assert outcome.cost is not None, f"{outcome.name} was not run on networks"
            val = np.nan_to_num(
                np.concatenate((outcome.val[:-1], stats.committed_acc[None])).astype(np.float64), nan=0.0
            )
            alone = np.ones_like(stats.compute)
            worth.append(100.0 * objective_value(val, stats.fossil_params, stats.host_params, alone, weights))
            costs.append(outcome.cost)
        return cls(
            worth=np.stack(worth),
            training=np.stack([cost.training for cost in costs]),
            measuring=np.stack([cost.measuring[0] for cost in costs]),
        )

    def at(self, rungs: Sequence[int]) -> tuple[Float[np.ndarray, "K R N"], Float[np.ndarray, "K R N"]]:
        """J at the steps `rungs` and at the end, and the FLOPs of a candidate that is measured there, up to each."""
        rows = [step - 1 for step in rungs] + [self.worth.shape[1] - 1]
        looks_R1 = np.arange(1, len(rows) + 1)[:, None]
        return self.worth[:, rows], self.training.cumsum(axis=1)[:, rows] + looks_R1 * self.measuring[:, None]


def race(worth: Float[np.ndarray, "*B C R N"]) -> tuple[Int[np.ndarray, "*B N"], Int[np.ndarray, "*B C N"]]:
    """The candidate that is kept on each host, and the rung at which each candidate stops: R - 1 is the end.

    Of m candidates that are left at a rung, max(m // 2, 1) go on. Of equally good ones the first go on.
    """
    candidates, rungs = worth.shape[-3:-1]
    runs = np.ones((*worth.shape[:-2], worth.shape[-1]), dtype=np.bool_)
    stopped = np.full(runs.shape, rungs - 1)
    left = candidates
    for rung in range(rungs - 1):
        if left == 1:
            break
        left //= 2
        order = np.where(runs, -worth[..., rung, :], np.inf).argsort(axis=-2, kind="stable")
        goes_on = order.argsort(axis=-2) < left
        stopped[runs & ~goes_on] = rung
        runs &= goes_on
    return np.where(runs, worth[..., -1, :], -np.inf).argmax(axis=-2), stopped


def raced(
    name: str,
    outcomes: Sequence[Outcome],
    weights: RewardConfig,
    rungs: Sequence[int] = (),
    *,
    every_step: bool = False,
) -> Outcome:
    """The outcome of a race of candidates on the same hosts: what each host keeps, with all that was spent on it.

    `rungs` are steps in rising order, before the last one. Candidates are measured there and at the end, or in
    `every_step`.
    """
    curves = Curves.of(outcomes, weights)
    steps = curves.worth.shape[1]
    chosen_N, rung_CN = race(curves.at(rungs)[0])
    last_CN = np.array([*rungs, steps])[rung_CN]
    step_T1 = np.arange(1, steps + 1)[:, None]
    ran_CTN = step_T1 <= last_CN[:, None]
    costs = [outcome.cost for outcome in outcomes if outcome.cost is not None]
    if every_step:
        measuring_CTN = np.stack([cost.measuring for cost in costs])
    else:
        measuring_CTN = curves.measuring[:, None] * np.isin(step_T1, [*rungs, steps])
    hosts = np.arange(len(chosen_N))

    def kept(values: Sequence[np.ndarray]) -> np.ndarray:
        found: np.ndarray = np.stack(values)[chosen_N, hosts]
        return found

    stats = [outcome.stats for outcome in outcomes]
    own = {f.name: getattr(stats[0], f.name) for f in fields(stats[0])}
    arrays: dict[str, Any] = {
        of: kept([getattr(one, of) for one in stats]) for of, x in own.items() if isinstance(x, np.ndarray)
    }
    # also of what a race would have stopped: this is what was run here
    ran = {f.name: sum(getattr(one.cost, f.name) for one in stats) for f in fields(RolloutCost)}
    training = (curves.training * ran_CTN).sum(axis=0)
    arrays["compute"] = stats[0].compute * training.sum(axis=0) / costs[0].training.sum(axis=0)
    return Outcome(
        name=name,
        stats=replace(stats[0], **arrays, cost=RolloutCost(**ran)),
        test_acc=kept([outcome.test_acc for outcome in outcomes]),
        val=np.stack([outcome.val for outcome in outcomes])[chosen_N, :, hosts].T,
        grown=tuple(outcomes[chosen].grown[n] for n, chosen in enumerate(chosen_N.tolist())),
        cost=TrainingCost(
            per_example=kept([cost.per_example for cost in costs]),
            training=training,
            measuring=(measuring_CTN * ran_CTN).sum(axis=0),
        ),
    )


# -- candidates --------------------------------------------------------------------------------------------------------


def of_seeds(seeds: Sequence[tuple[int, int]], spec: EngineSpec) -> Architecture:
    """The structure with these seeds, (slot, blueprint) indices in the order of the slots, each added to its host."""
    names = spec.slot_ids, spec.blueprint_names
    return Architecture(tuple(PlacedSeed(names[0][s], names[1][b], Algorithm.ADD.name) for s, b in seeds))


def single_seeds(spec: EngineSpec) -> list[tuple[int, int]]:
    """Each blueprint in each slot, as (slot, blueprint) indices."""
    return list(product(range(spec.num_slots), spec.selectable))


def small_structures(spec: EngineSpec) -> dict[Architecture, tuple[tuple[int, int], ...]]:
    """All structures of no, one or two seeds, with these as (slot, blueprint) indices."""
    singles = single_seeds(spec)
    pairs = [pair for pair in combinations(singles, 2) if pair[0][0] != pair[1][0]]
    return {of_seeds(seeds, spec): seeds for seeds in ((), *((seed,) for seed in singles), *pairs)}


def in_random_order(structures: Sequence[Architecture], spec: EngineSpec) -> Iterator[tuple[Architecture, ...]]:
    """The structures in a random order for each host; one for every host at a time."""
    order_NK = permutation(spec.run_seed, Stream.RANDOM_STRUCTURES, spec.host_ids().cpu(), len(structures))
    for row in order_NK.T.tolist():
        yield tuple(structures[i] for i in row)


# -- plans -------------------------------------------------------------------------------------------------------------


MOST_CANDIDATES = 8
"""Of a plan."""


@dataclass(frozen=True, kw_only=True)
class RacePlan:
    """A portfolio, or with rungs a halving.

    Attributes:
        structures: the candidates. rungs: steps at which the worse half stops.
        flops, objective: per host, means over the training hosts on which it was found.
    """

    structures: tuple[Architecture, ...]
    rungs: tuple[int, ...] = ()
    flops: float
    objective: float

    @property
    def words(self) -> str:
        """The plan in a line."""
        number = counted(len(self.structures), "structure")
        rungs = f", the worse half stops at step {' and '.join(map(str, self.rungs))}" if self.rungs else ""
        named = "; ".join(" + ".join(one.lines) or "none" for one in self.structures)
        return f"{number}{rungs}: {named.replace(f' {Algorithm.ADD.name}', '')}"


Plans = Mapping[str, Sequence[RacePlan]]
"""The plans of `portfolio` and `halving`, each better and more expensive than the one before it."""
LEAST_GAIN = 0.3
"""Points of 100·J by which a plan must beat every cheaper one; smaller gains are noise of the hosts."""
_MOST_RUNGS = 2
_RUNGS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7)
"""Where rungs are tried, in shares of an episode."""
_CLASS = 1.25
"""Ratio of the FLOPs of the cheapest and the most expensive race of one class."""
_AT_ONCE = 256  # races whose arrays are in memory


def best_plans(curves: Curves, structures: Sequence[Architecture]) -> Plans:
    """The plans that no plan of equal or lower cost equals, on these (training) hosts.

    A beam search for all rungs that are tried: every set of candidates in the beam gets one candidate more in every
    possible way. The best of each class of FLOPs stay in the beam, if no cheaper one of as many candidates is better.
    """
    length = curves.worth.shape[1]
    steps = sorted({round(share * length) for share in _RUNGS} - {0, length})
    halving = [rungs for number in range(1, _MOST_RUNGS + 1) for rungs in combinations(steps, number)]
    without = _plans(curves, structures, ())
    alone = [plan for plan in without if len(plan.structures) == 1]
    with_rungs = [plan for rungs in halving for plan in _plans(curves, structures, rungs)]
    return {PORTFOLIO: _front(without), HALVING: _front([*alone, *with_rungs])}


def _plans(curves: Curves, structures: Sequence[Architecture], rungs: tuple[int, ...]) -> list[RacePlan]:
    """All that are in the beam."""
    return [
        RacePlan(structures=tuple(structures[k] for k in members), rungs=rungs, flops=flops, objective=objective)
        for flops, objective, members in _beam(*curves.at(rungs))
        if len(members) >= 2 ** len(rungs)  # with fewer the last rung has nothing to decide
    ]


def _front(plans: Sequence[RacePlan]) -> tuple[RacePlan, ...]:
    """The plans that are better than every cheaper one, the cheapest first."""
    best, found = -math.inf, list[RacePlan]()
    for plan in sorted(plans, key=lambda plan: (plan.flops, -plan.objective)):
        if plan.objective >= best + LEAST_GAIN:
            best = plan.objective
            found.append(plan)
    return tuple(found)


Race = tuple[float, float, tuple[int, ...]]
"""Mean FLOPs, mean J, and the candidates in rising order."""


def _beam(worth: Float[np.ndarray, "K R N"], spent: Float[np.ndarray, "K R N"]) -> Iterator[Race]:
    """The races that are in the beam, of one candidate, of two, and so on."""
    beam: list[tuple[int, ...]] = [()]
    for _ in range(min(MOST_CANDIDATES, len(worth))):
        sets = sorted({tuple(sorted({*members, k})) for members in beam for k in range(len(worth)) if k not in members})
        best = dict[int, Race]()
        for first in range(0, len(sets), _AT_ONCE):
            for tried in _of_races(sets[first : first + _AT_ONCE], worth, spent):
                of_class = int(math.log(max(tried[0], 1.0), _CLASS))
                if of_class not in best or tried[1] > best[of_class][1]:
                    best[of_class] = tried
        beam, highest = [], -math.inf
        for of_class in sorted(best):
            if best[of_class][1] > highest:
                highest = best[of_class][1]
                beam.append(best[of_class][2])
                yield best[of_class]


def _of_races(
    sets: Sequence[tuple[int, ...]], worth: Float[np.ndarray, "K R N"], spent: Float[np.ndarray, "K R N"]
) -> Iterator[Race]:
    """Races of as many candidates each."""
    members_BC = np.array(sets)
    worth_BCRN, spent_BCRN = worth[members_BC], spent[members_BC]
    chosen_BN, rung_BCN = race(worth_BCRN)
    worth_B = np.take_along_axis(worth_BCRN[:, :, -1], chosen_BN[:, None], axis=1).mean(axis=(1, 2))
    spent_B = np.take_along_axis(spent_BCRN, rung_BCN[:, :, None], axis=2).sum(axis=1).mean(axis=(1, 2))
    return zip(spent_B.tolist(), worth_B.tolist(), sets, strict=True)


# -- within a budget ---------------------------------------------------------------------------------------------------

Structures = Callable[[Architecture], Sequence[Outcome]]
"""The outcomes of a structure, one per group of hosts."""


@final
@dataclass(frozen=True)
class Entry:
    """A controller or a race with what it spends.

    Attributes:
        label: in words. tried: candidates on each host.
        outcomes: one per group of hosts, of the candidate that each host keeps.
    """

    label: str
    tried: int
    outcomes: Sequence[Outcome]

    @property
    def flops(self) -> float:
        """Spent on a host, in the mean."""
        return float(np.mean([spent(outcome) for outcome in self.outcomes]))


def best_of(
    name: str, noun: str, passes: Iterable[Sequence[Outcome]], weights: RewardConfig, budget: float, *, every_step: bool
) -> Iterator[Entry]:
    """Races of the first pass, of the first two, and so on within the budget; a pass has one outcome per group.

    `every_step`: see `raced`.
    """
    runs = list[Sequence[Outcome]]()
    for outcomes in passes:
        runs.append(outcomes)
        number = len(runs)
        label = f"one {noun}" if number == 1 else f"best of {number} {noun}s"
        by_group = zip(*runs, strict=True)
        entry = Entry(label, number, [raced(name, found, weights, every_step=every_step) for found in by_group])
        if entry.flops > budget:
            return
        yield entry


def of_plan(name: str, plan: RacePlan, structures: Structures, weights: RewardConfig) -> Entry:
    """The race of a plan."""
    found = [structures(structure) for structure in plan.structures]
    outcomes = [raced(name, of_group, weights, plan.rungs) for of_group in zip(*found, strict=True)]
    return Entry(plan.words, len(plan.structures), outcomes)


# -- files -------------------------------------------------------------------------------------------------------------

FORMAT = "esper plans 1"


def write_plans(path: Path, plans: Plans, task: str, episode_length: int, found: Mapping[str, object]) -> None:
    """Write the plans atomically; `found` says in plain values, for the reader of the file, how they were found."""

    def tree(plan: RacePlan) -> dict[str, Any]:
        structures = [list(structure.lines) for structure in plan.structures]
        return {"flops": plan.flops, "objective": plan.objective, "rungs": plan.rungs, "structures": structures}

    values = {"format": FORMAT, "task": task, "episode_length": episode_length, "found": dict(found)}
    with replacing(path) as file:
        json.dump(values | {name: [tree(plan) for plan in plans[name]] for name in SEARCHED}, file, indent=1)
        file.write("\n")


def is_plans(path: Path) -> bool:
    """Whether the file says that it holds plans."""
    return path.is_file() and FORMAT in read_text(path, errors="replace")[:100]


@dataclass(frozen=True)
class _Tree:
    """A plan in a file."""

    structures: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1, max_length=MOST_CANDIDATES)]
    rungs: tuple[AtLeast1, ...]
    flops: Positive
    objective: Finite


def read_plans(path: Path, task: str, episode_length: int) -> Plans:
    """The plans of a file; raises ConfigError if it is malformed, or of another task or length."""
    try:
        values = read_json(path)
        of = values["task"], values["episode_length"]
        plans = {name: tuple(_plan(tree) for tree in values[name]) for name in SEARCHED}
    except (ConfigError, LookupError, TypeError, ValueError) as error:
        why = str(error).rstrip(".") if isinstance(error, ConfigError) else in_words(error)
        raise ConfigError(
            f"{path} does not hold plans of races ({why}); use a file that `esper search --portfolio` wrote."
        ) from error
    if of != (task, episode_length):
        raise ConfigError(
            f"the plans of {path} were searched for task {of[0]!r} with {of[1]} steps, so their FLOPs do not hold for "
            f"{task!r} with {episode_length}; search them with `esper search --portfolio`."
        )
    return plans


def _plan(tree: Mapping[str, Any]) -> RacePlan:
    found = parse(_Tree, tree)
    return RacePlan(**(vars(found) | {"structures": tuple(map(Architecture.of_lines, found.structures))}))


def plan_within(plans: Sequence[RacePlan], name: str, budget: float) -> RacePlan:
    """The best plan that costs at most `budget` FLOPs per host; raises ConfigError if there is none."""
    fitting = [plan for plan in plans if plan.flops <= budget]
    if not fitting:
        raise ConfigError(
            f"the cheapest plan of {name} takes {short(plans[0].flops)} FLOPs per host, more than the budget of "
            f"{short(budget)}; raise it, or leave {name} out."
        )
    return fitting[-1]


_MOST_CLIMBS = 4
_BEGIN, _END = 0.1, 0.6
"""Shares of the episode at which the first climb begins and the last one ends."""


def climbs_of(episode_length: int, num_slots: int) -> tuple[int, ...]:
    """The step after which the first climb begins, and those with which climbs end; one for each slot, at most 4."""
    number = min(_MOST_CLIMBS, num_slots)
    ends = [round((_BEGIN + (_END - _BEGIN) * i / number) * episode_length) for i in range(number + 1)]
    return tuple(sorted({max(1, end) for end in ends}))


class Climb:
    """The hosts of one seed, from the first step to the last.

    Args:
        config: of the task. dataset, device: those of `dataset_of` and `device_of`.
        run_seed: of the hosts. num_envs: N.
        copies: beside each host in a climb. pool: the seeds that they may get, as (slot, blueprint) indices.
        on_step: called after each step.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        device: torch.device,
        *,
        run_seed: int,
        num_envs: int,
        copies: int,
        pool: Sequence[tuple[int, int]],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._dataset, self._device = replace(config, compile="off"), dataset, device
        self._run_seed, self._num_envs, self._copies, self._pool = run_seed, num_envs, copies, pool
        self._on_step = on_step
        self._val_C = np.zeros(num_envs)  # of all rows after the last step
        self._engine = self._built(1)
        self._client = baseline_of(REFERENCE, config, self._engine.spec)
        spec, costs = self._engine.spec, self._engine.executor.costs
        self._meter = CostMeter(config.task_spec(), dataset, spec, costs)
        (self._params,) = host_read(costs.seed_params)
        self.grown = np.full((num_envs, spec.num_slots), -1)
        """Blueprint in each slot [N, S]; -1 without a seed."""
        self._val, self._training, self._measuring = (list[np.ndarray]() for _ in range(3))  # of each step
        self._rows_run = 0

    def _built(self, candidates: int) -> VectorizedEngine:
        hosts = self._config.engine(run_seed=self._run_seed, num_envs=candidates * self._num_envs)
        hosts = replace(hosts, distinct_hosts=self._num_envs)
        return engine_of(self._config, self._dataset, self._device, engine_config=hosts, on_step=self._listen)

    def _listen(self, report: StepReport) -> None:
        self._val_C = report.val_acc
        self._on_step()

    def run(self) -> Outcome:
        """All steps, and the test of what is kept."""
        began = time.perf_counter()
        self._engine.reset(self._client, episode=0)
        begin, *ends = climbs_of(self._config.episode_length, self._engine.spec.num_slots)
        self._advance(begin, self.grown[None])
        for number, end in enumerate(ends):
            candidates = self._candidates(number)
            self._continue([*range(self._num_envs)] * len(candidates))
            added = np.where(candidates != self.grown, candidates, -1).reshape(-1, candidates.shape[2])
            placed = [[(s, b) for s, b in enumerate(row) if b >= 0] for row in added.tolist()]
            self._engine.add_fossils([of_seeds(seeds, self._engine.spec) for seeds in placed])
            chosen = self._advance(end, candidates)
            self.grown = candidates[chosen, np.arange(self._num_envs)]
            self._continue([int(c) * self._num_envs + n for n, c in enumerate(chosen)])
        if self._engine.t < self._config.episode_length:
            self._advance(self._config.episode_length, self.grown[None])
        return self._outcome(time.perf_counter() - began)

    def _candidates(self, climb: int) -> Int[np.ndarray, "C N S"]:
        """The hosts as they are, and copies with one seed more; equal to the host where nothing is left to try."""
        hosts = self._engine.spec.host_ids().cpu()[: self._num_envs]
        order = permutation(self._run_seed, Stream.RANDOM_STRUCTURES, hosts, len(self._pool), t=1 + climb).tolist()
        found = np.repeat(self.grown[None], 1 + self._copies, axis=0)
        for n, of_host in enumerate(order):
            free = [self._pool[i] for i in of_host if self.grown[n, self._pool[i][0]] < 0]
            for copy, (slot, blueprint) in enumerate(free[: self._copies], 1):
                found[copy, n, slot] = blueprint
        return found

    def _continue(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        state = self._engine.state_of(rows)
        self._engine = self._built(len(rows) // self._num_envs)
        self._client = baseline_of(REFERENCE, self._config, self._engine.spec)
        self._engine.load_state_dict(state, self._client)

    def _advance(self, until: int, candidates: Int[np.ndarray, "C N S"]) -> Int[np.ndarray, " N"]:
        """Train all rows up to step `until`, and count it; the best candidate of each host by J with validation."""
        count, val = len(candidates), list[np.ndarray]()
        present = candidates >= 0
        differs = np.array([(one != self.grown).any(axis=1) for one in candidates])
        differs[0] = True  # a copy that got nothing new costs nothing
        per_example = np.array([self._meter.per_example(one) for one in candidates]) * differs
        for _ in range(self._engine.t, until):
            self._engine.step(self._client)
            self._engine.apply_structure()  # the report comes now
            val.append(self._val_C.reshape(count, -1).astype(np.float64))
            self._training.append((1 + BACKWARD) * self._meter.train * per_example.sum(axis=0))
            self._measuring.append(np.zeros(self._num_envs))
            self._rows_run += count * self._num_envs
        self._measuring[-1] = self._meter.val_N * per_example.sum(axis=0)
        columns = np.arange(candidates.shape[2])
        params = np.where(present, self._params[columns, np.maximum(candidates, 0)], 0).sum(axis=2)
        host, alone = np.full_like(params, self._engine.executor.host_params), np.ones_like(val[-1])
        worth = objective_value(np.nan_to_num(val[-1], nan=0.0), params, host, alone, self._config.reward)
        chosen = worth.argmax(axis=0)
        self._val += [one[chosen, np.arange(self._num_envs)] for one in val]
        return np.asarray(chosen)

    def _outcome(self, seconds: float) -> Outcome:
        engine, stats = self._engine, self._engine.outcome()
        (test_acc,) = host_read(engine.test())
        training, measuring = np.stack(self._training), np.stack(self._measuring)
        alone = len(training) * (1 + BACKWARD) * self._meter.train * self._meter.host
        cost = RolloutCost(seconds=seconds, steps=len(training), env_steps=self._rows_run, reads=stats.cost.reads)
        return Outcome(
            name=HILL_CLIMBING,
            stats=replace(stats, compute=(training.sum(axis=0) / alone).astype(np.float32), cost=cost),
            test_acc=test_acc,
            val=np.stack(self._val).astype(np.float32),
            grown=architectures_of(stats.stage, stats.blueprint, stats.algorithm, engine.spec),
            cost=TrainingCost(self._meter.per_example(self.grown), training, measuring),
        )
