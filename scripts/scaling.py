"""What a round would cost on more machines than there are here: a model from measured figures, checked against them.

With n hosts on each of R ranks, E steps in a round, and K sums of gradients in an update:

    round = E (a + b n)  +  u + v n  +  K (2 G / bandwidth + 4 latency log2 R)
            steps           update      reductions: a gradient of G bytes in slices, and two small messages before

a and b come from one and two ranks that have a core each; more ranks than cores take turns, so their prediction is
multiplied. u and v are measured here, by short runs of the task null. Then the same is computed for accelerators of
which a step takes what `--step-seconds` says.

    python benchmarks/ranks.py --cases own --json ranks.json
    python scripts/scaling.py ranks.json
"""

import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

SIZES = {"own": (16, 6), "mixed_digits": (128, 10), "null": (256, 40)}
"""Hosts and steps of the cases of benchmarks/ranks.py."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The measured file, and the machines to think of."""

    file: Annotated[Path, tyro.conf.Positional]
    case: str = "own"
    cores: int = 2
    """Of the machine that was measured."""
    sums: int = 48
    """K of the preset: update epochs x minibatches."""
    ranks: tuple[int, ...] = (1, 8, 64)
    hosts: int = 1000
    """Of each rank."""
    steps: int = 150
    """E of the large run."""
    step_seconds: float | None = None
    """Of all hosts of a rank; as measured here, host by host, if not given."""
    gigabits: float = 10.0
    """Between machines, per second."""
    latency: float = 50e-6
    """Seconds of a message."""
    host_bytes: float = 300e3
    """Of a host with optimizer and snapshot in a checkpoint that has hosts."""
    record_bytes: float = 25.0
    """Of a host and step in the record, compressed."""
    event_bytes: float = 150.0
    """Of an event; a host has about one in eight steps."""


@dataclass(frozen=True)
class Model:
    """Seconds: a step is a + b n, an update u + v n; gradient in bytes."""

    a: float
    b: float
    u: float
    v: float
    gradient: float

    def round(self, hosts: int, steps: int) -> tuple[float, float]:
        """Seconds of all steps, and of the update without reductions."""
        return steps * (self.a + self.b * hosts), self.u + self.v * hosts


def line_through(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Intercept and slope, neither below zero."""
    slope = max((first[1] - second[1]) / (first[0] - second[0]), 0.0)
    return max(second[1] - slope * second[0], 0.0), slope


def update_line(steps: int) -> tuple[float, float]:
    """Seconds of an update of the preset learn, in one process: a constant, and those of each host."""
    found = []
    for hosts in (32, 128):
        with TemporaryDirectory() as folder:
            out = Path(folder, "run")
            sizes = ("--num-envs", str(hosts), "--episode-length", str(steps), "--rounds", "3")
            command = [sys.executable, "-m", "esper", "train", "--task", "null", "--preset", "learn", *sizes]
            subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            found.append((hosts, statistics.median(line["update_seconds"] for line in lines)))
    return line_through(found[1], found[0])


def measured(rows: dict[str, list[dict[str, float]]], hosts: int, steps: int) -> dict[int, tuple[float, float]]:
    """Seconds of all steps of a round, and of an update, by number of ranks; medians."""
    found = {}
    for name, runs in rows.items():
        if name.endswith(" ranks"):
            update = statistics.median(run["update"] for run in runs)
            found[int(name.split()[0])] = (
                statistics.median(hosts * steps / run["speed"] for run in runs) - update,
                update,
            )
    return found


def model_of(found: dict[int, tuple[float, float]], hosts: int, steps: int, gradient: float, large: int) -> Model:
    """From one and two ranks, and updates of episodes of `large` steps."""
    a, b = line_through((hosts, found[1][0] / steps), (hosts / 2, found[2][0] / steps))
    return Model(a, b, *update_line(large), gradient)


def reduction(model: Model, ranks: int, options: Options) -> float:
    """Seconds of all sums of an update."""
    if ranks == 1:
        return 0.0
    sliced = 2 * model.gradient * 8 / (options.gigabits * 1e9)
    return options.sums * (sliced + 4 * options.latency * math.log2(ranks))


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def rule(columns: int) -> str:
    """The line below its head."""
    return row(*["---:"] * columns)


def main(options: Options) -> int:
    """Print both tables."""
    rows = json.loads(options.file.read_text(encoding="utf-8"))["rows"][options.case]
    hosts, steps = SIZES[options.case]
    found = measured(rows, hosts, steps)
    model = model_of(found, hosts, steps, next(iter(rows.values()))[0]["gradient"], options.steps)
    print(f"a step: {1e3 * model.a:.1f} ms + {1e3 * model.b:.2f} ms for each host")
    print(f"an update after {options.steps} steps: {1e3 * model.u:.0f} ms + {1e3 * model.v:.1f} ms for each host")
    print(f"a gradient: {model.gradient / 1e3:.0f} kB\n")
    print(row("ranks here", "steps s, predicted", "measured", "update ms, measured"), rule(4), sep="\n")
    for ranks, (seconds, update) in sorted(found.items()):
        turns = max(1.0, ranks / options.cores)
        ours = turns * model.round(hosts // ranks, steps)[0]
        print(row(ranks, f"{ours:.2f}", f"{seconds:.2f}", f"{1e3 * update:.0f}"))
    sizes = ("gathered by rank 0 in a round", "record of a round", "checkpoint with hosts")
    print()
    print(row("ranks", "hosts", "steps s", "update s", "sums s", "share of steps", *sizes), rule(9), sep="\n")
    for ranks in options.ranks:
        of_steps, update = model.round(options.hosts, options.steps)
        of_steps = of_steps if options.step_seconds is None else options.steps * options.step_seconds
        sums, total = reduction(model, ranks, options), ranks * options.hosts
        events = total * options.steps / 8 * options.event_bytes + total * 200
        all_bytes = (events, total * options.steps * options.record_bytes, total * options.host_bytes)
        share = of_steps / (of_steps + update + sums)
        seconds_of = (f"{of_steps:,.0f}", f"{update:.1f}", f"{sums:.2f}", f"{share:.1%}")
        print(row(ranks, f"{total:,}", *seconds_of, *(f"{size / 1e9:.2f} GB" for size in all_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
