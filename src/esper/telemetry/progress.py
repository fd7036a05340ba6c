"""Progress display of a run: a live page on a terminal (`page.py`), plain lines elsewhere.

    round 2/10 step 10/40  eta 8:12  427 env-steps/s  100·J 58.41 ± 2.10  committed 58.90  live 61.32  ops: wait 510 ...

The page is drawn by a thread of its own, so rarely that drawing takes at most one percent of the time.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.style import Style

from esper.telemetry.figures import counts, duration, figure, with_spread
from esper.telemetry.page import HostsShown, Line, Shown, View, page

REFRESH = 2.0
"""Pages per second at most."""
COST = 0.01
"""Share of the time that drawing may take."""
FIRST_INTERVAL, PLAIN_INTERVAL = 1.0, 30.0
"""Seconds until an unfinished round prints a plain line: the first in a run, and each later one."""
_ALARMS = 3
"""Rounds whose alarms are kept."""


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


def line(shown: Shown, rounds: int, steps: int, eta: str, alarms: str = "") -> str:
    """A round, or a round in progress, as one line of text; `alarms` are those of the round."""
    speed = f"{shown.speed:.0f}" if shown.speed >= 10.0 else f"{shown.speed:.1f}"
    inside = f" step {shown.step}/{steps}" if shown.step is not None else ""
    return (
        f"round {shown.round}/{rounds}{inside}  eta {eta}  {speed} env-steps/s  "
        f"100·J {with_spread(shown.objective, shown.spread)}  committed {figure(shown.committed, '.2f')}  "
        f"live {figure(shown.live, '.2f')}  "
        f"ops: {counts(shown.ops)}  slots: {counts(shown.slots)}{f'  alarms: {alarms}' if alarms else ''}"
    )


class _Lines:
    """Lines for rich, without its measuring and wrapping: they fit already."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for i, (text, style) in enumerate(self._lines):
            if i:
                yield Segment.line()
            yield Segment(text, Style.parse(style) if style else None)


class _Alarms:
    """The alarms of the newest rounds in words; the thread that draws may ask while the run adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[int, dict[str, list[Mapping[str, Any]]]] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        """Take an event of kind "alarm" or "rollback"."""
        name = fields["name"] if fields["kind"] == "alarm" else "rollback"
        with self._lock:
            self._rounds.setdefault(fields["round"], {}).setdefault(name, []).append(fields)
            while len(self._rounds) > _ALARMS:
                del self._rounds[min(self._rounds)]

    def of(self, round: int) -> str:
        """Those of a round, e.g. "objective_falls -2.31 (threshold -2.00), rollback of 2 hosts"; "" if none."""
        with self._lock:
            return ", ".join(self._words(name, events) for name, events in self._rounds.get(round, {}).items())

    def sentences(self) -> list[str]:
        """Those of each round, the newest last."""
        return [f"round {number}: {self.of(number)}" for number in sorted(self._rounds.copy())]

    def _words(self, name: str, events: list[Mapping[str, Any]]) -> str:
        hosts = len({event["host"] for event in events})
        if events[0]["host"] >= 0:
            return f"{name} of {hosts} host{'s' * (hosts != 1)}"
        return f"{name} {events[-1]['value']:.3g} (threshold {events[-1]['threshold']:g})"


@final
class RunProgress:
    """Displays a run; a listener, and a context manager around the run.

    Args:
        console: output; the live page needs a terminal.
        rounds, steps: total rounds, and control steps per round.
        done: control steps completed before a resume.
        hosts: gives the hosts of the newest step, when a page is drawn.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: RunConsole,
        *,
        rounds: int,
        steps: int,
        done: int = 0,
        hosts: Callable[[], HostsShown | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._rounds, self._steps, self._clock = console, rounds, steps, clock
        self._hosts = hosts
        self._first = self._finished = done
        self._began = clock()
        self._next_line = self._began + FIRST_INTERVAL
        self._history: list[Shown] = []
        self._now: Mapping[str, object] | None = None  # newest record of kind "step", converted only when it is drawn
        self._learner: Mapping[str, float] = {}
        self._memory: int | None = None
        self._alarms = _Alarms()
        self._drawn, self._next_page = _Lines([]), 0.0
        live = Live(console=console, get_renderable=self._drawing, refresh_per_second=REFRESH)
        self._live = live if self.is_live else None

    @property
    def is_live(self) -> bool:
        """Whether there is a page, instead of lines."""
        return self._console.is_terminal and not self._console.quiet

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._next_page = 0.0  # the last page shows the end
        if self._live is not None:
            self._live.__exit__(*error)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a record; only kinds "step", "round", "alarm" and "rollback" are displayed."""
        if kind == "step":
            self._step(fields)
        elif kind == "round":
            self._round(fields)
        elif kind in ("alarm", "rollback"):
            self._alarms.add(fields)

    def _step(self, fields: Mapping[str, Any]) -> None:
        self._now = fields
        self._finished = (fields["round"] - 1) * self._steps + fields["t"]
        if self._live is None and self._clock() >= self._next_line and self._finished % self._steps:
            self._print(Shown.of(fields))

    def _round(self, fields: Mapping[str, Any]) -> None:
        shown = Shown.of(fields)
        self._finished = shown.round * self._steps
        if self._live is None:
            self._print(shown)
            return
        self._learner = {name: value for name, value in fields.items() if isinstance(value, float)}
        self._memory = fields.get("memory_bytes", {}).get("peak")
        self._history.append(shown)
        self._now = None

    def _print(self, shown: Shown) -> None:
        alarms = self._alarms.of(shown.round)
        self._console.say(line(shown, self._rounds, self._steps, self._eta(), alarms))
        self._next_line = self._clock() + PLAIN_INTERVAL

    def _eta(self) -> str:
        ran = self._finished - self._first
        if ran <= 0:
            return "..."
        return duration((self._clock() - self._began) / ran * (self._rounds * self._steps - self._finished))

    def _drawing(self) -> _Lines:
        """The page; the one before if drawing it now would cost too much."""
        began = time.perf_counter()
        if began >= self._next_page:
            self._drawn = _Lines(self.page())
            ended = time.perf_counter()
            self._next_page = ended + (ended - began) / COST
        return self._drawn

    def page(self) -> list[Line]:
        """The lines of the page as it is now."""
        width, height = self._console.size
        view = View(
            rounds=self._rounds,
            steps=self._steps,
            finished=self._finished,
            elapsed=self._clock() - self._began,
            eta=self._eta(),
            history=self._history[:],
            now=Shown.of(self._now) if self._now else None,
            hosts=self._hosts(),
            learner=self._learner,
            alarms=self._alarms.sentences(),
            memory=self._memory,
        )
        return page(view, width, height)


@final
class PassProgress:
    """Progress of a search or a comparison; a context manager around the work. A pass is an episode of all hosts.

    grid  pass 12/65 --------            0:00:14 eta 1:02

    Args:
        console: output; the bar needs a terminal.
        passes: total.
        clock: monotonic seconds.
    """

    def __init__(self, console: RunConsole, passes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._passes, self._clock = console, passes, clock
        self._done, self._skipped, self._stage, self._began = 0.0, 0, "", clock()
        self._next_line = self._began + FIRST_INTERVAL
        self._bar = Progress(
            TextColumn("{task.description}  pass"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=passes, eta="...")
        self._live = console.is_terminal and not console.quiet

    def __enter__(self) -> "PassProgress":
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        if self._live:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """The work has reached another stage."""
        self._stage = name
        self._bar.update(self._task, description=name)

    def begin(self, what: str) -> None:
        """A pass begins that has a line of its own."""
        self.stage(what)
        if not self._live:
            self._console.say(f"esper: {what} ({self._whole + 1} of {self._passes}, eta {self._eta()})")

    def skip(self) -> None:
        """A pass is not needed; it took no time."""
        self._done, self._skipped = self._done + 1.0, self._skipped + 1
        self._bar.update(self._task, completed=self._done)

    def advance(self, share: float = 1.0) -> None:
        """So much of a pass is done."""
        self._done += share
        self._bar.update(self._task, completed=self._done, eta=self._eta())
        if not self._live and self._clock() >= self._next_line:
            self._console.say(f"{self._stage}  pass {self._whole}/{self._passes}  eta {self._eta()}")
            self._next_line = self._clock() + PLAIN_INTERVAL

    @property
    def _whole(self) -> int:
        """Passes that are done, or skipped."""
        return int(self._done + 1e-6)  # shares do not add up exactly

    def _eta(self) -> str:
        ran = self._done - self._skipped
        if ran <= 0.0:
            return "..."
        return duration((self._clock() - self._began) / ran * (self._passes - self._done))
