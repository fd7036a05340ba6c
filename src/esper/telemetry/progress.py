"""What a run shows while it runs: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_REFRESH = 4.0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown of a round, or of the steps of it that are done.

    Accuracies in percentage points; `ops` counts effective operations and `seeds` slots by stage, by name.
    """

    round: int
    step: int
    val_acc: float
    committed_acc: float
    mean_return: float
    env_steps_per_second: float
    ops: Mapping[str, int]
    seeds: Mapping[str, int]


def _counts(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name.lower()} {count}" for name, count in counts.items() if count) or "none"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def line(shown: Shown, rounds: int, eta: float) -> str:
    """One round as one line of text."""
    return (
        f"round {shown.round}/{rounds}  eta {_duration(eta)}  {shown.env_steps_per_second:.0f} env-steps/s  "
        f"accuracy {shown.val_acc:.2f}  committed {shown.committed_acc:.2f}  return {shown.mean_return:+.3f}  "
        f"ops: {_counts(shown.ops)}  slots: {_counts(shown.seeds)}"
    )


@final
class RunProgress:
    """Shows a run of `rounds` rounds of `steps` steps; a context manager."""

    def __init__(self, console: Console, *, rounds: int, steps: int, done: int = 0) -> None:
        self._console, self._rounds, self._steps, self._done = console, rounds, steps, done
        self._first, self._began = done, time.monotonic()
        self._history: list[Shown] = []
        self._now: Shown | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=rounds * steps, completed=done * steps, eta="...")
        self._live = (
            Live(console=console, refresh_per_second=_REFRESH, transient=False) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def step(self, shown: Shown) -> None:
        """Some steps of a round are done."""
        if self._live is None:
            return
        self._now = shown
        finished = self._done * self._steps + shown.step
        self._bar.update(self._task, completed=finished, eta=_duration(self._eta(finished)))
        self._live.update(self._page())

    def round(self, shown: Shown) -> None:
        """A round is done."""
        self._done += 1
        eta = self._eta(self._done * self._steps)
        if self._live is None:
            self._console.print(line(shown, self._rounds, eta), soft_wrap=True, highlight=False)
            return
        self._history.append(shown)
        self._now = None
        self._bar.update(self._task, completed=self._done * self._steps, eta=_duration(eta))
        self._live.update(self._page())

    def _eta(self, finished: int) -> float:
        ran = finished - self._first * self._steps
        return (time.monotonic() - self._began) / max(ran, 1) * (self._rounds * self._steps - finished)

    def _page(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for column in ("round", "env-steps/s", "accuracy", "committed", "return"):
            table.add_column(column, justify="right")
        table.add_column("operations")
        table.add_column("slots by stage")
        for shown in (*self._history[-12:], *([self._now] if self._now else [])):
            table.add_row(
                f"{shown.round}/{self._rounds}",
                f"{shown.env_steps_per_second:.0f}",
                f"{shown.val_acc:.2f}",
                f"{shown.committed_acc:.2f}",
                f"{shown.mean_return:+.3f}",
                _counts(shown.ops),
                _counts(shown.seeds),
            )
        return Group(table, self._bar)
