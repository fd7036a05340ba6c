"""esper train: starts or resumes a run."""

from collections.abc import Iterator
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

    Configuration, metrics, checkpoints and summary go to the run directory.

    Ctrl-C stops after the current step; --resume continues with identical results.
    """

    config: FilePath = None
    """Configuration file (TOML); command-line options override it."""
    task: Text = None
    """Task, one of those that `esper tasks` lists. (digits)"""
    preset: Text = None
    """Base settings: quickstart, small or paper. (quickstart)"""
    rounds: Number = None
    """Total rounds, including those before a resume. (set by the preset)"""
    num_envs: Number = None
    """Hosts that train in parallel. (set by the preset)"""
    episode_length: Number = None
    """Control steps (host epochs) per round. (set by the task)"""
    topology: FilePath = None
    """The model.json of an exported network: train hosts with the same seeds from new weights, in one round, instead of
    a controller."""
    seed: Number = None
    """Random seed; equal seeds give equal runs. (0)"""
    reward: Text = None
    """Reward: a built-in mode such as objective or shaped, or one from a plugin. (objective)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (auto)"""
    data_dir: FilePath = None
    """Folder of the data files. ($ESPER_DATA)"""
    executor: Text = None
    """How hosts are run: streamed (one by one), fused (all at once), native (C++ on a CPU) or auto. (auto)"""
    workers: Number = None
    """Processes that share the hosts on a CPU. (set by the preset)"""
    compile: Text = None
    """Use torch.compile for policy and reward: off, on or auto, which is on for CUDA. (auto)"""
    amp: Text = None
    """Mixed precision of host training: off, auto, bf16 or fp16. (off)"""
    checkpoint_every: Number = None
    """Rounds between checkpoints. (1)"""
    plugins: Plugins = ()
    """Plugins that register tasks, blueprints, rewards or listeners."""
    set: Annotated[Names, placeholder("NAME=VALUE ...")] = ()
    """Any other setting of config.toml, e.g. --set ppo.lr=1e-3 lifecycle.sequential=false."""
    run_dir: FilePath = None
    """Run directory to create. (a new folder under runs/)"""
    resume: FilePath = None
    """Run directory to continue. Only --rounds, --device, --data-dir, --compile and --checkpoint-every can be changed;
    --trust or --plugins allow its plugins."""
    trust: Flag = False
    """Execute all plugins that a run directory names, with --resume or --config."""


def train(command: Train) -> int:
    """Start or resume a run."""
    from esper.runs.presets import resolve
    from esper.runs.values import plain

    if command.resume is not None:
        return _resume(command, command.resume)
    given = overrides(command, joined(command.set))
    if command.topology is not None:
        given.setdefault("rounds", 1)
    config = resolve(given, command.config, trust=command.trust)
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
    with RunDirectory.reopen(path) as directory:  # checks everything before it changes anything
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
    """The configuration of an existing run with the changes of the command line."""
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
            "leave it out, or start a new run."
        )
    if command.data_dir is not None:
        given["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(path / CONFIG) | given, allowed=allowed, trust=command.trust)


def _require_something_to_do(path: Path, checkpoint: "Checkpoint", config: "RunConfig") -> None:
    done = checkpoint.header.rounds_done
    has_hosts = any(name.startswith("engine.") for name in checkpoint.state)  # needed for the test accuracy
    only_summary_missing = done == config.rounds and has_hosts and not (path / SUMMARY).exists()
    if done >= config.rounds and not only_summary_missing:
        raise ConfigError(
            f"{path} has completed {done} rounds and rounds is {config.rounds}; ask for more, such as "
            f"--resume {path} --rounds {done + 10}."
        )


def _assembled(config: "RunConfig") -> "Parts":
    """Print the first lines of a run, then build its parts, which may take a while."""
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
            f"note: no seed can be fossilized before step {first}, but a round has {config.episode_length} steps; "
            "use a larger --episode-length, or --set a smaller lifecycle.min_training_epochs"
        )
    if is_compiled(config.compile, device):
        RunConsole().say(
            "compiling (half a minute or more in the first run, seconds once the compiler cache is filled)"
        )
    return assemble(config, device, RunConsole().say)


def _why(executor: str, device: "torch.device") -> str:
    """Why "auto" chose this executor."""
    from esper.cpp.build import compiler

    if executor == "native":
        return " (C++ compiled for this CPU)"
    if device.type == "cpu" and compiler() is None:
        return " (install a C++ compiler such as g++ to run small hosts several times faster)"
    return " (chosen by image size)"


def _executor_lines(config: "RunConfig", parts: "Parts", asked: str) -> Iterator[str]:
    """What a run says about how its hosts are run; nothing for a task without networks."""
    from esper.tolaria.executors.native.executor import NativeExecutor
    from esper.tolaria.executors.sharded.executor import ShardedExecutor

    engine = parts.engine
    if config.graph == "static":
        yield "graph: static (metrics appear at the end of each round)"
    elif engine.config.executor != "auto":
        why = _why(engine.config.executor, engine.spec.device) if asked == "auto" else ""
        kind = "threads" if isinstance(engine.executor, NativeExecutor) else "processes"
        workers = f", {engine.config.workers} {kind}" if engine.config.workers > 1 else ""
        yield f"executor: {engine.config.executor}{why}{workers}"
    if isinstance(engine.executor, NativeExecutor | ShardedExecutor) and engine.executor.refused:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in engine.executor.refused.items())
        yield f"hosts with these blueprints are run by PyTorch, which is slower: {reasons}"


def _first_fossil(config: "RunConfig") -> int:
    """The earliest step with FOSSILIZE: germinate in step 1, train, blend at the fastest tempo, hold."""
    from esper.leyline.actions import TEMPO_TICKS

    return 1 + config.lifecycle.min_training_epochs + min(TEMPO_TICKS) + 1


def _run(config: "RunConfig", parts: "Parts", directory: RunDirectory, start: "Header | None", *, asked: str) -> int:
    from esper.runs import tables
    from esper.runs.runner import Runner
    from esper.telemetry.hub import Hub
    from esper.telemetry.progress import RunConsole, RunProgress

    console = RunConsole()
    console.say(f"run directory: {directory.path}, device: {parts.engine.spec.device}")
    for line in _executor_lines(config, parts, asked):
        console.say(line)
    if start is not None:
        console.say(f"continuing after {start.place} (of {config.rounds})")
    done = start.rounds_done * config.episode_length + start.step if start else 0
    progress = RunProgress(console, rounds=config.rounds, steps=config.episode_length, done=done)
    listeners = Hub({"progress": progress})
    listeners.add_registered(directory.path)
    runner = Runner(config, parts.engine, parts.client, directory, listeners, parts.shape, start)
    try:
        with progress:
            summary = runner.run()
    except KeyboardInterrupt:
        console.say(f"stopped; continue from the last checkpoint with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    warn(listeners.complaints())
    if summary is None:
        console.say(f"stopped; continue with: esper train --resume {directory.path}")
        return EXIT_STOPPED
    console.say(tables.done(summary))
    if not config.topology:
        console.say(f"compare with baselines: esper evaluate {directory.path}")
    return 0


def _free_name(config: "RunConfig") -> Path:
    """The first free name of runs/<task>-<preset>-s<seed>, ...-2, ...-3."""
    name = f"{config.task}-{config.preset}-s{config.seed}"
    candidates = (_RUNS / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())
