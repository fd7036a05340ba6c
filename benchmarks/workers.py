"""Hosts shared by several processes against the same hosts in one: wall time of a step (train and measure).

All run alternately in one process, with three mixed live seeds in every host; a ratio is the median over repetitions of
the ratio within each. Wall time, because that is what workers are for: other work on the machine shows in it.

    python benchmarks/workers.py
    python benchmarks/workers.py --min-speedup 1.3          # exit code 1 if two processes are not that much faster
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.telemetry.machine import environment
from esper.tolaria.memory import keep_freed_memory
from grown_hosts import BLOCKS, CPU, DIGITS_SHAPE, IMAGES, Shape, SharedHosts


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare one process with several."""

    hosts: tuple[int, ...] = (16, 32)
    """Hosts on 8x8 images."""
    image_hosts: int = 8
    """Hosts on 32x32 images."""
    workers: int = 2
    """Processes that share the hosts."""
    examples: int = 512
    """Train examples of each task; half as many on 32x32 images."""
    val_examples: int = 360
    """Validation examples of each task; 128 at most on 32x32 images."""
    repetitions: int = 5
    """Measurements of each; one more is taken before and not counted."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_speedup: float = 0.0
    """How many times faster the slowest of the rows must become."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One executor in one process and in several: medians of milliseconds, and how many times faster several are."""

    shape: str
    hosts: int
    executor: str
    one_ms: float
    shared_ms: float
    speedup: float
    lowest: float
    highest: float


def rows_of(shape: Shape, num_hosts: int, options: Options) -> list[Row]:
    """Both executors on these hosts, alternating with themselves in several processes."""
    train, val = options.examples, options.val_examples
    if shape == IMAGES:
        train, val = train // 2, min(val, 128)
    kinds = ("streamed", "fused")
    hosts = {
        (kind, workers): SharedHosts.build(shape, num_hosts, train, val, executor=kind, workers=workers)
        for kind in kinds
        for workers in (1, options.workers)
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in hosts}
    for repetition in range(options.repetitions + 1):
        for key, those in hosts.items():
            began = time.perf_counter()
            those.step()
            if repetition:
                times[key].append(1e3 * (time.perf_counter() - began))
    for those in hosts.values():
        those.close()
    return [_row(shape, num_hosts, kind, times[kind, 1], times[kind, options.workers]) for kind in kinds]


def _row(shape: Shape, num_hosts: int, kind: str, one: list[float], shared: list[float]) -> Row:
    ratios = [a / b for a, b in zip(one, shared, strict=True)]
    return Row(
        shape=shape.name,
        hosts=num_hosts,
        executor=kind,
        one_ms=statistics.median(one),
        shared_ms=statistics.median(shared),
        speedup=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def table(rows: list[Row], workers: int) -> Table:
    """The comparison, for people."""
    shown = Table("hosts", "executor", "1 process", f"{workers} processes", "speed-up", "lowest to highest")
    for row in rows:
        times = (f"{row.one_ms:.0f} ms", f"{row.shared_ms:.0f} ms", f"{row.speedup:.2f}")
        shown.add_row(f"{row.hosts} x {row.shape}", row.executor, *times, f"{row.lowest:.2f} to {row.highest:.2f}")
    return shown


def main(options: Options) -> int:
    """Measure, print, and return 1 where a bound is missed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = [(shape, n) for shape in (DIGITS_SHAPE, BLOCKS) for n in options.hosts] + [(IMAGES, options.image_hosts)]
    rows = [row for shape, n in sizes for row in rows_of(shape, n, options)]
    machine: Mapping[str, object] = environment(CPU)
    Console(width=120).print(table(rows, options.workers), machine)
    if options.json is not None:
        found = {"environment": machine, "workers": options.workers, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2))
    slowest = min(row.speedup for row in rows)
    if slowest < options.min_speedup:
        print(f"the smallest speed-up is {slowest:.2f}; at least {options.min_speedup} was asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
