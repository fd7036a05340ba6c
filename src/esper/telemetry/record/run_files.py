"""One run in the database of a reader: a schema of its own with a table or view for each table of the record.

run directory                          schema r0
record/*.parquet        ---------->    part_steps, part_slots, part_coalitions  ->  steps, decisions, slots, ...
metrics.jsonl           ---------->    rounds, updates
events.jsonl            ---------->    episodes
config.toml, about.json ---------->    runs
"""

import json
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, final

import duckdb

from esper.leyline.files import mode_of
from esper.telemetry.record import lines
from esper.telemetry.record.parts import (
    ABOUT,
    RECORD,
    Part,
    checksum,
    disjoint,
    identifier,
    parts_in,
    quoted,
)
from esper.telemetry.record.schema import (
    ANOMALIES,
    COALITIONS,
    DECISIONS,
    EPISODES,
    EVALUATIONS,
    FLAG,
    REWARDS,
    ROUNDS,
    RUNS,
    SCHEMA_VERSION,
    SLOTS,
    STEPS,
    STORED,
    TERM,
    Table,
)

_CHUNK = 10_000
"""Rows that are inserted at once."""


@final
class RunFiles:
    """Makes the schema of one run.

    Args:
        path: the run directory. schema: name of the schema. database: connection. complaints: receives a sentence for
            whatever cannot be read.

    Attributes:
        parts: files that queries will read.
    """

    def __init__(self, path: Path, schema: str, database: duckdb.DuckDBPyConnection, complaints: list[str]) -> None:
        self.path, self.schema, self.parts = path, schema, list[Path]()
        self._database, self._complaints = database, complaints
        self._config = _toml(path / "config.toml", complaints)
        self._metrics = lines.read_lines(path / "metrics.jsonl", (), complaints)
        by_kind = self._readable_parts()
        self._events = lines.read_lines(path / "events.jsonl", ("run_started", "episode"), complaints)
        self._started = next((event for event in self._events if event.get("kind") == "run_started"), {})
        self._about = _json(path / RECORD / ABOUT, complaints) or {}
        self._summary = _json(path / "summary.json", complaints)
        database.execute(f"CREATE SCHEMA {schema}")
        self._small_tables()
        columns = {kind: self._part_view(kind, by_kind[kind]) for kind in STORED}
        self._step_views(columns["steps"])
        self._view(SLOTS, "part_slots")
        database.execute(f"CREATE VIEW {schema}.seeds AS {_SEEDS.format(schema=schema)}")
        self._view(COALITIONS, "part_coalitions", members=_MEMBERS)
        self._table(ANOMALIES.name, ANOMALIES.types, ())

    # Parts ------------------------------------------------------------------------------------------------------------

    def _readable_parts(self) -> dict[str, list[Part]]:
        """The parts by kind, without those that are damaged, which are named."""
        folder, found = self.path / RECORD, dict[str, list[Part]]()
        if mode_of(folder) and not stat.S_ISDIR(mode_of(folder)):
            self._complaints.append(f"{folder} is a link or a file and was not read; restore the original folder.")
        for kind, group in groupby(parts_in(folder), key=lambda part: part.kind):
            found[kind] = [part for part, other in disjoint(list(group)) if self._is_readable(folder, part, other)]
        kinds = {kind: found.get(kind, []) for kind in STORED}
        self._name_gaps(kinds["steps"])
        newer = max((part.version for parts in kinds.values() for part in parts), default=SCHEMA_VERSION)
        if newer > SCHEMA_VERSION:
            about = _json(folder / ABOUT, []) or {}
            self._complaints.append(
                f"{self.path} was recorded by esper {about.get('version', 'of a later version')} (record version "
                f"{newer}; this one knows {SCHEMA_VERSION}): columns whose meaning changed may be wrong; install that "
                "esper to read all of it."
            )
        return kinds

    def _is_readable(self, folder: Path, part: Part, overlaps: Part | None) -> bool:
        """Whether to read a part; a sentence if not."""
        file, why = folder / part.name, ""
        if not stat.S_ISREG(mode_of(file)):
            why = "is not a regular file"
        elif overlaps is not None:
            why = f"has rows that {overlaps.name} has too (a resume was killed)"
        elif (found := checksum(file)) != part.checksum:
            why = f"is damaged: its checksum is {found:08x}, expected {part.checksum:08x}"
        if why:
            (a, b), (c, d) = part.first, part.last
            self._complaints.append(
                f"{file} {why}; its rows, round {a}, step {b} to round {c}, step {d}, are left out. Restore it from a "
                "backup to see them."
            )
        return not why

    def _name_gaps(self, parts: Sequence[Part]) -> None:
        """Complain about steps that no part holds: dropped, not written yet, or lost when the run was killed."""
        length, done = int(self._config.get("episode_length") or 0), len(self._metrics)
        if not length or (not parts and not done):
            return
        numbers = [tuple((n - 1) * length + t for n, t in (part.first, part.last)) for part in parts]
        end = max([done * length, *(last for _, last in numbers)])
        missing, next_step = [], 1
        for first, last in [*numbers, (end + 1, end + 1)]:
            if first > next_step:
                missing.append((next_step, first - 1))
            next_step = last + 1
        for first, last in missing:
            places = (f"round {(n - 1) // length + 1}, step {(n - 1) % length + 1}" for n in (first, last))
            self._complaints.append(
                f"{self.path} has no rows for {' to '.join(places)}: they were dropped, or lost when the run was "
                "killed, or are not written yet; results of rounds and episodes are complete."
            )

    def _part_view(self, kind: str, parts: Sequence[Part]) -> list[str]:
        """The view `part_KIND` over all parts; returns its columns. Parts with equal columns are read as one list."""
        groups: dict[tuple[str, ...], list[Path]] = {}
        for part in parts:
            file = self.path / RECORD / part.name
            try:
                described = self._database.execute(f"DESCRIBE SELECT * FROM read_parquet({quoted(file)})").fetchall()
            except duckdb.Error as error:
                self._complaints.append(f"{file} cannot be read ({_first_line(error)}); its rows are left out.")
                continue
            groups.setdefault(tuple(row[0] for row in described), []).append(file)
            self.parts.append(file)
        types = {c.name: "VARCHAR" if c.type == "VARCHAR[]" else c.type for c in STORED[kind]}
        found = (name for columns in groups for name in columns)
        known = dict.fromkeys(name for name in found if name in types or name.startswith((TERM, FLAG)))
        selects = []
        for columns, files in groups.items():
            names = ", ".join(identifier(name) for name in columns if name in known)
            selects.append(f"SELECT {names} FROM read_parquet([{', '.join(map(quoted, files))}])")
        missing = [f"NULL::{kind} AS {identifier(name)}" for name, kind in types.items() if name not in known]
        if not selects:
            selects.append(f"SELECT {', '.join(missing)} WHERE false")
            missing = []
        extra = "".join(f", {column}" for column in missing)
        union = " UNION ALL BY NAME ".join(selects)
        self._database.execute(f"CREATE VIEW {self.schema}.part_{kind} AS SELECT *{extra} FROM ({union})")
        return [*types, *(name for name in known if name not in types)]

    # Views ------------------------------------------------------------------------------------------------------------

    def _view(self, table: Table, source: str, where: str = "", **expressions: str) -> None:
        columns = (
            f"{expressions[name]} AS {identifier(name)}" if name in expressions else identifier(name)
            for name in table.types
        )
        text = f"SELECT {', '.join(columns)} FROM {self.schema}.{source}{where and f' WHERE {where}'}"
        self._database.execute(f"CREATE VIEW {self.schema}.{table.name} AS {text}")

    def _step_views(self, columns: Sequence[str]) -> None:
        """steps, decisions and rewards."""
        flags = "".join(f", {identifier(name)}" for name in columns if name.startswith(FLAG))
        names = ", ".join(identifier(name) for name in STEPS.types)
        schema = self.schema
        self._database.execute(f"CREATE VIEW {schema}.steps AS SELECT {names}{flags} FROM {schema}.part_steps")
        self._view(DECISIONS, "part_steps", where="op IS NOT NULL")
        terms = [
            f"SELECT round, t, host, {quoted(name.removeprefix(TERM))} AS term, {identifier(name)} AS value "
            f"FROM {schema}.part_steps WHERE {identifier(name)} IS NOT NULL"
            for name in columns
            if name.startswith(TERM)
        ]
        if terms:
            self._database.execute(f"CREATE VIEW {schema}.rewards AS {' UNION ALL '.join(terms)}")
        else:
            self._table(REWARDS.name, REWARDS.types, ())

    # Tables from JSON -------------------------------------------------------------------------------------------------

    def _small_tables(self) -> None:
        """runs, rounds, updates, episodes and evaluations."""
        host_params = self._started.get("host_params")
        rows, names = lines.update_rows(self._metrics)
        self._table(ROUNDS.name, ROUNDS.types, lines.round_rows(self._metrics))
        self._table("updates", {"round": "INTEGER", **dict.fromkeys(names, "DOUBLE")}, rows)
        self._table(EPISODES.name, EPISODES.types, lines.episode_rows(self._events, host_params))
        self._table(RUNS.name, RUNS.types, [self._run_row()])
        evaluations: list[lines.Row] = []
        for file in lines.evaluation_files(self.path):
            name = file.relative_to(self.path).as_posix()
            evaluations += lines.evaluation_rows(_any_json(file, self._complaints), name)
        self._table(EVALUATIONS.name, EVALUATIONS.types, evaluations)

    def _run_row(self) -> lines.Row:
        names = ("task", "preset", "seed", "num_envs", "episode_length", "slots")
        started, about, summary = self._started, self._about, self._summary or {}
        mode = (self._config.get("reward") or {}).get("mode")
        return {
            **{name: self._config.get(name) for name in names},
            "path": str(self.path.absolute()),
            "reward": started.get("reward") or self._config.get("custom_reward") or mode,
            "data": summary.get("data") or json.dumps(started.get("data")) if started else None,
            "blueprints": started.get("blueprints"),
            "reward_terms": about.get("terms"),
            "device": started.get("device") or summary.get("device"),
            "version": about.get("version"),
            "commit": (about.get("environment") or {}).get("commit"),
            "started": about.get("started"),
            "finished": self._summary is not None,
            "rounds": len(self._metrics),
            "host_params": started.get("host_params"),
            "config": self._config,
            "environment": about.get("environment"),
            "summary": self._summary,
        }

    def _table(self, name: str, types: Mapping[str, str], rows: Iterable[lines.Row]) -> None:
        """A table of rows by column; NULL where a row has no value, or one of another type."""
        columns = ", ".join(f"{identifier(column)} {kind}" for column, kind in types.items())
        self._database.execute(f"CREATE TABLE {self.schema}.{name} ({columns})")
        insert_rows(self._database, f"{self.schema}.{name}", types, rows)


def insert_rows(
    database: duckdb.DuckDBPyConnection, table: str, types: Mapping[str, str], rows: Iterable[lines.Row]
) -> None:
    """Insert rows, whose values are those of JSON, into a table with columns of these types."""
    structure = json.dumps(
        [{name: [kind.removesuffix("[]")] if kind.endswith("[]") else kind for name, kind in types.items()}]
    )
    wanted = [{name: row.get(name) for name in types} for row in rows]
    for begin in range(0, len(wanted), _CHUNK):
        text = json.dumps(wanted[begin : begin + _CHUNK])
        query = f"INSERT INTO {table} SELECT unnest(from_json($1::JSON, $2), max_depth := 2)"
        database.execute(query, [text, structure])


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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _text(path: Path, complaints: list[str]) -> str | None:
    """The content of a regular file, None if there is none."""
    mode = mode_of(path)
    if not mode:
        return None
    if not stat.S_ISREG(mode):
        complaints.append(f"{path} is not a regular file and was not read; restore the original.")
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def _json(path: Path, complaints: list[str]) -> dict[str, Any] | None:
    value = _any_json(path, complaints)
    return value if isinstance(value, dict) else None


def _any_json(path: Path, complaints: list[str]) -> object:
    text = _text(path, complaints)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        complaints.append(f"{path} is damaged ({error}) and was not read; restore it from a backup.")
        return None


def _toml(path: Path, complaints: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path, complaints) or "")
    except tomllib.TOMLDecodeError as error:
        complaints.append(f"{path} is damaged ({error}) and was not read; restore it from a backup.")
        return {}
