"""A row for each run, read so that a thousand runs of a thousand rounds can be looked at.

metrics.jsonl    |.......... read before ..........|.. new ..|last line|
                                                   ^ a look reads on from here, for as long as it may

The newest round is read first; the curve, the best round and the time follow when all rounds have been read.
"""

import json
import os
import re
import stat
import time
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import final

from esper.leyline.errors import in_words
from esper.leyline.files import json_of, mode_of, open_to_read, read_text, toml_of
from esper.telemetry.record.reader import DAMAGED, round_rows, sum_before
from esper.telemetry.report.payloads import Payload, rounded
from esper.telemetry.run_directory import CONFIG, METRICS, SUMMARY

POINTS = 60
"""Most points of a curve in the table."""
BLOCK, TAIL = 1 << 20, 1 << 16
"""Bytes that are read at once, and at the end of a file for its newest line."""
_SETTINGS = ("task", "preset", "seed", "num_envs", "episode_length")
_RESULTS = ("round", "objective", "objective_std", "committed", "growth", "env_steps_per_s")
_NAMES = (*_SETTINGS, *_RESULTS, "reward", "rounds", "config", "finished", "seconds", "best", "changed")
_SHOWN = re.compile(rf"^(?:{'|'.join(_SETTINGS)}|rounds|mode|custom_reward) = .*$", re.MULTILINE)
_SEED = re.compile(r"^seed = .*$", re.MULTILINE)
UNREADABLE = (OSError, *DAMAGED)
"""What reading a run may raise: files may be removed meanwhile."""
State = tuple[tuple[int, ...] | None, ...]


def encoded(value: object) -> bytes:
    """`value` as compact JSON."""
    return json.dumps(rounded(value), separators=(",", ":"), allow_nan=False).encode()


def state_of(paths: Iterable[str | Path]) -> State:
    """Time, size and number of each file; None where there is none."""
    return tuple(map(_state, paths))


def _state(path: str | Path) -> tuple[int, ...] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def state_of_row(run: Path) -> State:
    """Of the files that a row is read from."""
    folder = str(run)  # a path object for each of some thousand files takes longer than the question
    return state_of(f"{folder}/{name}" for name in (CONFIG, METRICS, SUMMARY))


@final
class Row:
    """What the overview says of a run.

    Attributes:
        shown: what is said; None where it is not known. `curve` has at most `POINTS` values of 100·J, means of
            `every` neighbouring rounds. Runs whose `config` is equal differ in the seed alone. `changed` is the time
            (seconds since 1970) of the last round, or of the start.
        text: the same as JSON.
        behind: bytes of metrics.jsonl that have not been read.
    """

    def __init__(self, name: str, run: Path) -> None:
        self._name, self._run, self._state = name, run, State()
        self.shown: Payload = {}
        self.text = b""
        self._settings: Payload = {}
        self._warnings: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._read, self._sum, self._damaged, self._seconds = 0, 0, 0, 0.0
        self._objectives = array("d")
        self._last: Payload = {}
        self.behind = 0

    def look(self) -> None:
        """Read the settings and the newest round, if files have changed."""
        before, self._state = self._state, state_of_row(self._run)
        if self._state != before:
            self._change(lambda: self._look(before))

    def read_on(self, until: float) -> None:
        """Read rounds that have not been read, until a time of `time.monotonic`."""
        if self.behind:
            self._change(lambda: self._read_rounds(until))

    def _change(self, act: Callable[[], None]) -> None:
        """Read, and say what is known then; also of a damaged run, so that the others are shown."""
        try:
            act()
            row = self._known()
        except UNREADABLE as error:
            self._begin()
            warning = f"{self._run} cannot be read ({in_words(error)}); restore its files from a backup."
            row = {**dict.fromkeys(_NAMES), "curve": [], "every": 1, "warnings": [warning]}
        self.shown = {"run": self._name, **row}
        self.text = encoded(self.shown)

    def _look(self, before: State) -> None:
        self._warnings = []
        if self._state[:1] != before[:1]:
            self._settings = _settings(self._run / CONFIG, self._warnings)
        metrics = self._run / METRICS
        if not stat.S_ISREG(mode_of(metrics)):
            self._begin()
            if mode_of(metrics):
                self._warnings.append(f"{metrics} is not a regular file and was not read; restore the original.")
            return
        with open_to_read(metrics) as file:
            if sum_before(file, self._read) != self._sum:  # a resumed run has cut it, and written on
                self._begin()
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            *lines, unfinished = file.read().split(b"\n")
        self.behind = size - len(unfinished) - self._read
        whole = next(filter(_is_whole, reversed(lines)), None)
        self._last = {} if whole is None else next(round_rows([json_of(whole.decode())]))

    def _read_rounds(self, until: float) -> None:
        with open_to_read(self._run / METRICS) as file:
            file.seek(self._read)
            while self.behind > 0 and time.monotonic() < until:
                lines = file.readlines(min(BLOCK, self.behind - 1) or 1)  # ends with the line that exceeds this
                for line in lines:
                    self._add(line)
                self._read += (size := sum(map(len, lines)))
                self.behind -= size or self.behind  # cut meanwhile: the next look begins again
            self._sum = sum_before(file, self._read)

    def _add(self, line: bytes) -> None:
        if not _is_whole(line):
            self._damaged += 1
            return
        objective = _number(line, b'"objective_mean": ')
        if objective is not None:
            self._objectives.append(objective)
        self._seconds += _number(line, b'"seconds": ') or 0.0

    def _known(self) -> Payload:
        known, damaged = not self.behind, self._damaged
        lost = f"{self._run / METRICS} has damaged lines, which are left out ({damaged}); restore it from a backup."
        return {
            **{name: self._settings.get(name) for name in (*_SETTINGS, "reward", "rounds", "config")},
            **{name: self._last.get(name) for name in _RESULTS},
            "finished": self._state[2] is not None,
            "seconds": self._seconds if known else None,
            "best": max(self._objectives, default=None) if known else None,
            "curve": thinned(self._objectives) if known else [],
            "every": rounds_of_point(len(self._objectives)),
            "changed": next((found[0] // 1_000_000_000 for found in self._state[1::-1] if found), None),
            "warnings": [*self._warnings, *([lost] if damaged else [])],
        }


def _settings(path: Path, warnings: list[str]) -> Payload:
    """The settings that are shown; the whole file would take milliseconds, which a thousand runs multiply."""
    try:
        text = read_text(path)
        top, _, tables = text.partition("\n[")
        reward = text.partition("\n[reward]\n")[2].partition("\n[")[0]
        found = toml_of("\n".join(_SHOWN.findall(top)))
        found["reward"] = found.pop("custom_reward", "") or toml_of("\n".join(_SHOWN.findall(reward))).get("mode")
        config = blake2b((_SEED.sub("", top) + tables).encode(), digest_size=8).hexdigest()
        return (found if "task" in found else toml_of(text)) | {"config": config}
    except (OSError, ValueError) as error:
        warnings.append(f"{path} cannot be read ({error}); restore it from a backup.")
        return {}


def _is_whole(line: bytes) -> bool:
    """Whether a line is one that a run wrote, as far as its ends say."""
    return line.startswith(b'{"round": ') and line.endswith((b"}", b"}\n"))


def _number(line: bytes, key: bytes) -> float | None:
    """The number after a key; a million lines take seconds, and a minute as JSON."""
    begin = line.find(key)
    if begin < 0:
        return None
    text = line[begin + len(key) : begin + len(key) + 30].partition(b",")[0].rstrip(b"}")
    try:
        return float(text)
    except ValueError:  # null
        return None


def rounds_of_point(rounds: int) -> int:
    """How many rounds a point of a curve stands for: a power of two, so that points of two curves can be joined."""
    return 1 << (max(rounds - 1, 0) // POINTS).bit_length()


def thinned(values: "array[float]") -> list[float]:
    """At most `POINTS` values: means of neighbours."""
    size = rounds_of_point(len(values))
    groups = (values[i : i + size] for i in range(0, len(values), size))
    return [sum(group) / len(group) for group in groups]
