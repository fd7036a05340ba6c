"""The run directory: what a run leaves behind.

config.toml     the configuration, complete: it gives the same run again
metrics.jsonl   one line a round
events.jsonl    one line for each thing that happened to a run, a host or a seed
steps.jsonl     one line for each step of each host, where the run asks for it
summary.json    what the run came to; written when it is complete
checkpoints/    where it can be resumed

A directory appears complete or not at all, and one process at a time writes to it.
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar, final

import tomli_w

from esper.leyline.errors import RunDirectoryError

CONFIG, METRICS, EVENTS, STEPS, SUMMARY, CHECKPOINTS = (
    "config.toml",
    "metrics.jsonl",
    "events.jsonl",
    "steps.jsonl",
    "summary.json",
    "checkpoints",
)
P = ParamSpec("P")
T = TypeVar("T")


_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def plain_json(value: object) -> object:
    """A missing number (NaN) or an infinite one as null: JSON has neither."""
    if type(value) in _AS_THEY_ARE:  # nearly everything: asked first, because a step may write thousands of them
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: inner if type(inner) in _AS_THEY_ARE else plain_json(inner) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return value


def _encoded(line: Mapping[str, object]) -> str:
    try:
        return _encode(line)
    except (ValueError, TypeError):  # a number that JSON does not have, or a mapping that is no dict: few have one
        return _encode(plain_json(line))


@final
class RunDirectory:
    """One run directory, open for writing; `create` and `reopen` give one. `steps`: it has a file for steps."""

    def __init__(self, path: Path, steps: bool = False) -> None:
        self.path = path
        self._files: dict[str, TextIO] = {}
        for name in (METRICS, EVENTS, *([STEPS] if steps or (path / STEPS).exists() else ())):
            self._files[name] = (path / name).open("a", encoding="utf-8")
        try:
            fcntl.flock(self._files[METRICS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise RunDirectoryError(
                f"{path} is being written by another process; wait until that run has ended, or end it."
            ) from error

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], *, steps: bool = False) -> "RunDirectory":
        """A new directory with its configuration; raises RunDirectoryError where it cannot be made."""
        require_free(path)
        draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
        try:
            draft.mkdir(parents=True)
            (draft / CONFIG).write_text(tomli_w.dumps(config), encoding="utf-8")
            draft.rename(path)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunDirectoryError(
                f"the run directory {path} cannot be made ({error.strerror}); name another with --run-dir."
            ) from error
        return _translated(path, cls, path, steps)

    @classmethod
    def reopen(
        cls, path: Path, cursor: Mapping[str, int], config: Mapping[str, Any], *, steps: bool = False
    ) -> "RunDirectory":
        """Continue a directory; what was recorded after the checkpoint is cut off, for it will happen again.

        Args:
            path: the run directory.
            cursor: length of each record file at the checkpoint.
            config: the configuration from now on.
            steps: whether steps are recorded from now on.
        """
        directory = _translated(path, cls, path, steps)

        def bring_back() -> None:
            (path / SUMMARY).unlink(missing_ok=True)
            for name, file in directory._files.items():
                file.truncate(min(cursor.get(name, 0), file.tell()))
                file.seek(0, os.SEEK_END)  # else `tell` would still say where the end was
            _replace(path / CONFIG, tomli_w.dumps(config))

        _translated(path, bring_back)
        return directory

    def write_metrics(self, line: Mapping[str, object]) -> None:
        """One line of metrics.jsonl; whoever reads along sees it, and all events before it, at once."""
        self._write(METRICS, [line])
        for file in self._files.values():
            _translated(self.path, file.flush)

    def write_events(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Lines of events.jsonl."""
        self._write(EVENTS, lines)

    def write_steps(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Lines of steps.jsonl; only where the directory was opened for steps."""
        self._write(STEPS, lines)

    def _write(self, name: str, lines: Iterable[Mapping[str, object]]) -> None:
        text = "".join(_encoded(line) + "\n" for line in lines)
        _translated(self.path, self._files[name].write, text)

    def cursor(self) -> dict[str, int]:
        """Length in bytes of each record file, everything written being on the disk."""

        def lengths() -> dict[str, int]:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            return {name: file.tell() for name, file in self._files.items()}

        return _translated(self.path, lengths)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """summary.json, whole or not at all."""
        text = json.dumps(plain_json(dict(summary)), indent=2, allow_nan=False) + "\n"
        _translated(self.path, _replace, self.path / SUMMARY, text)

    def close(self) -> None:
        """Close the record files; what cannot be written then was reported by the write before."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS


def require_free(path: Path) -> None:
    """Raise RunDirectoryError where `path` exists already."""
    if (path / CONFIG).is_file():
        raise RunDirectoryError(
            f"the run directory {path} exists already and is left as it is; "
            f"continue it with --resume {path}, or name another with --run-dir."
        )
    if path.exists() or path.is_symlink():
        raise RunDirectoryError(
            f"the path {path} exists already and is left as it is; name a new folder with --run-dir."
        )


def require_run(path: Path) -> None:
    """Raise RunDirectoryError unless `path` holds a run."""
    if not (path / CONFIG).is_file():
        found = (
            "it has no config.toml" if path.is_dir() else "it is no folder" if path.exists() else "it does not exist"
        )
        raise RunDirectoryError(f"{path} is not a run directory: {found}; give the --run-dir of an earlier run.")


def missing_records(path: Path, cursor: Mapping[str, int]) -> list[str]:
    """A sentence for each record file that is shorter than it was at a checkpoint."""
    lengths = {name: file.stat().st_size if (file := path / name).is_file() else 0 for name in cursor}
    return [
        f"{path / name} has {lengths[name]} bytes but had {length} at the checkpoint: lines of earlier rounds are lost."
        for name, length in cursor.items()
        if lengths[name] < length
    ]


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _translated(path: Path, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do something on the disk; what goes wrong there is said as the user knows it."""
    try:
        return act(*args, **kwargs)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {path} cannot be written ({error.strerror or error}); mend that, then continue with "
            f"--resume {path}."
        ) from error
