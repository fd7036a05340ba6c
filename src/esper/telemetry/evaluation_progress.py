"""Progress of a comparison: a bar with the time left on a terminal, a line per episode elsewhere.

heuristic, 16 hosts of digits  ━━━━━━━━━╸          7/18 episodes  0:00:41 eta 1:05
esper: heuristic, 16 hosts of digits of seed 1000000 (7 of 18, eta 1:05)
"""

import time
from collections.abc import Callable
from typing import Any, final

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from esper.telemetry.figures import duration
from esper.telemetry.progress import FIRST_INTERVAL, PLAIN_INTERVAL, RunConsole


@final
class EvaluationProgress:
    """Shows how far a comparison is; a context manager around it.

    Args:
        console: where it is shown; nothing is if it is quiet.
        clock: monotonic seconds.
    """

    def __init__(self, console: RunConsole, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.fields[episodes]} episodes"),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
            transient=True,
        )
        self._is_live = console.is_terminal and not console.quiet
        self._task: TaskID | None = None
        self._began = clock()
        self._next_line = self._began + FIRST_INTERVAL
        self._episodes = self._done = self._reused = self._steps = self._step = 0

    def __enter__(self) -> "EvaluationProgress":
        if self._is_live:
            self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        if self._is_live:
            self._bar.__exit__(*error)

    def plan(self, episodes: int, steps: int) -> None:
        """There will be so many episodes of so many control steps."""
        self._episodes, self._steps = episodes, steps
        self._task = self._bar.add_task("", total=episodes * steps, done=0, episodes=episodes, eta="...")

    def begin(self, what: str) -> None:
        """An episode begins."""
        self._done += 1
        self._step = 0
        if self._is_live:
            self._draw(what)
        else:
            self._console.say(f"esper: {what} ({self._done} of {self._episodes}, eta {self._eta()})")

    def reuse(self) -> None:
        """An episode is not needed, because its outcome is stored."""
        self._done += 1
        self._reused += 1
        self._step = self._steps
        if self._is_live:
            self._draw(None)

    def step(self) -> None:
        """A control step is done."""
        self._step += 1
        if self._is_live:
            self._draw(None)
        elif self._clock() >= self._next_line and self._step < self._steps:
            place = f"episode {self._done} of {self._episodes}, step {self._step}/{self._steps}"
            self._console.say(f"esper: {place}, eta {self._eta()}")
            self._next_line = self._clock() + PLAIN_INTERVAL

    def _draw(self, what: str | None) -> None:
        assert self._task is not None, "plan() comes first"
        changes: dict[str, Any] = {} if what is None else {"description": what}
        completed = max(self._done - 1, 0) * self._steps + self._step
        self._bar.update(self._task, completed=completed, done=self._done, eta=self._eta(), **changes)

    def _eta(self) -> str:
        """Time left: all episodes take as long as the mean of those that ran."""
        ran = (self._done - 1 - self._reused) * self._steps + self._step
        if ran <= 0:
            return "..."
        left = (self._episodes - self._done + 1) * self._steps - self._step
        return duration((self._clock() - self._began) / ran * left)
