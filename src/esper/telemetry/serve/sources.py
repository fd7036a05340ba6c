"""The runs that are served: which there are, when they change, and their records.

RUN             one run directory
DIR/*           the run directories in a folder, by name; links that lead out of it are left out

Requests name runs, never paths. Nothing is written.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import final

from esper.leyline.errors import RunDirectoryError, command
from esper.telemetry.record.reader import Record, evaluation_files, open_record
from esper.telemetry.report.payloads import rounded
from esper.telemetry.run_directory import CONFIG, IMPORTANCE, METRICS, RECORD, SUMMARY

OPEN = 4
"""Most records that stay open; the one that was used longest ago is closed first."""
ANSWERS = 200
"""Most answers that are kept for a record."""


class UnknownRunError(RunDirectoryError):
    """A request for a run that is not there."""


@final
@dataclass
class _Opened:
    """A record, the state of the files that it was read from, and what was computed from it."""

    version: str
    record: Record
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, bytes] = field(default_factory=dict)
    closed: bool = False

    def close(self) -> None:
        """Close the record when its present reader is done."""
        with self.lock:
            self.closed = True
            self.record.close()


@final
class Runs:
    """The runs below a path; safe to use from several threads.

    Records stay open until `close`, or the end of a `with` block.

    Args:
        path: a run directory, or a folder of them.

    Raises:
        RunDirectoryError: `path` is no folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "does not exist"
            raise RunDirectoryError(f"{path} {found}; name a run directory, or a folder of run directories.")
        self.root = path.resolve()
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, ...], _Opened] = {}

    @property
    def is_single(self) -> bool:
        """Whether the path is a run directory itself."""
        return (self.root / CONFIG).is_file()

    def found(self) -> dict[str, Path]:
        """The run directories by name."""
        return self._look()[0]

    def notes(self) -> list[str]:
        """Sentences about what is not shown."""
        found, outside = self._look()
        notes = [f"{name} leads out of {self.root} and is not shown; serve the folder it leads to." for name in outside]
        if not found:
            notes.append(
                f"{self.root} holds no run yet: no folder in it has a {CONFIG}. Start one with "
                f"{command('train', '--out', self.root / 'NAME')}; it appears here by itself."
            )
        return notes

    def _look(self) -> tuple[dict[str, Path], list[str]]:
        if self.is_single:
            return {self.root.name: self.root}, []
        try:
            entries = sorted(path for path in self.root.iterdir() if not path.name.startswith("."))
        except OSError:  # removed while it is served
            return {}, []
        runs = [path for path in entries if (path / CONFIG).is_file()]
        inside = {path.name: path for path in runs if path.resolve().is_relative_to(self.root)}
        return inside, [path.name for path in runs if path.name not in inside]

    def path_of(self, name: str) -> Path:
        """The directory of a run; raises UnknownRunError."""
        found = self.found()
        if name not in found:
            raise UnknownRunError(f"there is no run {name!r} here; the overview lists those that there are.")
        return found[name]

    def versions(self) -> dict[str, str]:
        """A text for each run that changes when its files do."""
        return {name: version_of(path) for name, path in self.found().items()}

    def answer(self, names: tuple[str, ...], key: str, make: Callable[[Record], object]) -> bytes:
        """The JSON of `make(record)` of these runs; computed once for each `key` and state of the files.

        Raises:
            UnknownRunError: a name is not that of a run.
            EsperError: what `make` raises.
        """
        while True:
            opened = self._open(names)
            with opened.lock:
                if opened.closed:  # meanwhile, by another thread
                    continue
                if key not in opened.answers:
                    if len(opened.answers) >= ANSWERS:
                        opened.answers.clear()
                    opened.answers[key] = encoded(make(opened.record))
                return opened.answers[key]

    def _open(self, names: tuple[str, ...]) -> _Opened:
        """The record of these runs as they are now."""
        paths = [self.path_of(name) for name in names]
        version = "".join(map(version_of, paths))  # before reading: what changes meanwhile is read again
        with self._lock:
            kept, old = self._opened.pop(names, None), []
            if kept is None or kept.version != version:
                old = [kept] if kept else []
                kept = _Opened(version, open_record(paths))
            self._opened[names] = kept
            while len(self._opened) > OPEN:
                old.append(self._opened.pop(next(iter(self._opened))))
        for one in old:
            one.close()
        return kept

    def close(self) -> None:
        """Close all records."""
        with self._lock:
            old = list(self._opened.values())
            self._opened.clear()
        for one in old:
            one.close()

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def version_of(run: Path) -> str:
    """A text that changes when a round, a part of the record, an evaluation, the summary or an importance is added.

    Events are not looked at, because they grow within a round; they are on disk just after the round's metrics.
    """
    names = (CONFIG, METRICS, SUMMARY, IMPORTANCE, RECORD)
    states = [_state(path) for path in (*(run / name for name in names), *evaluation_files(run))]
    return blake2b(repr(states).encode(), digest_size=8).hexdigest()


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def encoded(value: object) -> bytes:
    """`value` as compact JSON."""
    return json.dumps(rounded(value), separators=(",", ":"), allow_nan=False).encode()
