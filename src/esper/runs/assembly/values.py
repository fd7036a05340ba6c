"""Nested dictionaries of plain values, from TOML files and the command line, and their validation.

Validation is strict: `rounds = "3"` and `rounds = true` are refused; only `lr = 1` is accepted as a float.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from esper.leyline import files
from esper.leyline.errors import ConfigError
from esper.leyline.settings import first_problem

C = TypeVar("C")
Values = dict[str, Any]
_MOST_NAMES = 16
"""Error messages print no longer lists."""
_RATES = "optimizer.host_lr and optimizer.seed_lr, of the network and its seeds, or ppo.lr of the controller"
_MEANT = {
    "lr": _RATES,
    "learning_rate": _RATES,
    "ppo.learning_rate": "ppo.lr",
    "batch": "batch_train",
    "batch_size": "batch_train",
}
"""Usual names of settings that have others here."""


def plain(config: Any) -> Values:  # noqa: ANN401 -- any dataclass
    """A configuration as nested dictionaries of plain values, without None."""

    def table(items: list[tuple[str, Any]]) -> Values:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in items if x is not None}

    return asdict(config, dict_factory=table)


def flat(values: Mapping[str, Any], path: str = "") -> Values:
    """Every value by its dotted name, e.g. {"ppo.lr": 5e-4}."""
    leaves: Values = {}
    for key, value in values.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return leaves


def nested(values: Mapping[str, Any]) -> Values:
    """Nested dictionaries from dotted names, e.g. {"ppo.lr": 5e-4, "seed": 1} -> {"ppo": {"lr": 5e-4}, "seed": 1}.

    Raises:
        ConfigError: a name is both a value and a table.
    """
    tree: Values = {}
    for name, value in values.items():
        *path, leaf = name.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r}: {part} is a value, not a table; it has no {leaf}.")
        table[leaf] = nested(value) if isinstance(value, Mapping) else value
    return tree


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is not equal in two dictionaries, by name in alphabetical order; None where one has no such name."""
    names = sorted(one.keys() | two.keys())
    return {name: (one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`base` updated with `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def read_toml(path: Path) -> Values:
    """The tables of a TOML file; raises ConfigError if it is missing or malformed."""
    try:
        return files.read_toml(path)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read ({error.strerror}); check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not text in UTF-8 (byte {error.start}).") from error
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}. Correct that line.") from error


def parse(cls: type[C], values: Mapping[str, Any]) -> C:
    """An instance of the dataclass `cls`, validated strictly.

    Raises:
        ConfigError: the first wrong key, with the nearest valid name or the expected type.
    """
    try:
        # strict JSON mode: lists become tuples and tables dataclasses, but strings never become numbers
        return TypeAdapter(cls).validate_json(json.dumps(values, default=str), strict=True, extra="forbid")
    except ValidationError as error:
        unknown = [problem["loc"] for problem in error.errors() if problem["type"] == "unexpected_keyword_argument"]
        if not unknown:
            raise ConfigError(first_problem(error)) from None
        *path, key = map(str, unknown[0])
        leaves = [name.split(".") for name in _leaves(cls)]
        elsewhere = [".".join(name) for name in leaves if name[-1] == key]
        known = {name[len(path)] for name in leaves if name[: len(path)] == path}
        meant = _MEANT.get(".".join([*path, key])) or " or ".join(elsewhere)
        hint = f"did you mean {meant}?" if meant else suggest(key, known)
        raise ConfigError(f"unknown key {'.'.join([*path, key])[:80]}; {hint}") from None


def suggest(name: str, known: Iterable[str]) -> str:
    """The nearest known names, and all of them if they are few."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    if len(names) <= _MOST_NAMES:
        return f"{hint}{'Known' if close else 'known'} names: {', '.join(names)}."
    return f"{hint}{'All' if close else 'all'} {len(names)} names are in the config.toml of any run."


def _leaves(cls: type, path: str = "") -> list[str]:
    """Dotted names of all settings."""
    names: list[str] = []
    for f in fields(cls):
        inner = isinstance(f.type, type) and is_dataclass(f.type)
        names += _leaves(f.type, f"{path}{f.name}.") if inner else [path + f.name]  # type: ignore[arg-type]
    return names
