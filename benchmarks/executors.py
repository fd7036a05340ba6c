"""The executors fused (all hosts at once) and native (compiled C++) against streamed (host by host).

    train       one epoch, every host in its own order           measure   all 8 coalitions on the validation split
    peak        arithmetic of training against one matrix product of 1024 x 1024 x 1024
    coalitions  all 8 against the full network alone             auto      its choice against the fastest executor
    growth      time of a step (train and measure) per host      memory    of a process with many hosts

Every host has three seeds. Two executors run in turn in one process on one thread, in CPU time; a ratio is the median
over repetitions of the ratio within each. `measure` runs the coalitions of all hosts together when fused, unlike a run
on a CPU; `growth` and `memory` use the executor that `auto` chooses.

    python benchmarks/executors.py --json executors.json
    python benchmarks/executors.py --min-train 1.5 --min-auto 0.9       # exit code 1 if it is worse
    python benchmarks/executors.py --sweep                              # training on many shapes instead
"""

import json
import math
import multiprocessing
import resource
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console

from esper.telemetry.machine import environment
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.runtime import keep_freed_memory
from grown_hosts import BLOCKS, CPU, DIGITS_SHAPE, IMAGES, GrownHosts, Shape
from paired import Row, compare, comparisons
from peak import GEMM, flop_of_training, gemm_peak

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the fused and the native executor with the streamed one."""

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
    """Measurements of each; a first one is not counted."""
    sweep: bool = False
    """Compare training on many shapes and numbers of hosts instead, with seeds and without; only --min-auto applies."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_train: float = 0.0
    """Least speed-up of the fastest other executor over streamed in training digits."""
    min_measure: float = 0.0
    """The same for measuring all coalitions of digits."""
    min_blocks: float = 0.0
    """The same for training the 3x3 blocks."""
    min_peak: float = 0.0
    """Least share of the peak (0 to 1) that the fastest executor reaches on the 3x3 blocks."""
    max_coalitions: float = math.inf
    """Most time of all coalitions relative to one evaluation, for the best executor."""
    min_auto: float = 0.0
    """Least speed of `auto` relative to the fastest executor in training, the worst of all shapes."""
    max_growth: float = math.inf
    """Most time of a step per host at the larger number of hosts, relative to the smaller."""
    max_gib: float = math.inf
    """Most memory of the process with many hosts, in GiB."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Results that are not a comparison of two times. Shares and ratios are fractions, not per cent."""

    gflop: float
    """Of one epoch of the 3x3 blocks: 2 per multiply-add of convolutions and matrix products, forward and backward."""
    peak_gflops: float
    share: dict[str, float]
    """Of the peak, by executor."""
    coalitions: dict[str, float]
    """Time of all coalitions in evaluations of one, by executor."""
    auto: dict[str, str]
    auto_speed: dict[str, float]
    growth: dict[str, float]
    """Time of a step per host at many hosts relative to few, for streamed and the choice of auto."""
    memory_gib: float
    state_mib: float

    def lines(self, options: Options) -> list[str]:
        """The facts in sentences."""
        small, large = options.growth
        choices = (f"{name}: {taken}, {self.auto_speed[name]:.2f} of the fastest" for name, taken in self.auto.items())
        shares, coalitions, growth = (
            ", ".join(f"{how} {value:{form}}" for how, value in found.items())
            for found, form in ((self.share, ".1%"), (self.coalitions, ".2f"), (self.growth, ".2f"))
        )
        return [
            f"peak: {self.gflop:.2f} GFLOP per epoch of the 3x3 blocks; a matrix product of {GEMM}^3 reaches "
            f"{self.peak_gflops:.1f} GFLOP/s; share of it: {shares}",
            f"coalitions: all 8 in evaluations of one: {coalitions}",
            f"auto: {'; '.join(choices)}",
            f"growth: time of a step per host at {large} hosts relative to {small}: {growth}",
            f"memory: {options.memory_hosts} hosts of digits, one epoch and all coalitions: {self.memory_gib:.2f} GiB "
            f"at most, {self.state_mib:.1f} MiB of it checkpointed state",
        ]


def rivals(hosts: GrownHosts) -> dict[str, Executor]:
    """The executors that are compared with streamed, by name."""
    found: dict[str, Executor] = {"fused": hosts.fused}
    return found if hosts.native is None else found | {"native": hosts.native}


def training(hosts: GrownHosts, how: str, repetitions: int) -> Row:
    """One epoch, streamed and under another executor."""
    other = rivals(hosts)[how]
    work = (lambda: hosts.train(hosts.streamed), lambda: hosts.train(other))
    return compare(f"train {hosts.shape.name}, N = {hosts.num_hosts}", "streamed", how, work, repetitions)


def measuring(hosts: GrownHosts, how: str, repetitions: int) -> Row:
    """All coalitions, streamed and under another executor."""
    other = rivals(hosts)[how]
    work = (lambda: hosts.measure(hosts.streamed), lambda: hosts.measure(other))
    return compare(f"measure {hosts.shape.name}, N = {hosts.num_hosts}", "streamed", how, work, repetitions)


def all_against_one(hosts: GrownHosts, how: str, repetitions: int) -> Row:
    """All coalitions against the full network alone."""
    executor = executor_of(hosts, how)
    work = (lambda: hosts.measure(executor), lambda: hosts.measure(executor, all_sets=False))
    return compare(f"coalitions {hosts.shape.name}, {how}", "all 8", "one", work, repetitions)


def executor_of(hosts: GrownHosts, how: str) -> Executor:
    """The executor of this name."""
    return hosts.streamed if how == "streamed" else rivals(hosts)[how]


def step(hosts: GrownHosts, how: str) -> None:
    """Train and measure as a run does: with fused training on a CPU it measures host by host."""
    hosts.train(executor_of(hosts, how))
    hosts.measure(executor_of(hosts, "streamed" if how == "fused" else how))


def growth(few: GrownHosts, many: GrownHosts, how: str, repetitions: int) -> Row:
    """A step at the smaller number of hosts against one at the larger, in milliseconds per host."""
    small, large = few.num_hosts, many.num_hosts
    work = (lambda: step(few, how), lambda: step(many, how))
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
    (Shape("8x8, 3x3 of 32-64-128", 8, base=32), 8),
    (Shape("3x32x32, 3x3 of 32-64-128", 32, channels=3, base=32, batch=128), 2),
)


@dataclass(frozen=True, kw_only=True)
class Swept:
    """Training of one shape: each rival against streamed, the choice of `auto`, and its share of the top speed."""

    rows: dict[str, Row]
    auto: str
    auto_speed: float


def sweep(options: Options) -> dict[str, Swept]:
    """Train two batches on each shape under every executor."""
    found: dict[str, Swept] = {}
    for shape, num_hosts in SWEEP:
        for seeds in (True, False):
            hosts = GrownHosts.build(shape, num_hosts, 2 * shape.batch, 8, seeds=seeds)
            rows = {how: training(hosts, how, options.repetitions) for how in rivals(hosts)}
            name = f"{rows['fused'].name}, {'3 seeds' if seeds else 'no seeds'}"
            rows = {how: replace(row, name=name) for how, row in rows.items()}
            found[name] = Swept(rows=rows, auto=hosts.chosen, auto_speed=_relative_speed(rows, hosts.chosen))
    return found


def memory_of(num_hosts: int, train: int, val: int) -> tuple[int, int]:
    """Peak bytes of this process after an epoch and all coalitions of digits under `auto`, and bytes of state."""
    torch.set_num_threads(1)
    keep_freed_memory()
    hosts = GrownHosts.build(DIGITS_SHAPE, num_hosts, train, val)
    step(hosts, hosts.chosen)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, hosts.state_bytes()


def memory(options: Options) -> tuple[int, int]:
    """`memory_of` in a new process. Linux counts the parent's size too, so call it while this process is small."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(memory_of, options.memory_hosts, options.examples, options.val_examples).result()


def measure(options: Options) -> tuple[dict[str, Row], Facts]:
    """All comparisons by a short name, and the facts."""
    peak_bytes, state = memory(options)
    torch.set_num_threads(1)
    keep_freed_memory()
    examples, val, repetitions = options.examples, options.val_examples, options.repetitions

    def build(shape: Shape, hosts: int) -> GrownHosts:
        return GrownHosts.build(shape, hosts, examples // (1 + (shape == IMAGES)), val)

    digits, blocks = build(DIGITS_SHAPE, options.hosts), build(BLOCKS, options.hosts)
    subjects = {"digits": digits, "blocks": blocks, "images": build(IMAGES, options.image_hosts)}
    ways = list(rivals(digits))
    rows = {
        f"train {name} {how}": training(hosts, how, repetitions) for name, hosts in subjects.items() for how in ways
    }
    peak, flop = gemm_peak(), flop_of_training(lambda: blocks.train(blocks.streamed))
    for name in ("digits", "blocks"):
        rows |= {f"measure {name} {how}": measuring(subjects[name], how, repetitions) for how in ways}
    rows |= {f"coalitions {how}": all_against_one(digits, how, repetitions) for how in ("streamed", *ways)}
    few, many = (build(DIGITS_SHAPE, n) for n in options.growth)
    growing = list(dict.fromkeys(("streamed", digits.chosen)))
    rows |= {f"growth {how}": growth(few, many, how, repetitions) for how in growing}
    gflops = {"streamed": flop / 1e6 / rows["train blocks fused"].first_ms}
    gflops |= {how: flop / 1e6 / rows[f"train blocks {how}"].second_ms for how in ways}
    return rows, Facts(
        gflop=flop / 1e9,
        peak_gflops=peak,
        share={how: reached / peak for how, reached in gflops.items()},
        coalitions={how: rows[f"coalitions {how}"].ratio for how in ("streamed", *ways)},
        auto={name: hosts.chosen for name, hosts in subjects.items()},
        auto_speed={
            name: _relative_speed({how: rows[f"train {name} {how}"] for how in ways}, hosts.chosen)
            for name, hosts in subjects.items()
        },
        growth={how: 1.0 / rows[f"growth {how}"].ratio for how in growing},
        memory_gib=peak_bytes / GIB,
        state_mib=state / 2**20,
    )


def _relative_speed(rows: Mapping[str, Row], taken: str) -> float:
    """Speed of the executor `taken` relative to the fastest; 1 if it is the fastest."""
    speed = {"streamed": 1.0} | {how: row.ratio for how, row in rows.items()}
    return speed[taken] / max(speed.values())


def where_and_how(options: Options) -> dict[str, str | int]:
    """Machine and settings of the numbers."""
    settings = (
        f"batch 64 (128 on 32x32), {options.examples} train and {options.val_examples} validation examples "
        f"(half, and 128, on 32x32), 3 mixed seeds per host, {options.repetitions} repetitions, CPU time"
    )
    return {**environment(CPU), "settings": settings}


def complaints(rows: Mapping[str, Row], facts: Facts, options: Options) -> list[str]:
    """The limits that are missed."""

    def fastest(what: str) -> float:
        return max(row.ratio for name, row in rows.items() if name.startswith(what))

    auto_growth = list(facts.growth.values())[-1]
    limits = (
        ("training digits, against streamed", fastest("train digits"), options.min_train, math.inf),
        ("training the 3x3 blocks, against streamed", fastest("train blocks"), options.min_blocks, math.inf),
        ("measuring digits, against streamed", fastest("measure digits"), options.min_measure, math.inf),
        ("share of the peak", max(facts.share.values()), options.min_peak, math.inf),
        ("all coalitions against one", min(facts.coalitions.values()), 0.0, options.max_coalitions),
        ("auto against the fastest executor", min(facts.auto_speed.values()), options.min_auto, math.inf),
        ("growth of a step per host", auto_growth, 0.0, options.max_growth),
        ("GiB of memory", facts.memory_gib, 0.0, options.max_gib),
    )
    return [
        f"{name}: {found:.2f}; {f'at least {least:g}' if found < least else f'at most {most:g}'} is required."
        for name, found, least, most in limits
        if not least <= found <= most
    ]


def swept(options: Options) -> int:
    """`main` of the sweep."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found = sweep(options)
    where = environment(CPU) | {"settings": f"two batches, {options.repetitions} repetitions, CPU time"}
    console = Console(width=140)
    console.print(comparisons("executors", [row for one in found.values() for row in one.rows.values()], where))
    speed = {name: one.auto_speed for name, one in found.items()}
    worst = min(speed, key=speed.__getitem__)
    console.print(f"auto: {speed[worst]:.2f} of the fastest executor at worst, on {worst}", highlight=False)
    if options.json is not None:
        listed = {name: asdict(one) for name, one in found.items()}
        options.json.write_text(json.dumps({"environment": where, "rows": listed}, indent=2) + "\n")
    if speed[worst] >= options.min_auto:
        return 0
    print(f"worse: auto on {worst}: {speed[worst]:.2f}; at least {options.min_auto:g} is required.", file=sys.stderr)
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
