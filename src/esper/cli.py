"""The command line: esper train | evaluate | tasks.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from esper.leyline.errors import ConfigError, EsperError

EXIT_ERROR = 2
EXIT_STOPPED = 130


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller that grows networks."""

    config: Path | None = None
    """Configuration file (TOML); options of the command line win over it."""
    task: str | None = None
    """What is trained; `esper tasks` lists the names."""
    preset: str | None = None
    """Set of values to start from: quickstart, small or paper."""
    rounds: int | None = None
    """Rounds in all, those before a resume included."""
    num_envs: int | None = None
    """Hosts that train in parallel."""
    episode_length: int | None = None
    """Control steps (host epochs) per round."""
    seed: int | None = None
    """Run seed: the same seed gives the same run."""
    reward: str | None = None
    """Reward mode, e.g. objective or shaped."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N."""
    data_dir: Path | None = None
    """Folder of the task's data files; the environment variable ESPER_DATA is used otherwise."""
    amp: str | None = None
    """Precision of host training: off, auto, bf16 or fp16."""
    checkpoint_every: int | None = None
    """Rounds between two checkpoints."""
    set: tuple[str, ...] = ()
    """Any other value by its name in config.toml, e.g. --set ppo.lr=1e-3 lifecycle.sequential=false."""
    run_dir: Path | None = None
    """Where the run is recorded; a new folder under runs/ unless given."""
    resume: Path | None = None
    """Run directory to continue; only --rounds and --device may be given with it."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare a trained controller and baselines on fresh hosts with equal seeds."""

    controllers: tyro.conf.Positional[tuple[str, ...]]
    """Run directories (one at most) and baselines; a run alone is compared with all baselines."""
    task: str | None = None
    """Task, where no run is given."""
    preset: str | None = None
    """Preset, where no run is given."""
    num_envs: int = 16
    """Hosts per controller."""
    seed: int | None = None
    """Seed of the evaluation hosts; the training seed plus 1,000,000 unless given."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N."""
    data_dir: Path | None = None
    """Folder of the task's data files."""
    json: Path | None = None
    """Also write the table to this file."""


@dataclass(frozen=True)
class Tasks:
    """List the tasks."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 2 refused, 130 ended early by a signal)."""
    command = tyro.cli(Command, prog="esper", args=arguments)
    from esper import commands

    try:
        if isinstance(command, Train):
            return commands.train(command)
        if isinstance(command, Evaluate):
            return commands.evaluate(command)
        return commands.tasks()
    except EsperError as error:
        Console(stderr=True, soft_wrap=True).print(f"esper: {error}", markup=False, highlight=False)
        return EXIT_ERROR


def overrides(train: Train) -> dict[str, Any]:
    """What the command line says, as nested tables; raises ConfigError for a malformed --set."""
    names = ("task", "preset", "rounds", "num_envs", "episode_length", "seed", "device", "amp", "checkpoint_every")
    told: dict[str, Any] = {name: getattr(train, name) for name in names if getattr(train, name) is not None}
    if train.data_dir is not None:
        told["data_dir"] = str(train.data_dir)
    if train.reward is not None:
        told["reward"] = {"mode": train.reward}
    for assignment in train.set:
        _assign(told, assignment)
    return told


def _assign(told: dict[str, Any], assignment: str) -> None:
    import tomllib

    name, separator, text = assignment.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {assignment!r} is no assignment; write --set NAME=VALUE, e.g. --set ppo.lr=1e-3.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *path, leaf = name.split(".")
    for part in path:
        table = told.setdefault(part, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"--set {assignment!r}: {part} is a value, not a table.")
        told = told[part]
    told[leaf] = value


if __name__ == "__main__":
    sys.exit(main())
