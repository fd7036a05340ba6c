"""Progress display of a run: a live table on a terminal, plain lines elsewhere.

    round  env-steps/s  100·J  committed   live   operations chosen               slots by stage
     1/10          412  58.41      58.90  61.32   wait 510 germinate 61 prune 20  training 9 blending 4
     2/10 ...
    step 312/6400 ----------                          0:00:41 eta 8:12

Terminals under 140 columns show the counts of the newest round only, in two lines under the table.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import SegmentLines
from rich.table import Table

_REFRESH = 0.5  # per second; drawing takes ten milliseconds of the main process
_WIDE = 140
_OPERATIONS, _SLOTS = "operations chosen", "slots by stage"
FIRST_INTERVAL, PLAIN_INTERVAL = 1.0, 30.0
"""Seconds until an unfinished round prints a plain line: the first in a run, and each later one."""


class RunConsole(Console):
    """A console that goes silent when its pipe is closed (`esper ... | head`), instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Drop all further output."""
        self.quiet = True
        # what is still in Python's buffer would otherwise fail at exit
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stderr.fileno() if self.stderr else sys.stdout.fileno())
        os.close(devnull)

    def say(self, text: str) -> None:
        """Print one line of plain text without wrapping."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)


def warn(lines: Iterable[str]) -> None:
    """Print sentences to stderr."""
    for line in lines:
        RunConsole(stderr=True).say(f"esper: {line}")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The displayed values of a record of kind "step" (a round in progress) or "round".

    `objective` (100·J) and `committed` (pp) are means over hosts for the committed networks, `live` (pp) with all
    live seeds. `ops` counts effective operations, `slots` slots by stage.
    """

    round: int
    step: int | None
    objective: float
    committed: float
    live: float
    speed: float
    ops: Mapping[str, int]
    slots: Mapping[str, int]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Shown":
        """The values of a record."""
        return cls(
            round=fields["round"],
            step=fields.get("t"),
            objective=fields["objective_mean"],
            committed=fields["committed_accuracy_mean"],
            live=fields["live_accuracy_mean"],
            speed=fields["env_steps"] / max(fields["seconds"], 1e-9),
            ops=fields["ops"],
            slots=fields["slots"],
        )


def figure(value: float, form: str) -> str:
    """A formatted number, or "-" for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def counts(numbers: Mapping[str, int]) -> str:
    """The nonzero counts, e.g. "wait 510 germinate 61"."""
    return " ".join(f"{name.lower()} {number}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def line(shown: Shown, rounds: int, steps: int, eta: str) -> str:
    """A round, or a round in progress, as one line of text."""
    inside = f" step {shown.step}/{steps}" if shown.step is not None else ""
    return (
        f"round {shown.round}/{rounds}{inside}  eta {eta}  {_speed(shown)} env-steps/s  "
        f"100·J {figure(shown.objective, '.2f')}  committed {figure(shown.committed, '.2f')}  "
        f"live {figure(shown.live, '.2f')}  "
        f"ops: {counts(shown.ops)}  slots: {counts(shown.slots)}"
    )


def _speed(shown: Shown) -> str:
    return f"{shown.speed:.0f}" if shown.speed >= 10.0 else f"{shown.speed:.1f}"


@final
class RunProgress:
    """Displays a run; a listener, and a context manager around the run.

    Args:
        console: output; the live table needs a terminal.
        rounds, steps: total rounds, and control steps per round.
        done: control steps completed before a resume.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: RunConsole,
        *,
        rounds: int,
        steps: int,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._rounds, self._steps, self._clock = console, rounds, steps, clock
        self._first = self._finished = done
        self._began = clock()
        self._next_line = self._began + FIRST_INTERVAL
        self._history: list[Shown] = []
        self._now: Mapping[str, object] | None = None  # newest record of kind "step", converted only when it is drawn
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=rounds * steps, completed=done, eta="...")
        live = Live(console=console, get_renderable=self.page, refresh_per_second=_REFRESH)
        self._live = live if console.is_terminal and not console.quiet else None

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        if self._live is not None:
            self._live.__exit__(*error)

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take a record; only kinds "step" and "round" are displayed."""
        if kind == "step":
            self._step(fields)
        elif kind == "round":
            shown = Shown.of(fields)
            self._finished = shown.round * self._steps
            if self._live is None:
                self._print(shown)
            else:
                self._history.append(shown)
                self._now = None

    def _step(self, fields: Mapping[str, Any]) -> None:
        self._now = fields
        self._finished = (fields["round"] - 1) * self._steps + fields["t"]
        if self._live is None and self._clock() >= self._next_line and self._finished % self._steps:
            self._print(Shown.of(fields))

    def _print(self, shown: Shown) -> None:
        self._console.say(line(shown, self._rounds, self._steps, self._eta()))
        self._next_line = self._clock() + PLAIN_INTERVAL

    def _eta(self) -> str:
        ran = self._finished - self._first
        if ran <= 0:
            return "..."
        return duration((self._clock() - self._began) / ran * (self._rounds * self._steps - self._finished))

    def page(self) -> RenderableType:
        """The table of the last rounds and the progress bar, at most as high as the terminal."""
        self._bar.update(self._task, completed=self._finished, eta=self._eta())
        width, height = self._console.size
        shown = [*self._history, *([Shown.of(self._now)] if self._now else [])][-height:]
        while True:
            page = Group(*self._table(shown, wide=width >= _WIDE), self._bar)
            lines = self._console.render_lines(page, pad=False)
            too_many = len(lines) - height + 1
            if too_many <= 0 or len(shown) <= 1:
                return SegmentLines(lines, new_lines=True)  # reuses the rendered lines
            shown = shown[max(too_many * len(shown) // len(lines), 1) :]

    def _table(self, rounds: Sequence[Shown], *, wide: bool) -> list[RenderableType]:
        """One line per round, with counts in columns if `wide`, else those of the newest round below."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("round", "env-steps/s", "100·J", "committed", "live"):
            table.add_column(column, justify="right", no_wrap=True)
        for column in (_OPERATIONS, _SLOTS) if wide else ():
            table.add_column(column, overflow="fold")
        for shown in rounds:
            numbers = (
                f"{shown.round}/{self._rounds}",
                _speed(shown),
                figure(shown.objective, ".2f"),
                figure(shown.committed, ".2f"),
                figure(shown.live, ".2f"),
            )
            table.add_row(*numbers, *((counts(shown.ops), counts(shown.slots)) if wide else ()))
        if wide or not rounds:
            return [table]
        below = Table.grid(padding=(0, 2, 0, 0))
        below.add_row(_OPERATIONS, counts(rounds[-1].ops))
        below.add_row(_SLOTS, counts(rounds[-1].slots))
        return [table, below]
