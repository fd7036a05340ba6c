"""What the commands do; `esper.cli` says how they are called."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from esper.cli import EXIT_STOPPED, Evaluate, Tasks, Train, joined, overrides
from esper.kasmina.native.compiled import compiler
from esper.leyline.actions import TEMPO_TICKS
from esper.leyline.errors import ConfigError, RunDirectoryError, nearest
from esper.simic.compilation import is_compiled
from esper.simic.training import evaluate as comparison
from esper.simic.training import tables
from esper.simic.training.build import Parts, assemble, device_of
from esper.simic.training.checkpoint import Checkpoint, Header, load_newest, set_aside
from esper.simic.training.config import RunConfig
from esper.simic.training.identity import CHANGEABLE, require_same_config
from esper.simic.training.plugins import load_plugins
from esper.simic.training.presets import recorded, resolve
from esper.simic.training.runner import Runner, restore
from esper.simic.training.values import plain, read_toml
from esper.tamiyo.baselines import STATIC
from esper.tasks.registry import task_by_name, task_names
from esper.telemetry.hub import Hub
from esper.telemetry.progress import RunConsole, RunProgress
from esper.telemetry.run_directory import (
    CHECKPOINTS,
    CONFIG,
    SUMMARY,
    RunDirectory,
    missing_records,
    plain_json,
    require_free,
    require_run,
)

_RUNS = Path("runs")


def train(command: Train) -> int:
    """A new run, or the rest of an old one."""
    if command.resume is not None:
        return _resume(command, command.resume)
    config = resolve(overrides(command), command.config)
    path = command.run_dir or _free_name(config)
    require_free(path)
    parts = _assembled(config)
    with RunDirectory.create(path, plain(parts.config), steps=config.record_steps) as directory:
        return _run(parts.config, parts, directory, None, asked=config.executor)


def _resume(command: Train, path: Path) -> int:
    require_run(path)
    config = _continued(command, path)
    checkpoint, damaged, complaints = load_newest(path / CHECKPOINTS)
    start = checkpoint.header if checkpoint else None
    if checkpoint and start:
        _warn(f"{complaint} Using {checkpoint.path.name} instead." for complaint in complaints)
        require_same_config(start.config, config)
        _require_something_to_do(path, checkpoint, config)
        _warn(missing_records(path, start.cursor))
    # a run that recorded "auto" keeps it, as its checkpoints do; on a CPU that was float32, and nothing is measured now
    begun_elsewhere = config.amp == "auto" and device_of(config).type == "cpu"
    parts = _assembled(replace(config, amp="off") if begun_elsewhere else config)
    if checkpoint:
        restore(parts.engine, parts.client, checkpoint, parts.shape)
    cursor = start.cursor if start else {}
    with RunDirectory.reopen(path, cursor, plain(config), steps=config.record_steps) as directory:
        set_aside(damaged)
        return _run(config, parts, directory, start, asked=config.executor)


def _continued(command: Train, path: Path) -> RunConfig:
    """The configuration of a run with what may be changed of it."""
    given = overrides(command)
    extra = sorted(given.keys() - set(CHANGEABLE))
    extra += [name for name in ("config", "run_dir") if getattr(command, name) is not None]
    if extra:
        raise ConfigError(
            f"{', '.join(extra)} cannot be changed when a run is resumed, only {', '.join(CHANGEABLE)} can; "
            "leave it out, or start a new run for other settings."
        )
    if command.data_dir is not None:
        given["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(path / CONFIG) | given)


def _require_something_to_do(path: Path, checkpoint: Checkpoint, config: RunConfig) -> None:
    done = checkpoint.header.rounds_done
    at_the_end = any(name.startswith("engine.") for name in checkpoint.state)  # its hosts are there to be tested
    only_summary_missing = done == config.rounds and at_the_end and not (path / SUMMARY).exists()
    if done >= config.rounds and not only_summary_missing:
        raise ConfigError(
            f"{path} has done {done} rounds and {config.rounds} are asked for; go on with more, such as "
            f"--resume {path} --rounds {done + 10}."
        )


def _assembled(config: RunConfig) -> Parts:
    """What a run is made of, after the first line of the command: data may take a while to load."""
    device = device_of(config)
    sizes = ((config.num_envs, "host"), (config.episode_length, "step"), (config.rounds, "round"))
    size = " x ".join(f"{number} {unit}{'s' * (number != 1)}" for number, unit in sizes)
    RunConsole().say(f"esper: {config.task}, {size}, reward {config.reward_name}, seed {config.seed}")
    first = _first_fossil(config)
    if first > config.episode_length:
        RunConsole().say(
            f"note: no seed can become permanent before step {first}, and a round has {config.episode_length}; "
            "give a larger --episode-length, or a smaller lifecycle.min_training_epochs with --set"
        )
    if is_compiled(config.compile, device):
        RunConsole().say(
            "compiling (half a minute or more for the first run of its kind on a machine, seconds for the next)"
        )
    return assemble(config, device)


def _why(executor: str, device: torch.device) -> str:
    """Why "auto" took this executor, in a few words."""
    if executor == "native":
        return " (C++ compiled for this processor)"
    if device.type == "cpu" and compiler() is None:
        return " (chosen by image size; with a C++ compiler such as g++ small hosts run natively, several times faster)"
    return " (chosen by image size)"


def _first_fossil(config: RunConfig) -> int:
    """The step of the earliest FOSSILIZE: born in 1, trained, blended in the fewest ticks, then held."""
    return 1 + config.lifecycle.min_training_epochs + min(TEMPO_TICKS) + 1


def _run(config: RunConfig, parts: Parts, directory: RunDirectory, start: Header | None, *, asked: str) -> int:
    console = RunConsole()
    console.say(f"recorded in {directory.path}, on {parts.engine.spec.device}")
    if (taken := parts.engine.config.executor) != "auto":  # a task without networks has none
        workers = parts.engine.config.workers
        shared = f", hosts shared by {workers} processes" if workers > 1 else ""
        if config.topology == "static":
            console.say("topology: static (records arrive at the end of a round)")
        else:
            console.say(f"executor: {taken}{_why(taken, parts.engine.spec.device) if asked == 'auto' else ''}{shared}")
    for sentence in parts.told:
        console.say(sentence)
    if start is not None:
        inside = f" and {start.step} steps" if start.step else ""
        console.say(f"continuing after {start.rounds_done} of {config.rounds} rounds{inside}")
    done = start.rounds_done * config.episode_length + start.step if start else 0
    progress = RunProgress(console, rounds=config.rounds, steps=config.episode_length, done=done)
    listeners = Hub({"progress": progress})
    listeners.add_registered(directory.path)
    runner = Runner(config, parts.engine, parts.client, directory, listeners, parts.shape, start)
    try:
        with progress:
            summary = runner.run()
    except KeyboardInterrupt:
        console.say(f"ended at once; continue from the last checkpoint with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    _warn(listeners.complaints())
    if summary is None:
        console.say(f"stopped; continue with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    console.say(tables.done(summary))
    console.say(f"compare it with the baselines: esper evaluate {directory.path}")
    return 0


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        RunConsole(stderr=True).say(f"esper: {line}")


def _free_name(config: RunConfig) -> Path:
    """The first of runs/<task>-<preset>-s<seed>, ...-2, ...-3 that does not exist."""
    name = f"{config.task}-{config.preset}-s{config.seed}"
    candidates = (_RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())


def evaluate(command: Evaluate) -> int:
    """A table of controllers on equal hosts."""
    run, baselines = _named(command.controllers)
    config = _evaluated_config(command, run)
    names = dict.fromkeys((*(baselines or comparison.all_baselines(config)), comparison.REFERENCE))
    with _json_file(command.json) as write_json:
        controllers, place = [comparison.baseline(name, config) for name in names], ""
        if run is not None:
            found = comparison.trained(run, config, best=command.best)
            controllers.insert(0, found.controller)
            place = found.place
            _warn(f"{complaint} Using the one {place} instead." for complaint in found.complaints)
        controllers = comparison.in_order(controllers)
        seed = config.seed + comparison.SEED_OFFSET if command.seed is None else command.seed
        console = RunConsole(stderr=True)
        outcomes = comparison.evaluate(
            config,
            controllers,
            run_seed=seed,
            num_envs=command.num_envs,
            on_start=lambda name: console.say(f"esper: {name}, {command.num_envs} hosts of {config.task}"),
        )
        rows = comparison.table(outcomes, config.reward)
        write_json(plain_json(comparison.report(rows, config, run, place, seed, command.num_envs)))
    if str(command.json) != "-":
        console = RunConsole()
        console.say(
            f"{config.task}, {command.num_envs} hosts of seed {seed}" + (f", trained = {run} {place}" if run else "")
        )
        for table in (tables.comparison(rows), tables.operations(rows)):
            console.print("", table, sep="\n")
        notes = (*_static_note(controllers, rows), *tables.rollbacks(rows), comparison.verdict(rows))
        console.say("\n".join(("", tables.LEGEND, *notes)))
    return 0


def _static_note(controllers: Sequence[tuple[str, object]], rows: Sequence[comparison.Row]) -> list[str]:
    """Whose structure `static_final` has, where it is among them."""
    if STATIC not in (row.name for row in rows):
        return []
    source = controllers[0][0]
    (row,) = (row for row in rows if row.name == source)
    if not any(structure["slots"] for structure in row.structures):
        return [f"static_final: {source} ended without a permanent seed, so this is {comparison.REFERENCE} again."]
    return [f"static_final: the structure that {source} ended with, host by host, from step 1."]


def _named(controllers: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """The run and the baselines that are named; none is all of them."""
    if not controllers:
        raise ConfigError(
            f"nothing is named to be evaluated; name a run directory, or any of {', '.join(comparison.NAMES)}."
        )
    runs = [name for name in controllers if name not in comparison.NAMES]
    baselines = [name for name in dict.fromkeys(controllers) if name in comparison.NAMES]
    for name in runs:
        if not Path(name).exists():
            raise RunDirectoryError(
                f"{name} is neither a run directory nor a baseline; {nearest(name, comparison.NAMES)}"
            )
    if len(runs) > 1:
        raise ConfigError(f"{', '.join(runs)} are several run directories; name one of them, and any baselines.")
    return Path(runs[0]) if runs else None, tuple(baselines)


def _evaluated_config(command: Evaluate, run: Path | None) -> RunConfig:
    told = overrides(command)
    for name in ("seed", "num_envs"):  # of the evaluation hosts, not of the run
        told.pop(name, None)
    if run is None:
        if command.best:
            raise ConfigError("--best chooses a checkpoint of a run, and no run is named; name one, or leave it out.")
        return resolve(told)
    if own := sorted(told.keys() - {"device", "data_dir"}):
        raise ConfigError(
            f"{', '.join(own)} cannot be given with a run: it is evaluated as it was trained; leave it out."
        )
    require_run(run)
    if command.data_dir is not None:
        told["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(run / CONFIG) | told)


@contextmanager
def _json_file(path: Path | None) -> Iterator[Callable[[object], None]]:
    """Where the JSON goes; a file that cannot be written is refused before the evaluation rather than after it."""
    if path is None:
        yield lambda report: None
    elif str(path) == "-":
        yield lambda report: RunConsole().out(json.dumps(report, indent=2), highlight=False)
    else:
        draft = path.with_name(f".{path.name}.draft")
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file with --json.")
        try:
            file = draft.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the file {path} cannot be written ({error.strerror}); name another with --json."
            ) from error
        try:
            with file:
                yield lambda report: print(json.dumps(report, indent=2), file=file)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)


def tasks(command: Tasks) -> int:
    """A table of the tasks."""
    load_plugins(joined(command.plugins))
    RunConsole().print(tables.tasks([task_by_name(name) for name in task_names()]))
    return 0
