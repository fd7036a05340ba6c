"""How a message names what its reader can do: by options and commands in a shell, by arguments and calls in Python."""

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_readers = ["python"]


@contextmanager
def read_in_a_shell() -> Iterator[None]:
    """The messages inside are for a user of the command line."""
    _readers.append("shell")
    try:
        yield
    finally:
        _readers.pop()


def in_shell() -> bool:
    """Whether the reader uses the command line."""
    return _readers[-1] == "shell"


def option(name: str, value: object = None) -> str:
    """An argument as the reader gives it: `--rounds 12` in a shell, `rounds=12` in Python; True is a flag."""
    if in_shell():
        return f"--{name.replace('_', '-')}" + ("" if value is None or value is True else f" {shlex.quote(str(value))}")
    return name if value is None else f"{name}={value!r}"


def command(verb: str, *arguments: object, plugins: Iterable[str] = ()) -> str:
    """A command of esper that works when it is pasted; `plugins` are those that it may execute."""
    here = os.path.join(os.getcwd(), "")
    named = [plugin.removeprefix(here) for plugin in plugins]
    return shlex.join(["esper", verb, *map(str, arguments), *(["--plugins", *named] if named else [])])
