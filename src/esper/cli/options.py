"""Option types shared by the commands, their conversion to configuration values, and `--ranks N`.

The help of an option is the docstring below its field. If it needs several lines, it is a comment above the field: tyro
would break a docstring where its lines end.
"""

import logging
import math
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from esper.leyline.errors import ConfigError, EsperError

if TYPE_CHECKING:
    from esper.leyline.ranks import Group


EXIT_ERROR = 2
EXIT_STOPPED = 130
given_arguments: list[str] = []
"""The command line, for a command that runs itself again in other processes."""

T = TypeVar("T")


def placeholder(metavar: str) -> object:
    """The name of the value in the help, without the default `None`."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Text = Annotated[str | None, placeholder("NAME")]
Number = Annotated[int | None, placeholder("N")]
Whole = Annotated[int, placeholder("N")]
Real = Annotated[float | None, placeholder("X")]
Ranks = Annotated[
    int | None,
    placeholder("N"),
    tyro.conf.arg(help="Processes of this machine that share the work, as torchrun starts them on many. (1)"),
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
FilePath = Annotated[Path | None, placeholder("PATH")]
_MANY = tuple[tuple[str, ...], ...]
Names = Annotated[_MANY, tyro.conf.UseAppendAction]
Plugins = Annotated[Names, placeholder("MODULE|FILE.py ...")]


def folder_of_all(group: "Group", given: Path | None, free: Callable[[], Path]) -> Path:
    """The folder of what the ranks of a job write together: that of the first one, else a free one."""
    if len(found := set(group.gathered(given))) > 1:
        raise ConfigError(f"the ranks have --out {', '.join(sorted(map(str, found)))}; give all of them the same.")
    return given or group.of_first(free)


def names_first(options: type, arguments: Sequence[str]) -> list[str]:
    """The arguments with those that belong to no option first, as tyro needs them: RUN --best NAME has two names.

    An option that may have several values, or that is not known, takes all that follows it. What a command takes
    without a name may have it, as in --task NAME. Raises EsperError for what is no number behind an option of numbers.
    """
    kinds, marked = get_type_hints(options), get_type_hints(options, include_extras=True)
    unnamed = {name for name, kind in marked.items() if tyro.conf.Positional in getattr(kind, "__metadata__", ())}
    names, others, left = list[str](), list[str](), 0.0
    for argument in arguments:
        if argument.startswith("--"):
            option, given, value = argument.partition("=")
            if option[2:].replace("-", "_") in unnamed:
                names += [value] * bool(given)
                left = 0.0
                continue
            kind = kinds.get(option[2:].replace("-", "_"), _MANY)
            left = 0.0 if kind is bool or given else math.inf if kind == _MANY else 1.0
            if given:
                _require_number(option, kind, value)
            others.append(argument)
        elif left > 0.0 or argument.startswith("-"):
            if left == 1.0:
                _require_number(option, kind, argument)
            left -= 1.0
            others.append(argument)
        else:
            names.append(argument)
    return names + others


def _require_number(option: str, kind: Any, value: str) -> None:  # noqa: ANN401 -- any annotation
    """Raise EsperError if the value of an option is not the number that it has: tyro makes a box of that."""
    for number, words in ((int, f"a whole number, as in {option} 12,"), (float, f"a number, as in {option} 2.5,")):
        if number in (kind, *get_args(kind)):
            try:
                number(value)
            except ValueError:
                raise EsperError(f"found {value!r} where {words} is expected.") from None


def overrides(command: object, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration values given by the options of a command and by --set, as nested tables.

    Raises:
        ConfigError: a malformed --set, or another value than that of an option.
    """
    from esper.runs.assembly.run_config import RunConfig
    from esper.runs.assembly.values import nested

    settings = {field.name for field in fields(RunConfig)}
    given = {name: value for name, value in vars(command).items() if name in settings and value not in (None, ())}
    for name, convert in (("architecture", _architecture), ("data_dir", str), ("plugins", joined), ("sinks", joined)):
        if name in given:
            given[name] = convert(given[name])
    if isinstance(given.get("task"), tuple):
        given["task"] = given["task"][-1]
    if "reward" in given:
        given["reward.mode"] = given.pop("reward")
    assigned = dict(map(_assignment, assignments))  # the last of several values of one name
    for name in given.keys() & assigned.keys():
        if given[name] != assigned[name]:
            raise ConfigError(f"{name} is given as {given[name]!r} and as {assigned[name]!r}; leave one of them out.")
    return nested(given | assigned)


def _architecture(path: Path) -> list[str]:
    """The seeds that a model.json names; raises ExportError, or ConfigError if nothing grew."""
    from esper.export.grown import read_description

    lines = list(read_description(path).architecture.lines)
    if not lines:
        raise ConfigError(f"nothing grew in the network of {path}; leave --architecture out.")
    return lines


def joined(groups: tuple[tuple[T, ...], ...]) -> list[T]:
    """All values of an option that may be given several times."""
    return [value for group in groups for value in group]


def _assignment(text: str) -> tuple[str, Any]:
    """Dotted name and value of NAME=VALUE."""
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not all(name.split(".")):
        raise ConfigError(f"--set {text!r} is not an assignment; write --set NAME=VALUE, e.g. --set ppo.lr=1e-3.")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        return name, value  # a bare word is a string, as is a number of too many digits


def in_ranks(ranks: int, *more: str) -> int:
    """Run the command of this process, and `more` arguments, in so many processes; returns the exit code.

    They are started by the launcher that torchrun is made of.

    Raises:
        ConfigError: a number below 1, or this process is one of several already.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from esper.leyline.ranks import is_launched
    from esper.tolaria.runtime import usable_cores

    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; at least 1 process is needed.")
    if is_launched():
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes already, so --ranks {ranks} would start more "
            "in each; leave one of them out."
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # a step may take long, and a checkpoint follows
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="esper",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        # the last one of several values holds
        elastic_launch(config, sys.executable)("-m", "esper", *given_arguments, "--ranks", "1", *more)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if {EXIT_STOPPED, -signal.SIGINT} & set(codes.values()):
            return EXIT_STOPPED
        # when one ends, the launcher ends the others by SIGTERM
        killed = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
        if killed and EXIT_ERROR not in codes.values():
            names = ", ".join(f"rank {rank} by signal {number}" for rank, number in killed.items())
            print(f"esper: killed: {names}, perhaps for lack of memory", file=sys.stderr)
        return EXIT_ERROR
    return 0
