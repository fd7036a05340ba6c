"""esper report: shows runs as one HTML page, and as figures."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.cli.options import FilePath, placeholder
from esper.leyline.errors import ConfigError
from esper.leyline.files import replacing
from esper.telemetry.progress import RunConsole, warn

PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show runs as one HTML page, which needs no network.

    It shows whether the controller learns, what it does, which seeds paid off, what that cost, and what looks wrong.
    Results of `esper evaluate RUN --json RUN/evaluation.json` are part of it.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], placeholder("RUN ...")] = ()
    """Run directories; those of several runs are compared."""
    out: FilePath = None
    """The HTML file to write. (report.html in the first run directory)"""
    figures: FilePath = None
    """Also write a picture of each run, as PNG and SVG, to this folder: run.png, or NAME.png for several runs."""


def report(command: Report) -> int:
    """Write the page and the figures."""
    from esper.telemetry.record import open_record
    from esper.telemetry.report.page import document, payloads_of

    if not command.runs:
        raise ConfigError("no run is given; name one or more run directories: esper report RUN ...")
    out = command.out or command.runs[0] / PAGE
    with open_record(list(command.runs)) as record, _progress() as on_section:
        payloads = payloads_of(record, on_section)
    warn(record.complaints)
    _write(out, document(payloads, ", ".join(path.absolute().name for path in command.runs)))
    if command.figures is not None:
        _write_figures(payloads, command.figures)
    return 0


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


def _write(path: Path, page: str) -> None:
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file with --out.") from error
    RunConsole().say(f"{path}: {path.stat().st_size / 1e6:.1f} MB, opens in any browser without a network")


def _write_figures(payloads: Mapping[str, Any], folder: Path) -> None:
    try:
        from esper.telemetry.report.figures import write_figures
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib, and importing it failed ({error}); pip install 'esper-growth[report]', or leave "
            "--figures out: each chart of the page saves its own picture."
        ) from error
    try:
        written = write_figures(payloads, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); name another with --figures.") from error
    RunConsole().say(", ".join(map(str, written)) or "no figures: no run has a complete round yet")
