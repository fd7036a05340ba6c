"""esper train: a new run, or the rest of an old one."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from esper.cli.options import (
    EXIT_STOPPED,
    FilePath,
    Flag,
    Names,
    Number,
    Plugins,
    Text,
    joined,
    overrides,
    placeholder,
    warn,
)
from esper.leyline.errors import ConfigError
from esper.telemetry.run_directory import (
    CONFIG,
    SUMMARY,
    RunDirectory,
    missing_records,
    require_free,
    require_nothing_to_lose,
    require_run,
)

if TYPE_CHECKING:
    import torch

    from esper.runs.build import Parts
    from esper.runs.checkpoint import Checkpoint, Header
    from esper.runs.config import RunConfig

_RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller that grows networks.

    A run has its own folder: configuration, records, checkpoints and a summary.

    Ctrl-C ends it after this step; --resume continues as if it had never ended.
    """

    config: FilePath = None
    """Configuration file (TOML); options of the command line win over it."""
    task: Text = None
    """What is trained; `esper tasks` lists the names. (digits)"""
    preset: Text = None
    """Set of values to start from: quickstart, small or paper. (quickstart)"""
    rounds: Number = None
    """Rounds in all, those before a resume included. (by the preset)"""
    num_envs: Number = None
    """Hosts that train in parallel. (by the preset)"""
    episode_length: Number = None
    """Control steps (host epochs) per round. (by the task)"""
    seed: Number = None
    """Run seed: the same seed gives the same run. (0)"""
    reward: Text = None
    """Reward by name: a built-in mode such as objective or shaped, or one that a plugin registers. (objective)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (auto)"""
    data_dir: FilePath = None
    """Folder of the task's data files. (the environment variable ESPER_DATA)"""
    executor: Text = None
    """How hosts are run: streamed (one by one), fused (all at once), native (in C++, on a CPU) or auto (by a rule)."""
    workers: Number = None
    """Processes that share the hosts of a CPU. (by the preset)"""
    compile: Text = None
    """How a step beside the hosts is run: off (eager), on (compiled by PyTorch) or auto. (auto)"""
    amp: Text = None
    """Precision of host training: off, auto, bf16 or fp16. (off)"""
    checkpoint_every: Number = None
    """Rounds between two checkpoints. (1)"""
    plugins: Plugins = ()
    """Your own code that registers tasks, blueprints, rewards or listeners."""
    set: Annotated[Names, placeholder("NAME=VALUE ...")] = ()
    """Any other value by its name in config.toml, e.g. --set ppo.lr=1e-3 lifecycle.sequential=false."""
    run_dir: FilePath = None
    """Where the run is recorded. (a new folder under runs/)"""
    resume: FilePath = None
    """Run directory to continue, with its own configuration; only --rounds, --device, --data-dir, --compile and
    --checkpoint-every may be given with it, and --trust or --plugins to allow its code."""
    trust: Flag = False
    """Allow all code (plugins) that a run directory names, with --resume or --config."""


def train(command: Train) -> int:
    """A new run, or the rest of an old one."""
    from esper.runs.presets import resolve
    from esper.runs.values import plain

    if command.resume is not None:
        return _resume(command, command.resume)
    config = resolve(overrides(command, joined(command.set)), command.config, trust=command.trust)
    path = command.run_dir or _free_name(config)
    require_free(path)
    parts = _assembled(config)
    with RunDirectory.create(path, plain(parts.config), steps=config.record_steps) as directory:
        return _run(parts.config, parts, directory, None, asked=config.executor)


def _resume(command: Train, path: Path) -> int:
    from esper.runs.checkpoint import load_newest, set_aside
    from esper.runs.identity import require_same_config
    from esper.runs.runner import restore
    from esper.runs.values import plain

    require_run(path)
    config = _continued(command, path)
    with RunDirectory.reopen(path) as directory:  # nothing is changed before everything was checked
        checkpoint, damaged, complaints = load_newest(directory.checkpoints)
        start = checkpoint.header if checkpoint else None
        if checkpoint and start:
            warn(f"{complaint} Using {checkpoint.path.name} instead." for complaint in complaints)
            require_same_config(start.config, config)
            _require_something_to_do(path, checkpoint, config)
            warn(missing_records(path, start.cursor))
        else:
            require_nothing_to_lose(path)
        parts = _assembled(config)
        if checkpoint:
            restore(parts.engine, parts.client, checkpoint, parts.shape)
        directory.rewind(start.cursor if start else {}, plain(config), steps=config.record_steps)
        set_aside(damaged)
        return _run(config, parts, directory, start, asked=config.executor)


def _continued(command: Train, path: Path) -> "RunConfig":
    """The configuration of a run with what may be changed of it."""
    from esper.runs.identity import CHANGEABLE
    from esper.runs.presets import recorded
    from esper.runs.values import read_toml

    given = overrides(command, joined(command.set))
    allowed = given.pop("plugins", [])
    extra = sorted(given.keys() - set(CHANGEABLE))
    extra += [name for name in ("config", "run_dir") if getattr(command, name) is not None]
    if extra:
        raise ConfigError(
            f"{', '.join(extra)} cannot be changed when a run is resumed, only {', '.join(CHANGEABLE)} can; "
            "leave it out, or start a new run for other settings."
        )
    if command.data_dir is not None:
        given["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(path / CONFIG) | given, allowed=allowed, trust=command.trust)


def _require_something_to_do(path: Path, checkpoint: "Checkpoint", config: "RunConfig") -> None:
    done = checkpoint.header.rounds_done
    at_the_end = any(name.startswith("engine.") for name in checkpoint.state)  # its hosts are there to be tested
    only_summary_missing = done == config.rounds and at_the_end and not (path / SUMMARY).exists()
    if done >= config.rounds and not only_summary_missing:
        raise ConfigError(
            f"{path} has done {done} rounds and {config.rounds} are asked for; go on with more, such as "
            f"--resume {path} --rounds {done + 10}."
        )


def _assembled(config: "RunConfig") -> "Parts":
    """What a run is made of, after the first line of the command: data may take a while to load."""
    from esper.runs.build import assemble, device_of
    from esper.simic.compilation import is_compiled
    from esper.telemetry.progress import RunConsole

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


def _why(executor: str, device: "torch.device") -> str:
    """Why "auto" took this executor, in a few words."""
    from esper.cpp.build import compiler

    if executor == "native":
        return " (C++ compiled for this processor)"
    if device.type == "cpu" and compiler() is None:
        return " (chosen by image size; with a C++ compiler such as g++ small hosts run natively, several times faster)"
    return " (chosen by image size)"


def _first_fossil(config: "RunConfig") -> int:
    """The step of the earliest FOSSILIZE: born in 1, trained, blended in the fewest ticks, then held."""
    from esper.leyline.actions import TEMPO_TICKS

    return 1 + config.lifecycle.min_training_epochs + min(TEMPO_TICKS) + 1


def _run(config: "RunConfig", parts: "Parts", directory: RunDirectory, start: "Header | None", *, asked: str) -> int:
    from esper.runs import tables
    from esper.runs.runner import Runner
    from esper.telemetry.hub import Hub
    from esper.telemetry.progress import RunConsole, RunProgress

    console = RunConsole()
    console.say(f"recorded in {directory.path}, on {parts.engine.spec.device}")
    if (taken := parts.engine.config.executor) != "auto":  # a task without networks has none
        workers = parts.engine.config.workers
        shared = f", hosts shared by {workers} processes" if workers > 1 else ""
        if config.graph == "static":
            console.say("graph: static (records arrive at the end of a round)")
        else:
            console.say(f"executor: {taken}{_why(taken, parts.engine.spec.device) if asked == 'auto' else ''}{shared}")
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
    warn(listeners.complaints())
    if summary is None:
        console.say(f"stopped; continue with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    console.say(tables.done(summary))
    console.say(f"compare it with the baselines: esper evaluate {directory.path}")
    return 0


def _free_name(config: "RunConfig") -> Path:
    """The first of runs/<task>-<preset>-s<seed>, ...-2, ...-3 that does not exist."""
    name = f"{config.task}-{config.preset}-s{config.seed}"
    candidates = (_RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())
