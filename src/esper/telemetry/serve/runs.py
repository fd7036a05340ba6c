"""The runs that are served, and what the live page shows of them beyond the report, as JSON values.

RUN             one run directory
DIR/**          the run directories below a folder, by their path from it; links that lead out of it are left out

Requests name runs, never paths. Nothing is written.

The overview has a row for each run, read so that a thousand runs of a thousand rounds can be looked at:

    metrics.jsonl    |.......... read before ..........|.. new ..|last line|
                                                       ^ a look reads on from here, for as long as it may

The newest round is read first; the curve, the best round and the time follow when all rounds have been read.
"""

import json
import os
import re
import stat
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import NoReturn, final

from esper.leyline.errors import QueryError, RunDirectoryError, command, in_words
from esper.leyline.files import Closing, json_of, mode_of, open_to_read, read_text, toml_of
from esper.leyline.lifecycle import LifecycleOp
from esper.telemetry.record.reader import (
    DAMAGED,
    Record,
    damage_said,
    evaluation_files,
    open_record,
    round_rows,
    sum_before,
)
from esper.telemetry.report.page import PAYLOADS, Payload, Rounds, of_each_run, round_of, rounded, segments, waterfall
from esper.telemetry.run_directory import CONFIG, IMPORTANCE, METRICS, RECORD, SUMMARY

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


OPEN = 4
"""Most records that stay open; the one that was used longest ago is closed first."""
ANSWERS = 200
"""Most answers that are kept for a record."""
DEPTH, FOLDERS = 6, 5_000
"""Most parts of the path of a run, and most folders that are searched for runs."""
PATIENCE = 0.5
"""Seconds for which an answer waits for what has not been read of the runs."""


class UnknownRunError(RunDirectoryError):
    """A request for a run that is not there."""


@dataclass
class _Opened:
    """A record, the state of the files that it was read from, and what was computed from it.

    A thread that uses it holds its lock, so that other records can be used meanwhile.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    version: str = ""
    record: Record | None = None
    answers: dict[str, bytes] = field(default_factory=dict)

    def read(self, names: tuple[str, ...], paths: list[Path], version: str) -> None:
        """Read what is new, or all of it."""
        try:
            is_continued = self.record is not None and self.record.read_on()
        except UNREADABLE:  # said below, if it is still so
            is_continued = False
        if not is_continued:
            self.close()
            self.record = open_record(paths, follows=True, names=names)
        self.version, self.answers = version, {}

    def close(self) -> None:
        if self.record is not None:
            self.record.close()
        self.version, self.record, self.answers = "", None, {}


@final
class Runs(Closing):
    """The runs below a path; safe to use from several threads.

    Records stay open until `close`, or the end of a `with` block.

    Args:
        path: a run directory, or a folder of them.

    Raises:
        RunDirectoryError: `path` is not a folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "does not exist"
            raise RunDirectoryError(f"{path} {found}; name a run directory, or a folder of run directories.")
        self.root = path.resolve()
        self._lock = threading.Lock()  # of `_opened`
        self._opened: dict[tuple[str, ...], _Opened] = {}
        self._looking = threading.Lock()  # of what follows
        self._rows: dict[str, Row] = {}
        self._looks, self._overview = 0, b""

    @property
    def is_single(self) -> bool:
        """Whether the path is a run directory itself."""
        return (self.root / CONFIG).is_file()

    def found(self) -> dict[str, Path]:
        """The run directories by name."""
        return self._look()[0]

    def _look(self) -> tuple[dict[str, Path], list[str]]:
        """The runs by name, and sentences about those that are not shown; neither runs nor links are searched."""
        if self.is_single:
            return {self.root.name: self.root}, []
        found: dict[str, Path] = {}
        hidden, level, left = list[str](), [""], FOLDERS
        for _ in range(DEPTH):
            folders, level = level[:left], level[left:]
            left -= len(folders)
            for name, is_link in (inner for folder in folders for inner in _folders(self.root, folder)):
                if not os.path.isfile(f"{self.root}/{name}/{CONFIG}"):
                    level += [] if is_link else [f"{name}/"]
                elif is_link and not (self.root / name).resolve().is_relative_to(self.root):
                    hidden.append(f"{name} leads out of {self.root} and is not shown; serve the folder it leads to.")
                else:
                    found[name] = self.root / name
        if left <= 0 < len(level):
            hidden.append(f"{self.root} has more than {FOLDERS:,} folders, not all of which were searched for runs.")
        if not found:
            hidden.append(
                f"{self.root} holds no run yet: no folder below it has a {CONFIG}. Start one with "
                f"{command('train', '--out', self.root / 'NAME')}; it appears here by itself."
            )
        return dict(sorted(found.items())), hidden

    def path_of(self, name: str) -> Path:
        """The directory of a run; raises UnknownRunError."""
        found = self.found()
        if name not in found:
            raise UnknownRunError(f"there is no run {name!r} here; the list of runs has those that there are.")
        return found[name]

    def versions(self, names: Collection[str] = ()) -> dict[str, object]:
        """For each run, or each of these, what changes when its files do; of all runs, those of the overview."""
        found = self.found()
        if names:
            return {name: version_of(found[name]) for name in names if name in found}
        return {name: state_of_row(path) for name, path in found.items()}

    def answer(self, names: tuple[str, ...], key: str, make: Callable[[Record], object]) -> bytes:
        """The JSON of `make(record)` of these runs; computed once for each `key` and state of the files.

        Raises:
            UnknownRunError: a name is not that of a run.
            EsperError: what `make` raises.
        """
        paths = [self.path_of(name) for name in names]
        opened = self._kept(names)
        with opened.lock:
            version = "".join(map(version_of, paths))  # before reading: what changes meanwhile is read again
            if opened.record is None or opened.version != version:
                opened.read(names, paths, version)
            assert opened.record is not None
            if key not in opened.answers:
                if len(opened.answers) >= ANSWERS:
                    opened.answers.clear()
                with damage_said(paths):
                    opened.answers[key] = encoded(make(opened.record))
            return opened.answers[key]

    def _kept(self, names: tuple[str, ...]) -> _Opened:
        """What is known of these runs; closes records that were not used for long."""
        with self._lock:
            kept = self._opened.pop(names) if names in self._opened else _Opened()
            self._opened[names] = kept  # the newest at the end
            for other in list(self._opened)[:-OPEN]:
                if (left := self._opened[other]).lock.acquire(blocking=False):  # else it is in use
                    left.close()
                    left.lock.release()
                    del self._opened[other]
        return kept

    def overview(self) -> Payload:
        """A row for each run, and sentences about what is missing."""
        with self._looking:
            _, notes = self._look_at_rows(inf)
            return {"runs": [row.shown for row in self._rows.values()], "notes": notes}

    def overview_json(self) -> bytes:
        """The overview with what can be read in `PATIENCE` seconds; `reading` runs are left to the next question."""
        asked = self._looks
        with self._looking:
            if self._looks == asked:  # else a look began after the question, whose answer is as good
                self._looks += 1
                reading, notes = self._look_at_rows(PATIENCE)
                rows = b",".join(row.text for row in self._rows.values())
                self._overview = b'{"runs":[%b],"notes":%b,"reading":%d}' % (rows, encoded(notes), reading)
            return self._overview

    def _look_at_rows(self, seconds: float) -> tuple[int, list[str]]:
        """Read what is new for so many seconds; how many runs are not read to their ends, and what is not shown."""
        until, (found, hidden) = time.monotonic() + seconds, self._look()
        self._rows = {name: self._rows.get(name) or Row(name, path) for name, path in found.items()}
        for row in self._rows.values():
            row.look()
        for row in self._rows.values():
            row.read_on(until)
        return sum(row.behind > 0 for row in self._rows.values()), hidden

    def close(self) -> None:
        """Close all records."""
        with self._lock:
            while self._opened:
                opened = self._opened.popitem()[1]
                with opened.lock:
                    opened.close()


def _folders(root: Path, folder: str) -> list[tuple[str, bool]]:
    """The path from `root` of each folder in `folder`, which is empty or ends with /, and whether it is a link."""
    try:
        with os.scandir(f"{root}/{folder}") as entries:
            return [(folder + e.name, e.is_symlink()) for e in entries if e.name[0] != "." and e.is_dir()]
    except OSError:  # removed while it is served, or not ours to read
        return []


def version_of(run: Path) -> str:
    """A text that changes when a round, a part of the record, an evaluation, the summary or an importance is added.

    Events are not looked at, because they grow within a round; they are on disk just after the round's metrics.
    """
    names = (CONFIG, METRICS, SUMMARY, IMPORTANCE, RECORD)
    states = state_of((*(run / name for name in names), *evaluation_files(run)))
    return blake2b(repr(states).encode(), digest_size=8).hexdigest()


Place = Mapping[str, int]
"""Numbers of `round` and `host`, where the request gave them."""


def host_round(record: Record, place: Place) -> Payload:
    """All hosts of a round of the first run, step by step; the newest round whose steps are there, if none is given.

    `first` and `newest` are the rounds to choose from; without any, `round` is None and `hosts` empty.
    """
    known, number = _begin(record, place)
    if number is None:
        return known | {"hosts": [], "total": 0}
    found = known | round_of(record, known["run"], number, "newest" if number == known["newest"] else "")
    return found if found["hosts"] else _missing(known)


def _begin(record: Record, place: Place) -> tuple[Payload, int | None]:
    """What both payloads say of the first run, and the round that is asked for.

    The rounds to choose from are those with steps, or else all that are complete.
    """
    run = record.query("select run, episode_length, slots from runs order by run limit 1")[0]
    name = (run["run"],)
    (rounds,) = record.query(_WITH_STEPS, name)
    if rounds["newest"] is None:
        (rounds,) = record.query("select min(round) as first, max(round) as newest from episodes where run = ?", name)
    number = place.get("round", rounds["newest"])
    about = {"run": run["run"], "length": run["episode_length"], "slots": run["slots"] or []}
    return {**about, **rounds, "round": number}, number


def _missing(known: Payload) -> NoReturn:
    raise QueryError("round {round} of {run} is not there; rounds {first} to {newest} are.".format(**known))


_WITH_STEPS = """
select min(round) as first, max(round) as newest
from (select distinct round from steps where run = $1) join (select distinct round from episodes where run = $1)
using (round)"""


def host(record: Record, place: Place) -> Payload:
    """What happened to a host in a round: everything that the record has about it, by step.

    Without a host, the one with the highest J of the round among those that grew.
    """
    known, number = _begin(record, place)
    if number is None:
        return known | {"hosts": [], "host": None}
    results = "select * exclude (run, instance), instance::varchar as instance from episodes"
    of_round = record.query(f"{results} where run = ? and round = ? order by host", (known["run"], number))
    if not of_round:
        _missing(known)
    known["hosts"] = [row["host"] for row in of_round]
    best = max(of_round, key=lambda row: (bool(row["fossilized"]), -1e9 if (j := row["objective"]) is None else j))
    chosen = place.get("host", best["host"])
    result = next((row for row in of_round if row["host"] == chosen), None)
    if result is None:
        raise QueryError(
            f"round {number} has no host {chosen}; it has {of_round[0]['host']} to {of_round[-1]['host']}."
        )
    return known | {"host": chosen, "result": result} | _episode(record, (known["run"], number, chosen))


def _episode(record: Record, where: tuple[str, int, int]) -> Payload:
    """Rows of each table about one host in one round, in the order of the steps."""

    def rows(table: str, order: str = "t") -> list[Payload]:
        select = f"select * exclude (run, round, host) from {table} where run = ? and round = ? and host = ?"
        return record.query(f"{select} order by {order}", where)

    slots = rows("slots", "slot, t")
    scores = {
        t: {frozenset(row["members"]): row["accuracy"] for row in group}
        for t, group in groupby(rows("coalitions"), key=itemgetter("t"))
    }
    return {
        "steps": rows("steps"),
        "decisions": rows("decisions"),
        "slot_rows": slots,
        "segments": segments(slots),
        "seeds": rows("seeds", "germinated_t, slot"),
        "rewards": [row for row in rows("rewards", "t, term") if row["value"]],
        "waterfalls": {t: parts for t, known in scores.items() if (parts := waterfall(known)) is not None},
    }


@of_each_run
def policy(record: Record, run: str, found: Rounds) -> Payload:
    """The mean probability of each operation by step, in the first and the last quarter of the rounds."""
    return {
        phase: {"rounds": rounds, "steps": record.query(_PROBABILITIES, (run, *rounds))}
        for phase, rounds in found.phases.items()
        if found.last
    }


_PROBABILITIES = f"""
select t, {", ".join(f"avg(p_{op.name.lower()}) as {op.name.lower()}" for op in LifecycleOp)}, avg(value) as value
from decisions where run = $1 and round between $2 and $3 and p_wait is not null group by t order by t"""


def _of_all(section: Callable[[Record], object]) -> Callable[[Record, Place], object]:
    return lambda record, place: section(record)


LIVE: Mapping[str, Callable[[Record, Place], object]] = {
    **{name: _of_all(section) for name, section in PAYLOADS.items()},
    "round": host_round,
    "host": host,
    "policy": _of_all(policy),
}
"""The payloads by name: those of the report, and those of this page."""
