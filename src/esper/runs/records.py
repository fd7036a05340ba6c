"""What the steps of a run leave behind: events.jsonl, steps.jsonl, and what listeners are told.

engine --step report--> Records --32 steps, or those of a quarter second--> files, listeners

Steps are recorded several at a time, because asking numpy what happened takes as long for many steps as for one. When
that is depends on the clock; what is recorded, and in which order, does not. A listener of the user's may act upon what
it hears, so where there is one nothing is held back.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import final

from esper.leyline.protocols import EngineSpec
from esper.runs import events
from esper.runs.report import RoundSoFar
from esper.runs.step_lines import step_lines
from esper.simic.rewards.config import RewardConfig
from esper.telemetry.hub import Hub
from esper.telemetry.run_directory import RunDirectory
from esper.tolaria.state import StepReport

MOST_STEPS = 32
LONGEST = 0.25
"""Seconds that a step waits for others, if one comes after it."""


@final
class Records:
    """Records the steps of a run, and its other events in the order in which they are told.

    Args:
        directory: where lines are written. listeners: who is told, of each step and each event.
        spec: of the engine. weights: those of J.
        terms: the names of the reward's columns, where every step of every host is recorded; else None.
        clock: seconds from any moment on.
    """

    def __init__(
        self,
        directory: RunDirectory,
        listeners: Hub,
        spec: EngineSpec,
        weights: RewardConfig,
        terms: Sequence[str] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._listeners, self._spec, self._terms = directory, listeners, spec, terms
        self._clock = clock
        self._began = clock()
        self._held: list[StepReport] = []
        self._times: list[float] = []
        self._so_far = RoundSoFar(weights)

    def begin(self) -> None:
        """A round, or what is left of one, begins now: the seconds of its steps count from here."""
        self._began = self._clock()

    def step(self, report: StepReport) -> None:
        """Take a step; it is recorded by the time of the next `flush` at the latest."""
        if self._held and self._held[0].episode != report.episode:
            self.flush()
        now = self._clock()
        self._held.append(report)
        self._times.append(now - self._began)
        waited = self._times[-1] - self._times[0]
        if len(self._held) == MOST_STEPS or waited >= LONGEST or self._listeners.is_prompt:
            self.flush()

    def flush(self) -> None:
        """Record the steps that were held back."""
        if not self._held:
            return
        held, self._held = self._held, []
        times, self._times = self._times, []
        found = list(events.step_events(held, self._spec))
        self._directory.write_events(found)
        if self._terms is not None:
            for report in held:
                self._directory.write_steps(step_lines(report, self._spec, self._terms))
        rest = iter(found)
        event = next(rest, None)
        for report, shown in zip(held, self._so_far.add(held, times), strict=True):
            while event is not None and event["t"] == report.t:
                self._listeners.write(str(event["kind"]), event)
                event = next(rest, None)
            self._listeners.write("step", shown)

    def write_events(self, lines: Iterable[events.Event]) -> None:
        """Record other events, after the steps that were told before."""
        self.flush()
        found = list(lines)
        self._directory.write_events(found)
        for event in found:
            self._listeners.write(str(event["kind"]), event)
