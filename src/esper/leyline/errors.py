"""Errors that a user can cause, and the words for a way out: what was found, what was expected, how to continue."""

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E")


class EsperError(Exception):
    """Base of all errors that a user can cause; the command line prints one paragraph and exits with code 2."""


class ConfigError(EsperError, ValueError):
    """An invalid configuration value, key or combination."""


class StackingError(ConfigError):
    """A blueprint whose modules cannot be stacked for many hosts."""


class DataError(EsperError):
    """A data set that is missing, damaged, or different from the expected one."""


class RunDirectoryError(EsperError):
    """A run directory that exists already, is missing, or was not written by esper."""


class CheckpointError(EsperError):
    """A checkpoint that is damaged or belongs to a run with another configuration."""


class ExportError(EsperError):
    """A saved network that is damaged, or one that cannot be saved."""


class QueryError(EsperError):
    """A query of a run record that is not allowed or cannot be answered."""


class RegistryError(EsperError, KeyError):
    """A name that is not registered, or is registered already."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class TrainingError(EsperError):
    """Training cannot continue: three updates in a row had no finite minibatch."""


class RankError(EsperError):
    """A process of a run failed, ended early or differs from the others."""


class OperatingSystemError(EsperError):
    """A file, or memory, that the operating system refused."""


class Stopped(SystemExit, KeyboardInterrupt):
    """Work that Ctrl-C ended. Caught like KeyboardInterrupt, it ends a program with its sentence and no traceback."""


def in_words(error: BaseException) -> str:
    """Class and text of an exception in one line, of one that cannot give its text the class alone."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": .")


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """What the operating system refuses inside becomes an OperatingSystemError; a closed pipe does not."""
    try:
        yield
    except (EsperError, BrokenPipeError):
        raise
    except OSError as error:
        places = " -> ".join(os.fsdecode(place) for place in (error.filename, error.filename2) if place)
        raise OperatingSystemError(
            f"{places or 'the operating system'}: {error.strerror or error}; check the path, the space and the "
            "permissions there, or name another."
        ) from error
    except (MemoryError, RuntimeError, ValueError) as error:
        message = in_words(error)
        if isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY):
            raise OperatingSystemError(
                f"there is not enough memory ({str(error).partition(chr(10))[0] or type(error).__name__}); use fewer "
                "hosts, smaller batches or a smaller network."
            ) from error
        if isinstance(error, RecursionError):
            raise OperatingSystemError("a file, a network or another value is nested too deeply.") from error
        if isinstance(error, UnicodeEncodeError) or "null byte" in message or "null character" in message:
            raise OperatingSystemError(f"a path or a text has a character that is not allowed: {error}.") from error
        raise


@contextmanager
def refusing_exit() -> Iterator[None]:
    """An exit inside, of code of the user's, becomes a ConfigError: it would end the program as if all were done."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error, Stopped):
            raise
        raise ConfigError(
            f"code of yours ended the program (sys.exit or SystemExit, {error.code!r}), so nothing was finished; let "
            "it raise another exception, or return."
        ) from error


@contextmanager
def refusing(kind: type[EsperError], what: str, way: str) -> Iterator[None]:
    """What the operating system refuses inside becomes an error of this kind: "WHAT (reason); WAY."."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}); {way}.") from error


@contextmanager
def importing(needs: str, extra: str, instead: str = "", kind: type[EsperError] = ConfigError) -> Iterator[None]:
    """Imports of packages that esper can do without; an error of this kind where one is missing."""
    try:
        yield
    except ImportError as error:
        way = f", or {instead}" if instead else ""
        raise kind(f"{needs}, and importing it failed ({error}); pip install 'esper-growth[{extra}]'{way}.") from error


_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "std::bad_alloc", "array is too big")
"""Of torch and NumPy, whose errors of memory have no class of their own."""


def is_own(part: object) -> bool:
    """Whether the class of a part, e.g. a reward, is one of the user's."""
    return type(part).__module__.partition(".")[0] != "esper"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'digits'?`, and all known names; it follows a semicolon in a message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{hint} names: {', '.join(names)}."


_registered: dict[tuple[str, str], object] = {}


def is_again(made: object, before: object) -> bool:
    """Whether a class or function is another one whose definition was executed again: of one module and name."""
    one, other = ((getattr(x, "__module__", None), getattr(x, "__qualname__", "<")) for x in (made, before))
    return one == other and "<" not in one[1]


def registering(kind: str, name: str, table: dict[str, E], entry: Callable[[T], E]) -> Callable[[T], T]:
    """A decorator that puts the entry of what it decorates into a table of its kind.

    What is defined again, e.g. by a cell of a notebook, takes the place of what it was. Raises RegistryError if
    something else has the name.
    """
    taken = RegistryError(f"a {kind} named {name!r} is registered already; choose another name.")
    if name in table and (kind, name) not in _registered:  # found before anything is decorated
        raise taken

    def register(made: T) -> T:
        if name in table and not is_again(made, _registered[kind, name]):
            raise taken
        table[name], _registered[kind, name] = entry(made), made
        return made

    return register


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
