"""Where the time of a control step on the `null` task goes: by phase and by operator, on one thread.

time        least over the repetitions, so that a busy machine disturbs it little
operators   calls that reach PyTorch's kernels in one step; a count, hence free of noise

python benchmarks/null_step_profile.py
python benchmarks/null_step_profile.py --hosts 1024 --functions 25
"""

import cProfile
import pstats
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from null_control_step import Options as Shape
from null_control_step import Subject, environment


@dataclass(frozen=True, kw_only=True)
class Options:
    """Profile the control step of the null task."""

    hosts: tuple[int, ...] = (16, 1024)
    """Numbers of hosts."""
    repetitions: int = 5
    """Episodes that are timed."""
    operators: int = 12
    """Lines of the table of operators."""
    functions: int = 0
    """Lines of the table of Python functions by their own time; the profiler adds to the time of each call."""


class OperatorCounter(TorchDispatchMode):
    """Counts operators by the phase in which they are called; stands in for the engine's timer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._phase = "between"

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
            self._phase = "between"


def time_by_phase(subject: Subject, repetitions: int) -> dict[str, float]:
    """Microseconds of each phase per step."""
    engine = subject.engine
    engine.timer.enabled = True
    subject.seconds_per_step(0)
    engine.timer.read()
    least: dict[str, float] = {}
    for repetition in range(1, repetitions + 1):
        whole = 1e6 * subject.seconds_per_step(repetition)
        spans = {phase: 1e3 * ms / engine.spec.episode_length for phase, ms in engine.timer.read().items()}
        spans["between"] = whole - sum(spans.values())
        least = {phase: min(us, least.get(phase, us)) for phase, us in spans.items()}
    engine.timer.enabled = False
    return least


def operators_by_phase(subject: Subject) -> dict[str, float]:
    """Operators of each phase per step."""
    engine, counter = subject.engine, OperatorCounter()
    engine.reset(subject.client, 0)
    timer, engine.timer = engine.timer, counter  # type: ignore[assignment]
    with counter:
        engine.rollout(subject.client)
    engine.timer = timer
    return {phase: calls / engine.spec.episode_length for phase, calls in counter.calls.items()}


def phases(subjects: Sequence[Subject], repetitions: int, caption: str) -> Table:
    """Time and operators of each phase at each number of hosts."""
    page = Table(title="phases of a control step", caption=caption)
    page.add_column("phase")
    times = []
    for subject in subjects:
        page.add_column(f"N={subject.engine.spec.num_envs} µs", justify="right")
        times.append(time_by_phase(subject, repetitions))
    page.add_column("operators", justify="right")
    counts = operators_by_phase(subjects[0])
    for phase in times[0]:
        cells = (f"{by_phase[phase]:.0f}" for by_phase in times)
        page.add_row(phase, *cells, f"{counts.get(phase, 0.0):.0f}")
    sums = (f"{sum(by_phase.values()):.0f}" for by_phase in times)
    page.add_section()
    page.add_row("whole step", *sums, f"{sum(counts.values()):.0f}")
    return page


def operators(subject: Subject, lines: int) -> Table:
    """The operators that cost most by their own time."""
    engine = subject.engine
    engine.reset(subject.client, 0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        engine.rollout(subject.client)
    steps = engine.spec.episode_length
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    page = Table(title=f"operators, N={engine.spec.num_envs} (own time, with the profiler's overhead)")
    for column in ("operator", "calls per step", "share %", "µs per call"):
        page.add_column(column, justify="left" if column == "operator" else "right")
    for event in events[:lines]:
        share, per_call = 100.0 * event.self_cpu_time_total / whole, event.self_cpu_time_total / event.count
        page.add_row(event.key, f"{event.count / steps:.1f}", f"{share:.1f}", f"{per_call:.1f}")
    return page


def print_functions(subject: Subject, lines: int) -> None:
    """The Python functions that cost most by their own time."""
    subject.engine.reset(subject.client, 0)
    seen = cProfile.Profile()
    seen.runcall(subject.engine.rollout, subject.client)
    pstats.Stats(seen, stream=sys.stdout).sort_stats("tottime").print_stats(lines)


def main(options: Options) -> int:
    """Print the tables."""
    torch.set_num_threads(1)
    shape = Shape(hosts=options.hosts, repetitions=options.repetitions)
    subjects = [Subject.build(num_envs, shape) for num_envs in options.hosts]
    console = Console(width=120)
    console.print(phases(subjects, options.repetitions, ", ".join(environment(shape).values())))
    for subject in subjects:
        console.print(operators(subject, options.operators))
        if options.functions:
            print_functions(subject, options.functions)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
