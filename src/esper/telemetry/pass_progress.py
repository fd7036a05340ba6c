"""Progress of a search or a comparison: a bar on a terminal, plain lines elsewhere. A pass is an episode of all hosts.

grid  pass 12/65 --------            0:00:14 eta 1:02
esper: heuristic, 16 hosts of digits of seed 1000000 (7 of 18, eta 1:05)
"""

import time
from collections.abc import Callable
from typing import Any, final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from esper.telemetry.figures import duration
from esper.telemetry.progress import FIRST_INTERVAL, PLAIN_INTERVAL, RunConsole


@final
class PassProgress:
    """Counts passes; a context manager around the work.

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
