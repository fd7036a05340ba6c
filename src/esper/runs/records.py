"""Writes step reports to events.jsonl and passes them to listeners, several steps at a time.

engine --step report--> Records --32 steps, or those of a quarter second--> files, listeners
                            `----at once----> writer of the run record, which has a thread of its own

Converting many steps takes numpy about as long as one. The clock decides how many are written at once, but not what is
written or in which order. With a listener of the user's, every step is written at once.
"""

import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import final

from esper.leyline.protocols import EngineSpec
from esper.runs import events
from esper.runs.report import RoundSoFar
from esper.simic.rewards.config import RewardConfig
from esper.telemetry.record.writer import RecordWriter
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub
from esper.tolaria.state import StepReport

MOST_STEPS = 32
LONGEST = 0.25
"""Seconds after which the arrival of a step writes those that wait."""


@final
class Records:
    """Records the steps and the other events of a run, in order.

    Args:
        directory: receives the lines. listeners: receive each step and each event.
        spec: of the engine. weights: those of J.
        clock: monotonic seconds. record: receives each step, if given.
    """

    def __init__(
        self,
        directory: RunDirectory,
        listeners: Hub,
        spec: EngineSpec,
        weights: RewardConfig,
        clock: Callable[[], float] = time.monotonic,
        record: RecordWriter[StepReport] | None = None,
    ) -> None:
        self._record = record
        self._directory, self._listeners, self._spec = directory, listeners, spec
        self._clock = clock
        self._began = clock()
        self._held: list[StepReport] = []
        self._times: list[float] = []
        self._so_far = RoundSoFar(weights)

    def begin(self) -> None:
        """Start the clock of a round, or of the rest of one."""
        self._began = self._clock()

    def step(self, report: StepReport) -> None:
        """Record a step, at the latest with the next `flush`."""
        if self._held and self._held[0].episode != report.episode:
            self.flush()
        if self._record is not None:
            self._record.add(report)
        now = self._clock()
        self._held.append(report)
        self._times.append(now - self._began)
        waited = self._times[-1] - self._times[0]
        if len(self._held) == MOST_STEPS or waited >= LONGEST or self._listeners.is_prompt:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait."""
        if not self._held:
            return
        held, self._held = self._held, []
        times, self._times = self._times, []
        found = list(events.step_events(held, self._spec))
        self._directory.write_events(found)
        events_of = {t: list(group) for t, group in groupby(found, key=itemgetter("t"))}
        for report, shown in zip(held, self._so_far.add(held, times), strict=True):
            for event in events_of.get(report.t, ()):
                self._listeners.write(str(event["kind"]), event)
            self._listeners.write("step", shown)

    def write_events(self, lines: Iterable[events.Event]) -> None:
        """Record other events, after the steps so far."""
        self.flush()
        found = list(lines)
        self._directory.write_events(found)
        for event in found:
            self._listeners.write(str(event["kind"]), event)
