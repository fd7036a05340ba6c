"""Starts or resumes a run, and prints what it does."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from esper.cpp.build import compiler
from esper.leyline.actions import TEMPO_TICKS
from esper.leyline.errors import ConfigError
from esper.leyline.wording import option
from esper.runs import best_host, tables
from esper.runs.best_host import BestHost
from esper.runs.build import Parts, assemble, device_of
from esper.runs.checkpoint import Checkpoint, Header, checkpoints, load_newest, set_aside
from esper.runs.config import RunConfig
from esper.runs.identity import data_of, require_same_config
from esper.runs.record_rows import begin_record, rewind_record
from esper.runs.runner import Runner, restore
from esper.runs.values import plain
from esper.simic.compilation import is_compiled
from esper.telemetry.progress import RunConsole, RunProgress, warn
from esper.telemetry.record import open_record
from esper.telemetry.run_directory import (
    CHECKPOINTS,
    SUMMARY,
    RunDirectory,
    continuing,
    missing_records,
    require_free,
    require_nothing_to_lose,
)
from esper.telemetry.sinks import SINKS, Hub, require_installed
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.sharded.executor import ShardedExecutor

RUNS = Path("runs")


def start(config: RunConfig, path: Path, console: RunConsole) -> dict[str, Any] | None:
    """Train a new run in the directory `path`. Returns its summary, or None if it was stopped.

    Raises:
        RunDirectoryError: the directory exists. ConfigError, DataError: the run cannot be built.
    """
    require_free(path)
    require_installed(config.sinks)
    with suppress(KeyboardInterrupt):  # before the first step, or at once by a second Ctrl-C
        parts = _assembled(config, console)
        with RunDirectory.create(path, plain(parts.config)) as directory:
            return _run(parts.config, parts, directory, None, console, asked=config.executor)
    return None


def resume(config: RunConfig, path: Path, console: RunConsole) -> dict[str, Any] | None:
    """Continue the run in the directory `path`. Returns its summary, or None if it was stopped.

    Args:
        config: that of the run, with changes of what may be changed (`identity.CHANGEABLE`).
        path: the run directory.
        console: receives the lines.

    Raises:
        CheckpointError, RunDirectoryError, ConfigError: there is nothing to continue from, or nothing to do.
    """
    require_installed(config.sinks)
    # checks everything before it changes anything
    with suppress(KeyboardInterrupt), RunDirectory.reopen(path) as directory:
        checkpoint, damaged, complaints = load_newest(directory.checkpoints)
        start = checkpoint.header if checkpoint else None
        if checkpoint and start:
            warn(f"{complaint} Using {checkpoint.path.name} instead." for complaint in complaints)
            require_same_config(start.config, config)
            _require_something_to_do(path, checkpoint, config)
            warn(missing_records(path, start.cursor))
        else:
            require_nothing_to_lose(path)
        best = best_host.read(directory.checkpoints)
        parts = _assembled(config, console, start.rounds_done if start else 0)
        if checkpoint:
            restore(parts.engine, parts.client, checkpoint, parts.shape)
        directory.rewind(start.cursor if start else {}, plain(config))
        rewind_record(path, start.rounds_done if start else 0, start.step if start else 0)
        set_aside(damaged)
        return _run(config, parts, directory, start, console, asked=config.executor, best=best)
    return None


def free_name(config: RunConfig) -> Path:
    """The first free name of runs/<task>-<preset>-s<seed>, ...-2, ...-3."""
    name = f"{config.task}-{config.preset}-s{config.seed}"
    candidates = (RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())


def _require_something_to_do(path: Path, checkpoint: Checkpoint, config: RunConfig) -> None:
    done = checkpoint.header.rounds_done
    has_hosts = any(name.startswith("engine.") for name in checkpoint.state)  # needed for the test accuracy
    only_summary_missing = done == config.rounds and has_hosts and not (path / SUMMARY).exists()
    if done >= config.rounds and not only_summary_missing:
        raise ConfigError(
            f"{path} has completed {done} rounds and rounds is {config.rounds}; ask for more: "
            f"{continuing(path, done + 10)}."
        )


def _assembled(config: RunConfig, console: RunConsole, rounds_done: int = 0) -> Parts:
    """Print the first lines of a run, then build its parts, which may take a while."""
    device = device_of(config)
    sizes = ((config.num_envs, "host"), (config.episode_length, "step"), (config.rounds, "round"))
    size = " x ".join(f"{number} {unit}{'s' * (number != 1)}" for number, unit in sizes)
    console.say(f"esper: {config.task}, {size}, reward {config.reward_name}, seed {config.seed}")
    first = _first_fossil(config)
    if first > config.episode_length:
        console.say(
            f"note: no seed can be fossilized before step {first}, but a round ends with step {config.episode_length}; "
            f"use a larger {option('episode_length')}, or a smaller lifecycle.min_training_epochs"
        )
    if is_compiled(config.compile, device):
        console.say("compiling (half a minute or more in the first run, seconds once the compiler cache is filled)")
    return assemble(config, device, console.say, rounds_done=rounds_done)


def _first_fossil(config: RunConfig) -> int:
    """The earliest step with FOSSILIZE: germinate in step 1, train, blend at the fastest tempo, hold."""
    return 1 + config.lifecycle.min_training_epochs + min(TEMPO_TICKS) + 1


def why_chosen(executor: str, device: torch.device) -> str:
    """Why "auto" chose this executor."""
    if executor == "native":
        return " (C++ compiled for this CPU)"
    if device.type == "cpu" and compiler() is None:
        return " (install a C++ compiler such as g++ to run small hosts several times faster)"
    return " (chosen by the size of activations)"


def _executor_lines(config: RunConfig, parts: Parts, asked: str) -> Iterator[str]:
    """What a run says about how its hosts are run; nothing for a task without networks."""
    engine = parts.engine
    if engine.config.executor != "auto":
        why = why_chosen(engine.config.executor, engine.spec.device) if asked == "auto" else ""
        kind = "threads" if isinstance(engine.executor, NativeExecutor) else "processes"
        workers = f", {engine.config.workers} {kind}" if engine.config.workers > 1 else ""
        yield f"executor: {engine.config.executor}{why}{workers}"
    if isinstance(engine.executor, NativeExecutor | ShardedExecutor) and engine.executor.refused:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in engine.executor.refused.items())
        yield f"hosts with these blueprints are run by PyTorch, which is slower: {reasons}"


def _run(
    config: RunConfig,
    parts: Parts,
    directory: RunDirectory,
    start: Header | None,
    console: RunConsole,
    *,
    asked: str,
    best: BestHost | None = None,
) -> dict[str, Any] | None:
    console.say(f"run directory: {directory.path}, device: {parts.engine.spec.device}")
    if (data := data_of(parts.shape)) not in ("none", config.task):
        console.say(f"data: {data}")
    for line in _executor_lines(config, parts, asked):
        console.say(line)
    if start is not None:
        console.say(f"continuing after {start.place} (of {config.rounds})")
    done = start.rounds_done * config.episode_length + start.step if start else 0
    progress = RunProgress(console, rounds=config.rounds, steps=config.episode_length, done=done)
    listeners = Hub({"progress": progress})
    listeners.add_registered(directory.path)
    if start is None:
        begin_record(directory.path, parts.engine.spec, parts.client.terms)
    for name in config.sinks:
        where = SINKS[name].where.format(directory.path)
        console.say(f"sink: {name}{f' ({where})' * bool(where)}")
    listeners.start_sinks(config.sinks, directory.path)
    runner = Runner(
        config, parts.engine, parts.client, directory, listeners, parts.shape, start, dataset=parts.dataset, best=best
    )
    with listeners, progress:
        summary = runner.run()
    warn(runner.record.complaints())
    if summary is not None:
        console.say(tables.done(summary))
        _say_anomalies(directory.path, console)
    return summary


def stopped(path: Path, *, task: bool = False) -> str:
    """How a run that was stopped goes on; `task` says that only a program knows its task."""
    if not checkpoints(path / CHECKPOINTS):
        return "stopped before the first checkpoint; nothing was kept"
    return f"stopped; continue with: {continuing(path, task=task)}"


def _say_anomalies(path: Path, console: RunConsole) -> None:
    """What looks wrong in a complete run, and what of its record cannot be read."""
    with open_record([path]) as record:
        warn(record.complaints)
        for line in record.anomaly_lines():
            console.say(f"look at {line}")
