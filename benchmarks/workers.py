"""Wall time of a step (train and measure) of the same hosts by one worker and by several: threads or processes.

Both run in turn, with three live seeds in every host; a ratio is the median over repetitions of the ratio within each.

    python benchmarks/workers.py
    python benchmarks/workers.py --min-speedup 1.3          # exit code 1 if two workers are not that much faster
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console

from esper.cpp.build import compiler
from esper.telemetry.machine import environment
from esper.tolaria.engine_config import ExecutorChoice
from esper.tolaria.runtime import keep_freed_memory
from grown_hosts import BLOCKS, CPU, DIGITS_SHAPE, IMAGES, Shape, SharedHosts
from paired import Row, compare, comparisons, wall_ms


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare one worker with several."""

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
    """Measurements of each; a first one is not counted."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_speedup: float = 0.0
    """Least speed-up of the slowest row."""


def rows_of(shape: Shape, num_hosts: int, options: Options) -> list[Row]:
    """Each executor on these hosts, by one worker and by several."""
    train, val = options.examples, options.val_examples
    if shape == IMAGES:
        train, val = train // 2, min(val, 128)
    rows = []
    kinds: tuple[ExecutorChoice, ...] = ("streamed", "fused") if compiler() is None else ("streamed", "fused", "native")
    for kind in kinds:
        one, shared = (
            SharedHosts.build(shape, num_hosts, train, val, executor=kind, workers=workers)
            for workers in (1, options.workers)
        )
        name, several = f"{num_hosts} x {shape.name}, {kind}", f"{options.workers} workers"
        rows.append(compare(name, "1 worker", several, (one.step, shared.step), options.repetitions, wall_ms))
        shared.close()
    return rows


def main(options: Options) -> int:
    """Measure and print; returns 1 if the bound is missed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = [(shape, n) for shape in (DIGITS_SHAPE, BLOCKS) for n in options.hosts] + [(IMAGES, options.image_hosts)]
    rows = [row for shape, n in sizes for row in rows_of(shape, n, options)]
    machine = environment(CPU)
    Console(width=140).print(comparisons("hosts shared by workers, wall time", rows, machine))
    if options.json is not None:
        found = {"environment": machine, "workers": options.workers, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2))
    slowest = min(row.ratio for row in rows)
    if slowest < options.min_speedup:
        print(f"the smallest speed-up is {slowest:.2f}; at least {options.min_speedup} was required", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
