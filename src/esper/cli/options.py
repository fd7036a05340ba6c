"""Option types shared by the commands, and their conversion to configuration values."""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

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


def _parsed(kind: type[int] | type[float], words: str) -> object:
    """A number on the command line, or a sentence: tyro makes a box of what it does not understand itself."""

    def instance(found: list[str]) -> int | float:
        try:
            return kind(found[0])
        except ValueError:
            raise EsperError(f"found {found[0]!r} where {words} is expected.") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=instance,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


Text = Annotated[str | None, placeholder("NAME")]
_WHOLE = _parsed(int, "a whole number, as in --rounds 12,")
Number = Annotated[int | None, placeholder("N"), _WHOLE]
Whole = Annotated[int, placeholder("N"), _WHOLE]
Real = Annotated[float | None, placeholder("X"), _parsed(float, "a number, as in --minutes 2.5,")]
Ranks = Annotated[
    int | None,
    placeholder("N"),
    _WHOLE,
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

    An option that may have several values, or that is not known, takes all that follows it.
    """
    kinds = get_type_hints(options)
    names, others, left = list[str](), list[str](), 0.0
    for argument in arguments:
        if argument.startswith("--"):
            kind = kinds.get(argument[2:].replace("-", "_"), _MANY)
            left = 0.0 if kind is bool or "=" in argument else math.inf if kind == _MANY else 1.0
            others.append(argument)
        elif left > 0.0 or argument.startswith("-"):
            left -= 1.0
            others.append(argument)
        else:
            names.append(argument)
    return names + others


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
