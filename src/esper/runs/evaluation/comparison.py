"""A comparison of controllers from start to end: which ones, on which hosts, with the result as tables.

    group   the hosts of one evaluation seed: those of one run (its seed + 1,000,000), or without runs of one given seed
    job     one controller on one group: one episode of N hosts
    race    several jobs, of which validation keeps one on each host; FLOPs per host decide how many

Every controller meets the same groups, so that all differences are paired.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from esper.leyline.architecture import Architecture
from esper.leyline.errors import ConfigError, RunDirectoryError, nearest, option
from esper.leyline.lifecycle import OP_NAMES
from esper.leyline.messages import EngineSpec
from esper.leyline.ranks import group
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of, require_memory
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation import controllers as known
from esper.runs.evaluation import races
from esper.runs.evaluation.controllers import DERIVED, Controller, Trained
from esper.runs.evaluation.costs import CostMeter
from esper.runs.evaluation.outcomes import SEED_OFFSET, OutcomeStore, key_of, run_controller
from esper.runs.evaluation.races import (
    Climb,
    Entry,
    Plans,
    best_of,
    climbs_of,
    in_random_order,
    is_plans,
    of_plan,
    of_seeds,
    plan_within,
    read_plans,
    single_seeds,
    small_structures,
)
from esper.runs.evaluation.results import (
    HILL_CLIMBING,
    RACES,
    RANDOM_SEARCH,
    REFERENCE,
    SEARCHED,
    TRAINED,
    ControllerResult,
    Outcome,
    Size,
    host_figures,
    results,
    spent,
    verdict,
)
from esper.runs.evaluation.rewards import differing, is_of_learning
from esper.runs.evaluation.tables import counted, plain_table, short, text
from esper.simic.rewards.reward_config import RewardConfig
from esper.tamiyo.policy_files import SUFFIX, is_policy_file
from esper.tasks.datasets import data_label
from esper.telemetry.progress import PassProgress, RunConsole, warn, with_spread
from esper.telemetry.record.writer import sha256_of
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.memory import available_bytes

PLAIN_RUNS = 3
"""Trainings of the plain host that a race may spend where neither a budget nor a trained controller says more."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The hosts of one seed.

    Attributes:
        config: of the run, or of the task. seed: of the hosts.
        run: directory of the trained controller, or None; trained: what was found there.
    """

    config: RunConfig
    seed: int
    run: Path | None = None
    trained: Trained | None = None


@dataclass(frozen=True, kw_only=True)
class EqualCompute:
    """The results at equal compute.

    Attributes:
        budget: FLOPs per host. rows: of the most expensive entry of each name that fits; labels, tried: of these.
        curves: of every entry that fits, by name: means over hosts of `POINT`.
        excluded: a sentence for each controller that spends more in a single run.
    """

    budget: float
    rows: Sequence[ControllerResult]
    labels: Mapping[str, str]
    tried: Mapping[str, int]
    curves: Mapping[str, Sequence[Mapping[str, float]]]
    excluded: Sequence[str]

    def verdict(self, size: Size) -> str:
        """The best of the others against the trained controller, or against wait_only."""
        return f"At equal compute, at most {short(self.budget)} FLOPs per host: {verdict(self.rows, size)}"

    def report(self, size: Size) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "flops_per_host": self.budget,
            "verdict": self.verdict(size),
            "labels": dict(self.labels),
            "excluded": list(self.excluded),
            "curves": {name: list(curve) for name, curve in self.curves.items()},
            "controllers": [asdict(row) for row in self.rows],
        }

    def pages(self) -> Iterator[Table]:
        """The tables."""
        first, reference = f"at {short(self.budget)} FLOPs", _reference(self.rows)
        page = plain_table(first, "tried", "100·J", f"vs {reference}", "better")
        for row in self.rows:
            value = with_spread(row.objective, row.objective_std)
            page.add_row(row.name, str(self.tried[row.name]), value, *row.cells(reference))
        yield page
        page = plain_table(first, "val", "test", "J test", "growth", "train", "measure")
        for row in self.rows:
            page.add_row(row.name, *row.points_and_growth, short(row.training_flops), short(row.measuring_flops))
        yield page

    @property
    def notes(self) -> list[str]:
        """What each of them is, in words, and who is missing."""
        return [*(f"{name}: {label}." for name, label in self.labels.items()), *self.excluded]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Controllers on the same new hosts.

    Attributes:
        groups: the hosts. num_envs: hosts of each group. data: their data set in words.
        rows: the results, the trained controller first. notes: sentences about single controllers.
        reused: how many outcomes were found in the folder. equal: the results at equal compute, if they were asked for.
    """

    groups: Sequence[Group]
    num_envs: int
    data: str
    rows: Sequence[ControllerResult]
    notes: Sequence[str] = ()
    reused: int = 0
    equal: EqualCompute | None = None

    @property
    def size(self) -> Size:
        """Groups and hosts."""
        return Size(len(self.groups), self.num_envs, self.groups[0].run is not None)

    @property
    def verdict(self) -> str:
        """The best baseline against the trained controller, or against wait_only."""
        return verdict(self.rows, self.size)

    def report(self) -> dict[str, Any]:
        """The comparison as JSON values, including those of every host."""
        config = self.groups[0].config
        groups = [
            {
                "seed": group.seed,
                "run": str(group.run) if group.run else None,
                "training_seed": group.config.seed if group.run else None,
                "trained": group.trained.place if group.trained else None,
            }
            for group in self.groups
        ]
        return {
            "task": config.task,
            "data": self.data,
            "preset": config.preset,
            "reward": config.reward_name,
            **{name: groups[0][name] for name in ("run", "trained", "seed")},
            "groups": groups,
            "num_envs": self.num_envs,
            "episode_length": config.episode_length,
            "reference": _reference(self.rows),
            "unit": self.size.units.removesuffix("s"),
            "verdict": self.verdict,
            "notes": list(self.notes),
            "controllers": [asdict(row) for row in self.rows],
            "equal_compute": self.equal.report(self.size) if self.equal else None,
        }

    def show(self, console: RunConsole) -> None:
        """Print the tables and the verdict."""
        task = self.groups[0].config.task
        named = task if self.data in ("none", task) else f"{task}, data {self.data}"
        seeds = ", ".join(str(group.seed) for group in self.groups)
        trained = [f"trained = {group.run} {group.trained.place}" for group in self.groups if group.trained]
        of, between = ("of seed", ", ") if len(self.groups) == 1 else ("of each of the seeds", "\n")
        console.say(between.join([f"{named}, {counted(self.num_envs, 'host')} {of} {seeds}", *trained]))
        for page in pages(self.rows):
            console.print("", page, sep="\n")
        console.say("\n".join(("", legend(self.size.units), *self.notes, *rollbacks(self.rows), self.verdict)))
        if self.equal is not None:
            for page in self.equal.pages():
                console.print("", page, sep="\n")
            console.say("\n".join(("", *self.equal.notes, self.equal.verdict(self.size))))

    def __str__(self) -> str:
        return text(self.show)

    __repr__ = __str__


def _reference(rows: Sequence[ControllerResult]) -> str:
    """The controller that differences are taken to."""
    return TRAINED if rows[0].name == TRAINED else REFERENCE


def pages(rows: Sequence[ControllerResult]) -> Iterator[Table]:
    """The tables of a comparison, one line for each controller."""
    reference = _reference(rows)
    page = plain_table("controller", "100·J", "IQM", f"vs {reference}", "better")
    for row in rows:
        value = with_spread(row.objective, row.objective_std)
        page.add_row(row.name, value, f"{row.objective_iqm.mean:.2f}", *row.cells(reference))
    yield page
    page = plain_table("controller", "val", "test", "J test", "growth", "FLOPs", "train", "measure")
    for row in rows:
        spent_on = map(short, (row.flops, row.training_flops, row.measuring_flops))
        page.add_row(row.name, *row.points_and_growth, *spent_on)
    yield page
    if not math.isnan(rows[0].perplexity):
        losses = [(row.name, f"{row.loss:.4f}", f"{row.perplexity:.2f}") for row in rows]
        yield plain_table("controller", "loss", "perplexity", rows=losses)
    page = plain_table("ops per host", *(name.lower().removesuffix("_target") for name in OP_NAMES))
    for row in rows:
        page.add_row(row.name, *(f"{row.ops[name] / len(row.hosts['objective']):.1f}" for name in OP_NAMES))
    yield page


def legend(units: str) -> str:
    """What the columns mean; `units` are hosts or runs."""
    return f"""Means over hosts, each with its fossilized seeds only (the committed network).
100·J: val minus the price of added parameters ± standard deviation over {units};
IQM: interquartile mean over {units}; vs: paired difference and 95 % interval;
better: share of {units} in which it is better; val, test: points, e.g. accuracy;
J test: 100·J with test. FLOPs: of one example; to train and measure a host."""


def rollbacks(rows: Sequence[ControllerResult]) -> list[str]:
    """A sentence for each controller with rollbacks."""
    times = {row.name: "once" if row.rollbacks == 1 else f"{row.rollbacks} times" for row in rows if row.rollbacks}
    return [f"{name}: hosts were rolled back {number}." for name, number in times.items()]


def named(controllers: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The run directories and the baselines among names; raises ConfigError, RunDirectoryError for others."""
    names = known.known_names()
    if not controllers:
        raise ConfigError(f"no controller given; name a run directory, or any of {', '.join(names)}.")
    unique = list(dict.fromkeys(controllers))
    baselines = [name for name in unique if name in names or is_policy_file(name)]
    runs = [name for name in unique if name not in baselines]
    files = [Path(name).name for name in baselines if is_policy_file(name)]
    if twice := sorted({name for name in files if files.count(name) > 1}):
        raise ConfigError(f"several policy files are named {twice[0]}, as their rows would be; rename one.")
    for name in runs:
        if not Path(name).exists():
            raise RunDirectoryError(f"{name} is neither a run directory nor a baseline; {nearest(name, names)}")
    return tuple(map(Path, runs)), tuple(baselines)


def compare(
    configs: Sequence[RunConfig],
    runs: Sequence[Path],
    baselines: Sequence[str],
    *,
    best: bool = False,
    seeds: Sequence[int] = (),
    num_envs: int = 16,
    flops: float | None = None,
    out: Path | None = None,
    console: RunConsole,
) -> Comparison:
    """Compare the controllers of runs with baselines; no name of a baseline means all that the task supports.

    Args:
        configs: of the runs, or one of the task without runs.
        runs: one condition, trained with several seeds.
        baselines: their names, or policy files, or a file of plans for portfolio and halving; wait_only is always among
            them.
        best: use the checkpoint with the highest mean J of ten rounds.
        seeds: of the hosts, one for each run, or any number without runs; none: the training seeds + 1,000,000.
        num_envs: hosts per controller and seed.
        flops: budget of each host, at which all are compared once more; None means no such comparison, and that races
            spend what the trained controller does, or else `PLAIN_RUNS` trainings of the plain host.
        out: folder that keeps every outcome as soon as it is known, and gives those that it has.
        console: shows the progress.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: a controller cannot be evaluated.
    """
    _require_one_condition(configs, runs)
    configs[0].engine(num_envs=num_envs)  # refuses an impossible number of hosts before anything is shown
    names, plans = _with_plans(baselines or known.all_baselines(configs[0], with_run=bool(runs)), configs[0])
    races = [name for name in names if name in RACES]
    if (races or flops is not None) and configs[0].task_spec().host is None:
        raise ConfigError(
            f"the hosts of task {configs[0].task!r} are not networks, so nothing costs FLOPs; leave "
            f"{', '.join(races) or option('flops_per_host')} out."
        )
    own = [name for name in names if name not in RACES]
    groups = _groups(configs, runs, seeds, best)
    store = OutcomeStore(out) if out is not None else None
    with PassProgress(console, len(groups) * (len(own) + bool(runs))) as progress:
        session = _Session(num_envs, groups, store, progress, console)
        if flops is not None:
            session.require_plain_run(flops)
        alone: dict[str, Sequence[Outcome]] = {**session.alone(own)}
        times, of = (1, TRAINED) if TRAINED in alone else (PLAIN_RUNS, REFERENCE)
        budget = flops or (times * float(np.mean([spent(one) for one in alone[of]])) if races else 0.0)
        of_races = {name: session.race(name, plans, budget, all_plans=flops is not None) for name in races}
        alone |= {name: entries[-1].outcomes for name, entries in of_races.items() if entries}
        equal = None if flops is None else _at_equal_compute(session, alone, of_races, flops)
    rows = results(alone, configs[0].reward, configs[0].task_spec().objective, by_run=bool(runs))
    if store is not None and session.reused:
        console.say(f"esper: {session.reused} of {session.jobs} outcomes were found in {store.folder}")
    notes = [note for outcomes in alone.values() for note in _notes(groups, outcomes)]
    return Comparison(
        groups=groups,
        num_envs=num_envs,
        data=session.data,
        rows=rows,
        notes=[*notes, *(_label(name, entries, budget) for name, entries in of_races.items())],
        reused=session.reused,
        equal=equal,
    )


def _with_plans(baselines: Sequence[str], config: RunConfig) -> tuple[tuple[str, ...], Plans]:
    """The names, with those of races in place of a file of plans, and the plans; raises ConfigError without plans."""
    files = [name for name in baselines if name.endswith(SUFFIX) and is_plans(Path(name))]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)} both hold plans of races; name one of them.")
    named = [*(name for name in baselines if name not in files), *(SEARCHED if files else ()), REFERENCE]
    names = tuple(dict.fromkeys(named))
    if not set(SEARCHED) & set(names):
        return names, {}
    path = Path(files[0]) if files else config.task_spec().plans
    if path is None or not (files or known.has_plans(config)):
        raise ConfigError(
            f"no plans of {' and '.join(SEARCHED)} are known for task {config.task!r} with these slots and steps; find "
            f"them with esper search {config.task} --portfolio, and name the file that it writes."
        )
    return names, read_plans(path, config.task, config.episode_length)


def _require_budget(budget: float, costs: Sequence[float]) -> None:
    """Raise ConfigError for a budget below the mean of what hosts cost without seeds, at least."""
    least = float(np.mean(costs))
    if budget < least:
        raise ConfigError(
            f"{option('flops_per_host')} is {short(budget)}, but the host alone takes {short(least)} FLOPs or more to "
            f"be trained and measured; give at least {least:.3g}, or shorten the episode."
        )


def _label(name: str, entries: Sequence[Entry], budget: float) -> str:
    """What the last entry is, or that there is none."""
    if entries:
        return f"{name}: {entries[-1].label}."
    return f"{name}: a single training spends more than {short(budget)} FLOPs per host, so it is left out."


POINT = ("flops", "objective", "test_objective", "test")
"""Values of a point of a curve: FLOPs spent on a host, 100·J with validation and with test, test accuracy (pp)."""


def point(entry: Entry, weights: RewardConfig) -> dict[str, float]:
    """Means over all hosts."""
    hosts = host_figures(entry.outcomes, weights)
    means = {name: float(hosts[name].mean()) for name in POINT[1:]}
    return {POINT[0]: entry.flops, **means}


def _at_equal_compute(
    session: "_Session", alone: Mapping[str, Sequence[Outcome]], of_races: Mapping[str, Sequence[Entry]], budget: float
) -> EqualCompute:
    """Every controller, run as often as fits, beside the races."""
    weights, by_run = session.config.reward, TRAINED in alone
    entries = {name: list(found) for name, found in of_races.items()}
    for name, first in alone.items():
        if name not in RACES:
            runs = session.runs(name, first, budget)
            entries[name] = list(best_of(name, "run", runs, weights, budget, every_step=True))
    fitting = {name: found for name, found in entries.items() if found}
    return EqualCompute(
        budget=budget,
        rows=results(
            {name: found[-1].outcomes for name, found in fitting.items()},
            weights,
            session.config.task_spec().objective,
            by_run=by_run,
        ),
        labels={name: found[-1].label for name, found in fitting.items()},
        tried={name: found[-1].tried for name, found in fitting.items()},
        curves={name: [point(entry, weights) for entry in found] for name, found in fitting.items()},
        excluded=[_label(name, [], budget) for name in entries if name not in fitting],
    )


def _notes(groups: Sequence[Group], outcomes: Sequence[Outcome]) -> list[str]:
    """The notes about one controller, each once, and with the seed where they differ."""
    notes = [outcome.note for outcome in outcomes]
    if len(set(notes)) == 1:
        return notes[:1] if notes[0] else []
    return [f"seed {group.seed}: {note}" for group, note in zip(groups, notes, strict=True)]


def _require_one_condition(configs: Sequence[RunConfig], runs: Sequence[Path]) -> None:
    """Raise ConfigError unless the runs differ in their seed, and in nothing else that matters."""
    seeds: dict[int, Path] = {}
    for run, config in zip(runs, configs, strict=bool(runs)):
        changes = differing(configs[0], config)
        if config.seed in seeds and not any(map(is_of_learning, changes)):
            raise ConfigError(
                f"{seeds[config.seed]} and {run} were both trained with seed {config.seed}, so they are not "
                "independent; compare runs of different seeds."
            )
        if changes:
            name = min(changes, key=is_of_learning)
            first, other = changes[name]
            raise ConfigError(
                f"{runs[0]} and {run} are not runs of one condition: {name} is {first} in the first and {other} in the "
                "other; compare runs that differ in their seed, their reward or settings of the learner alone, or each "
                "by itself."
            )
        seeds[config.seed] = run


def _groups(configs: Sequence[RunConfig], runs: Sequence[Path], seeds: Sequence[int], best: bool) -> list[Group]:
    """The groups of hosts; raises ConfigError where seeds do not fit the runs."""
    if runs and seeds and len(seeds) != len(runs):
        raise ConfigError(
            f"{counted(len(seeds), 'seed')} given for {counted(len(runs), 'run')}; give one for each run, or leave "
            f"{option('seed')} out."
        )
    own = list(seeds) or [config.seed + SEED_OFFSET for config in configs]
    if len(set(own)) < len(own):
        raise ConfigError(f"the seeds {', '.join(map(str, own))} are not all different; give each once.")
    if not runs:
        return [Group(config=configs[0], seed=seed) for seed in own]
    groups = []
    for config, run, seed in zip(configs, runs, own, strict=True):
        found = known.trained(run, config, best=best)
        warn(f"{warning} Using the one {found.place} instead." for warning in found.warnings)
        groups.append(Group(config=config, seed=seed, run=run, trained=found))
    return groups


class _Place:
    """The hosts of a group: where they are and what they learn."""

    def __init__(self, group: Group) -> None:
        self.group, self.config = group, replace(group.config, compile="off")
        self.device = device_of(self.config)
        self.dataset = dataset_of(self.config, self.device)

    @cached_property
    def engine(self) -> VectorizedEngine:
        """An engine for one of them, to describe them."""
        config = self.config.engine(run_seed=self.group.seed, num_envs=1)
        return engine_of(self.config, self.dataset, self.device, engine_config=config)

    def spec(self, num_envs: int) -> EngineSpec:
        """The description of an engine for `num_envs` of them."""
        return replace(self.engine.spec, num_envs=num_envs)

    def meter(self, structures: Sequence[Architecture]) -> CostMeter:
        """Of hosts with these structures, one each."""
        assert self.dataset is not None, "only networks are measured"
        spec, costs = self.spec(len(structures)), self.engine.executor.costs
        return CostMeter(self.config.task_spec(), self.dataset, spec, costs, structures)


class _Session:
    """Runs the jobs of a comparison, or finds their outcomes."""

    def __init__(
        self,
        num_envs: int,
        groups: Sequence[Group],
        store: OutcomeStore | None,
        progress: PassProgress,
        console: RunConsole,
    ) -> None:
        self._num_envs, self._store = num_envs, store
        self._progress, self._console = progress, console
        self._places = [_Place(group) for group in groups]
        self.config = self._places[0].config
        self._found = dict[tuple[int, str], tuple[Controller, Outcome]]()
        self._structures = dict[Architecture, list[Outcome]]()
        self._available: int | None = None
        self.reused, self.jobs = 0, 0

    @property
    def data(self) -> str:
        dataset = self._places[0].dataset
        return data_label(dataset.identity) if dataset else "none"

    def require_plain_run(self, budget: float) -> None:
        """Raise ConfigError for a budget that does not pay for the host alone; if possible, before it is trained."""
        _require_budget(budget, [place.meter([Architecture()]).of_structures[0] for place in self._places])
        _require_budget(budget, [spent(outcome) for outcome in self.alone([REFERENCE])[REFERENCE]])

    def alone(self, names: Sequence[str]) -> dict[str, list[Outcome]]:
        """The outcomes of each controller, one per group, also of the trained one."""
        found = [self._of_group(place, names) for place in self._places]
        return {name: [outcomes[name] for outcomes in found] for name in found[0]}

    def _of_group(self, place: _Place, names: Sequence[str]) -> dict[str, Outcome]:
        config = place.config
        own = [place.group.trained.controller] if place.group.trained else []
        source = known.source_of([*(c.name for c in own), *names], config)
        own += [known.baseline(name, config) for name in names if name not in DERIVED]
        own.sort(key=lambda controller: controller.name != source)
        found = {controller.name: self._once(place, controller) for controller in own}
        start = found[source] if source else next(iter(found.values()))
        params = start.stats.host_params + start.stats.fossil_params
        for name in (name for name in names if name in DERIVED):
            found[name] = self._once(place, known.derived(name, config, source, start.grown, params))
        return found

    def runs(self, name: str, first: Sequence[Outcome], budget: float) -> Iterator[Sequence[Outcome]]:
        """The first run of a controller, and as many others on the same hosts as the budget pays for.

        Those that start with what another controller has grown stay alone: they are not methods of their own.
        """
        yield first
        cost = float(np.mean([spent(outcome) for outcome in first]))
        number = 1 if name in DERIVED else int(budget // cost)
        self._progress.more((number - 1) * len(self._places))
        for repetition in range(1, number):
            of = [(place, self._found[place.group.seed, name][0]) for place in self._places]
            yield [self._outcome(place, controller, repetition) for place, controller in of]

    def race(self, name: str, plans: Plans, budget: float, *, all_plans: bool) -> list[Entry]:
        """The entries of a race that fit the budget, the most expensive one last; only that one without `all_plans`.

        Raises ConfigError if no plan fits.
        """
        weights = self.config.reward
        if name == HILL_CLIMBING:
            return list(self._climbs(budget))
        if name == RANDOM_SEARCH:
            return list(best_of(name, "random structure", self._random(budget), weights, budget, every_step=False))
        last = plan_within(plans[name], name, budget)
        chosen = [plan for plan in plans[name] if plan.flops <= last.flops] if all_plans else [last]
        return [of_plan(name, plan, self.structure, weights) for plan in chosen]

    def structure(self, structure: Architecture) -> Sequence[Outcome]:
        """The outcomes of a structure that all hosts have from the first step, one per group."""
        if structure not in self._structures:
            self._progress.more(len(self._places))
            controller = known.fixed([structure], self.config)
            self._structures[structure] = [self._outcome(place, controller) for place in self._places]
        return self._structures[structure]

    def _climbs(self, budget: float) -> Iterator[Entry]:
        """Hill climbing with one copy of each host in a climb, with two, and so on within the budget."""
        pools = [self._pool(place, budget) for place in self._places]
        climbs = len(climbs_of(self.config.episode_length, len(self.config.slots))) - 1
        for copies in range(1, 1 + min(map(len, pools))):
            self._progress.more(len(self._places))
            outcomes = [self._climbed(place, pool, copies) for place, pool in zip(self._places, pools, strict=True)]
            label = f"{counted(climbs, 'climb')}, each with one more random seed in {copies} of {1 + copies} rows"
            entry = Entry(label, 1 + climbs * copies, outcomes)
            if entry.flops > budget:
                return
            yield entry

    def _pool(self, place: _Place, budget: float) -> list[tuple[int, int]]:
        """Seeds with which a training of a host costs at most half of the budget."""
        seeds = single_seeds(place.spec(1))
        flops = place.meter([of_seeds([seed], place.spec(1)) for seed in seeds]).of_structures
        return [seed for seed, cost in zip(seeds, flops, strict=True) if 2.0 * cost <= budget]

    def _climbed(self, place: _Place, pool: list[tuple[int, int]], copies: int) -> Outcome:
        dataset = place.dataset
        assert dataset is not None, "only networks climb"

        def run(on_step: Callable[[], None]) -> Outcome:
            seed, hosts = place.group.seed, self._num_envs
            return Climb(
                place.config, dataset, place.device, run_seed=seed, num_envs=hosts, copies=copies, pool=pool,
                on_step=on_step,
            ).run()  # fmt: skip

        identity = {"copies": copies, "pool": pool, "program": sha256_of(Path(races.__file__))}
        controller = replace(known.fixed([], place.config), name=HILL_CLIMBING, identity=identity)
        return self._outcome(place, controller, run=run, rows=1 + copies)

    def _random(self, budget: float) -> Iterator[Sequence[Outcome]]:
        """Passes in which every host has a structure that it has not had yet, of those that cost half of the budget."""
        drawn = []
        for place in self._places:
            known_ones = list(small_structures(place.spec(1)))
            flops = place.meter(known_ones).of_structures
            cheap = [structure for structure, cost in zip(known_ones, flops, strict=True) if 2.0 * cost <= budget]
            drawn.append(in_random_order(cheap, place.spec(self._num_envs)))
        for passes in zip(*drawn, strict=True):
            self._progress.more(len(self._places))
            yield [
                self._outcome(place, known.fixed(structures, place.config))
                for place, structures in zip(self._places, passes, strict=True)
            ]

    def _once(self, place: _Place, controller: Controller) -> Outcome:
        """The first run of a controller."""
        at = place.group.seed, controller.name
        if at not in self._found:
            self._found[at] = controller, self._outcome(place, controller)
        return self._found[at][1]

    def _outcome(
        self,
        place: _Place,
        controller: Controller,
        repetition: int = 0,
        run: Callable[[Callable[[], None]], Outcome] | None = None,
        rows: int = 1,
    ) -> Outcome:
        """The outcome of a controller, or of `run`, which has so many rows for each host at once."""
        num_envs, config, dataset, seed = self._num_envs, place.config, place.dataset, place.group.seed
        hosts = {"run_seed": seed, "num_envs": num_envs, "repetition": repetition}
        key = key_of(config, dataset, controller, **hosts) if self._store else {}
        self.jobs += 1
        if self._store and (stored := self._store.get(key)) is not None:
            self.reused += 1
            self._progress.skip()
            return stored
        first, task = self._available is None, config.task_spec()
        if self._available is None:
            self._available = available_bytes(place.device)  # memory that earlier hosts gave back stays in this process
        if first or controller.host is not None or rows > 1:  # refuse hosts that do not fit, also wider or more ones
            require_memory(
                config,
                task if controller.host is None else replace(task, host=controller.host),
                dataset,
                place.device,
                self._console.say if first else lambda line: None,
                num_envs=rows * num_envs,
                episodes=self._progress.left,
                available=self._available,
            )
        again = f", run {repetition + 1}" if repetition else ""
        self._progress.begin(f"{controller.name}{again}, {counted(num_envs, 'host')} of {config.task} of seed {seed}")
        advance = partial(self._progress.advance, 1.0 / config.episode_length)
        if run is not None:
            outcome = group().of_first(lambda: run(advance))
        else:
            outcome = run_controller(config, dataset, place.device, controller, **hosts, on_step=advance)
        if self._store:
            self._store.put(key, outcome)
        return outcome
