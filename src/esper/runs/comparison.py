"""A comparison of controllers from start to end: which ones, on which hosts, with the result as tables.

    group   the hosts of one evaluation seed: those of one run (its seed + 1,000,000), or without runs of one given seed
    job     one controller on one group: one episode of N hosts

Every controller meets the same groups, so that all differences are paired.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.hosts.host import HostSpec
from esper.leyline.errors import ConfigError, RunDirectoryError, nearest, option
from esper.runs import controllers as known
from esper.runs import tables
from esper.runs.build import dataset_of, device_of, require_memory
from esper.runs.config import RunConfig
from esper.runs.controllers import REFERENCE, TRAINED, Controller, Trained
from esper.runs.identity import CHANGEABLE
from esper.runs.outcome_store import OutcomeStore, key_of
from esper.runs.outcomes import SEED_OFFSET, Outcome, run_controller
from esper.runs.rows import Row, Size, counted, table, verdict
from esper.runs.values import flat, plain
from esper.tamiyo.policy_files import SUFFIX
from esper.tasks.datasets import Dataset, data_label
from esper.telemetry.progress import PassProgress, RunConsole, warn
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
    rows: Sequence[Row]
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
        pages = [tables.comparison(self.rows), tables.quality_and_cost(self.rows), tables.operations(self.rows)]
        if not math.isnan(self.rows[0].perplexity):
            pages.insert(2, tables.perplexities(self.rows))
        for page in pages:
            console.print("", page, sep="\n")
        notes = (*self.notes, *tables.rollbacks(self.rows), self.verdict)
        console.say("\n".join(("", tables.legend(self.size.units), *notes)))

    def __str__(self) -> str:
        return tables.text(self.show)

    __repr__ = __str__


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
    rows = table(
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
        warn(f"{complaint} Using the one {found.place} instead." for complaint in found.complaints)
        groups.append(Group(config=config, seed=seed, run=run, trained=found))
    return groups


class _Session:
    """Runs the jobs of a comparison, or finds their outcomes."""

    def __init__(
        self,
        num_envs: int,
        episodes: int,
        store: OutcomeStore | None,
        progress: PassProgress,
        console: RunConsole,
    ) -> None:
        self.episodes = episodes
        self._num_envs, self._store, self._progress, self._console = num_envs, store, progress, console
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
        own += [known.baseline(name, config) for name in names if not _is_derived(name)]
        own.sort(key=lambda controller: controller.name != source)
        found: dict[str, Outcome] = {}
        for controller in own:
            found[controller.name] = self._outcome(group, config, dataset, device, controller)
        for name in filter(_is_derived, names):
            start = found[source] if source else next(iter(found.values()))
            params = start.stats.host_params + start.stats.fossil_params
            controller = known.derived(name, config, source, start.grown, params)
            found[name] = self._outcome(group, config, dataset, device, controller)
        return found

    def _outcome(
        self, group: Group, config: RunConfig, dataset: Dataset | None, device: torch.device, controller: Controller
    ) -> Outcome:
        seed, num_envs = group.seed, self._num_envs
        key = key_of(config, dataset, controller, run_seed=seed, num_envs=num_envs) if self._store else None
        if self._store and key and (stored := self._store.get(key)) is not None:
            self.reused += 1
            self._progress.skip()
            return stored
        self._require_memory(config, dataset, device, controller.host)
        self._progress.begin(f"{controller.name}, {counted(num_envs, 'host')} of {config.task} of seed {seed}")
        advance = partial(self._progress.advance, 1.0 / config.episode_length)
        outcome = run_controller(config, dataset, device, controller, run_seed=seed, num_envs=num_envs, on_step=advance)
        if self._store and key:
            self._store.put(key, outcome)
        return outcome

    def _require_memory(
        self, config: RunConfig, dataset: Dataset | None, device: torch.device, wider: HostSpec | None
    ) -> None:
        """Refuse hosts that do not fit, before the first episode and before one of wider hosts."""
        first, task = self._available is None, config.task_spec()
        if self._available is None:
            self._available = available_bytes(device)  # memory that earlier hosts gave back stays in this process
        if first or wider is not None:
            require_memory(
                config,
                task if wider is None else replace(task, host=wider),
                dataset,
                device,
                self._console.say if first else lambda line: None,
                num_envs=self._num_envs,
                episodes=self.episodes - self.reused,
                available=self._available,
            )


def _is_derived(name: str) -> bool:
    return name in known.DERIVED
