"""The commands that read runs: esper report (a page, figures), query (SQL), serve (a live page), mcp (assistants)."""

import atexit
import csv
import ipaddress
import json
import math
import os
import re
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.cli.options import (
    EXIT_ERROR,
    EXIT_STOPPED,
    FilePath,
    Flag,
    Names,
    Number,
    Plugins,
    Real,
    Text,
    joined,
    placeholder,
)
from esper.leyline.errors import ConfigError, EsperError, QueryError, importing, refusing
from esper.leyline.files import replacing
from esper.telemetry.progress import RunConsole, warn
from esper.telemetry.run_directory import CONFIG, plain_json

if TYPE_CHECKING:
    from esper.telemetry.record.reader import Record


PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show runs as one HTML page, which needs no network.

    It shows whether the controller learns, what it does, which seeds paid off, what that cost, and what looks wrong.
    Results of `esper evaluate RUN --out RUN/evaluation` are part of it.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], placeholder("RUN ...")] = ()
    """Run directories; those of several runs are compared."""
    out: FilePath = None
    """The HTML file to write. (report.html in the first run directory)"""
    figures: Flag = False
    """Also write a picture of each run beside the page, as PNG and SVG: run.png, or NAME.png for several runs."""
    # New hosts on which is measured what the controller looks at; 0 leaves it out. (16, if that takes less than a
    # minute)
    num_envs: Number = None
    plugins: Plugins = ()
    """Plugins of the runs that may be executed to measure it."""
    trust: Flag = False
    """Execute all plugins that the run directories name."""


def report(command: Report) -> int:
    """Write the page and the figures."""
    from esper.telemetry.record.reader import damage_said, open_record
    from esper.telemetry.report.page import document, payloads_of

    if not command.runs:
        raise ConfigError("no run is given; name one or more run directories: esper report RUN ...")
    out = command.out or command.runs[0] / PAGE
    if command.num_envs is not None and (command.num_envs < 0 or command.num_envs == 1):
        raise ConfigError(f"--num-envs is {command.num_envs}, expected at least 2, or 0 to measure nothing.")
    with _progress() as on_section:
        unknown = _measure(command, on_section) if command.num_envs != 0 else {}
        with open_record(list(command.runs)) as record, damage_said(command.runs):
            payloads: dict[str, Any] = payloads_of(record, on_section)
    for run in payloads["runs"]:
        found = payloads["importance"][run["run"]]
        found["why"] = unknown.get(Path(run["path"]), found.get("why"))
    warn(record.warnings)
    with refusing(ConfigError, f"{out} cannot be written", "name another file with --out"), replacing(out) as file:
        file.write(document(payloads, ", ".join(path.absolute().name for path in command.runs)))
    console = RunConsole()
    console.say(f"{out}: {out.stat().st_size / 1e6:.1f} MB, opens in any browser without a network")
    if command.figures:
        instead = "leave --figures out: each chart of the page saves its own picture"
        with importing("figures need matplotlib", "report", instead):
            from esper.telemetry.report.figures import write_figures
        with refusing(ConfigError, f"{out.parent} cannot be written", "name another with --out"):
            written = write_figures(payloads, out.parent)
        console.say(", ".join(map(str, written)) or "no figures: no run has a complete round yet")
    return 0


def _measure(command: Report, on_section: Callable[[int, int, str], None]) -> dict[Path, str]:
    """Write into each run directory what its controller looks at; returns, for those where it fails, why."""
    from esper.runs.evaluation.importance import importance_of

    options: dict[str, Any] = {"allowed": joined(command.plugins), "trust": command.trust}
    unknown = {}
    for run in command.runs:
        what = f"what the controller of {run.absolute().name} looks at"
        options["on_step"] = lambda done, total, what=what: on_section(done, total, what)
        try:
            importance_of(run, hosts=command.num_envs, **options)
        except EsperError as error:
            unknown[run.absolute()] = str(error)
        except OSError as error:
            unknown[run.absolute()] = f"{run} cannot be written ({error.strerror})."
    return unknown


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the remaining time on a terminal; long records take seconds."""
    console = RunConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def on_section(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"reading: {name}")

        yield on_section


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
    timeout: Annotated[Real, placeholder("SECONDS")] = None
    """Seconds after which the query is ended. (no limit)"""


def query(command: Query) -> int:
    """Print the answer."""
    if command.timeout is not None and not 0 < command.timeout < threading.TIMEOUT_MAX:
        raise ConfigError(f"--timeout is {command.timeout:g}, expected a number of seconds above 0.")
    if command.csv and command.json:
        raise ConfigError("--csv and --json were both given; choose one.")
    *paths, last = command.runs or ("",)
    is_run = os.path.isfile(os.path.join(last, CONFIG))  # Path.is_file fails where a SELECT is too long for a path
    sql = None if is_run else last
    if sql is None:
        paths.append(last)
    if not paths:
        if last and " " not in last:
            way, of_runs = "name one, and say what is asked of it", f"it holds runs, which {shlex.quote(last)}/* names"
            way = of_runs if any(Path(last).glob(f"*/{CONFIG}")) else way
            raise ConfigError(f"{last} is not a run; {way}.")
        raise ConfigError('name a run directory and a SELECT, e.g. esper query RUN "select * from rounds".')
    _in_a_thread(lambda: _answer([Path(path) for path in paths], sql, command), command.timeout)
    return 0


def _in_a_thread(work: Callable[[], None], seconds: float | None) -> None:
    """Wait for `work`, which DuckDB may keep from ending: within a value it neither looks at signals nor can it stop.

    Raises:
        QueryError: it took more `seconds`. KeyboardInterrupt: Ctrl-C; in both cases it goes on until the process ends.
    """
    done = Future[None]()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        done.result(seconds)
    except (KeyboardInterrupt, TimeoutError) as error:
        if done.done():
            raise
        interrupted = isinstance(error, KeyboardInterrupt)
        atexit.register(os._exit, EXIT_STOPPED if interrupted else EXIT_ERROR)  # a thread in C++ would abort the exit
        atexit.register(sys.stderr.flush)  # before that
        if interrupted:
            raise
        raise QueryError(
            f"the query was ended after {seconds:g} seconds; select fewer rounds, hosts or columns, or allow more with "
            "--timeout."
        ) from error


def _answer(paths: Sequence[Path], sql: str | None, command: Query) -> None:
    from esper.telemetry.record.reader import open_record

    with open_record(paths) as record:
        warn(record.warnings)
        if sql is None:
            _overview(record)
        elif command.json:
            empty = "[]"
            for row in record.rows(sql):
                text = indent(json.dumps(plain_json(row), default=str, indent=1), " ")
                print("[" if empty else ",", text, sep="\n", end="")
                empty = ""
            print(empty or "\n]")
        elif command.csv:
            writer, name = csv.writer(sys.stdout, lineterminator="\n"), printable if sys.stdout.isatty() else str
            for i, row in enumerate(record.rows(sql)):
                if i == 0:
                    writer.writerow(map(name, row))
                writer.writerow(name(_cell(value, exact=True)) for value in row.values())
        else:
            _print_table(*record.beginning(sql, SHOWN))


def _print_table(rows: Sequence[Mapping[str, Any]], more: int, is_all: bool) -> None:
    if not rows:
        RunConsole().say("no rows")
        return
    from rich.markup import escape
    from rich.measure import Measurement

    from esper.runs.evaluation.tables import plain_table

    shown = [{printable(name): printable(_cell(value)) for name, value in row.items()} for row in rows]
    console, page = RunConsole(), plain_table(*map(escape, shown[0]))
    for row in shown:
        page.add_row(*map(escape, row.values()))
    unlimited = console.options.update(max_width=_WIDEST)
    if Measurement.get(console, unlimited, page).maximum <= console.width:
        console.print(page)
    else:  # too wide for columns that can be read
        width = max(map(len, shown[0]))
        lines = ("\n".join(f"{name:{width}}  {cell}" for name, cell in row.items()) for row in shown)
        console.say("\n\n".join(lines))
    if more:
        console.say(f"{'' if is_all else 'at least '}{more} more rows; --csv and --json print all.")


def _overview(record: "Record") -> None:
    """The tables, and the anomalies by kind."""
    from esper.runs.evaluation.tables import plain_table
    from esper.telemetry.record.schema import TABLES

    page = plain_table("table", "rows", "content")
    page.columns[2].justify, page.columns[2].no_wrap = "left", False
    for table in TABLES:
        (count,) = record.query(f"SELECT count(*) AS n FROM {table.name}")
        page.add_row(table.name, str(count["n"]), table.meaning)
    RunConsole().print(page)
    for line in record.anomaly_lines():
        RunConsole().say(line)


def printable(text: str) -> str:
    """A text without what a terminal would obey, and cut if it is long."""
    text = text if len(text) <= _WIDEST else f"{text[:_WIDEST]}... ({len(text) - _WIDEST} more characters)"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cell(value: object, *, exact: bool = False) -> str:
    """A value as text; a missing one is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and not exact:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return str(value)


LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Show runs as a live page in the browser, which follows those that are training.

    It only reads. Without --host it can be reached from this machine alone; elsewhere a token is needed, which is in
    the address that is printed.
    """

    path: Annotated[tyro.conf.Positional[Path | None], placeholder("RUN|DIR")] = None
    """A run directory, or a folder with run directories below it."""
    port: int = 8080
    """Port to listen on; 0 chooses a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all networks."""
    token: Text = None
    """Secret that the address must bring once. (generated where --host can be reached from elsewhere)"""
    allow_host: Annotated[Names, placeholder("NAME ...")] = ()
    """Further names by which browsers reach this machine, e.g. behind a proxy. (not needed with a token)"""
    root_path: Annotated[str, placeholder("/PATH")] = ""
    """Path below which a proxy shows the page, e.g. /esper. (the page is at /)"""
    allow_frames: Flag = False
    """Let other pages, such as a notebook, show this one in a frame."""


def serve(command: Serve) -> int:
    """Answer requests until interrupted."""
    with importing("esper serve needs starlette with uvicorn", "serve", "write a page with esper report"):
        from esper.telemetry.serve.app import LOCAL, server_of
    from esper.telemetry.serve.runs import Runs

    if command.path is None:
        raise ConfigError("nothing to serve is named; give a run directory or a folder of them: esper serve runs")
    if command.token == "":
        raise ConfigError("--token is empty; give a secret, or leave it out to have one made.")
    if not re.fullmatch(r"(/[\w.~-]+)*/?", command.root_path, re.ASCII):
        raise ConfigError(f"--root-path is {command.root_path!r}, expected the path of an address such as /esper.")
    root = command.root_path.rstrip("/")
    token = command.token if command.token or _is_local(command.host) else secrets.token_urlsafe(16)
    shown = f"[{command.host}]" if ":" in command.host else command.host
    names = (*LOCAL, socket.gethostname(), shown, *joined(command.allow_host))
    with Runs(command.path) as runs, _listening(command.host, command.port) as port:
        start = root + (f"/run?run={quote(runs.root.name)}" if runs.is_single else "/")
        secret = f"{'&' if '?' in start else '?'}token={quote(token)}" if token else ""
        RunConsole().say(f"{runs.root} at http://{shown}:{port.getsockname()[1]}{start}{secret} (Ctrl-C ends)")
        with suppress(KeyboardInterrupt):  # the way to end it
            served = server_of(runs, names=names, token=token, root=root, frames=command.allow_frames)
            served.run(sockets=[port])
    return 0


def _is_local(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens; raises ConfigError."""
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--port is {port}, expected 0 to {LAST_PORT}.")
    way = "choose another with --port, e.g. --port 0 for a free one, or another --host"
    with refusing(ConfigError, f"{host}, port {port}, cannot be listened on", way):
        found = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return found


@dataclass(frozen=True, kw_only=True)
class Mcp:
    """Answer assistants about runs, by the Model Context Protocol on standard input and output.

    It only reads: runs, tables, one SELECT, a host. Assistants start this command themselves; docs/mcp.md shows how.
    """

    path: Annotated[tyro.conf.Positional[Path], placeholder("RUN|DIR")] = Path("runs")
    """A run directory, or a folder of run directories. (runs)"""


def mcp(command: Mcp) -> int:
    """Answer until standard input is closed."""
    with importing("esper mcp needs the package mcp", "mcp", "ask with esper query"):
        from esper.telemetry.serve.assistants import server_of
    from esper.telemetry.serve.runs import Runs

    with Runs(command.path) as runs:
        server_of(runs).run("stdio")
    return 0
