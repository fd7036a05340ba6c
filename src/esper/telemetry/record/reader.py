"""Opens the records of one or several runs as tables of one database, which can only be read.

run directory                          schema run_0
record/*.parquet        ---------->    part_steps, part_slots, part_coalitions  ->  steps, decisions, slots, ...
metrics.jsonl           ---------->    rounds, updates
events.jsonl            ---------->    episodes
evaluation*.json        ---------->    evaluations
config.toml, about.json ---------->    runs
"""

import json
import os
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypeVar, final

import duckdb
from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from esper.leyline.errors import QueryError, RunDirectoryError, importing
from esper.leyline.files import Closing, json_of, mode_of, open_to_read, read_text, toml_of
from esper.leyline.lifecycle import OP_NAMES
from esper.leyline.settings import first_problem
from esper.telemetry.anomalies import find, in_words
from esper.telemetry.record.schema import (
    ANOMALIES,
    DECISIONS,
    EPISODES,
    EVALUATIONS,
    FLAG,
    REWARDS,
    ROUNDS,
    RUNS,
    STEPS,
    STORED,
    TABLES,
    TERM,
    Table,
)
from esper.telemetry.record.writer import identifier, number_of, part_of, parts_of_round, quoted, sha256_of
from esper.telemetry.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    RECORD,
    SUMMARY,
    about_of,
    changed_settings,
    require_run,
)

if TYPE_CHECKING:
    import pandas
    import polars

MEMORY = "1GiB"
"""Most memory that a query may use."""
_CHUNK, _CHECKED = 1_000, 1 << 13
"""Rows that are inserted at once, and bytes that are read again to see whether they are the same."""
COUNTED, COUNTING = 100_000, 2.0
"""Most rows that are counted beyond those that are wanted, and seconds for it."""
Line = Mapping[str, Any]
Row = dict[str, Any]
T = TypeVar("T")


@final
class Record(Closing):
    """The tables of some runs; see docs/record.md. Made by `open_record`, closed with `close` or a `with` block."""

    def __init__(self, paths: Sequence[Path], follows: bool = False, names: Sequence[str] = ()) -> None:
        limits = {"memory_limit": MEMORY, "temp_directory": "", "threads": str(min(os.cpu_count() or 1, 8))}
        self._database = duckdb.connect(":memory:", config={**limits})
        self._database.execute("SET parquet_metadata_cache = true")  # parts never change
        names = names or _unique_names(paths)
        self._runs = {
            name: _RunTables(path, f"run_{i}", self._database)
            for i, (name, path) in enumerate(zip(names, paths, strict=True))
        }
        for table in TABLES:  # one view over all runs, with the column `run` first
            selects = (f"SELECT {quoted(n)} AS run, * FROM {run.schema}.{table.name}" for n, run in self._runs.items())
            self._database.execute(f"CREATE VIEW {table.name} AS {' UNION ALL BY NAME '.join(selects)}")
        self._lock(follows)
        self._searched = False

    @property
    def warnings(self) -> list[str]:
        """Sentences about what is damaged, missing or not written yet."""
        return [warning for run in self._runs.values() for warning in run.warnings]

    def read_on(self) -> bool:
        """Add what the runs have written since; False where they have done something else, and nothing is added.

        Only for a record that was opened with `follows`.
        """
        if not all(run.is_continued() for run in self._runs.values()):
            return False
        for run in self._runs.values():
            run.read_on()
        self._searched = False
        return True

    def query(self, sql: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of one SELECT; `params` fill its question marks.

        Raises:
            QueryError: it is not a SELECT, reads other files, or is wrong; the message names the tables.
        """
        with self._asked(sql, params) as found:
            return _named(found, found.fetchall())

    def rows(self, sql: str) -> Iterator[dict[str, Any]]:
        """The rows of one SELECT one by one, so that they need not fit in memory; raises QueryError like `query`."""
        with self._asked(sql, ()) as found:
            while chunk := found.fetchmany(_CHUNK):
                yield from _named(found, chunk)

    def beginning(self, sql: str, most: int) -> tuple[list[dict[str, Any]], int, bool]:
        """The first `most` rows of one SELECT, how many others were counted, and whether those are all.

        Raises QueryError like `query`.
        """
        with self._asked(sql, ()) as found:
            rows, more = _named(found, found.fetchmany(most)), 0
            until = time.monotonic() + COUNTING
            while chunk := found.fetchmany(_CHUNK):
                more += len(chunk)
                if more >= COUNTED or time.monotonic() > until:
                    return rows, more, False
        return rows, more, True

    def frame(self, sql: str) -> "pandas.DataFrame":
        """The result of one SELECT as a pandas frame; raises QueryError like `query`, or without pandas."""
        with importing("frames need pandas", "frames", kind=QueryError):
            import pandas
        with self._asked(sql, ()) as found:
            return pandas.DataFrame(found.df())

    def polars(self, sql: str) -> "polars.DataFrame":
        """The result of one SELECT as a polars frame; raises QueryError like `query`, or without polars."""
        with importing("frames need polars", "frames", kind=QueryError):
            import polars
        with self._asked(sql, ()) as found:
            return polars.DataFrame(found.fetchall(), schema=_names(found), orient="row", infer_schema_length=None)

    def anomaly_lines(self) -> list[str]:
        """A line for each kind of anomaly, with its rounds and advice."""
        rows = self.query(
            "SELECT run, kind, count(*) AS n, min(round) AS first, max(round) AS last, arg_max(value, round) AS value, "
            "any_value(message) AS message, any_value(advice) AS advice FROM anomalies GROUP BY run, kind ORDER BY ALL"
        )
        return [f"{row['run']}: " * (len(self._runs) > 1) + in_words(row) for row in rows]

    def columns(self, table: str) -> dict[str, str]:
        """Type by column of a table; raises QueryError if there is none."""
        if table not in (known.name for known in TABLES):
            raise QueryError(f"there is no table {table!r}. {self._known()}")
        return {row["column_name"]: row["column_type"] for row in self.query(f"DESCRIBE {identifier(table)}")}

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    @contextmanager
    def _asked(self, sql: str, params: Sequence[object]) -> Iterator[duckdb.DuckDBPyConnection]:
        """The result of one SELECT. Later rows may be computed, and fail, only while they are fetched."""
        if ANOMALIES.name in sql.lower() and not self._searched:  # once: it takes longer than opening the record
            self._searched = True
            for name, run in self._runs.items():
                with damage_said([run.path]):
                    run.replace(ANOMALIES, list(find(self.query, name)))
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                kinds = " and ".join(statement.type.name for statement in statements) or "nothing"
                kinds = kinds.replace("MULTI", "a PIVOT whose values are not listed by IN (...)")
                raise QueryError(
                    f"found {kinds}, but a record can only be read, by one SELECT (also WITH, FROM, DESCRIBE, "
                    f"SUMMARIZE). {self._known()}"
                )
            with _stoppable():
                yield self._database.execute(sql, list(params))
        except duckdb.PermissionException as error:
            raise QueryError(f"a query reads the record alone, no other files. {self._known()}") from error
        except duckdb.OutOfMemoryException as error:
            raise QueryError(
                f"the query needs more than {MEMORY} of memory; select fewer rounds, hosts or columns."
            ) from error
        except duckdb.Error as error:
            if any(str(part) in str(error) for run in self._runs.values() for part in run.parts):
                raise QueryError(f"the record cannot be read ({_first_line(error)}); restore a backup.") from error
            raise QueryError(f"{_explained(error)} {self._known()}") from error

    def _known(self) -> str:
        return f"Tables: {', '.join([table.name for table in TABLES])}; DESCRIBE shows the columns of one."

    def _lock(self, follows: bool) -> None:
        """From here on the database reads the parts and nothing else, and these settings cannot be changed.

        One that follows runs reads whatever is in the folders of parts, where a link may lead elsewhere.
        """
        runs = self._runs.values()
        places = [run.path.absolute() / RECORD for run in runs] if follows else [f for run in runs for f in run.parts]
        for setting in (
            f"{'allowed_directories' if follows else 'allowed_paths'} = [{', '.join(map(quoted, places))}]",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            self._database.execute(f"SET {setting}")


def open_record(paths: Sequence[Path], follows: bool = False, names: Sequence[str] = ()) -> Record:
    """The record of these run directories, as it is now.

    Args:
        paths: run directories.
        follows: whether it can be `read_on`. It must not be asked what others wrote: it reads all files that are beside
            the parts, also where links lead.
        names: of the runs, else those of their directories.

    Raises:
        RunDirectoryError: a path is not a run directory, or its run is of another version.
    """
    if not paths:
        raise RunDirectoryError("no run was named; give at least one run directory.")
    for path in paths:
        require_run(path)
    with damage_said(paths):
        return Record(list(paths), follows, names)


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """The name of each directory, with that of its parent where two are equal."""
    names = [path.absolute().name for path in paths]
    count = Counter(names)
    full = [p.absolute() for p in paths]
    return _unique([n if count[n] == 1 else f"{p.parent.name}/{n}" for n, p in zip(names, full, strict=True)])


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with a number after those that occurred before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def _names(found: duckdb.DuckDBPyConnection) -> list[str]:
    return _unique([column[0] for column in found.description or ()])


def _named(found: duckdb.DuckDBPyConnection, rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    names = _names(found)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _explained(error: duckdb.Error) -> str:
    """The first sentence of a database error, and its hint."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    kept = [row for row in rows[:3] if not row.startswith(("LINE", "^"))]
    text = " ".join(kept).removeprefix("Catalog Error: ").removeprefix("Binder Error: ").removeprefix("Parser Error: ")
    return f"the query is wrong: {text.rstrip('.')}{'.' * (not text.endswith('?'))}"


# One run ------------------------------------------------------------------------------------------------------------


@final
class _RunTables:
    """Makes the schema of one run; `warnings` has a sentence for whatever cannot be read."""

    def __init__(self, path: Path, schema: str, database: duckdb.DuckDBPyConnection) -> None:
        self.path, self.schema = path, schema
        self.warnings: list[str] = []
        self._database, self._newest = database, 0
        self._rounds = set[int]()
        self._started: Row = {}
        self._metrics, self._events = Lines(path / METRICS), Lines(path / EVENTS, ("run_started", "episode"))
        self._parts: dict[str, list[Path]] = {kind: [] for kind in STORED}  # of complete rounds
        self._begun: dict[str, list[Path]] = {}  # of the round after them
        self._faults: dict[tuple[str, str], list[Path]] = {}  # by kind of part and what is wrong
        self._updates = {"round": "INTEGER"}
        folder = mode_of(path / RECORD)
        self._has_folder = not folder or stat.S_ISDIR(folder)
        database.execute(f"CREATE SCHEMA {schema}")
        self._table("updates", self._updates)
        for table in (ROUNDS, EPISODES, RUNS, EVALUATIONS, ANOMALIES):
            self._table(table.name, table.types)
        self.read_on()

    @property
    def parts(self) -> list[Path]:
        """The files that queries will read."""
        return [part for kind in STORED for part in (*self._parts[kind], *self._begun[kind])]

    def is_continued(self) -> bool:
        """Whether all that was read is sound, and still there."""
        return not self._faults and self._metrics.is_continued() and self._events.is_continued()

    def read_on(self) -> None:
        """Add what is new in the files of the run."""
        self.warnings = []
        for lines in _chunks(self._metrics.new()):
            self._add_rounds(lines)
        events = self._events.new()
        first = next(events, {})
        if first.get("kind") == "run_started" and not self._started:
            self._started = first
        episodes = _episode_rows(chain([first], events), self._started.get("host_params"))
        self._insert(EPISODES.name, EPISODES.types, episodes)
        self.warnings += [*self._metrics.warnings(), *self._events.warnings()]
        self.replace(RUNS, [self._run_row()])
        evaluations = evaluations_of(self.path, self.warnings).items()
        self.replace(EVALUATIONS, (row for file, found in evaluations for row in _evaluation_rows(file, found)))
        self._begun = {kind: list(self._begun_parts(kind)) for kind in STORED}
        self._say_faults()
        columns = {kind: self._part_view(kind) for kind in STORED}
        self._step_views(columns["steps"])
        self._view("slots", f"SELECT * FROM {self.schema}.part_slots")
        self._view("seeds", _SEEDS.format(schema=self.schema))
        self._view("coalitions", f"SELECT * REPLACE ({_MEMBERS} AS members) FROM {self.schema}.part_coalitions")

    def _add_rounds(self, lines: Sequence[Line]) -> None:
        """Rows of rounds and updates; the latter get a column for each metric that is new."""
        self._insert(ROUNDS.name, ROUNDS.types, round_rows(lines))
        rows, names = _update_rows(lines)
        for name in names:
            if name not in self._updates:
                self._updates[name] = "DOUBLE"
                self._database.execute(f"ALTER TABLE {self.schema}.updates ADD COLUMN {identifier(name)} DOUBLE")
        self._insert("updates", self._updates, rows)
        for line in lines:
            self._newest = int(line.get("round") or 0)
            self._rounds.add(self._newest)
            for key, digest in (line.get("record") or {}).items() if self._has_folder else ():
                self._add_part(str(key), digest)

    def _add_part(self, key: str, digest: object) -> None:
        """Add a part of the newest round, if it can be read."""
        kind, _, host = key.partition("-")
        if kind not in STORED or not (host or "0").isdecimal():
            return
        part = part_of(self.path / RECORD, kind, self._newest, int(host or 0))
        if not mode_of(part):
            fault = "is missing"
        elif not stat.S_ISREG(mode_of(part)):
            fault = "is not a regular file"
        elif sha256_of(part) != digest:
            fault = "is damaged: its SHA-256 is not that in metrics.jsonl"
        else:
            self._parts[kind].append(part)
            return
        self._faults.setdefault((kind, fault), []).append(part)

    @property
    def _begun_round(self) -> tuple[int, ...]:
        """The round behind the complete ones, of which a run that goes on may have parts."""
        return () if mode_of(self.path / SUMMARY) else (self._newest + 1,)

    def _begun_parts(self, kind: str) -> Iterator[Path]:
        if not self._has_folder:
            return
        for part in (part for number in self._begun_round for part in parts_of_round(self.path / RECORD, kind, number)):
            if not stat.S_ISREG(mode_of(part)):
                continue
            try:
                self._database.execute(f"DESCRIBE SELECT * FROM read_parquet({quoted(part)})")
                yield part
            except duckdb.Error as error:
                self.warnings.append(f"{part} cannot be read ({_first_line(error)}); its rows are left out.")

    def _say_faults(self) -> None:
        folder = self.path / RECORD
        found = {number_of(part) for part in folder.iterdir()} if self._has_folder and mode_of(folder) else set()
        if not self._has_folder:
            self.warnings.append(f"{folder} is a link or a file and was not read; restore the original folder.")
        elif others := found - self._rounds - {0, *self._begun_round}:
            first, its = min(others), "their" if len(others) > 1 else "its"
            which = f"{first}{' and others' * (len(others) > 1)}, so that {its}"
            self.warnings.append(
                f"{self.path / METRICS} has no line of round {which} rows are left out. Restore it from a backup to "
                "see them."
            )
        if self._rounds and not self._started:
            self.warnings.append(
                f"{self.path / EVENTS} does not begin with the start of the run; episodes are left out. Restore it "
                "from a backup to see them."
            )
        elif self._rounds and (hosts := self._started.get("num_envs")):
            there = f"SELECT count(*) FROM {self.schema}.episodes WHERE round <= {self._newest}"
            ((episodes,),) = self._database.execute(there).fetchall()
            if isinstance(hosts, int) and episodes < hosts * len(self._rounds):
                self.warnings.append(
                    f"{self.path / EVENTS} has {episodes} of {hosts * len(self._rounds)} episodes. Restore it from a "
                    "backup to see all."
                )
        for (_, why), parts in self._faults.items():
            more = f" (also those of {len(parts) - 1} later rounds)" * (len(parts) > 1)
            self.warnings.append(
                f"{parts[0]} {why}{more}; its rows are left out. Restore it from a backup to see them."
            )

    def _part_view(self, kind: str) -> list[str]:
        """The view `part_KIND` over all parts that can be read; returns its columns."""
        files = (*self._parts[kind], *self._begun[kind])
        types = {c.name: "VARCHAR" if c.type == "VARCHAR[]" else c.type for c in STORED[kind]}
        source, found = "", list[str]()
        if files:
            source = f" FROM read_parquet([{', '.join(map(quoted, files))}])"
            found = [row[0] for row in self._database.execute(f"DESCRIBE SELECT *{source}").fetchall()]
        own = [name for name in found if name.startswith((TERM, FLAG))]
        values = {name: identifier(name) if name in found else f"NULL::{type}" for name, type in types.items()}
        select = ", ".join([*(f"{value} AS {identifier(n)}" for n, value in values.items()), *map(identifier, own)])
        self._view(f"part_{kind}", f"SELECT {select}{source or ' WHERE false'}")
        return [*types, *own]

    def _view(self, name: str, select: str) -> None:
        self._database.execute(f"CREATE OR REPLACE VIEW {self.schema}.{name} AS {select}")

    def _step_views(self, columns: Sequence[str]) -> None:
        parts = f"FROM {self.schema}.part_steps"
        flags = (name for name in columns if name.startswith(FLAG))
        self._view("steps", f"SELECT {', '.join(map(identifier, (*STEPS.types, *flags)))} {parts}")
        self._view("decisions", f"SELECT {', '.join(map(identifier, DECISIONS.types))} {parts} WHERE op IS NOT NULL")
        terms = [
            f"SELECT round, t, host, {quoted(name.removeprefix(TERM))} AS term, {identifier(name)} AS value "
            f"{parts} WHERE {identifier(name)} IS NOT NULL"
            for name in columns
            if name.startswith(TERM)
        ] or [f"SELECT {', '.join(f'NULL::{kind} AS {name}' for name, kind in REWARDS.types.items())} WHERE false"]
        self._view("rewards", " UNION ALL ".join(terms))

    def _run_row(self) -> Row:
        started = self._started
        config, about = _parsed(self.path / CONFIG, toml_of, self.warnings) or {}, about_of(self.path)
        if config and (changed := changed_settings(self.path, config)):
            others = f" (and {len(changed) - 1} more)" * (len(changed) > 1)
            self.warnings.append(f"{self.path}: {changed[0]}{others}; restore it.")
        found = _parsed(self.path / SUMMARY, json_of, self.warnings)
        summary = found if isinstance(found, dict) else {}
        mode = (config.get("reward") or {}).get("mode")
        return {
            **{name: config.get(name) for name in ("task", "preset", "seed", "num_envs", "episode_length", "slots")},
            "path": str(self.path.absolute()),
            "reward": started.get("reward") or config.get("custom_reward") or mode,
            "data": summary.get("data") or _data_of(started.get("data")),
            **{name: started.get(name) for name in ("blueprints", "host_params")},
            **{name: about.get(name) for name in ("version", "started", "environment")},
            "reward_terms": about.get("terms"),
            "device": started.get("device") or summary.get("device"),
            "commit": (about.get("environment") or {}).get("commit"),
            "finished": bool(summary),
            "rounds": len(self._rounds),
            "config": config,
            "summary": found,
        }

    def _table(self, name: str, types: Mapping[str, str]) -> None:
        columns = ", ".join(f"{identifier(column)} {kind}" for column, kind in types.items())
        self._database.execute(f"CREATE TABLE {self.schema}.{name} ({columns})")

    def _insert(self, table: str, types: Mapping[str, str], rows: Iterable[Row]) -> None:
        """Insert rows, whose values are those of JSON, into a table with columns of these types.

        NULL where a row has no value, or one of another type. They are sent column by column, so that names are read
        once and not in every row.
        """
        structure = json.dumps({name: [[kind[:-2]] if kind.endswith("[]") else kind] for name, kind in types.items()})
        values = ", ".join(f"unnest(found.{identifier(name)})" for name in types)
        query = f"INSERT INTO {self.schema}.{table} SELECT {values} FROM (SELECT from_json($1::JSON, $2) AS found)"
        for chunk in _chunks(rows):
            columns = {name: [row.get(name) for row in chunk] for name in types}
            self._database.execute(query, [json.dumps(columns), structure])

    def replace(self, table: Table, rows: Iterable[Row]) -> None:
        """Put these rows in the place of those in a table."""
        self._database.execute(f"DELETE FROM {self.schema}.{table.name}")
        self._insert(table.name, table.types, rows)


def _chunks(rows: Iterable[T]) -> Iterator[list[T]]:
    """At most `_CHUNK` rows at once, so that a file of any length takes little memory."""
    rows = iter(rows)
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk


_MEMBERS = "CASE WHEN members = '' THEN []::VARCHAR[] ELSE string_split(members, '+') END"
_SEEDS = """
SELECT round, host, slot, serial, any_value(blueprint) AS blueprint, min(t)::INTEGER AS germinated_t,
       (min(t) FILTER (stage = 'FOSSILIZED'))::INTEGER AS fossilized_t,
       (CASE WHEN max(t) < any_value(last_t) AND arg_max(stage, t) <> 'FOSSILIZED' THEN max(t) + 1 END)::INTEGER
           AS pruned_t,
       arg_max(stage, t) AS last_stage, arg_max(alpha, t) AS last_alpha, max(params) AS params,
       arg_max(contribution, t) AS contribution
FROM {schema}.part_slots
JOIN (SELECT round, max(t) AS last_t FROM {schema}.part_steps GROUP BY round) USING (round)
GROUP BY round, host, slot, serial
"""
"""A seed has a row in `slots` after every step of its life: the step after its last row pruned it."""


DAMAGED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, duckdb.Error)
"""What values of other types than expected raise."""


@contextmanager
def damage_said(runs: Sequence[Path]) -> Iterator[None]:
    """Raises RunDirectoryError where values of these runs are of other types than expected."""
    try:
        with _stoppable():
            yield
    except DAMAGED as error:
        raise RunDirectoryError(
            f"the record of {', '.join(map(str, runs))} cannot be read ({_first_line(error)}); one of its files is "
            "damaged: restore it from a backup."
        ) from error


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C, of which DuckDB makes an error of its own, is raised as a KeyboardInterrupt."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from error


def _data_of(identity: object) -> str | None:
    """The data set of the first event, in the words of the summary."""
    if not isinstance(identity, dict):
        return None
    name, copy = identity.get("name", "none"), identity.get("copy")
    return f"{name} ({copy})" if copy else str(name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _parsed(path: Path, parse: Callable[[str], Any], warnings: list[str]) -> Any:  # noqa: ANN401 -- what `parse` gives
    """The value of the text in a regular file; None if there is none, or if it is damaged."""
    mode = mode_of(path)
    if mode and not stat.S_ISREG(mode):
        warnings.append(f"{path} is not a regular file and was not read; restore the original.")
        return None
    try:
        return parse(read_text(path, errors="replace")) if mode else None
    except ValueError as error:
        warnings.append(f"{path} is damaged ({error}) and was not read; restore it from a backup.")
        return None


# Rows from JSON -------------------------------------------------------------------------------------------------------


_ROUND_KEYS = {
    "objective": "objective_mean",
    "committed": "committed_accuracy_mean",
    "live": "live_accuracy_mean",
    "growth": "growth_ratio_mean",
    "shapley": "shapley_mean",
    **{name: f"{name}_mean" for name in ("germinated", "pruned", "fossilized", "contributing", "refused")},
}
"""Key in metrics.jsonl by column of `rounds`, where they differ."""
_EPISODE_KEYS = {"committed": "committed_accuracy", "live": "live_accuracy", "growth": "growth_ratio"}
"""Key of an episode in events.jsonl by column of `episodes`, where they differ."""
_NO_METRIC = {*_ROUND_KEYS.values(), *ROUNDS.types, "ops", "slots", "record", "phase_milliseconds", "memory_bytes"}


def read_lines(path: Path, kinds: Sequence[str], warnings: list[str]) -> list[Row]:
    """All `Lines` of a file, as it is now."""
    lines = Lines(path, kinds)
    found = list(lines.new())
    warnings += lines.warnings()
    return found


@final
class Lines:
    """The lines of a file to which a run appends; with `kinds`, those of these kinds. A link or non-file is refused.

    A line that is damaged is left out and counted. So is a last line without its end, but nothing is said of it: a run
    that trains is writing it, and where the run was killed a resume writes it again.
    """

    def __init__(self, path: Path, kinds: Sequence[str] = ()) -> None:
        self._path, self._starts = path, tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds)
        self._read, self._sum, self._damaged, self._is_file = 0, 0, 0, True

    def new(self) -> Iterator[Row]:
        """The lines that have not been read, in order."""
        self._is_file = stat.S_ISREG(mode_of(self._path) or stat.S_IFREG)
        if not self._is_file or not mode_of(self._path):
            return
        with open_to_read(self._path) as file:
            file.seek(self._read)
            for line in takewhile(lambda line: line.endswith(b"\n"), file):
                self._read += len(line)
                if self._starts and not line.startswith(self._starts):
                    continue
                try:
                    value = json_of(line.decode(errors="replace"))
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    self._damaged += 1
            self._sum = sum_before(file, self._read)

    def is_continued(self) -> bool:
        """Whether the file still begins with what was read; a resumed run cuts it, and writes on."""
        if not (stat.S_ISREG(mode_of(self._path)) and self._is_file):
            return not mode_of(self._path) and not self._read
        with open_to_read(self._path) as file:
            return sum_before(file, self._read) == self._sum

    def warnings(self) -> list[str]:
        """What has been left out."""
        lost = f"has damaged lines, which are left out ({self._damaged}); restore it from a backup."
        link = "is not a regular file and was not read; restore the original."
        return [f"{self._path} {what}" for what, so in ((link, not self._is_file), (lost, self._damaged)) if so]


def sum_before(file: BufferedReader, end: int) -> int:
    """A checksum of the last line or more before a place, which tells whether it is still what was read."""
    file.seek(max(0, end - _CHECKED))
    return zlib.crc32(file.read(min(end, _CHECKED)))


def round_rows(lines: Sequence[Line]) -> Iterator[Row]:
    """Rows of `rounds` from metrics.jsonl."""
    names = list(ROUNDS.types)
    for line in lines:
        row = {name: line.get(_ROUND_KEYS.get(name, name)) for name in names} | _ops(line)
        seconds = (line.get("seconds") or 0.0) + (line.get("update_seconds") or 0.0)
        row["env_steps_per_s"] = line.get("env_steps", 0) / seconds if seconds else None
        row["memory_peak"] = (line.get("memory_bytes") or {}).get("peak")
        yield row


def _update_rows(lines: Sequence[Line]) -> tuple[list[Row], list[str]]:
    """Rows of `updates` from metrics.jsonl, and the names of the metrics in the order of their first line."""
    names: dict[str, None] = {}
    rows = []
    for line in lines:
        metrics = {
            name: value
            for name, value in line.items()
            if name not in _NO_METRIC and (value is None or isinstance(value, int | float))
        }
        names |= dict.fromkeys(metrics)
        if metrics:
            rows.append({"round": line.get("round"), **metrics})
    return rows, list(names)


def _episode_rows(events: Iterable[Line], host_params: int | None) -> Iterator[Row]:
    """Rows of `episodes` from events.jsonl."""
    names = list(EPISODES.types)
    for event in events:
        if event.get("kind") == "episode":
            row = {name: event.get(_EPISODE_KEYS.get(name, name)) for name in names} | _ops(event)
            growth = row["growth"]
            row["params"] = round(growth * host_params) if host_params and growth is not None else None
            yield row


def evaluation_files(run: Path) -> list[Path]:
    """The results of `esper evaluate` in a run directory, also in folders of its --out; the oldest first."""
    folders = [path for path in run.glob("*/evaluation.json") if not path.parent.is_symlink()]
    return sorted((*run.glob("evaluation*.json"), *folders), key=lambda path: (path.lstat().st_mtime_ns, path.name))


@with_config(extra="allow")
class _Controller(TypedDict):
    name: str
    hosts: NotRequired[dict[str, Any] | None]


@with_config(extra="allow")
class _Evaluation(TypedDict):
    controllers: list[_Controller]


_EVALUATIONS: TypeAdapter[list[Any]] = TypeAdapter(list[_Evaluation])
"""What is read of a file of `esper evaluate`."""


def evaluations_of(run: Path, warnings: list[str]) -> dict[str, list[Row]]:
    """The evaluations in a run directory by file, oldest first, without those that are damaged.

    A file of several tasks has one for each.
    """
    found = {file: _parsed(file, _evaluations, warnings) for file in evaluation_files(run)}
    return {file.relative_to(run).as_posix(): documents for file, documents in found.items() if documents}


def _evaluations(text: str) -> list[Row]:
    document = json_of(text)
    try:
        return _EVALUATIONS.validate_python(document if isinstance(document, list) else [document])
    except ValidationError as error:
        raise ValueError(first_problem(error).rstrip(".")) from None


def _evaluation_rows(file: str, documents: Sequence[Line]) -> Iterator[Row]:
    """Rows of `evaluations`: the means of all hosts, then each host."""
    names = ("objective", "committed", "test", "growth", "training_flops")
    for task, found in ((one.get("task"), found) for one in documents for found in one["controllers"]):
        place = {"file": file, "task": task, "controller": found["name"]}
        yield {**place, "host": None, **{name: found.get(name) for name in names}}
        columns = {n: v for n, v in (found.get("hosts") or {}).items() if n in names and isinstance(v, list)}
        for host, values in enumerate(zip(*columns.values(), strict=False)):
            yield {**place, "host": host, **dict(zip(columns, values, strict=True))}


def _ops(line: Line) -> Row:
    ops = line.get("ops") or {}
    return {f"ops_{name.lower()}": ops.get(name) for name in OP_NAMES}
