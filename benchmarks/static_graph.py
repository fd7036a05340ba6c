"""What a static graph costs: everything that could grow, under masks, against what does grow, fused by groups.

    train     one epoch                      measure   all 8 coalitions (dynamic: as `auto` does, host by host on a CPU)
    settle    the end of a step in which nothing happens
    step      train, measure and settle

Both run alternately in one process on one thread, on the same hosts with a heard seed in each of three slots, and with
none; a time is CPU time (on a GPU the time until it has finished), a ratio the median over repetitions of the ratio
within each.

    python benchmarks/static_graph.py --hosts 16
    python benchmarks/static_graph.py --device cuda --hosts 16 128
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.telemetry.machine import environment
from esper.tolaria.executors.protocol import Changes
from esper.tolaria.executors.static import StaticExecutor
from esper.tolaria.memory import keep_freed_memory
from esper.tolaria.runtime import choose_device
from grown_hosts import DIGITS_SHAPE, GrownHosts

Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare a static with a dynamic graph."""

    hosts: tuple[int, ...] = (16,)
    """Numbers of hosts."""
    examples: int = 512
    """Train examples."""
    val_examples: int = 360
    """Validation examples."""
    repetitions: int = 5
    """Measurements of each; one more is taken before and not counted."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of milliseconds, and how many times longer the static graph takes."""

    hosts: int
    seeds: int
    work: str
    grouped_ms: float
    static_ms: float
    ratio: float
    lowest: float
    highest: float


def nothing_happened(hosts: GrownHosts) -> Changes:
    """The end of a step without events, on the device of the hosts."""
    never = torch.zeros_like(hosts.slots.has_gate)
    nobody = never.any(dim=1)
    return Changes(t=1, germinated=never, released=never, panicked=nobody, snapshot=nobody, keep=never)


def works(hosts: GrownHosts) -> dict[str, tuple[Work, Work]]:
    """What is timed by name: grouped and static."""
    static, none = StaticExecutor(hosts.streamed.data), nothing_happened(hosts)
    grouped = hosts.fused
    grouped.measures_together = hosts.slots.stage.device.type != "cpu"
    pairs = {
        "train": (lambda: hosts.train(grouped), lambda: hosts.train(static)),
        "measure": (lambda: hosts.measure(grouped), lambda: hosts.measure(static)),
        "settle": (lambda: grouped.settle(hosts.structure), lambda: static.settle_on_device(none, hosts.slots)),
    }
    whole = tuple(lambda i=i: [pairs[name][i]() for name in ("train", "measure", "settle")] for i in (0, 1))
    return {**pairs, "step": whole}


def milliseconds(work: Work, device: torch.device) -> float:
    """CPU time of the process; on a GPU the time until the device has finished."""
    if device.type != "cuda":
        began = time.process_time()
        work()
        return 1e3 * (time.process_time() - began)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def measured(options: Options) -> list[Row]:
    """All rows."""
    device, rows = choose_device(options.device), []
    for num_hosts in options.hosts:
        for seeds in (3, 0):
            hosts = GrownHosts.build(
                DIGITS_SHAPE, num_hosts, options.examples, options.val_examples, seeds=seeds > 0, device=device
            )
            for name, pair in works(hosts).items():
                for work in pair:
                    work()
                times = []
                for i in range(options.repetitions):
                    ms = {j: milliseconds(pair[j], device) for j in ((0, 1) if i % 2 else (1, 0))}
                    times.append((ms[0], ms[1]))
                ratios = [static / max(grouped, 1e-6) for grouped, static in times]
                rows.append(
                    Row(
                        hosts=num_hosts,
                        seeds=seeds,
                        work=name,
                        grouped_ms=statistics.median(a for a, _ in times),
                        static_ms=statistics.median(b for _, b in times),
                        ratio=statistics.median(ratios),
                        lowest=min(ratios),
                        highest=max(ratios),
                    )
                )
    return rows


def main(options: Options) -> int:
    """Measure and print; returns the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, where = measured(options), environment(choose_device(options.device))
    page = Table(title="static against dynamic graph, digits", caption=", ".join(map(str, where.values())))
    for column in ("hosts", "seeds", "work", "ms grouped", "ms static", "times longer", "range"):
        page.add_column(column, justify="right")
    for r in rows:
        span = f"{r.lowest:.2f} to {r.highest:.2f}" if r.work != "settle" else "-"
        ratio = f"{r.ratio:.2f}" if r.work != "settle" else "-"
        page.add_row(str(r.hosts), str(r.seeds), r.work, f"{r.grouped_ms:.1f}", f"{r.static_ms:.1f}", ratio, span)
    Console(width=140).print(page)
    if options.json is not None:
        report = {"environment": where, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
