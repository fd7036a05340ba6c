"""Counts of the PyTorch operators that a call dispatches; a count has no noise."""

import cProfile
import pstats
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from measured_rounds import OUTSIDE, Subject


class OperatorCounter(TorchDispatchMode):
    """Counts operators by the phase in which they are called; can stand in for the engine's timer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._phase = OUTSIDE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[self._phase] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Operators inside belong to `phase`."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = OUTSIDE


def operators_of(call: Callable[[], object]) -> int:
    """Operators of one call."""
    with OperatorCounter() as counter:
        call()
    return counter.calls.total()


def operators_by_phase(subject: Subject) -> dict[str, float]:
    """Operators of each phase per control step."""
    engine, counter = subject.engine, OperatorCounter()
    engine.reset(subject.client, 0)
    timer, engine.timer = engine.timer, counter  # type: ignore[assignment]
    with counter:
        engine.rollout(subject.client)
    engine.timer = timer
    return {phase: calls / engine.spec.episode_length for phase, calls in counter.calls.items()}


def most_expensive_operators(subject: Subject, lines: int) -> Table:
    """The operators with the most own time, including the profiler's overhead."""
    engine = subject.engine
    engine.reset(subject.client, 0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        engine.rollout(subject.client)
    steps = engine.spec.episode_length
    found = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in found)
    page = Table(title=f"operators of a control step, N={engine.spec.num_envs} (own time)")
    for column in ("operator", "calls per step", "share %", "µs per call"):
        page.add_column(column, justify="left" if column == "operator" else "right")
    for event in found[:lines]:
        share, per_call = 100.0 * event.self_cpu_time_total / whole, event.self_cpu_time_total / event.count
        page.add_row(event.key, f"{event.count / steps:.1f}", f"{share:.1f}", f"{per_call:.1f}")
    return page


def print_functions(subject: Subject, lines: int) -> None:
    """The Python functions with the most own time; the profiler adds to the time of each call."""
    subject.engine.reset(subject.client, 0)
    seen = cProfile.Profile()
    seen.runcall(subject.engine.rollout, subject.client)
    pstats.Stats(seen, stream=sys.stdout).sort_stats("tottime").print_stats(lines)
