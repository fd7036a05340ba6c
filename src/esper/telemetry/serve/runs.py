"""The runs that are served, and what the live page shows of them beyond the report, as JSON values.

RUN             one run directory
DIR/*           the run directories in a folder, by name; links that lead out of it are left out

Requests name runs, never paths. Nothing is written.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, final

import duckdb

from esper.leyline.errors import QueryError, RunDirectoryError, command
from esper.leyline.files import read_toml
from esper.leyline.lifecycle import LifecycleOp
from esper.telemetry.record.reader import Record, evaluation_files, open_record, read_lines, round_rows
from esper.telemetry.report.payloads import PAYLOADS, Payload, round_of, rounded, rounds_of, segments, waterfall
from esper.telemetry.run_directory import CONFIG, IMPORTANCE, METRICS, RECORD, SUMMARY

OPEN = 4
"""Most records that stay open; the one that was used longest ago is closed first."""
ANSWERS = 200
"""Most answers that are kept for a record."""


DAMAGED = (OSError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, duckdb.Error)
"""What reading a run may raise: files may be removed meanwhile, and values of damaged ones are of any type."""


class UnknownRunError(RunDirectoryError):
    """A request for a run that is not there."""


@dataclass
class _Opened:
    """A record, the state of the files that it was read from, and what was computed from it."""

    version: str
    record: Record
    answers: dict[str, bytes] = field(default_factory=dict)


@final
class Runs:
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
        self._lock = threading.Lock()  # records are read and closed by one thread at a time
        self._opened: dict[tuple[str, ...], _Opened] = {}
        self._rows: dict[str, tuple[str, Payload]] = {}  # of the overview, with the state of the files

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
            raise UnknownRunError(f"there is no run {name!r} here; the list of runs has those that there are.")
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
        with self._lock:
            opened = self._open(names)
            if key not in opened.answers:
                if len(opened.answers) >= ANSWERS:
                    opened.answers.clear()
                opened.answers[key] = encoded(make(opened.record))
            return opened.answers[key]

    def _open(self, names: tuple[str, ...]) -> _Opened:
        """The record of these runs as they are now."""
        paths = [self.path_of(name) for name in names]
        version = "".join(map(version_of, paths))  # before reading: what changes meanwhile is read again
        kept = self._opened.pop(names, None)
        if kept is None or kept.version != version:
            if kept is not None:
                kept.record.close()
            kept = _Opened(version, open_record(paths))
        self._opened[names] = kept
        while len(self._opened) > OPEN:
            self._opened.pop(next(iter(self._opened))).record.close()
        return kept

    def overview(self) -> Payload:
        """A row for each run, and sentences about what is missing.

        A row is computed again when the files of its run have changed.
        """
        rows = {}
        for name, path in self.found().items():
            version, kept = version_of(path), self._rows.get(name)
            rows[name] = kept if kept and kept[0] == version else (version, _row_of_any(path))
        self._rows = rows
        return {"runs": [{"run": name, **row} for name, (_, row) in rows.items()], "notes": self.notes()}

    def close(self) -> None:
        """Close all records."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].record.close()

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


POINTS = 120
"""Most points of a curve in the table."""
_SETTINGS = ("task", "preset", "seed", "num_envs", "episode_length")
_RESULTS = ("round", "objective", "objective_std", "committed", "growth", "env_steps_per_s")


def row_of(run: Path) -> Payload:
    """What the overview says of a run; None where it is not known.

    `curve` has at most `POINTS` values of 100·J, means of neighbouring rounds. `changed` is the time (seconds since
    1970) of the last round, or of the start.
    """
    complaints: list[str] = []
    config = _config(run / CONFIG, complaints)
    rounds = list(round_rows(read_lines(run / METRICS, (), complaints)))
    last: Payload = rounds[-1] if rounds else {}
    objectives = [row["objective"] for row in rounds if row["objective"] is not None]
    written = next((path for path in (run / METRICS, run / CONFIG) if path.exists()), None)
    return {
        **{name: config.get(name) for name in _SETTINGS},
        **{name: last.get(name) for name in _RESULTS},
        "reward": (config.get("reward") or {}).get("mode"),
        "rounds": config.get("rounds"),
        "finished": (run / SUMMARY).exists(),
        "seconds": sum(row["seconds"] or 0.0 for row in rounds),
        "best": max(objectives, default=None),
        "curve": thinned(objectives),
        "changed": written and written.stat().st_mtime,
        "complaints": complaints,
    }


def _row_of_any(run: Path) -> Payload:
    """The row of a run, also of a damaged one: the others are shown."""
    try:
        return row_of(run)
    except DAMAGED as error:
        names = (*_SETTINGS, *_RESULTS, "reward", "rounds", "finished", "seconds", "best", "changed")
        complaint = f"{run} cannot be read ({type(error).__name__}: {error}); restore its files from a backup."
        return {**dict.fromkeys(names), "curve": [], "complaints": [complaint]}


def _config(path: Path, complaints: list[str]) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        complaints.append(f"{path} cannot be read ({error}); restore it from a backup.")
        return {}


def thinned(values: list[float]) -> list[float]:
    """At most `POINTS` values: means of neighbours."""
    size = -(-len(values) // POINTS) or 1
    groups = (values[i : i + size] for i in range(0, len(values), size))
    return [sum(group) / len(group) for group in groups]


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

    Without a host, the one with the highest J of the round.
    """
    known, number = _begin(record, place)
    if number is None:
        return known | {"hosts": [], "host": None}
    of_round = record.query(_OF_ROUND, (known["run"], number)) or _missing(known)
    known["hosts"] = [row["host"] for row in of_round]
    best = max(of_round, key=lambda row: -1e9 if row["objective"] is None else row["objective"])
    chosen = place.get("host", best["host"])
    result = next((row for row in of_round if row["host"] == chosen), None)
    if result is None:
        raise QueryError(
            f"round {number} has no host {chosen}; it has {of_round[0]['host']} to {of_round[-1]['host']}."
        )
    return known | {"host": chosen, "result": result} | _episode(record, (known["run"], number, chosen))


_OF_ROUND = """
select * exclude (run, instance), instance::varchar as instance from episodes where run = ? and round = ?
order by host"""


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
        "seeds": rows("seeds", "germinated_t"),
        "rewards": [row for row in rows("rewards", "t, term") if row["value"]],
        "waterfalls": {t: parts for t, known in scores.items() if (parts := waterfall(known)) is not None},
    }


def policy(record: Record, place: Place) -> dict[str, Payload]:
    """For each run, the mean probability of each operation by step, in the first and the last quarter of its rounds."""
    del place
    return {
        run: {
            phase: {"rounds": rounds, "steps": record.query(_PROBABILITIES, (run, *rounds))}
            for phase, rounds in (("first", (1, found.quarter)), ("last", (found.last - found.quarter + 1, found.last)))
            if found.last
        }
        for run, found in rounds_of(record).items()
    }


_PROBABILITIES = f"""
select t, {", ".join(f"avg(p_{op.name.lower()}) as {op.name.lower()}" for op in LifecycleOp)}, avg(value) as value
from decisions where run = $1 and round between $2 and $3 and p_wait is not null group by t order by t"""


def _of_report(name: str, record: Record, place: Place) -> object:
    del place
    return PAYLOADS[name](record)


LIVE: Mapping[str, Callable[[Record, Place], object]] = {
    **{name: partial(_of_report, name) for name in PAYLOADS},
    "round": host_round,
    "host": host,
    "policy": policy,
}
"""The payloads by name: those of the report, and those of this page."""
