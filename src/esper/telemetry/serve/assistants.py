"""The runs of a folder for assistants: tools of the Model Context Protocol that read, as text of bounded size.

    list_runs   name, task, state, rounds and 100·J of each run
    overview    a run at a glance: settings, learning curve, last round, evaluations, what looks wrong
    tables      the tables of the record with their columns
    query       one SELECT, see `queries`
    host        what grew in a host, and what it is worth

Requests name runs, never paths. What cannot be answered is a sentence.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import ValidationError

from esper.leyline.errors import EsperError, QueryError, in_words
from esper.leyline.settings import first_problem
from esper.telemetry.machine import version
from esper.telemetry.record.reader import Record
from esper.telemetry.record.schema import TABLES
from esper.telemetry.report.page import evaluation, rounded
from esper.telemetry.report.page import runs as described
from esper.telemetry.serve import queries
from esper.telemetry.serve.runs import UNREADABLE, Runs, host

RUNS, POINTS, ROWS, LINES = 100, 20, 200, 30
"""Most runs of a list, points of a curve, rows of a query, and lines of any other list."""
CHARACTERS = 2 * queries.CHARACTERS
"""Of any answer."""
_INSTRUCTIONS = (
    "Runs of Esper, in which a controller grows neural networks (hosts) by seeds in their slots. 100·J, in all tables "
    "the column objective, is the value of a network: its validation accuracy in points minus a price for added "
    "parameters. Begin with list_runs."
)
_LISTED = ("run", "task", "reward", "seed", "round", "rounds", "objective", "best")
_SETTINGS = ("task", "preset", "reward", "seed", "num_envs", "episode_length", "slots", "blueprints", "device",
             "version", "started", "finished", "host_params")  # fmt: skip
_ROUND = ("round", "objective", "objective_std", "committed", "live", "growth", "rollbacks", "env_steps_per_s")
P = ParamSpec("P")


class _Server(MCPServer[Any]):
    """Its errors are sentences: of ours the text alone, of wrong arguments what is expected."""

    async def call_tool(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- as in the class above
        try:
            return await super().call_tool(*args, **kwargs)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ToolError):
                raise cause from None
            if isinstance(cause, ValidationError):
                raise ToolError(first_problem(cause)) from cause
            raise


def server_of(runs: Runs, seconds: float = queries.SECONDS) -> MCPServer[Any]:
    """A server of these runs; a query may take so many seconds."""
    server = _Server("esper", instructions=_INSTRUCTIONS, version=version(), log_level="CRITICAL")
    reads = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    tools = _Tools(runs, seconds)
    for tool in (tools.list_runs, tools.overview, tools.tables, tools.query, tools.host):
        server.add_tool(_explained(tool), annotations=reads, structured_output=False)
    return server


def _explained(tool: Callable[P, object]) -> Callable[P, str]:
    """The tool with its answer as compact JSON, and every error as a sentence."""

    @wraps(tool)
    def answered(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            found = rounded(tool(*args, **kwargs))
        except EsperError as error:
            raise ToolError(" ".join(str(error).split())) from None
        except UNREADABLE as error:
            why = in_words(error)
            raise ToolError(f"the run cannot be read ({why}); restore its files from a backup.") from None
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False, default=str)
        if len(text) > CHARACTERS:
            raise ToolError(
                f"the answer has {len(text):,} characters, more than {CHARACTERS:,}; ask for less by query."
            )
        return text

    answered.__annotations__ = {**tool.__annotations__, "return": str}
    return answered


class _Tools:
    """The tools; their docstrings are what an assistant reads about them."""

    def __init__(self, runs: Runs, seconds: float) -> None:
        self._runs, self._seconds = runs, seconds

    def list_runs(self) -> object:
        """List the runs: task, state, rounds done and planned, and 100·J of the last and of the best round."""
        found = self._runs.overview()
        rows = sorted(found["runs"], key=lambda row: -(row["changed"] or 0.0))
        listed = [
            {name: row[name] for name in _LISTED} | {"state": _state(row)} | _notes(row["warnings"])
            for row in rows[:RUNS]
        ]
        return {"runs": listed, **_left_out(len(rows) - RUNS, "older runs"), **_notes(found["notes"])}

    def overview(self, run: str) -> object:
        """A run at a glance: settings, 100·J by round, last round, evaluations, and what looks wrong."""
        return self._of_record(run, "overview", _overview)

    def tables(self, run: str, table: str = "") -> object:
        """The tables of the record of a run, with their rows and columns; or one table with units and meanings."""
        return self._of_record(run, f"tables {table}", lambda record: _tables(record, table))

    def query(self, runs: list[str], sql: str, rows: int = 50) -> object:
        """Answer one SELECT (DuckDB) about runs; at most 200 rows. Each table begins with the column run."""
        if not 1 <= rows <= ROWS:
            raise QueryError(f"rows is {rows}, expected 1 to {ROWS}; aggregate, or order and limit the rows.")
        if not runs:
            raise QueryError("no run is named; list_runs has their names.")
        found = queries.answer([self._runs.path_of(name) for name in runs], sql, rows, self._seconds, runs)
        return found | _notes(found.get("notes", []))

    def host(self, run: str, round: int | None = None, host: int | None = None) -> object:
        """What a host of a round became: 100·J, accuracy, growth, parameters, its seeds, test accuracy if known.

        Without a round the newest, without a host the one with the highest J.
        """
        given = {"round": round, "host": host}
        place = {name: value for name, value in given.items() if value is not None}
        return self._of_record(run, f"host of {place}", lambda record: _host(record, place))

    def _of_record(self, run: str, key: str, make: Callable[[Record], dict[str, object]]) -> object:
        """What `make` says of a run, and what is damaged or not written yet."""
        noted = lambda record: make(record) | _notes(record.warnings)  # noqa: E731
        return json.loads(self._runs.answer((run,), f"assistant: {key}", noted))


def _state(row: Mapping[str, Any]) -> str:
    if row["finished"]:
        return "finished"
    if row["changed"] is None:
        return "empty"
    return f"not finished, last written {max(time.time() - row['changed'], 0.0):.0f} seconds ago"


def _left_out(number: int, what: str) -> dict[str, str]:
    return {"left_out": f"{number:,} more {what}"} if number > 0 else {}


def _notes(sentences: Sequence[str]) -> dict[str, list[str]]:
    unique = list(dict.fromkeys(sentences))
    more = [f"and {len(unique) - LINES} more"] * (len(unique) > LINES)
    return {"notes": [*unique[:LINES], *more]} if unique else {}


def _overview(record: Record) -> dict[str, object]:
    (found,) = described(record)
    curve = record.query(
        "select min(round) as first, max(round) as last, avg(objective) as objective, avg(committed) as committed, "
        "avg(growth) as growth from (select *, ntile(?) over (order by round) as part from rounds) group by part "
        "order by 1",
        (POINTS,),
    )
    anomalies, last = record.anomaly_lines(), found["last"]
    tested = [
        {name: row.get(name) for name in ("task", "controller", "objective", "committed", "test", "growth")}
        for section in evaluation(record)
        for row in section["rows"]
    ]
    return {
        "settings": {name: found[name] for name in _SETTINGS} | {"rounds_planned": found["config"].get("rounds")},
        "last_round": {name: last[name] for name in _ROUND} if last else "no round is complete yet",
        "means_of_rounds": curve,
        "evaluations": tested[:LINES],
        **_left_out(len(tested) - LINES, "evaluations; see the table evaluations"),
        "best_host": found["summary"].get("best_host"),
        "looks_wrong": anomalies[:LINES],
    }


def _tables(record: Record, table: str) -> dict[str, object]:
    if not table:
        return {
            known.name: {
                "meaning": known.meaning,
                "rows": record.query(f"select count(*) as n from {known.name}")[0]["n"],
                "columns": ", ".join(record.columns(known.name)),
            }
            for known in TABLES
        }
    about = {column.name: column for known in TABLES if known.name == table for column in known.columns}
    columns: dict[str, object] = {}
    for name, kind in record.columns(table).items():
        column = about.get(name)
        unit = f", {column.unit}" if column and column.unit else ""
        columns[name] = kind + unit + (f": {column.meaning}" if column else "")
    return columns


def _host(record: Record, place: Mapping[str, int]) -> dict[str, object]:
    found = host(record, place)
    if found["host"] is None:
        return {"run": found["run"], "host": "no round is complete yet, so no host has a result"}
    best = described(record)[0]["summary"].get("best_host") or {}
    is_best = (best.get("round"), best.get("host")) == (found["round"], found["host"])
    known = f"of the best host alone: host {best['host']} of round {best['round']}" if best else "after the last round"
    return {
        **{name: found[name] for name in ("run", "round", "first", "newest", "host")},
        "hosts": len(found["hosts"]),
        "result": {name: value for name, value in found["result"].items() if not name.startswith("ops_")},
        "seeds": found["seeds"][:LINES],
        **_left_out(len(found["seeds"]) - LINES, "seeds; see the table seeds"),
        "test_accuracy": best["test"] if is_best else f"known {known}",
    }
