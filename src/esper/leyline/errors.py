"""Errors that a user can cause. Each message says what was found, what was expected and how to continue."""

import difflib
from collections.abc import Iterable


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


class WorkerError(EsperError):
    """A process that runs hosts ended early."""


class Stopped(SystemExit, KeyboardInterrupt):
    """Work that Ctrl-C ended. Caught like KeyboardInterrupt, it ends a program with its sentence and no traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'digits'?`, and all known names; it follows a semicolon in a message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{hint} names: {', '.join(names)}."
