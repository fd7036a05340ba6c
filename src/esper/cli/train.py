"""esper train: starts or resumes a run."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from esper.cli.options import (
    EXIT_STOPPED,
    FilePath,
    Flag,
    Names,
    Number,
    Plugins,
    Ranks,
    Text,
    folder_of_all,
    in_ranks,
    joined,
    overrides,
    placeholder,
)
from esper.leyline.errors import ConfigError
from esper.leyline.errors import command as command_line
from esper.leyline.files import replacing
from esper.telemetry.progress import RunConsole, ranks_of_job
from esper.telemetry.run_directory import COMPARISON, plain_json, plugins_of

if TYPE_CHECKING:
    from esper.leyline.ranks import Group
    from esper.runs.assembly.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller that grows networks.

    Configuration, metrics, checkpoints and summary go to the run directory.

    Ctrl-C stops after the current step; --resume continues with identical results.
    """

    config: FilePath = None
    """Configuration file (TOML); command-line options override it."""
    # Task, one of those that `esper tasks` lists, or FILE.py:NAME, an esper.Task in a file. With several, the rounds
    # take turns and train one policy, OUT/policy.safetensors; the same command again continues. (digits)
    task: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], placeholder("NAME")] = ()
    policy: Text = None
    """Learned policy to start from: its file, a checkpoint of a run, or pretrained. (a new policy)"""
    preset: Text = None
    """Base settings: quickstart, small, learn or paper. (quickstart)"""
    rounds: Number = None
    """Total rounds, including those before a resume. (set by the preset)"""
    num_envs: Number = None
    """Hosts that train in parallel. (set by the preset)"""
    episode_length: Number = None
    """Control steps (host epochs) per round. (set by the task)"""
    # The model.json of an exported network: train hosts with the same seeds from new weights, in one round, instead of
    # a controller.
    architecture: FilePath = None
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
    ranks: Ranks = None
    compile: Text = None
    """Use torch.compile for policy and reward: off, on or auto, which is on for long runs on CUDA. (auto)"""
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
    profile: FilePath = None
    """Folder for a trace of some steps of the first round by torch.profiler, and a table of where their time went."""
    profile_steps: Text = None
    """Those steps, from the third on. (3-5)"""
    out: FilePath = None
    """Run directory to create. (a new folder under runs/)"""
    # Run directory to continue. Only --rounds, --device, --data-dir, --compile, --checkpoint-every and --sinks can be
    # changed; --trust or --plugins allow its plugins.
    resume: FilePath = None
    trust: Flag = False
    """Execute all plugins that a run directory names, with --resume or --config."""


NEW_HOSTS = 32
"""Hosts on which a finished run is compared with the best schedule of its task."""


def train(command: Train) -> int:
    """Start or resume a run."""
    from esper.runs.assembly.run_config import free_folder
    from esper.runs.training import runner

    console = RunConsole()
    if command.ranks is not None and command.ranks != 1:
        return _in_ranks(command, command.ranks)
    if command.resume is None and len(command.task) > 1:
        return _train_mixture(command, console)
    config = _config(command)
    with ranks_of_job(config.rank_timeout) as group, _profiled(command, config, console, group):
        if command.resume is not None:
            path = command.resume
            summary = runner.resume(config, path, console)
        else:
            path = folder_of_all(group, command.out, lambda: free_folder(config, config.preset))
            summary = runner.start(config, path, console)
    if summary is None:
        console.say(runner.stopped(path))
        return EXIT_STOPPED
    if not group.is_first:
        return 0
    if not config.architecture:
        console.say(f"compare with baselines: {command_line('evaluate', path, plugins=plugins_of(path))}")
        _say_against_best_schedule(config, path, console)
    return 0


def _in_ranks(command: Train, ranks: int) -> int:
    """The same command in several processes; what is wrong with it is known before they start."""
    from esper.leyline import ranks as sharing
    from esper.runs.assembly.run_config import free_folder
    from esper.telemetry.run_directory import require_free

    if len(command.task) > 1:
        raise ConfigError("several tasks train one policy in one process; leave --ranks out, or give one task.")
    out, config = tuple[str, ...](), _config(command)
    if command.resume is None:
        require_free(path := command.out or free_folder(config, config.preset))
        out = () if command.out else ("--out", str(path))
    blocks = config.blocks or min(ranks, config.num_envs)
    sharing.Ranks(config.num_envs, blocks, sharing.Group(size=ranks))  # refuses what does not fit
    return in_ranks(ranks, *out)


def _profiled(command: Train, config: "RunConfig", console: RunConsole, group: "Group") -> AbstractContextManager[None]:
    """Traces some steps of what is trained inside, if a folder for the trace was given."""
    if command.profile is None and command.profile_steps is not None:
        raise ConfigError("--profile-steps was given without --profile; name the folder of the trace.")
    if command.profile is None or not group.is_first:
        return nullcontext()
    from esper.runs.assembly.assemble import device_of
    from esper.runs.profiling import profiled, steps_of

    first, last = steps_of(command.profile_steps or "3-5", config.episode_length)
    return profiled(command.profile, first, last, device_of(config), console)


def _train_mixture(command: Train, console: RunConsole) -> int:
    from esper.leyline import ranks as sharing
    from esper.runs.assembly.presets import resolve
    from esper.runs.training.mixture import train_mixture

    given = overrides(command, joined(command.set))
    configs = [resolve(given | {"task": task}, command.config, trust=command.trust) for task in command.task]
    if command.out is None or any(config.architecture for config in configs):
        raise ConfigError("several tasks train one policy: give --out, the folder to keep it in, and no architecture.")
    if sharing.is_launched():
        raise ConfigError("several tasks train one policy in one process; start them without torchrun.")
    shortest = min(configs, key=lambda config: config.episode_length)
    with _profiled(command, shortest, console, sharing.ALONE):
        file = train_mixture(configs, command.out, console)
    if file is None:
        console.say("stopped; the same command continues with the first round that is not in the folder")
        return EXIT_STOPPED
    console.say(f"done: {file}; compare it: {command_line('evaluate', file)} --task {command.task[0]}")
    return 0


def _say_against_best_schedule(config: "RunConfig", path: Path, console: RunConsole) -> None:
    """Compare a run with the best schedule of its task, if that is known, on new hosts; also for its report."""
    from esper.runs.evaluation.comparison import compare
    from esper.runs.evaluation.controllers import BEST_SCHEDULE, has_best_schedule

    if not has_best_schedule(config):
        return
    found = compare([config], [path], [BEST_SCHEDULE], num_envs=NEW_HOSTS, console=console)
    with replacing(path / COMPARISON) as file:
        print(json.dumps(plain_json(found.report()), indent=2), file=file)
    console.say(f"beside the best constant schedule: {found.verdict}")


def _config(command: Train) -> "RunConfig":
    """The configuration of a new run, or of an existing one with the changes of the command line."""
    from esper.runs.assembly.presets import config_of_run, resolve
    from esper.telemetry.run_directory import CHANGEABLE

    given = overrides(command, joined(command.set))
    if command.resume is None:
        return resolve(({"rounds": 1} if command.architecture else {}) | given, command.config, trust=command.trust)
    extra = sorted(given.keys() - {"plugins", *CHANGEABLE})
    extra += [name for name in ("config", "out") if getattr(command, name) is not None]
    if extra:
        raise ConfigError(
            f"{', '.join(extra)} cannot be changed when a run is resumed, only {', '.join(CHANGEABLE)} can; "
            "leave it out, or start a new run."
        )
    return config_of_run(command.resume, given, trust=command.trust)


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List the tasks, or draw the host of one with its slots."""

    name: Annotated[tyro.conf.Positional[str], placeholder("TASK")] = ""
    """The task to draw, or FILE.py:NAME."""
    data_dir: FilePath = None
    """Folder of the data files. ($ESPER_DATA)"""
    plugins: Plugins = ()
    """Plugins that register tasks."""


def tasks(command: Tasks) -> int:
    """Print the table of tasks, or one task."""
    from esper.runs.assembly.plugins import load_plugins, names_task, task_in_file
    from esper.runs.assembly.run_config import data_folder
    from esper.runs.evaluation import tables
    from esper.tasks import presets  # noqa: F401 -- registers the built-in tasks
    from esper.tasks.registry import task_by_name, task_names
    from esper.telemetry.progress import RunConsole

    load_plugins(joined(command.plugins))
    console, folder = RunConsole(), data_folder(str(command.data_dir or ""))
    if command.name:
        name = command.name
        lines = tables.task(task_in_file(name) if names_task(name) else task_by_name(name), folder)
    else:
        found = [task_by_name(name) for name in task_names()]
        console.print(tables.tasks(found, folder))
        lines = ["", *tables.data_lines(found, folder), "", "esper tasks TASK draws the host of a task with its slots."]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return 0
