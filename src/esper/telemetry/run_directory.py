"""The run directory: what a run leaves behind.

config.toml     the configuration, complete: it gives the same run again
metrics.jsonl   one line a round
events.jsonl    one line for each thing that happened to a run, a host or a seed
steps.jsonl     one line for each step of each host, where the run asks for it
summary.json    what the run came to; written when it is complete
checkpoints/    where it can be resumed

A directory appears complete or not at all, and one process at a time writes to it. A link among its
records is refused: what would be written and cut off lies elsewhere.
"""

import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar, final

import tomli_w

from esper.leyline.errors import RunDirectoryError
from esper.leyline.files import draft_of, is_draft, mode_of, remove, replacing, sync

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
    """One run directory, open for writing by this process alone; `create` and `reopen` give one."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path = path
        self._files: dict[str, TextIO] = {}
        for name in names:
            self._open(name)

    def _open(self, name: str) -> None:
        """Open a record file for appending; METRICS is what processes lock."""
        self._files[name] = file = open(self.path / name, "a", encoding="utf-8", opener=_open_own)  # noqa: SIM115
        if name != METRICS:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise RunDirectoryError(
                f"{self.path} is being written by another process; wait until that run has ended, or end it."
            ) from error

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], *, steps: bool = False) -> "RunDirectory":
        """A new directory with its configuration; raises RunDirectoryError where it cannot be made.

        Args:
            path: where nothing is yet.
            config: the configuration.
            steps: whether steps are recorded.
        """
        require_free(path)
        draft = draft_of(path)
        try:
            draft.mkdir(parents=True)
            (draft / CONFIG).write_text(tomli_w.dumps(config), encoding="utf-8")
            for written in (draft / CONFIG, draft):
                sync(written)
            draft.rename(path)
            sync(path.parent)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunDirectoryError(
                f"the run directory {path} cannot be made ({error.strerror}); name another with --run-dir."
            ) from error
        return _translated(path, cls, path, _record_files(path, steps))

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Take a directory that exists. Nothing is changed in it before `rewind`.

        Raises:
            RunDirectoryError: another process writes to it, or something in it is not what a run leaves.
        """
        require_own_files(path)
        there = [name for name in _record_files(path, steps=False) if (path / name).exists()]
        return _translated(path, cls, path, there)

    def rewind(self, cursor: Mapping[str, int], config: Mapping[str, Any], *, steps: bool = False) -> None:
        """Go back to a checkpoint; what was recorded after it is cut off, for it will happen again.

        Args:
            cursor: length of each record file at the checkpoint.
            config: the configuration from now on.
            steps: whether steps are recorded from now on.
        """

        def bring_back() -> None:
            for name in _record_files(self.path, steps):
                if name not in self._files:
                    self._open(name)
            (self.path / SUMMARY).unlink(missing_ok=True)
            for name, file in self._files.items():
                file.truncate(min(cursor.get(name, 0), file.tell()))
                file.seek(0, os.SEEK_END)  # else `tell` would still say where the end was
            for left in filter(is_draft, self.path.iterdir()):  # by a process that was killed
                remove(left)
            _replace(self.path / CONFIG, tomli_w.dumps(config))

        _translated(self.path, bring_back)

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


def is_run(path: Path) -> bool:
    """Whether a folder holds what a run leaves besides its configuration."""
    return any((path / name).exists() for name in (METRICS, EVENTS, CHECKPOINTS))


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


def require_own_files(path: Path) -> None:
    """Raise RunDirectoryError where what a run writes into is a link, a device or the like."""
    kinds = {METRICS: stat.S_ISREG, EVENTS: stat.S_ISREG, STEPS: stat.S_ISREG, CHECKPOINTS: stat.S_ISDIR}
    for name, is_own in kinds.items():
        mode = mode_of(path / name)
        if mode and not is_own(mode):
            raise RunDirectoryError(
                f"{path / name} is not a {'folder' if name == CHECKPOINTS else 'regular file'} of the run itself, so "
                "nothing is written there; put back what the run left, or start a new run."
            )


def require_nothing_to_lose(path: Path) -> None:
    """Raise RunDirectoryError where complete rounds are recorded, which a run without a checkpoint would delete."""
    metrics = path / METRICS
    if (path / SUMMARY).exists() or (metrics.exists() and metrics.stat().st_size):
        raise RunDirectoryError(
            f"{path} has records but no checkpoint to continue from; put its {CHECKPOINTS} back, or start the run "
            f"again in a new directory: esper train --config {path / CONFIG} --run-dir NEW."
        )


def _record_files(path: Path, steps: bool) -> tuple[str, ...]:
    """Names of the record files, with that of steps where they are asked for or were recorded before."""
    return (METRICS, EVENTS, *([STEPS] if steps or (path / STEPS).exists() else ()))


def _open_own(path: str, flags: int) -> int:
    """For `open`: a link is an error."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def _translated(path: Path, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do something on the disk; what goes wrong there is said as the user knows it."""
    try:
        return act(*args, **kwargs)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {path} cannot be written ({error.strerror or error}); mend that, then continue with "
            f"--resume {path}."
        ) from error
