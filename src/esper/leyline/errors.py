"""The family of errors.

    EsperError                 everything a user can cause; the command line prints it as one paragraph, exit code 2
    ├── ConfigError            a value, a key, or a combination that cannot be
    │   └── StackingError      a blueprint that cannot be run for many hosts at once
    ├── DataError              a data set that is missing, broken, or not the one that was named
    ├── RunDirectoryError      a run directory that exists, is missing, or is not one of ours
    ├── CheckpointError        a checkpoint that is damaged or belongs to another kind of run
    ├── RegistryError          a name that nobody registered, or that is registered already
    ├── TrainingError          learning that cannot go on (three updates without one finite minibatch)
    └── WorkerError            a process that runs hosts ended before its time

Each message says what was found, what was expected and the way out. What only we can cause is an `assert`.
"""

import difflib
from collections.abc import Iterable


class EsperError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(EsperError, ValueError):
    """A configuration value, key or combination that cannot be."""


class StackingError(ConfigError):
    """A blueprint that cannot be run for many hosts at once."""


class DataError(EsperError):
    """A data set that is missing, broken, or not the one that was named."""


class RunDirectoryError(EsperError):
    """A run directory that exists already, is missing, or is not one of ours."""


class CheckpointError(EsperError):
    """A checkpoint that is damaged or belongs to another kind of run."""


class RegistryError(EsperError, KeyError):
    """A name that nobody registered, or that is registered already."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class TrainingError(EsperError):
    """Learning that cannot go on."""


class WorkerError(EsperError):
    """A process that runs hosts ended before its time."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'digits'?`, and all known names; it goes behind a semicolon."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{hint} names: {', '.join(names)}."
