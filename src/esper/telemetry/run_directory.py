"""The run directory: what a run leaves behind.

config.toml     the configuration, complete: it gives the same run again
metrics.jsonl   one line a round
events.jsonl    one line for each thing that happened to a seed or a host
summary.json    what the run came to; written when it is complete
checkpoints/    where it can be resumed
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO, final

import tomli_w

from esper.leyline.errors import RunDirectoryError

CONFIG, METRICS, EVENTS, SUMMARY, CHECKPOINTS = (
    "config.toml",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "checkpoints",
)


def plain_json(value: object) -> object:
    """A missing number (NaN) or an infinite one as null: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return value


@final
class RunDirectory:
    """One run directory, open for writing."""

    def __init__(self, path: Path) -> None:
        """Use `create` or `reopen`."""
        self.path = path
        self._files: dict[str, TextIO] = {}

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """A new directory with its configuration; raises RunDirectoryError where the path exists."""
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise RunDirectoryError(
                f"the run directory {path} exists already and is left as it is; "
                f"continue it with --resume {path}, or name another with --run-dir."
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {path} cannot be made ({error.strerror}); name another with --run-dir."
            ) from error
        (path / CONFIG).write_text(tomli_w.dumps(config))
        directory = cls(path)
        directory._open()
        return directory

    @classmethod
    def reopen(cls, path: Path, cursor: Mapping[str, int], config: Mapping[str, Any]) -> Self:
        """Continue a directory; what was recorded after the checkpoint is cut off, for it will happen again."""
        draft = path / f".{CONFIG}"
        draft.write_text(tomli_w.dumps(config))
        draft.rename(path / CONFIG)
        for name in (METRICS, EVENTS):
            file = path / name
            if file.exists():
                os.truncate(file, min(cursor.get(name, 0), file.stat().st_size))
        directory = cls(path)
        directory._open()
        return directory

    def _open(self) -> None:
        self._files = {name: (self.path / name).open("a", encoding="utf-8") for name in (METRICS, EVENTS)}

    def write_metrics(self, line: Mapping[str, object]) -> None:
        """One line of metrics.jsonl."""
        self._write(METRICS, [line])

    def write_events(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Lines of events.jsonl."""
        self._write(EVENTS, lines)

    def _write(self, name: str, lines: Iterable[Mapping[str, object]]) -> None:
        file = self._files[name]
        file.writelines(json.dumps(plain_json(dict(line)), allow_nan=False) + "\n" for line in lines)

    def cursor(self) -> dict[str, int]:
        """Length in bytes of each record file, everything written being on the disk."""
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            lengths[name] = file.tell()
        return lengths

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """summary.json, whole or not at all."""
        draft = self.path / f".{SUMMARY}"
        draft.write_text(json.dumps(plain_json(dict(summary)), indent=2, allow_nan=False) + "\n")
        draft.rename(self.path / SUMMARY)

    def close(self) -> None:
        """Close the record files."""
        for file in self._files.values():
            file.close()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS


def require_run(path: Path) -> None:
    """Raise RunDirectoryError unless `path` holds a run."""
    if not (path / CONFIG).is_file():
        found = "has no config.toml" if path.is_dir() else "does not exist"
        raise RunDirectoryError(f"{path} is not a run directory: it {found}; give the --run-dir of an earlier run.")
