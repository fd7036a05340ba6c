"""A sum whose order does not depend on the ranks, against a plain all-reduce, of vectors as long as a gradient.

    torchrun --standalone --nproc-per-node 2 benchmarks/reduction.py
    torchrun --standalone --nproc-per-node 4 benchmarks/reduction.py --repetitions 200

All run in turn; times are medians of the slowest rank.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro

from esper.leyline.ranks import Ranks, joined


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is added."""

    sizes: tuple[int, ...] = (66, 100_000, 1_000_000)
    """Numbers in a vector: the sums of a loss, and gradients."""
    repetitions: int = 50


def seconds(act: Callable[[], object]) -> float:
    """Of one call, after all ranks have come to it."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main(options: Options) -> None:
    """Print a line for each size."""
    with joined() as group:
        ranks = Ranks(group.size, group.size, group)
        for size in options.sizes:
            own, times = torch.randn(size), dict[str, list[float]](ordered=[], plain=[])
            before = group.bytes_received
            for _ in range(options.repetitions):
                times["ordered"].append(seconds(lambda own=own: ranks.total([own])))
                times["plain"].append(seconds(lambda own=own: dist.all_reduce(own.clone())))
            received = (group.bytes_received - before) / options.repetitions / own.nbytes
            slowest = {name: max(group.gathered(statistics.median(found))) for name, found in times.items()}
            if group.is_first:
                ordered, plain = 1e3 * slowest["ordered"], 1e3 * slowest["plain"]
                print(
                    f"{group.size} ranks, {size:,} numbers: {ordered:.2f} ms in order, {plain:.2f} ms by all-reduce, "
                    f"ratio {ordered / plain:.2f}; each rank received {received:.2f} vectors"
                )


if __name__ == "__main__":
    main(tyro.cli(Options))
