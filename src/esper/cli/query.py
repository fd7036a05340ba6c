"""esper query: answers SQL about runs."""

import csv
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from esper.cli.options import Flag, placeholder
from esper.leyline.errors import ConfigError
from esper.telemetry.progress import RunConsole, warn
from esper.telemetry.run_directory import CONFIG, plain_json

if TYPE_CHECKING:
    from esper.telemetry.record import Record

SHOWN = 50
"""Rows that the table shows at most."""
_WIDEST = 10_000


@dataclass(frozen=True, kw_only=True)
class Query:
    """Answer a SELECT about one or several runs, e.g. esper query RUN "select host, op from decisions where t = 12".

    Without a SELECT, list the tables and what looks wrong. Every table begins with the column run; `describe TABLE`
    shows the others. The SQL is that of DuckDB; it can read the record alone.
    """

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], placeholder("RUN ... [SELECT]")] = ()
    """Run directories, then the SELECT in quotes."""
    csv: Flag = False
    """Print all rows as CSV."""
    json: Flag = False
    """Print all rows as JSON."""


def query(command: Query) -> int:
    """Print the answer."""
    from esper.telemetry.record import open_record

    if command.csv and command.json:
        raise ConfigError("--csv and --json were both given; choose one.")
    *paths, last = command.runs or ("",)
    is_run = os.path.isfile(os.path.join(last, CONFIG))  # Path.is_file fails where a SELECT is too long for a path
    sql = None if is_run else last
    if sql is None:
        paths.append(last)
    if not paths:
        raise ConfigError('name a run directory and a SELECT, e.g. esper query RUN "select * from rounds".')
    with open_record([Path(path) for path in paths]) as record:
        warn(record.complaints)
        if sql is None:
            _overview(record)
        else:
            _answer(record.query(sql), command)
    return 0


def _answer(rows: Sequence[Mapping[str, Any]], command: Query) -> None:
    if command.json:
        print(json.dumps([plain_json(row) for row in rows], default=str, indent=1))
    elif command.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        if rows:
            writer.writerow(rows[0])
        writer.writerows([_cell(value, exact=True) for value in row.values()] for row in rows)
    elif rows:
        from rich.measure import Measurement

        from esper.runs.tables import plain_table

        console, page = RunConsole(), plain_table(*rows[0])
        for row in rows[:SHOWN]:
            page.add_row(*map(_cell, row.values()))
        unlimited = console.options.update(max_width=_WIDEST)
        if Measurement.get(console, unlimited, page).maximum <= console.width:
            console.print(page)
        else:  # too wide for columns that can be read
            console.say("\n\n".join(map(_lines, rows[:SHOWN])))
        if len(rows) > SHOWN:
            RunConsole().say(f"{len(rows) - SHOWN} more rows; --csv and --json print all.")
    else:
        RunConsole().say("no rows")


def _lines(row: Mapping[str, Any]) -> str:
    """One row, a line for each column."""
    width = max(map(len, row))
    return "\n".join(f"{name:{width}}  {_cell(value)}" for name, value in row.items())


def _overview(record: "Record") -> None:
    """The tables, and the anomalies by kind."""
    from esper.runs.tables import plain_table
    from esper.telemetry.record.schema import TABLES

    page = plain_table("table", "rows", "content")
    page.columns[2].justify, page.columns[2].no_wrap = "left", False
    for table in TABLES:
        (count,) = record.query(f"SELECT count(*) AS n FROM {table.name}")
        page.add_row(table.name, str(count["n"]), table.meaning)
    RunConsole().print(page)
    for line in record.anomaly_lines():
        RunConsole().say(line)


def _cell(value: object, *, exact: bool = False) -> str:
    """A value as text; a missing one is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and not exact:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return str(value)
