"""esper train: starts or resumes a run."""

from dataclasses import dataclass
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
)
from esper.leyline.errors import ConfigError
from esper.leyline.errors import command as command_line
from esper.telemetry.progress import RunConsole
from esper.telemetry.run_directory import CONFIG, plugins_of, require_run

if TYPE_CHECKING:
    from esper.runs.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller that grows networks.

    Configuration, metrics, checkpoints and summary go to the run directory.

    Ctrl-C stops after the current step; --resume continues with identical results.
    """

    config: FilePath = None
    """Configuration file (TOML); command-line options override it."""
    task: Text = None
    """Task, one of those that `esper tasks` lists, or FILE.py:NAME, an esper.Task in a file. (digits)"""
    preset: Text = None
    """Base settings: quickstart, small, learn or paper. (quickstart)"""
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
    sinks: Annotated[Names, placeholder("NAME ...")] = ()
    """Where metrics go besides the run directory: tensorboard, wandb, trackio, or one from a plugin."""
    run_dir: FilePath = None
    """Run directory to create. (a new folder under runs/)"""
    resume: FilePath = None
    """Run directory to continue. Only --rounds, --device, --data-dir, --compile, --checkpoint-every and --sinks can be
    changed; --trust or --plugins allow its plugins."""
    trust: Flag = False
    """Execute all plugins that a run directory names, with --resume or --config."""


NEW_HOSTS = 32
"""Hosts on which a finished run is compared with the best schedule of its task."""


def train(command: Train) -> int:
    """Start or resume a run."""
    from esper.runs import training
    from esper.runs.presets import resolve

    console = RunConsole()
    if command.resume is not None:
        require_run(command.resume)
        path, config = command.resume, _continued(command, command.resume)
        summary = training.resume(config, path, console)
    else:
        given = overrides(command, joined(command.set))
        if command.topology is not None:
            given.setdefault("rounds", 1)
        config = resolve(given, command.config, trust=command.trust)
        path = command.run_dir or training.free_name(config)
        summary = training.start(config, path, console)
    if summary is None:
        console.say(training.stopped(path))
        return EXIT_STOPPED
    if not config.topology:
        console.say(f"compare with baselines: {command_line('evaluate', path, plugins=plugins_of(path))}")
        _say_against_best_schedule(config, path, console)
    return 0


def _say_against_best_schedule(config: "RunConfig", path: Path, console: RunConsole) -> None:
    """The last line of a run on a task whose best schedule is known: 100·J of both on new hosts."""
    from esper.runs.comparison import compare
    from esper.runs.controllers import BEST_SCHEDULE, has_best_schedule

    if not has_best_schedule(config):
        return
    found = compare([config], [path], [BEST_SCHEDULE], num_envs=NEW_HOSTS, console=console)
    console.say(f"beside the best constant schedule: {found.verdict}")


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
