"""What bfloat16 is worth on this CPU: hosts trained and measured in float32 and under autocast, in turn.

The hosts are those of `executors.py`: a live, heard seed in each of three slots, all mixed. One thread, CPU time; a
ratio is the median over repetitions of the ratio within each, and above 1 bf16 is faster.

    python benchmarks/precision.py --json precision.json
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console

from esper.telemetry.machine import environment
from esper.tolaria.amp import LossScaler
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.memory import keep_freed_memory
from grown_hosts import BLOCKS, CPU, DIGITS_SHAPE, IMAGES, GrownHosts, Shape
from paired import Row, compare, comparisons

WIDE_SMALL = Shape("8x8, 3x3 of 32-64-128", 8, base=32)
WIDE_IMAGES = Shape("3x32x32, 3x3 of 32-64-128", 32, channels=3, base=32, batch=128)
WORK = ((DIGITS_SHAPE, 16, 512), (BLOCKS, 16, 512), (WIDE_SMALL, 8, 256), (IMAGES, 8, 256), (WIDE_IMAGES, 4, 256))
"""Shape, number of hosts and of train examples."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare float32 with bf16 on this CPU."""

    repetitions: int = 5
    """Times each is measured; one more is taken before and not counted."""
    val: int = 128
    """Validation examples."""
    json: Path | None = None
    """Also write the numbers to this file."""


def rows_of(shape: Shape, num_hosts: int, train: int, options: Options) -> list[Row]:
    """Training and measuring under both executors."""
    hosts = GrownHosts.build(shape, num_hosts, train, options.val)
    scalers = hosts.streamed.data.scaler, LossScaler(torch.bfloat16, num_hosts, CPU)

    def in_precision(which: int, work: Callable[[Executor], None], executor: Executor) -> Callable[[], None]:
        def run() -> None:
            hosts.streamed.data.scaler = scalers[which]
            work(executor)

        return run

    executors = {"streamed": hosts.streamed, "fused": hosts.fused}
    return [
        compare(
            f"{verb} {shape.name}, N = {num_hosts}, {name}",
            "float32",
            "bf16",
            [in_precision(which, work, executor) for which in (0, 1)],
            options.repetitions,
        )
        for verb, work in (("train", hosts.train), ("measure", hosts.measure))
        for name, executor in executors.items()
    ]


def main(options: Options) -> int:
    """Measure and print; returns the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [row for shape, hosts, train in WORK for row in rows_of(shape, hosts, train, options)]
    where = environment(CPU) | {"settings": f"{options.repetitions} repetitions"}
    Console(width=140).print(comparisons("precision", rows, where))
    if options.json is not None:
        report = {"environment": where, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
