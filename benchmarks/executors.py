"""The two executors side by side: all hosts at once (fused) against host by host (streamed), with three seeds in each.

    train       one epoch, every host in its own order           measure   all 8 coalitions on the validation split
    peak        arithmetic of training against one matrix product of 1024 x 1024 x 1024
    coalitions  8 of them against the network as it stands       auto      the executor it takes against the faster one
    growth      a step (train and measure) per host              memory    of a process with many hosts

Both run alternately in one process on one thread; a time is CPU time, a ratio the median over repetitions of the ratio
within each, so that a busy machine slows both alike. `measure` runs all coalitions fused, which `auto` does not on a
CPU; `growth` and `memory` run what `auto` runs.

    python benchmarks/executors.py --json executors.json
    python benchmarks/executors.py --min-train 1.5 --min-auto 0.9       # exit code 1 if it is worse
    python benchmarks/executors.py --sweep                              # training on many shapes instead
"""

import json
import math
import multiprocessing
import resource
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from esper.telemetry.machine import environment
from esper.tolaria.memory import keep_freed_memory
from grown_hosts import BLOCKS, CPU, DIGITS_SHAPE, IMAGES, GrownHosts, Shape
from paired import Row, compare, comparisons, cpu_ms

GIB = 2**30
GEMM = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the fused with the streamed executor."""

    hosts: int = 32
    """Hosts on 8x8 images."""
    image_hosts: int = 8
    """Hosts on 32x32 images."""
    growth: tuple[int, int] = (8, 64)
    """Numbers of hosts between which the cost per host is compared."""
    memory_hosts: int = 64
    """Hosts of the process whose memory is measured."""
    examples: int = 512
    """Train examples of each task; half as many on 32x32 images."""
    val_examples: int = 360
    """Validation examples of each task; 128 at most on 32x32 images."""
    repetitions: int = 5
    """Measurements of each; one more is taken before and not counted."""
    sweep: bool = False
    """Compare training on many shapes and numbers of hosts instead, with seeds and without; only --min-auto applies."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_train: float = 0.0
    """How many times faster fused must train digits."""
    min_measure: float = 0.0
    """How many times faster fused must measure all coalitions of digits."""
    min_blocks: float = 0.0
    """How many times faster fused must train the 3x3 blocks."""
    min_peak: float = 0.0
    """Least share of the peak of a matrix product that the faster executor reaches on the 3x3 blocks, 0 to 1."""
    max_coalitions: float = math.inf
    """Most that all coalitions may cost, relative to one plain evaluation, where they are measured host by host."""
    min_auto: float = 0.0
    """Least speed of `auto` relative to the faster executor in training, the worst of all shapes."""
    max_growth: float = math.inf
    """Most that a step per host may cost at the larger number of hosts, relative to the smaller."""
    max_gib: float = math.inf
    """Most memory of the process with many hosts, in GiB."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is no comparison of two times. Shares and ratios are plain numbers, not per cent."""

    gflop: float
    """Of one epoch of the 3x3 blocks: 2 per multiply-add of convolutions and matrix products, there and back."""
    peak_gflops: float
    share_streamed: float
    share_fused: float
    coalitions_streamed: float
    coalitions_fused: float
    auto: dict[str, str]
    auto_speed: dict[str, float]
    growth_streamed: float
    growth_auto: float
    memory_gib: float
    state_mib: float

    def lines(self, options: Options) -> list[str]:
        """Sentences for people."""
        small, large = options.growth
        choices = (f"{name}: {taken}, {self.auto_speed[name]:.2f} of the faster" for name, taken in self.auto.items())
        return [
            f"peak: {self.gflop:.2f} GFLOP per epoch of the 3x3 blocks; a matrix product of {GEMM}^3 reaches "
            f"{self.peak_gflops:.1f} GFLOP/s; streamed {100 * self.share_streamed:.1f} % of it, fused "
            f"{100 * self.share_fused:.1f} %",
            f"coalitions: all 8 cost {self.coalitions_streamed:.2f} plain evaluations streamed, "
            f"{self.coalitions_fused:.2f} fused",
            f"auto: {'; '.join(choices)}",
            f"growth: a step per host at {large} hosts costs {self.growth_streamed:.2f} of one at {small} streamed, "
            f"{self.growth_auto:.2f} with auto",
            f"memory: {options.memory_hosts} hosts of digits, one epoch and all coalitions: {self.memory_gib:.2f} GiB "
            f"at most; {self.state_mib:.1f} MiB of it are the stacked state",
        ]


def training(hosts: GrownHosts, repetitions: int) -> Row:
    """One epoch, streamed and fused."""
    work = (lambda: hosts.train(hosts.streamed), lambda: hosts.train(hosts.fused))
    return compare(f"train {hosts.shape.name}, N = {hosts.num_hosts}", "streamed", "fused", work, repetitions)


def measuring(hosts: GrownHosts, repetitions: int) -> Row:
    """All coalitions, streamed and fused."""
    work = (lambda: hosts.measure(hosts.streamed), lambda: hosts.measure(hosts.fused))
    return compare(f"measure {hosts.shape.name}, N = {hosts.num_hosts}", "streamed", "fused", work, repetitions)


def all_against_one(hosts: GrownHosts, how: str, repetitions: int) -> Row:
    """All coalitions against the network as it stands."""
    executor = hosts.fused if how == "fused" else hosts.streamed
    work = (lambda: hosts.measure(executor), lambda: hosts.measure(executor, all_sets=False))
    return compare(f"coalitions {hosts.shape.name}, {how}", "all 8", "one", work, repetitions)


def growth(few: GrownHosts, many: GrownHosts, how: str, repetitions: int) -> Row:
    """A step of the smaller number of hosts against one of the larger, milliseconds per host."""

    def step(hosts: GrownHosts) -> None:
        # `auto` trains fused and measures host by host
        hosts.train(hosts.fused if how == "auto" and hosts.chosen == "fused" else hosts.streamed)
        hosts.measure(hosts.streamed)

    small, large = few.num_hosts, many.num_hosts
    work = (lambda: step(few), lambda: step(many))
    row = compare(f"step per host of digits, {how}", f"N = {small}", f"N = {large}", work, repetitions)
    scaled = {name: getattr(row, name) * large / small for name in ("ratio", "lowest", "highest")}
    return Row(**(asdict(row) | {"first_ms": row.first_ms / small, "second_ms": row.second_ms / large} | scaled))


SWEEP = (
    *((DIGITS_SHAPE, n) for n in (1, 2, 4, 8, 16)),
    *((BLOCKS, n) for n in (4, 16)),
    (Shape("16x16, 3x3 of 8-16-32", 16), 8),
    (Shape("3x16x16, 3x3 of 8-16-32", 16, channels=3), 32),
    (Shape("20x20, 3x3 of 8-16-32", 20), 8),
    (Shape("28x28, 3x3 of 4-8-16", 28, base=4, batch=256), 16),
    (Shape("28x28, 3x3 of 4-8-16, batch 64", 28, base=4), 4),
    *((IMAGES, n) for n in (2, 8)),
)


def sweep(options: Options) -> dict[str, tuple[Row, str]]:
    """Training of two batches on each shape, with the executor that `auto` takes."""
    found: dict[str, tuple[Row, str]] = {}
    for shape, num_hosts in SWEEP:
        for seeds in (True, False):
            hosts = GrownHosts.build(shape, num_hosts, 2 * shape.batch, 8, seeds=seeds)
            row = training(hosts, options.repetitions)
            name = f"{row.name}, {'3 seeds' if seeds else 'no seeds'}"
            found[name] = replace(row, name=name), hosts.chosen
    return found


def flop_of_training(hosts: GrownHosts) -> int:
    """Operations of one epoch: 2 per multiply-add of convolutions and matrix products, forward and backward.

    Products with the zeros of a padded border are counted as work; norms, activations and pooling are not.
    """
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _slopes_flop}) as counter:
        hosts.train(hosts.streamed)
    return counter.get_total_flops()


def _slopes_flop(
    slope: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: Any, **_: Any
) -> int:
    """A gradient of a convolution costs what its forward pass costs; PyTorch's own formula ignores groups."""
    wanted = rest[-1]
    return 2 * slope[0] * math.prod(slope[2:]) * math.prod(weight) * sum(wanted[:2])


def gemm_peak() -> float:
    """Best GFLOP/s of a float32 matrix product of 1024 x 1024 x 1024, in CPU time of one thread."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    out = torch.empty(GEMM, GEMM)
    best = min(cpu_ms(lambda: torch.mm(a, b, out=out)) for _ in range(20))
    return 2 * GEMM**3 / best / 1e6


def memory_of(num_hosts: int, train: int, val: int) -> tuple[int, int]:
    """Peak bytes of this process after an epoch and all coalitions of digits, as `auto` runs them; bytes of state."""
    torch.set_num_threads(1)
    keep_freed_memory()
    hosts = GrownHosts.build(DIGITS_SHAPE, num_hosts, train, val)
    hosts.train(hosts.fused)
    hosts.measure(hosts.streamed)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, hosts.state_bytes()


def memory(options: Options) -> tuple[int, int]:
    """`memory_of` in a process of its own. Linux counts the parent's size too: call it while this one is small."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(memory_of, options.memory_hosts, options.examples, options.val_examples).result()


def measure(options: Options) -> tuple[dict[str, Row], Facts]:
    """Everything: comparisons by a short name, and the rest."""
    peak_bytes, state = memory(options)
    torch.set_num_threads(1)
    keep_freed_memory()
    examples, val, repetitions = options.examples, options.val_examples, options.repetitions

    def build(shape: Shape, hosts: int) -> GrownHosts:
        return GrownHosts.build(shape, hosts, examples // (1 + (shape == IMAGES)), val)

    digits, blocks = build(DIGITS_SHAPE, options.hosts), build(BLOCKS, options.hosts)
    subjects = {"digits": digits, "blocks": blocks, "images": build(IMAGES, options.image_hosts)}
    rows = {f"train {name}": training(hosts, repetitions) for name, hosts in subjects.items()}
    peak, flop = gemm_peak(), flop_of_training(blocks)
    rows |= {f"measure {name}": measuring(subjects[name], repetitions) for name in ("digits", "blocks")}
    rows |= {f"coalitions {how}": all_against_one(digits, how, repetitions) for how in ("streamed", "fused")}
    few, many = (build(DIGITS_SHAPE, n) for n in options.growth)
    rows |= {f"growth {how}": growth(few, many, how, repetitions) for how in ("streamed", "auto")}
    taken = {name: hosts.chosen for name, hosts in subjects.items()}
    return rows, Facts(
        gflop=flop / 1e9,
        peak_gflops=peak,
        share_streamed=flop / 1e6 / rows["train blocks"].first_ms / peak,
        share_fused=flop / 1e6 / rows["train blocks"].second_ms / peak,
        coalitions_streamed=rows["coalitions streamed"].ratio,
        coalitions_fused=rows["coalitions fused"].ratio,
        auto=dict(taken),
        auto_speed={name: _relative_speed(rows[f"train {name}"], taken[name]) for name in taken},
        growth_streamed=1.0 / rows["growth streamed"].ratio,
        growth_auto=1.0 / rows["growth auto"].ratio,
        memory_gib=peak_bytes / GIB,
        state_mib=state / 2**20,
    )


def _relative_speed(row: Row, taken: str) -> float:
    """Speed of the executor that was taken relative to the faster one; 1 where it is the faster one."""
    return min(row.ratio if taken == "fused" else 1.0 / row.ratio, 1.0)


def where_and_how(options: Options) -> dict[str, str | int]:
    """Where the numbers come from."""
    settings = (
        f"batch 64 (128 on 32x32), {options.examples} train and {options.val_examples} validation examples "
        f"(half, and 128, on 32x32), 3 mixed seeds per host, {options.repetitions} repetitions, CPU time"
    )
    return {**environment(CPU), "settings": settings}


def complaints(rows: Mapping[str, Row], facts: Facts, options: Options) -> list[str]:
    """What is worse than was asked for."""
    limits = (
        ("fused on training digits", rows["train digits"].ratio, options.min_train, math.inf),
        ("fused on training the 3x3 blocks", rows["train blocks"].ratio, options.min_blocks, math.inf),
        ("fused on measuring digits", rows["measure digits"].ratio, options.min_measure, math.inf),
        ("share of the peak", max(facts.share_streamed, facts.share_fused), options.min_peak, math.inf),
        ("all coalitions against one", facts.coalitions_streamed, 0.0, options.max_coalitions),
        ("auto against the faster executor", min(facts.auto_speed.values()), options.min_auto, math.inf),
        ("growth of a step per host", facts.growth_auto, 0.0, options.max_growth),
        ("GiB of memory", facts.memory_gib, 0.0, options.max_gib),
    )
    return [
        f"{name}: {found:.2f}; {f'at least {least:g}' if found < least else f'at most {most:g}'} is asked for."
        for name, found, least, most in limits
        if not least <= found <= most
    ]


def swept(options: Options) -> int:
    """`main` of the sweep."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found = sweep(options)
    where = environment(CPU) | {"settings": f"two batches, {options.repetitions} repetitions, CPU time"}
    speed = {name: _relative_speed(row, taken) for name, (row, taken) in found.items()}
    console = Console(width=140)
    console.print(comparisons("executors", [row for row, _ in found.values()], where))
    worst = min(speed, key=speed.__getitem__)
    console.print(f"auto: {speed[worst]:.2f} of the faster executor at worst, on {worst}", highlight=False)
    if options.json is not None:
        listed = {name: asdict(row) | {"auto": taken} for name, (row, taken) in found.items()}
        options.json.write_text(json.dumps({"environment": where, "rows": listed}, indent=2) + "\n")
    if speed[worst] >= options.min_auto:
        return 0
    print(f"worse: auto on {worst}: {speed[worst]:.2f}; at least {options.min_auto:g} is asked for.", file=sys.stderr)
    return 1


def main(options: Options) -> int:
    """Measure, print, compare with the limits; returns the exit code."""
    if options.sweep:
        return swept(options)
    rows, facts = measure(options)
    where = where_and_how(options)
    console = Console(width=140)
    console.print(comparisons("executors", rows.values(), where))
    for line in facts.lines(options):
        console.print(line, highlight=False)
    if options.json is not None:
        report = {
            "environment": where,
            "rows": {name: asdict(row) for name, row in rows.items()},
            "facts": asdict(facts),
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    found = complaints(rows, facts, options)
    for line in found:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
