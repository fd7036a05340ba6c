"""The command line: esper train | evaluate | tasks.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from esper.leyline.errors import ConfigError, EsperError

EXIT_ERROR = 2
EXIT_STOPPED = 130

T = TypeVar("T")


def _placeholder(metavar: str) -> object:
    """What stands for the value in the help; `None` is no default worth telling."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


_Text = Annotated[str | None, _placeholder("NAME")]
_Number = Annotated[int | None, _placeholder("N")]
_Path = Annotated[Path | None, _placeholder("PATH")]
_Names = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller that grows networks.

    A run has its own folder: configuration, records, checkpoints and a summary.

    Ctrl-C ends it after this step; --resume continues as if it had never ended.
    """

    config: _Path = None
    """Configuration file (TOML); options of the command line win over it."""
    task: _Text = None
    """What is trained; `esper tasks` lists the names. (digits)"""
    preset: _Text = None
    """Set of values to start from: quickstart, small or paper. (quickstart)"""
    rounds: _Number = None
    """Rounds in all, those before a resume included. (by the preset)"""
    num_envs: _Number = None
    """Hosts that train in parallel. (by the preset)"""
    episode_length: _Number = None
    """Control steps (host epochs) per round. (by the task)"""
    seed: _Number = None
    """Run seed: the same seed gives the same run. (0)"""
    reward: _Text = None
    """Reward by name: a built-in mode such as objective or shaped, or one that a plugin registers. (objective)"""
    device: _Text = None
    """auto, cpu, cuda or cuda:N. (auto)"""
    data_dir: _Path = None
    """Folder of the task's data files. (the environment variable ESPER_DATA)"""
    executor: _Text = None
    """How hosts are run: streamed (one by one), fused (all at once), auto (by image size) or measured (the faster)."""
    workers: _Number = None
    """Processes that share the hosts of a CPU. (by the preset)"""
    topology: _Text = None
    """What is run: grouped (what grows) or static (all that could grow, without a read between steps). (grouped)"""
    compile: _Text = None
    """How a step beside the hosts is run: off (eager), on (compiled by PyTorch) or auto. (auto)"""
    capture: _Text = None
    """Whether they and fused training are replayed as CUDA graphs: on, off or auto, which waits for proof. (auto)"""
    amp: _Text = None
    """Precision of host training: off, auto, bf16 or fp16. (off)"""
    checkpoint_every: _Number = None
    """Rounds between two checkpoints. (1)"""
    plugins: Annotated[_Names, _placeholder("MODULE|FILE.py ...")] = ()
    """Your own code that registers tasks, blueprints, rewards or listeners."""
    set: Annotated[_Names, _placeholder("NAME=VALUE ...")] = ()
    """Any other value by its name in config.toml, e.g. --set ppo.lr=1e-3 lifecycle.sequential=false."""
    run_dir: _Path = None
    """Where the run is recorded. (a new folder under runs/)"""
    resume: _Path = None
    """Run directory to continue, with its own configuration; only --rounds, --device, --data-dir,
    --compile, --capture and --checkpoint-every may be given with it."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare a trained controller and baselines on fresh hosts with equal seeds.

    Baselines: wait_only, random, fixed_schedule, heuristic, static_final.

    A run alone is compared with all of them.

    Nobody learns, and nothing in the run directory is changed.
    """

    controllers: Annotated[tyro.conf.Positional[tuple[str, ...]], _placeholder("RUN|BASELINE ...")] = ()
    """A run directory and names of baselines, in any order."""
    best: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False
    """The checkpoint of the run with the best committed accuracy of ten rounds, instead of the newest."""
    task: _Text = None
    """Task, where no run is given. (digits)"""
    preset: _Text = None
    """Preset, where no run is given. (quickstart)"""
    reward: _Text = None
    """Reward, where no run is given. (objective)"""
    num_envs: Annotated[int, _placeholder("N")] = 16
    """Hosts per controller. (16)"""
    episode_length: _Number = None
    """Control steps per host, where no run is given. (by the task)"""
    seed: _Number = None
    """Seed of the evaluation hosts. (the training seed plus 1,000,000)"""
    device: _Text = None
    """auto, cpu, cuda or cuda:N. (that of the run)"""
    data_dir: _Path = None
    """Folder of the task's data files. (that of the run)"""
    plugins: Annotated[_Names, _placeholder("MODULE|FILE.py ...")] = ()
    """Your own code that registers tasks, blueprints or rewards, where no run is given."""
    json: _Path = None
    """Also write the comparison, with the numbers of every host, to this file; - writes it instead of the table."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List the tasks."""

    plugins: Annotated[_Names, _placeholder("MODULE|FILE.py ...")] = ()
    """Your own code that registers tasks."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 2 refused, 130 ended early by a signal)."""
    # Threads that wait by spinning take the core from those that work when a machine is shared; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no box characters is no reason to fail
    try:
        command: Train | Evaluate | Tasks = tyro.cli(
            Command,
            prog="esper",
            args=arguments,
            description="Networks that grow while they train, and a controller that learns to grow them.",
            config=(tyro.conf.DisallowNone,),
        )
        from esper import commands

        if isinstance(command, Train):
            return commands.train(command)
        if isinstance(command, Evaluate):
            return commands.evaluate(command)
        return commands.tasks(command)
    except EsperError as error:
        print(f"esper: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # `esper --help | head`; what is left in the buffer would fail when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("esper: ended at once", file=sys.stderr)
        return EXIT_STOPPED


def overrides(command: Train | Evaluate) -> dict[str, Any]:
    """What the command line says of a configuration, as nested tables; raises ConfigError for a malformed --set."""
    numbers = ("rounds", "num_envs", "episode_length", "seed", "workers", "checkpoint_every")
    names = ("task", "preset", "device", "executor", "topology", "compile", "capture", "amp", *numbers)
    told: dict[str, Any] = {name: value for name in names if (value := getattr(command, name, None)) is not None}
    if command.data_dir is not None:
        told["data_dir"] = str(command.data_dir)
    if command.plugins:
        told["plugins"] = joined(command.plugins)
    if command.reward is not None:
        told["reward"] = {"mode": command.reward}
    for assignment in joined(command.set) if isinstance(command, Train) else ():
        _assign(told, assignment)
    return told


def joined(groups: tuple[tuple[T, ...], ...]) -> list[T]:
    """The values of an option that was given several times, several at a time."""
    return [value for group in groups for value in group]


def _assign(told: dict[str, Any], assignment: str) -> None:
    import tomllib

    name, separator, text = assignment.partition("=")
    if not separator or not all(name.split(".")):
        raise ConfigError(f"--set {assignment!r} is no assignment; write --set NAME=VALUE, e.g. --set ppo.lr=1e-3.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *path, leaf = name.split(".")
    for part in path:
        table = told.setdefault(part, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"--set {assignment!r}: {part} is a value, not a table; it has no {leaf}.")
        told = told[part]
    told[leaf] = value


if __name__ == "__main__":
    from esper.cli import main as imported_main  # else the options would be of other classes than `commands` knows

    sys.exit(imported_main())
