"""What is printed while work goes on: a table that is drawn again on a terminal, plain lines elsewhere.

    round 12/100 step 23/40 ━━━━━╸━━━━━━━━━━━━━━━━━━━ 12:41 eta 1:38:12  peak 1.20 GB
    round   100·J ± hosts  committed   live      growth  env-steps/s
       11   58.41 ± 2.10       58.90  61.32       1.20x          427
       12   51.02 ± 3.33       51.30  55.87  unfinished          431
    alarms      round 11: entropy_op 0.0120 (threshold 0.0500)
    seeds       training 9 blending 4
    operations  wait 510 germinate 61
    learner     KL 0.0118  clipped 0.115  explained variance 0.02
    entropy     slot 0.74  blueprint 1.00  style 0.99

    round 2/10 step 10/40  eta 8:12  427 env-steps/s  100·J 58.41 ± 2.10  committed 58.90  live 61.32  ops: wait 510 ...

The table is drawn by a thread of rich, which cuts what the terminal has no room for.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from esper.leyline.ranks import Group as Ranked

REFRESH = 1.0
"""Tables per second; one takes several milliseconds, in the process of the run."""
FIRST_INTERVAL, PLAIN_INTERVAL = 1.0, 30.0
"""Seconds until unfinished work prints a plain line: the first, and each later one."""
_ALARMS = 3
"""Rounds whose alarms are kept."""
_BELOW = 15
"""Lines that the terminal keeps for what is not a round."""
_LEARNER = {
    "approx_kl": ("KL", ".4f"),
    "clip_fraction": ("clipped", ".3f"),
    "explained_variance": ("explained variance", ".2f"),
    "grad_norm": ("gradient norm", ".2f"),
    "return_mean": ("return", ".3f"),
}


class RunConsole(Console):
    """A console that goes silent when its pipe is closed (`esper ... | head`), instead of ending the process.

    Of several ranks the first one prints: on the others `silent` is true.
    """

    silent = False

    def __init__(self, *, quiet: bool = False, **options: Any) -> None:  # noqa: ANN401 -- as in rich
        super().__init__(quiet=quiet or RunConsole.silent, **options)

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 -- as in rich
        """Print, on the first rank."""
        if not RunConsole.silent:
            super().print(*objects, **options)

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


@contextmanager
def ranks_of_job(timeout: float = 600.0) -> Iterator["Ranked"]:
    """Join the other ranks, if torchrun started several; the first one prints. May raise RankError."""
    from esper.leyline.ranks import joined  # imports torch, which --help does not need

    with joined(timeout) as group:
        RunConsole.silent = not group.is_first
        yield group


def warn(lines: Iterable[str]) -> None:
    """Print sentences to stderr."""
    for line in lines:
        RunConsole(stderr=True).say(f"esper: {line}")


def figure(value: float, form: str) -> str:
    """A formatted number, or "-" for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def with_spread(value: float, spread: float) -> str:
    """A mean and the standard deviation over hosts, e.g. "58.41 ± 2.10"; only the mean if there is a single host."""
    return figure(value, ".2f") + ("" if math.isnan(spread) else f" ± {spread:.2f}")


def counts(numbers: Mapping[str, int]) -> str:
    """The nonzero counts, e.g. "wait 510 germinate 61"."""
    return " ".join(f"{name.lower()} {number}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(num_bytes: int) -> str:
    """Memory, e.g. "12 kB", "330 MB" or "1.25 GB"."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def line(fields: Mapping[str, Any], rounds: int, steps: int, eta: str, alarms: str = "") -> str:
    """A record of kind "round", or "step" of a round in progress, as one line; `alarms` are those of the round."""
    inside = f" step {fields['t']}/{steps}" if "t" in fields else ""
    return (
        f"round {fields['round']}/{rounds}{inside}  eta {eta}  {_speed(fields)} env-steps/s  "
        f"100·J {with_spread(fields['objective_mean'], fields['objective_std'])}  "
        f"committed {figure(fields['committed_accuracy_mean'], '.2f')}  "
        f"live {figure(fields['live_accuracy_mean'], '.2f')}  "
        f"ops: {counts(fields['ops'])}  slots: {counts(fields['slots'])}{f'  alarms: {alarms}' if alarms else ''}"
    )


def _speed(fields: Mapping[str, Any]) -> str:
    speed = fields["env_steps"] / max(fields["seconds"], 1e-9)
    return f"{speed:.0f}" if speed >= 10.0 else f"{speed:.1f}"


class _Display:
    """Shows work of `total` units, of which `done` need no time; a context manager around the work.

    Args:
        console: output; the table needs a terminal.
        clock: monotonic seconds.
    """

    def __init__(self, console: RunConsole, total: int, done: int, clock: Callable[[], float]) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._done, self._free = float(done), float(done)
        self._began = self._since = clock()
        self._next_line = self._began + FIRST_INTERVAL
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[times]}", markup=False),
        )
        self._bar = Progress(*columns, console=console, auto_refresh=False, expand=True)
        self._task = self._bar.add_task("", total=total, times="")
        self.is_live = console.is_terminal and not console.quiet
        """Whether there is a table, instead of lines."""
        self._live = Live(console=console, get_renderable=self._drawing, refresh_per_second=REFRESH)

    def __enter__(self) -> "Any":  # noqa: ANN401
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self._live.stop()

    def _eta(self) -> str:
        ran = self._done - self._free
        if ran <= 0.0:
            return "..."
        return duration((self._clock() - self._since) / ran * (self._total - self._done))

    def _say_when_due(self, text: Callable[[], str]) -> None:
        if not self.is_live and self._clock() >= self._next_line:
            self._say(text())

    def _say(self, text: str) -> None:
        self._console.say(text)
        self._next_line = self._clock() + PLAIN_INTERVAL

    def _drawing(self) -> RenderableType:
        """The bar, and what comes below it."""
        text, more = self._about()
        times = f"{duration(self._clock() - self._began)} eta {self._eta()}{more}"
        self._bar.update(self._task, completed=self._done, description=text, times=times)
        return Group(self._bar, *self._below())

    def _about(self) -> tuple[str, str]:
        """What stands before the bar, and after the time that is left."""
        raise NotImplementedError

    def _below(self) -> Iterable[RenderableType]:
        return ()


@final
class RunProgress(_Display):
    """Displays a run; a listener, and a context manager around the run.

    Args:
        console, clock: as for any display.
        rounds, steps: total rounds, and control steps per round.
        done: control steps completed before a resume.
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
        self._rounds, self._steps = rounds, steps
        self._history: deque[Mapping[str, Any]] = deque(maxlen=50)
        self._now: Mapping[str, Any] | None = None  # newest record of kind "step"
        self._events: dict[int, dict[str, tuple[set[int], Mapping[str, Any]]]] = {}
        self._alarms: dict[int, str] = {}  # replaced as a whole: the thread that draws may be reading
        super().__init__(console, rounds * steps, done, clock)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a record; only kinds "step", "round", "alarm" and "rollback" are displayed."""
        if kind == "step":
            self._now = fields
            self._done = (fields["round"] - 1) * self._steps + fields["t"]
            if fields["t"] < self._steps:
                self._say_when_due(lambda: self._line(fields))
        elif kind == "round":
            self._done = fields["round"] * self._steps
            self._history.append(fields)
            self._now = None
            if not self.is_live:
                self._say(self._line(fields))
        elif kind in ("alarm", "rollback"):
            self._alarm(fields)

    def _line(self, fields: Mapping[str, Any]) -> str:
        return line(fields, self._rounds, self._steps, self._eta(), self._alarms.get(fields["round"], ""))

    def _alarm(self, fields: Mapping[str, Any]) -> None:
        """Put the alarms of a round in words, e.g. "objective_falls -2.31 (threshold -2), rollback of 2 hosts"."""
        number, name = fields["round"], fields["name"] if fields["kind"] == "alarm" else "rollback"
        hosts, _ = self._events.setdefault(number, {}).get(name, (set(), fields))
        self._events[number][name] = (hosts | {fields["host"]}, fields)
        self._events = {kept: self._events[kept] for kept in sorted(self._events)[-_ALARMS:]}
        self._alarms = {kept: ", ".join(_words(*item) for item in of.items()) for kept, of in self._events.items()}

    def _about(self) -> tuple[str, str]:
        now, last = self._now, self._history[-1] if self._history else {}
        peak = last.get("memory_bytes", {}).get("peak")
        memory = f"  peak {size(peak)}" if peak else ""
        if now is None and last.get("round") == self._rounds:
            return f"{self._rounds} round{'s' * (self._rounds != 1)} done", memory
        rounds, steps = divmod(int(self._done), self._steps)
        if now is not None:  # a round is unfinished until its policy update, after the last step
            rounds, steps = now["round"] - 1, now["t"]
        return f"round {rounds + 1}/{self._rounds} step {steps}/{self._steps}", memory

    def _below(self) -> Iterator[RenderableType]:
        now, history = self._now, list(self._history)
        shown = [*history, *([now] if now else [])]
        if shown:
            yield self._round_table(shown[-max(self._console.height - _BELOW, 1) :])
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="ellipsis")
        for number, text in sorted(self._alarms.items(), reverse=True):
            grid.add_row("alarms", Text(f"round {number}: {text}"), style="bold red")
        for label, text in self._rows(shown[-1] if shown else {}, history[-1] if history else {}):
            grid.add_row(label, text)
        yield grid

    def _round_table(self, shown: list[Mapping[str, Any]]) -> Table:
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        for heading in ("round", "100·J ± hosts", "committed", "live", "growth", "env-steps/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        for fields in shown:
            unfinished = "t" in fields
            table.add_row(
                str(fields["round"]),
                with_spread(fields["objective_mean"], fields["objective_std"]),
                figure(fields["committed_accuracy_mean"], ".2f"),
                figure(fields["live_accuracy_mean"], ".2f"),
                "unfinished" if unfinished else f"{fields.get('growth_ratio_mean', math.nan):.2f}x",
                _speed(fields),
                style="yellow" if unfinished else None,
            )
        return table

    def _rows(self, newest: Mapping[str, Any], update: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The newest step or round, then the newest update of the learner."""
        if newest:
            yield "seeds", counts(newest["slots"])
            yield "operations", counts(newest["ops"])
        known = {name: value for name, value in _LEARNER.items() if name in update}
        if learner := [f"{word} {figure(update[name], form)}" for name, (word, form) in known.items()]:
            yield "learner", "  ".join(learner)
        heads = [name for name in update if name.startswith("entropy_") and name != "entropy_loss"]
        if heads:
            yield (
                "entropy",
                "  ".join(f"{name.removeprefix('entropy_')} {figure(update[name], '.2f')}" for name in heads),
            )


def _words(name: str, found: tuple[set[int], Mapping[str, Any]]) -> str:
    hosts, event = found
    if event["host"] >= 0:
        return f"{name} of {len(hosts)} host{'s' * (len(hosts) != 1)}"
    return f"{name} {event['value']:.3g} (threshold {event['threshold']:g})"


@final
class PassProgress(_Display):
    """Progress of a search, a comparison or a growth; a context manager around the work.

    A pass is an episode of all hosts, or a hundredth of a growth (`percent`).

    grid  pass 12/65 ━━━━━━━━━━━━╸━━━━━━━━━━━━ 0:14 eta 1:02
    """

    def __init__(
        self,
        console: RunConsole,
        passes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        percent: bool = False,
    ) -> None:
        self._stage, self._has_begun, self._percent = "", False, percent
        super().__init__(console, passes, 0, clock)

    def stage(self, name: str) -> None:
        """The work has reached another stage."""
        self._stage = name

    def begin(self, what: str) -> None:
        """A pass begins that has a line of its own."""
        self._stage = what
        if not self.is_live:
            self._console.say(f"esper: {what} ({self._whole + 1} of {self._total}, eta {self._eta()})")

    def more(self, passes: int) -> None:
        """So many passes are needed besides those that were known."""
        self._total += passes
        self._bar.update(self._task, total=self._total)

    def skip(self, passes: float = 1.0) -> None:
        """So many passes are not needed; they took no time."""
        self._done, self._free = self._done + passes, self._free + passes

    def advance(self, share: float = 1.0) -> None:
        """So much of a pass is done.

        A first step is not counted in the time that is left: compiling and building come before it.
        """
        if not self._has_begun and share < 1.0:
            self._since, self._free = self._clock(), self._free + share
        self._has_begun = True
        self._done += share
        self._say_when_due(lambda: f"{self._about()[0]}  eta {self._eta()}")

    @property
    def left(self) -> int:
        """Passes that are known and not done."""
        return self._total - self._whole

    @property
    def _whole(self) -> int:
        """Passes that are done, or skipped."""
        return int(self._done + 1e-6)  # shares do not add up exactly

    def _about(self) -> tuple[str, str]:
        done = f"{self._whole} %" if self._percent else f"pass {self._whole}/{self._total}"
        return f"{self._stage}  {done}", ""
