"""The run directory: the files of a run.

config.toml     the complete configuration, which reproduces the run
about.json      format of the run, versions, machine, names, settings and plugins at the start, its time
metrics.jsonl   one line per round
events.jsonl    one line per event of the run, a host or a seed
record/         one row per step and host, seed and coalition, as Parquet; see record/writer.py
summary.json    results; written when the run is complete
checkpoints/    see runs/training/checkpoint.py
importance.json what the controller looks at; written by `esper report`
evaluation_after_training.json  the comparison at the end of `esper train`

A directory is created atomically and locked by the process that writes to it. Record files that are links are refused,
because a resume would truncate their targets.
"""

import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import tomli_w

from esper.leyline.errors import RunDirectoryError, command, in_shell, option
from esper.leyline.files import (
    Closing,
    draft_of,
    is_draft,
    lock,
    mode_of,
    open_to_read,
    read_json,
    read_toml,
    remove,
    replacing,
    sync,
    sync_file,
)
from esper.telemetry.record.schema import STORED
from esper.telemetry.record.writer import Rows, key_of_part, merge_parts, number_of, part_of, quoted, write_part

if TYPE_CHECKING:
    import duckdb

FORMAT = 7
"""Of all files of a run, also its checkpoints and its record; raised when this version cannot read an older run."""
CHANGEABLE = ("rounds", "device", "data_dir", "compile", "checkpoint_every", "sinks", "rank_timeout")
"""Settings that a resumed run may change."""
CONFIG, ABOUT, METRICS, EVENTS = "config.toml", "about.json", "metrics.jsonl", "events.jsonl"
SUMMARY, COMPARISON, IMPORTANCE = "summary.json", "evaluation_after_training.json", "importance.json"
RECORD, CHECKPOINTS = "record", "checkpoints"
_RECORD_FILES = (METRICS, EVENTS)
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode
_JSON_SCALARS = frozenset({str, int, bool, type(None)})


def plain_json(value: object, of_finite: Callable[[float], float] = lambda number: number) -> object:
    """`value` with NaN and infinities replaced by None, because JSON has neither, and other floats by `of_finite`."""
    if type(value) in _JSON_SCALARS:  # the common case first: a step may write thousands
        return value
    if isinstance(value, float):
        return of_finite(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {
            k: inner if type(inner) in _JSON_SCALARS else plain_json(inner, of_finite) for k, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_json(inner, of_finite) for inner in value]
    return value


def _encoded(line: Mapping[str, object]) -> str:
    try:
        return _encode(line)
    except (ValueError, TypeError):  # rare: NaN, or a mapping that is not a dict
        return _encode(plain_json(line))


@final
class RunDirectory(Closing):
    """A run directory locked and open for writing; made by `create` or `reopen`."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path, self._folder = path, path.stat()
        self._files: dict[str, TextIO] = {}
        self._unsent: list[dict[str, object]] = []
        self._unsynced: set[Path] = set()
        self._database: duckdb.DuckDBPyConnection | None = None
        for name in names:
            self._open(name)

    def _open(self, name: str) -> None:
        """Open a record file for appending; metrics.jsonl also serves as the lock."""
        self._files[name] = file = open(self.path / name, "a", encoding="utf-8", opener=_open_own)  # noqa: SIM115
        if name != METRICS:
            return
        try:
            lock(file)
        except BlockingIOError as error:
            self.close()
            raise RunDirectoryError(
                f"another process is writing to {self.path}; wait until that run has ended, or stop it."
            ) from error

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], about: Mapping[str, object] | None = None) -> "RunDirectory":
        """Create the directory `path` with config.toml, and about.json with what is given.

        Raises:
            RunDirectoryError: `path` exists, or cannot be created.
        """
        require_free(path)
        draft = draft_of(path)
        try:
            (draft / RECORD).mkdir(parents=True)
            (draft / CONFIG).write_text(tomli_w.dumps(config), encoding="utf-8")
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"format": FORMAT, "started": now, **(about or {}), "config": config}, indent=1)
            (draft / ABOUT).write_text(text, encoding="utf-8")
            for written in (draft / CONFIG, draft / ABOUT, draft / RECORD, draft):
                sync(written)
            draft.rename(path)
            sync(path.parent)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunDirectoryError(
                f"the run directory {path} cannot be created ({error.strerror}); name another {option('out')}."
            ) from error
        with _writing(path):
            return cls(path, _RECORD_FILES)

    @classmethod
    def share(cls, path: Path) -> "RunDirectory":
        """An existing directory for another rank than the first: it writes parts, and its events wait to be sent."""
        with _writing(path):
            return cls(path, ())

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Open an existing directory; `rewind` must follow. Changes no file.

        Raises:
            RunDirectoryError: another process writes to it, or a record file or the checkpoint folder is a link, a
                device or the like.
        """
        folders = (CHECKPOINTS, RECORD)
        kinds = {name: stat.S_ISREG for name in _RECORD_FILES} | dict.fromkeys(folders, stat.S_ISDIR)
        for name, is_own in kinds.items():
            mode = mode_of(path / name)
            if mode and not is_own(mode):
                raise RunDirectoryError(
                    f"{path / name} is not a {'folder' if name in folders else 'regular file'} and cannot be resumed "
                    "safely; restore the original, or start a new run."
                )
        with _writing(path):
            return cls(path, [name for name in _RECORD_FILES if (path / name).exists()])

    def rewind(self, cursor: Mapping[str, int], config: Mapping[str, Any], rounds: int = 0) -> None:
        """Cut the record files to their length at a checkpoint, and replace config.toml.

        Args:
            cursor: length in bytes of each record file at the checkpoint.
            config: the new configuration.
            rounds: how many rounds had begun; the parts of later ones are deleted.
        """
        with _writing(self.path):
            record = self.path / RECORD
            record.mkdir(exist_ok=True)
            for part in filter(lambda part: number_of(part) > rounds or is_draft(part), list(record.iterdir())):
                remove(part)
            for name in _RECORD_FILES:
                if name not in self._files:
                    self._open(name)
            for result in (SUMMARY, COMPARISON):
                (self.path / result).unlink(missing_ok=True)
            for name, file in self._files.items():
                file.truncate(min(cursor.get(name, 0), file.tell()))
                file.seek(0, os.SEEK_END)  # else `tell` still gives the old end
            for left in filter(is_draft, self.path.iterdir()):  # of a killed process
                remove(left)
            _replace(self.path / CONFIG, tomli_w.dumps(config))

    def merge_parts(self, number: int) -> None:
        """Make one part of each kind of those that all ranks wrote in a round that is not complete."""
        with _writing(self.path):
            for kind in STORED:
                merge_parts(self.path / RECORD, kind, number)

    def write_metrics(self, line: Mapping[str, object]) -> None:
        """Write one line of metrics.jsonl and flush all record files."""
        self._write(METRICS, [line])
        with _writing(self.path):
            for file in self._files.values():
                file.flush()

    def write_parts(self, kinds: Iterable[Rows], number: int, first: int, host: int = 0) -> dict[str, str]:
        """Write the rows of round `number` from step `first` on, of the hosts of a rank that begin with `host`.

        Returns the SHA-256 of each part by `key_of_part`.
        """
        import duckdb  # takes a tenth of a second

        self._require_there()
        folder = self.path / RECORD
        self._unsynced |= {part_of(folder, kind, number, host) for kind in STORED}
        self._database = self._database or duckdb.connect(":memory:", config={"threads": 1})
        try:
            with _writing(self.path):
                return {
                    key_of_part(rows.kind, host): write_part(folder, rows, number, first, self._database, host)
                    for rows in kinds
                }
        except duckdb.Error as error:
            raise _not_written(self.path, str(error).partition("\n")[0]) from error

    def write_events(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Write lines of events.jsonl."""
        if EVENTS in self._files:
            self._write(EVENTS, lines)
        else:
            self._unsent += map(dict, lines)

    def take_unsent(self) -> list[dict[str, object]]:
        """The events of another rank than the first since the last call."""
        taken, self._unsent = self._unsent, []
        return taken

    def _require_there(self) -> None:
        """Raise RunDirectoryError if the path is no longer the folder that was opened."""
        if not (self.path.exists() and os.path.samestat(self.path.stat(), self._folder)):
            raise RunDirectoryError(
                f"the run directory {self.path} was moved or deleted while the run wrote to it, so the run ends; move "
                f"it back, then continue with --resume {self.path}."
            )

    def _write(self, name: str, lines: Iterable[Mapping[str, object]]) -> None:
        self._require_there()
        with _writing(self.path):
            self._files[name].write("".join(_encoded(line) + "\n" for line in lines))

    def cursor(self) -> dict[str, int]:
        """Sync all record files to disk; returns the length in bytes of each."""
        with _writing(self.path):
            for file in self._files.values():
                file.flush()
                sync_file(file.fileno())
            for part in (*self._unsynced, self.path / RECORD):
                sync(part)
            self._unsynced.clear()
            return {name: file.tell() for name, file in self._files.items()}

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json atomically."""
        self._require_there()
        text = json.dumps(plain_json(dict(summary)), indent=2, allow_nan=False) + "\n"
        with _writing(self.path):
            _replace(self.path / SUMMARY, text)

    def close(self) -> None:
        """Close the record files. Errors are ignored: `write_metrics` and `cursor` flush and report them."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; raises RunDirectoryError if the run directory was moved or deleted."""
        self._require_there()
        return self.path / CHECKPOINTS


def plugins_of(path: Path) -> list[str]:
    """The plugins that a run names; none where its config.toml cannot be read."""
    try:
        return [str(name) for name in read_toml(path / CONFIG).get("plugins", ())]
    except (OSError, ValueError):
        return []


def continuing(path: Path, rounds: int | None = None, *, task: bool = False) -> str:
    """The command, or in Python the call, that continues a run; `task` says that only a program knows its task."""
    plugins = plugins_of(path)
    if in_shell():
        longer = () if rounds is None else ("--rounds", rounds)
        return command("train", "--resume", path, *longer, plugins=plugins)
    known = ", task=task" * task + ", trust=True" * bool(plugins)
    return f"esper.load({str(path)!r}{known}).resume({option('rounds', rounds) if rounds else ''})"


def require_free(path: Path) -> None:
    """Raise RunDirectoryError if `path` exists."""
    if (path / CONFIG).is_file():
        raise RunDirectoryError(
            f"the run directory {path} exists already; continue it with {continuing(path)}, or name another "
            f"{option('out')}."
        )
    if path.exists() or path.is_symlink():
        raise RunDirectoryError(f"{path} exists already; name a new folder with {option('out')}.")


def is_run(path: Path) -> bool:
    """Whether a folder has files of a run besides config.toml."""
    return any((path / name).exists() for name in (METRICS, EVENTS, CHECKPOINTS))


def require_run(path: Path) -> None:
    """Raise RunDirectoryError unless `path` holds a run that this version can read."""
    if not (path / CONFIG).is_file():
        has = "has a config.toml that is not a file" if mode_of(path / CONFIG) else "has no config.toml"
        found = has if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise RunDirectoryError(f"{path} is not a run directory: it {found}; give the directory of an earlier run.")
    about = about_of(path)
    if (number := about.get("format")) != FORMAT:
        if not number and mode_of(path / ABOUT):
            raise RunDirectoryError(f"{path / ABOUT} is damaged; restore it from a backup.")
        written = f"was written in format {number} by esper {about.get('version')}" if number else f"has no {ABOUT}"
        again = command("train", "--config", path / CONFIG, "--out", "NEW", plugins=plugins_of(path))
        raise RunDirectoryError(
            f"{path} {written}, but this version reads runs of format {FORMAT}; open it with the version that wrote "
            f"it, or train again: {again}."
        )


def changed_settings(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Settings of the config.toml of a run with which it was not started, as "seed is 7 in ..., but ... with 0"."""
    was = about_of(path).get("config")
    return list(_changed(was, config)) if isinstance(was, dict) else []


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for name in sorted(was.keys() | now.keys()):
        one, other, setting = was.get(name), now.get(name), f"{place}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _changed(one, other, f"{setting}.")
        elif one != other and setting not in (*CHANGEABLE, "plugins"):  # whose files may have moved
            yield f"{setting} is {other} in {CONFIG}, but the run was made with {one}"


def about_of(path: Path) -> dict[str, Any]:
    """about.json of a run; {} if it is missing or damaged."""
    try:
        found = read_json(path / ABOUT)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def require_begun_round(path: Path, rounds: int, step: int) -> None:
    """Raise RunDirectoryError unless the record has the first steps of the round after `rounds`."""
    import duckdb

    for part in (part_of(path / RECORD, kind, rounds + 1) for kind in STORED):
        try:
            with duckdb.connect(":memory:", config={"threads": 1}) as database:
                (last,) = database.execute(f"SELECT max(t) FROM read_parquet({quoted(part)})").fetchall()[0]
            why = f"ends with step {last}" if part.name.startswith("steps") and last < step else ""
        except (duckdb.Error, TypeError):
            why = "cannot be read" if mode_of(part) else "is missing"
        if why:
            raise RunDirectoryError(
                f"{part}, which held the first {step} steps of round {rounds + 1}, {why}; restore it from a backup, or "
                f"delete the newest file in {path / CHECKPOINTS} to continue from the one before."
            )


def missing_records(path: Path, cursor: Mapping[str, int]) -> list[str]:
    """A sentence for each record file that is shorter than at the checkpoint."""
    lengths = {name: file.stat().st_size if (file := path / name).is_file() else 0 for name in cursor}
    return [
        f"{path / name} has {lengths[name]} bytes but had {length} at the checkpoint: lines of earlier rounds are lost."
        for name, length in cursor.items()
        if lengths[name] < length
    ]


def require_nothing_to_lose(path: Path) -> None:
    """Raise RunDirectoryError if rounds are recorded, which a resume without checkpoint would delete.

    A run that ended before its first checkpoint was due has lost nothing: its rounds are played again as they were.
    """
    recorded, due = 0, read_toml(path / CONFIG).get("checkpoint_every", 1)
    if (path / METRICS).exists():
        with open_to_read(path / METRICS) as lines:
            recorded = sum(1 for _ in lines)
    if (path / SUMMARY).exists() or recorded > due:
        raise RunDirectoryError(
            f"{path} has records but no checkpoint to continue from; restore its {CHECKPOINTS}, or start a new run: "
            f"{command('train', '--config', path / CONFIG, '--out', 'NEW', plugins=plugins_of(path))}."
        )


def _open_own(path: str, flags: int) -> int:
    """An opener for `open` that refuses links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a RunDirectoryError."""
    try:
        yield
    except OSError as error:
        raise _not_written(path, error.strerror or str(error)) from error


def _not_written(path: Path, why: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"the run directory {path} cannot be written ({why}); fix that, then continue with {continuing(path)}."
    )
