"""What the commands do; `esper.cli` says how they are called."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from esper.cli import EXIT_STOPPED, Evaluate, Train, overrides
from esper.leyline.errors import ConfigError, nearest
from esper.simic.client import SimicClient
from esper.simic.training.build import dataset_of, device_of, engine_of, learner_of
from esper.simic.training.checkpoint import Header, load_newest
from esper.simic.training.config import RunConfig, plain, read_toml, validated
from esper.simic.training.evaluate import SEED_OFFSET, Row, all_baselines, table
from esper.simic.training.evaluate import evaluate as run_evaluation
from esper.simic.training.presets import resolve
from esper.simic.training.runner import Runner, restore, run_shape
from esper.tamiyo.baselines import BASELINES
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.registry import task_by_name, task_names
from esper.telemetry.progress import RunProgress
from esper.telemetry.run_directory import CHECKPOINTS, CONFIG, RunDirectory, plain_json, require_run
from esper.tolaria.engine import VectorizedEngine

assert _presets
_RUNS = Path("runs")


def train(command: Train) -> int:
    """A new run, or the rest of an old one."""
    if command.resume is not None:
        return _resume(command, command.resume)
    config = resolve(overrides(command), command.config)
    parts = _Parts.of(config)
    directory = RunDirectory.create(command.run_dir or _free_name(config), plain(config))
    return _run(parts, directory, None)


def _resume(command: Train, path: Path) -> int:
    require_run(path)
    given = overrides(command)
    extra = sorted(given.keys() - {"rounds", "device"})
    extra += [name for name in ("config", "run_dir") if getattr(command, name) is not None]
    if extra:
        raise ConfigError(
            f"{', '.join(extra)} cannot be changed when a run is resumed; only rounds and device can. "
            "Start a new run for other settings."
        )
    config = validated(read_toml(path / CONFIG) | given)
    checkpoint, complaints = load_newest(path / CHECKPOINTS)
    _warn(f"{complaint} Using {checkpoint.path.name} instead." for complaint in complaints)
    header = checkpoint.header
    if header.rounds_done >= config.rounds:
        raise ConfigError(
            f"{path} has done {header.rounds_done} of {config.rounds} rounds; "
            f"ask for more with --rounds {header.rounds_done + 10}."
        )
    parts = _Parts.of(config)
    restore(parts.engine, parts.client, checkpoint, parts.shape)
    return _run(parts, RunDirectory.reopen(path, header.cursor, plain(config)), header)


@dataclass(frozen=True)
class _Parts:
    """What a run is made of."""

    config: RunConfig
    engine: VectorizedEngine
    client: SimicClient
    shape: dict[str, object]

    @classmethod
    def of(cls, config: RunConfig) -> "_Parts":
        device = device_of(config)
        dataset = dataset_of(config, device)
        engine = engine_of(config, dataset, device)
        identity = dict(dataset.identity) if dataset else {}
        return cls(config, engine, learner_of(config, engine.spec), run_shape(config, engine.spec, identity))


def _run(parts: _Parts, directory: RunDirectory, start: Header | None) -> int:
    config, console = parts.config, Console()
    done = start.rounds_done if start else 0
    hosts = f"{config.num_envs} hosts x {config.episode_length} steps x {config.rounds} rounds"
    tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    tell(f"esper: {config.task}, {hosts}, reward {config.reward.mode}, seed {config.seed}")
    tell(f"recorded in {directory.path}")
    if start is not None:
        tell(f"continuing after {done} rounds" + (f" and {start.step} steps" if start.step else ""))
    progress = RunProgress(console, rounds=config.rounds, steps=config.episode_length, done=done)
    summary = Runner(config, parts.engine, parts.client, directory, progress, parts.shape, start).run()
    if summary is None:
        tell(f"stopped; continue with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    names = ("final_val_accuracy_mean", "final_test_accuracy_mean", "growth_ratio_mean", "env_steps_per_second")
    tell("done: " + ", ".join(f"{name} {summary[name]:.2f}" for name in names))
    tell(f"compare it with the baselines: esper evaluate {directory.path}")
    return 0


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        Console(stderr=True, soft_wrap=True).print(f"esper: {line}", markup=False, highlight=False)


def _free_name(config: RunConfig) -> Path:
    """The first of runs/<task>-<preset>-s<seed>, ...-2, ...-3 that does not exist."""
    name = f"{config.task}-{config.preset}-s{config.seed}"
    candidates = (_RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())


def evaluate(command: Evaluate) -> int:
    """A table of controllers on equal hosts."""
    runs = [name for name in command.controllers if name not in BASELINES]
    baselines = [name for name in command.controllers if name in BASELINES]
    if len(runs) > 1:
        raise ConfigError(
            f"{', '.join(runs)} are neither baselines nor one run; give one run directory and any of "
            f"{', '.join(BASELINES)}."
        )
    run = Path(runs[0]) if runs else None
    config = _evaluated_config(command, run)
    if run is not None:
        _, complaints = load_newest(run / CHECKPOINTS)
        _warn(f"{complaint} Using the one before." for complaint in complaints)
    seed = config.seed + SEED_OFFSET if command.seed is None else command.seed
    outcomes = run_evaluation(
        config, run, baselines or (all_baselines() if run else ()), run_seed=seed, num_envs=command.num_envs
    )
    rows = table(outcomes)
    Console().print(_comparison(rows, f"{config.task}: {command.num_envs} hosts of seed {seed}"))
    if command.json is not None:
        lines = [dataclasses.asdict(row) for row in rows]
        report = {"task": config.task, "seed": seed, "num_envs": command.num_envs, "controllers": lines}
        command.json.write_text(json.dumps(plain_json(report), indent=2) + "\n")
    return 0


def _evaluated_config(command: Evaluate, run: Path | None) -> RunConfig:
    told: dict[str, Any] = {}
    if command.device is not None:
        told["device"] = command.device
    if command.data_dir is not None:
        told["data_dir"] = str(command.data_dir)
    choices = {name: value for name in ("task", "preset") if (value := getattr(command, name)) is not None}
    if run is None:
        return resolve(told | choices)
    if choices:
        raise ConfigError(f"--{' --'.join(choices)} cannot be given with a run: it is evaluated on its own task.")
    if not run.exists():
        raise ConfigError(f"{run} is neither a run directory nor a baseline; {nearest(str(run), BASELINES)}")
    require_run(run)
    return validated(read_toml(run / CONFIG) | told)


def _comparison(rows: Sequence[Row], title: str) -> Table:
    page = Table(title=title)
    page.add_column("controller")
    for column in ("committed acc", "test acc", "vs wait_only", "growth", "return", "fossils", "operations"):
        page.add_column(column, justify="left" if column == "operations" else "right")
    for row in rows:
        ops = " ".join(f"{name.lower()} {n}" for name, n in row.ops.items() if n and name != "WAIT") or "none"
        gain = "" if math.isnan(row.gain) else f"{row.gain:+.2f} ± {row.gain_standard_error:.2f}"
        cells = (f"{row.committed:.2f} ± {row.committed_std:.2f}", f"{row.test:.2f}", gain, f"{row.growth:.2f}x")
        page.add_row(row.name, *cells, f"{row.mean_return:+.3f}", f"{row.fossilized:.2f}", ops)
    return page


def tasks() -> int:
    """A table of the tasks."""
    page = Table()
    for column in ("task", "slots", "steps", "data", "description"):
        page.add_column(column)
    for name in task_names():
        task = task_by_name(name)
        data = "files (--data-dir)" if task.needs_data_dir else "embedded" if task.load else "none"
        page.add_row(name, " ".join(task.enabled), str(task.episode_length), data, task.description)
    Console().print(page)
    return 0
