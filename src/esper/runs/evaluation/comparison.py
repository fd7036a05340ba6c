"""A comparison of controllers from start to end: which ones, on which hosts, with the result as tables.

    group   the hosts of one evaluation seed: those of one run (its seed + 1,000,000), or without runs of one given seed
    job     one controller on one group: one episode of N hosts

Every controller meets the same groups, so that all differences are paired.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from esper.leyline.errors import ConfigError, RunDirectoryError, nearest, option
from esper.leyline.lifecycle import LifecycleOp
from esper.runs.assembly.assemble import dataset_of, device_of, require_memory
from esper.runs.assembly.run_config import CHANGEABLE, RunConfig
from esper.runs.assembly.values import flat, plain
from esper.runs.evaluation import controllers as known
from esper.runs.evaluation.controllers import DERIVED, Controller, Trained
from esper.runs.evaluation.outcomes import SEED_OFFSET, OutcomeStore, key_of, run_controller
from esper.runs.evaluation.results import (
    LEAST_UNITS,
    REFERENCE,
    TRAINED,
    ControllerResult,
    Outcome,
    Size,
    results,
    verdict,
)
from esper.runs.evaluation.tables import counted, plain_table, short, text
from esper.tamiyo.policy_files import SUFFIX
from esper.tasks.datasets import Dataset, data_label
from esper.telemetry.progress import PassProgress, RunConsole, warn, with_spread
from esper.tolaria.memory import available_bytes

_FREE = frozenset({"seed", "executor", "workers", "threads", *CHANGEABLE} - {"rounds"})
"""Settings in which the runs of one condition may differ."""


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
class Comparison:
    """Controllers on the same new hosts.

    Attributes:
        groups: the hosts. num_envs: hosts of each group. data: their data set in words.
        rows: the results, the trained controller first. notes: sentences about single controllers.
        reused: how many outcomes were found in the folder.
    """

    groups: Sequence[Group]
    num_envs: int
    data: str
    rows: Sequence[ControllerResult]
    notes: Sequence[str] = ()
    reused: int = 0

    @property
    def size(self) -> Size:
        """Groups and hosts."""
        return Size(len(self.groups), self.num_envs, self.groups[0].run is not None)

    @property
    def verdict(self) -> str:
        """The trained controller against the best baseline, or that one against wait_only."""
        return verdict(self.rows, self.size)

    def report(self) -> dict[str, Any]:
        """The comparison as JSON values, including those of every host."""
        first, config = self.groups[0], self.groups[0].config
        return {
            "task": config.task,
            "data": self.data,
            "preset": config.preset,
            "reward": config.reward_name,
            "run": str(first.run) if first.run else None,
            "trained": first.trained.place if first.trained else None,
            "seed": first.seed,
            "groups": [
                {
                    "seed": group.seed,
                    "run": str(group.run) if group.run else None,
                    "training_seed": group.config.seed if group.run else None,
                    "trained": group.trained.place if group.trained else None,
                }
                for group in self.groups
            ],
            "num_envs": self.num_envs,
            "episode_length": config.episode_length,
            "reference": self.rows[0].name if self.rows[0].name == TRAINED else REFERENCE,
            "unit": self.size.units.removesuffix("s"),
            "verdict": self.verdict,
            "notes": list(self.notes),
            "controllers": [asdict(row) for row in self.rows],
        }

    def show(self, console: RunConsole) -> None:
        """Print the tables and the verdict."""
        task = self.groups[0].config.task
        named = task if self.data in ("none", task) else f"{task}, data {self.data}"
        seeds = ", ".join(str(group.seed) for group in self.groups)
        trained = [f"trained = {group.run} {group.trained.place}" for group in self.groups if group.trained]
        hosts = counted(self.num_envs, "host")
        if len(self.groups) == 1:
            console.say(", ".join([f"{named}, {hosts} of seed {seeds}", *trained]))
        else:
            console.say("\n".join([f"{named}, {hosts} of each of the seeds {seeds}", *trained]))
        for page in pages(self.rows):
            console.print("", page, sep="\n")
        console.say("\n".join(("", legend(self.size.units), *self.notes, *rollbacks(self.rows), self.verdict)))

    def __str__(self) -> str:
        return text(self.show)

    __repr__ = __str__


def pages(rows: Sequence[ControllerResult]) -> Iterator[Table]:
    """The tables of a comparison, one line for each controller."""
    reference, names = TRAINED if rows[0].name == TRAINED else REFERENCE, [op.name for op in LifecycleOp]
    tables: list[tuple[tuple[str, ...], Callable[[ControllerResult], Iterable[str]]]] = [
        (
            ("controller", "100·J", "IQM", f"vs {reference}", "better"),
            lambda row: (
                with_spread(row.objective, row.objective_std),
                f"{row.objective_iqm.mean:.2f}",
                *(("", "") if row.name == reference else _against_reference(row)),
            ),
        ),
        (
            ("controller", "val", "test", "J test", "growth", "FLOPs", "train", "measure"),
            lambda row: (
                *(f"{value:.2f}" for value in (row.committed, row.test, row.test_objective)),
                f"{row.growth:.2f}x",
                *(short(value) for value in (row.flops, row.training_flops, row.measuring_flops)),
            ),
        ),
        (("controller", "loss", "perplexity"), lambda row: (f"{row.loss:.4f}", f"{row.perplexity:.2f}")),
        (
            ("ops per host", *(name.lower().removesuffix("_target") for name in names)),
            lambda row: (f"{row.ops[name] / len(row.hosts['objective']):.1f}" for name in names),
        ),
    ]
    if math.isnan(rows[0].perplexity):
        del tables[2]
    for columns, cells in tables:
        page = plain_table(*columns)
        for row in rows:
            page.add_row(row.name, *cells(row))
        yield page


def _against_reference(row: ControllerResult) -> tuple[str, str]:
    """The difference, with its interval where there are enough units for one, and how often it is above 0."""
    difference = row.difference
    interval = f" [{difference.low:+z.2f}, {difference.high:+z.2f}]" if len(row.units) >= LEAST_UNITS else ""
    return f"{difference.mean:+z.2f}{interval}", f"{100.0 * row.improvement.mean:.0f} %"


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
    baselines = [name for name in unique if name in names or name.endswith(SUFFIX)]
    runs = [name for name in unique if name not in baselines]
    files = [Path(name).name for name in baselines if name.endswith(SUFFIX)]
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
    transfer: bool = False,
    seeds: Sequence[int] = (),
    num_envs: int = 16,
    out: Path | None = None,
    console: RunConsole,
) -> Comparison:
    """Compare the controllers of runs with baselines; no name of a baseline means all that the task supports.

    Args:
        configs: of the runs, or one of the task without runs.
        runs: their directories, which are not changed: one condition, trained with several seeds.
        baselines: their names, or policy files; wait_only is always among them.
        best: use the checkpoint with the highest mean J of ten rounds.
        transfer: whether the task is another one than that of the runs.
        seeds: of the hosts, one for each run, or any number without runs. None means the training seeds + 1,000,000.
        num_envs: hosts per controller and seed.
        out: folder that keeps every outcome as soon as it is known, and gives those that it has.
        console: shows the progress.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: a controller cannot be evaluated.
    """
    _require_one_condition(configs, runs)
    configs[0].engine(num_envs=num_envs)  # refuses an impossible number of hosts before anything is shown
    names = dict.fromkeys((*(baselines or known.all_baselines(configs[0], with_run=bool(runs))), REFERENCE))
    groups = _groups(configs, runs, seeds, best, transfer)
    store = OutcomeStore(out) if out is not None else None
    episodes = len(groups) * (len(names) + bool(runs))
    with PassProgress(console, episodes) as progress:
        session = _Session(num_envs, episodes, store, progress, console)
        found = [session.outcomes(group, tuple(names)) for group in groups]
    rows = results(
        {name: [outcomes[name] for outcomes in found] for name in found[0]},
        configs[0].reward,
        configs[0].task_spec().objective,
        by_run=bool(runs),
    )
    if store is not None and session.reused:
        console.say(f"esper: {session.reused} of {len(groups) * len(found[0])} outcomes were found in {store.folder}")
    return Comparison(
        groups=groups,
        num_envs=num_envs,
        data=session.data,
        rows=rows,
        notes=[note for name in found[0] for note in _notes(groups, [outcomes[name] for outcomes in found])],
        reused=session.reused,
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
        if config.seed in seeds:
            raise ConfigError(
                f"{seeds[config.seed]} and {run} were both trained with seed {config.seed}, so they are not "
                "independent; compare runs of different seeds."
            )
        seeds[config.seed] = run
        first, own = flat(plain(configs[0])), flat(plain(config))
        for name in sorted(first.keys() | own.keys()):
            if name.partition(".")[0] not in _FREE and first.get(name) != own.get(name):
                raise ConfigError(
                    f"{runs[0]} and {run} are not runs of one condition: {name} is {first.get(name)} in the first and "
                    f"{own.get(name)} in the other; compare runs that differ in their seed alone, or each by itself."
                )


def _groups(
    configs: Sequence[RunConfig], runs: Sequence[Path], seeds: Sequence[int], best: bool, transfer: bool
) -> list[Group]:
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
        found = known.trained(run, config, best=best, transfer=transfer)
        warn(f"{said} Using the one {found.place} instead." for said in found.warnings)
        groups.append(Group(config=config, seed=seed, run=run, trained=found))
    return groups


class _Session:
    """Runs the jobs of a comparison, or finds their outcomes."""

    def __init__(
        self, num_envs: int, episodes: int, store: OutcomeStore | None, progress: PassProgress, console: RunConsole
    ) -> None:
        self._num_envs, self._episodes, self._store = num_envs, episodes, store
        self._progress, self._console = progress, console
        self._available: int | None = None
        self.reused, self.data = 0, "none"

    def outcomes(self, group: Group, names: Sequence[str]) -> dict[str, Outcome]:
        """The outcome of each controller on the hosts of a group, by name."""
        config = replace(group.config, compile="off")
        device = device_of(config)
        dataset = dataset_of(config, device)
        self.data = data_label(dataset.identity) if dataset else "none"
        own = [group.trained.controller] if group.trained else []
        source = known.source_of([*(c.name for c in own), *names], config)
        own += [known.baseline(name, config) for name in names if name not in DERIVED]
        own.sort(key=lambda controller: controller.name != source)
        found = {of.name: self._outcome(group.seed, config, dataset, device, of) for of in own}
        start = found[source] if source else next(iter(found.values()))
        params = start.stats.host_params + start.stats.fossil_params
        for name in (name for name in names if name in DERIVED):
            controller = known.derived(name, config, source, start.grown, params)
            found[name] = self._outcome(group.seed, config, dataset, device, controller)
        return found

    def _outcome(
        self, seed: int, config: RunConfig, dataset: Dataset | None, device: torch.device, controller: Controller
    ) -> Outcome:
        num_envs = self._num_envs
        key = key_of(config, dataset, controller, run_seed=seed, num_envs=num_envs) if self._store else {}
        if self._store and (stored := self._store.get(key)) is not None:
            self.reused += 1
            self._progress.skip()
            return stored
        first, task = self._available is None, config.task_spec()
        if self._available is None:
            self._available = available_bytes(device)  # memory that earlier hosts gave back stays in this process
        if first or controller.host is not None:  # refuse hosts that do not fit, also wider ones
            require_memory(
                config,
                task if controller.host is None else replace(task, host=controller.host),
                dataset,
                device,
                self._console.say if first else lambda line: None,
                num_envs=num_envs,
                episodes=self._episodes - self.reused,
                available=self._available,
            )
        self._progress.begin(f"{controller.name}, {counted(num_envs, 'host')} of {config.task} of seed {seed}")
        advance = partial(self._progress.advance, 1.0 / config.episode_length)
        outcome = run_controller(config, dataset, device, controller, run_seed=seed, num_envs=num_envs, on_step=advance)
        if self._store:
            self._store.put(key, outcome)
        return outcome
