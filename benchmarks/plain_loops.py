"""Esper against N independent training loops in plain PyTorch (`plain_nets.py`), which share no code with it.

Same networks with three grown seeds each, same weights, data, order, batches, optimizer and clipping; wall time on all
cores. The loops run with one thread and with one per core, and the faster counts; esper runs the executor that `auto`
chooses, with one worker per core. `train` is one epoch; `coalitions` is the time of measuring all 8 coalitions of each
host in plain evaluations of the whole network. All run in turn; a result is the median over repetitions.

    python benchmarks/plain_loops.py
    python benchmarks/plain_loops.py --min-native 2.2 --min-transformer 1.5 --max-coalitions 3   # exit code 1 if missed
"""

import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from esper.kasmina.blueprints import registry
from esper.kasmina.parameters.population import Population
from esper.leyline.lifecycle import Algorithm
from esper.telemetry.machine import environment
from esper.tolaria.engine_config import ExecutorChoice
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.runtime import keep_freed_memory, usable_cores
from grown_hosts import CPU, IMAGES, TEXT, TEXT_DROPOUT, Shape, SharedHosts, TextShape, task_of
from paired import wall_ms
from plain_nets import Blend, Data, Grown, PlainCNN, PlainLoops, PlainTransformer

LARGE_BATCH = replace(IMAGES, name=f"{IMAGES.name}, batch 512", batch=512)
BLENDS: dict[int, Blend] = {Algorithm.ADD: "ADD", Algorithm.MULTIPLY: "MULTIPLY", Algorithm.GATE: "GATE"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare esper with plain training loops."""

    hosts: int = 8
    """N."""
    threads: int = usable_cores()
    """Threads of the loops, and those that esper takes."""
    batches: int = 2
    """Batches of training per epoch."""
    val_examples: int = 128
    """Validation examples."""
    repetitions: int = 5
    """Measurements of each; a first one is not counted."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_native: float = 0.0
    """Least speed-up over the loops in training grown CNNs."""
    min_transformer: float = 0.0
    """The same for transformers."""
    max_coalitions: float = math.inf
    """Most time of all coalitions, in plain evaluations."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one kind of hosts: milliseconds of the loops and of esper, and the ratios within each repetition."""

    name: str
    executor: str
    train_loops_ms: float
    train_ms: float
    speed_up: float
    lowest: float
    highest: float
    evaluation_ms: float
    coalitions_ms: float
    coalitions: float


def loops_of(shape: Shape | TextShape, hosts: SharedHosts) -> PlainLoops:
    """The plain networks with the weights and the data of streamed hosts of this shape."""
    assert isinstance(hosts.executor, NetworkExecutor)
    data, task = hosts.executor.data, task_of(shape)
    order = data.train_batches(1).order
    assert order is not None
    splits = ((split.x, split.y) for split in (hosts.data.train, hosts.data.val))
    plain = Data(train=next(splits), val=next(splits), orders=order, batch_train=task.batch_train,
                 batch_val=task.batch_val)  # fmt: skip
    nets = []
    for n in range(data.population.num_envs):
        grown = _grown(hosts, data.population, n)
        net = _net(shape, grown)
        _copy_weights(net, data.population, grown, n)
        nets.append(net)
    return PlainLoops(nets, plain, adamw=task.optimizer.kind == "adamw", lr=task.optimizer.host_lr)


def _grown(hosts: SharedHosts, population: Population, n: int) -> list[Grown]:
    structure, names = hosts.structure, registry.names()
    return [
        Grown(slot=point.slot_id, blueprint=names[structure.blueprint[n, s]], channels=point.channels,
              blend=BLENDS[int(structure.algorithm[n, s])], alpha=float(structure.alpha[n, s]))
        for s, point in enumerate(population.points)
        if structure.blueprint[n, s] >= 0
    ]  # fmt: skip


def _net(shape: Shape | TextShape, grown: list[Grown]) -> nn.Module:
    if isinstance(shape, TextShape):
        return PlainTransformer(shape.vocabulary, shape.width, 4, 4, shape.context, shape.dropout, grown)
    return PlainCNN((shape.channels, shape.base, 2 * shape.base, 4 * shape.base), 10, grown)


@torch.no_grad()
def _copy_weights(net: nn.Module, population: Population, grown: list[Grown], n: int) -> None:
    """Give a plain network the parameters of host `n` and of its seeds."""
    found = population.host_kind.template.parameters.unpack(population.host.params[n])
    columns = {point.slot_id: s for s, point in enumerate(population.points)}
    for g in grown:
        row = n * population.num_slots + columns[g.slot]
        kinds = [("seed", population.seeds, population.seed_kinds[g.channels, registry.names().index(g.blueprint)])]
        if g.blend == "GATE":
            kinds.append(("gate", population.gates, population.gate_kinds[g.channels]))
        for part, flat, kind in kinds:
            layout = kind.template.parameters
            for name, value in layout.unpack(flat.params[row, : layout.total]).items():
                found[f"seeds.{g.slot}.{part}.{name}"] = value
    own = dict(net.named_parameters())
    assert own.keys() == found.keys(), sorted(own.keys() ^ found.keys())
    for name, value in found.items():
        own[name].copy_(value)


def with_threads(threads: int, work: Callable[[], object]) -> Callable[[], object]:
    """The same work with this number of threads in an operation."""

    def run() -> None:
        torch.set_num_threads(threads)
        work()

    return run


def compared(shape: Shape | TextShape, options: Options, *, executor: ExecutorChoice = "auto") -> Row:
    """Training and coalitions of esper against the loops."""
    torch.set_num_threads(1)
    train, val = shape.batch * options.batches, options.val_examples
    alone = SharedHosts.build(shape, options.hosts, train, val, executor="streamed")
    shared = SharedHosts.build(shape, options.hosts, train, val, executor=executor)
    loops = loops_of(shape, alone)
    counts = sorted({1, options.threads})
    ways = {
        "train": [with_threads(1, shared.train), *(with_threads(count, loops.train) for count in counts)],
        "measure": [with_threads(1, shared.measure), *(with_threads(count, loops.evaluate) for count in counts)],
    }
    found = {name: paired(work, options.repetitions) for name, work in ways.items()}
    speed_ups = [loop / own for own, loop in found["train"]]
    medians = {name: [statistics.median(side) for side in zip(*pairs, strict=True)] for name, pairs in found.items()}
    return Row(
        name=f"{options.hosts} x {shape.name}",
        executor=shared.taken,
        train_loops_ms=medians["train"][1],
        train_ms=medians["train"][0],
        speed_up=statistics.median(speed_ups),
        lowest=min(speed_ups),
        highest=max(speed_ups),
        evaluation_ms=medians["measure"][1],
        coalitions_ms=medians["measure"][0],
        coalitions=statistics.median(own / loop for own, loop in found["measure"]),
    )


def paired(work: list[Callable[[], object]], repetitions: int) -> list[tuple[float, float]]:
    """Milliseconds of the first way and of the fastest other one, in each repetition; the order alternates."""
    for one in work:
        one()
    pairs = []
    for i in range(repetitions):
        ms = np.zeros(len(work))
        for j in range(len(work))[:: 1 if i % 2 else -1]:
            ms[j] = wall_ms(work[j])
        pairs.append((float(ms[0]), float(ms[1:].min())))
    return pairs


def complaints(results: dict[str, Row], options: Options) -> list[str]:
    """The limits that are missed."""
    found = []
    for kind, result in results.items():
        least = options.min_transformer if kind.startswith("text") else options.min_native
        if result.speed_up < least:
            found.append(f"{result.name}: training is {result.speed_up:.2f} times as fast; at least {least:g}")
        if result.coalitions > options.max_coalitions:
            most = options.max_coalitions
            found.append(f"{result.name}: all coalitions take {result.coalitions:.2f} evaluations; at most {most:g}")
    return found


def main(options: Options) -> int:
    """Measure and print; returns 1 if a limit is missed."""
    keep_freed_memory()
    shapes = {"images": IMAGES, "images, batch 512": LARGE_BATCH, "text": TEXT, "text with dropout": TEXT_DROPOUT}
    results = {kind: compared(shape, options) for kind, shape in shapes.items()}
    machine = environment(CPU)
    console = Console(width=140)
    console.print(table_of(results, machine))
    if options.json is not None:
        listed = [asdict(result) for result in results.values()]
        options.json.write_text(json.dumps({"environment": machine, "rows": listed}, indent=2) + "\n")
    missed = complaints(results, options)
    for line in missed:
        print(f"missed: {line} is required.", file=sys.stderr)
    return 1 if missed else 0


def table_of(results: dict[str, Row], machine: dict[str, str | int]) -> Table:
    """The results as a table."""
    page = Table(title="esper against plain loops, wall time", caption=", ".join(map(str, machine.values())))
    page.add_column("hosts")
    for column in ("executor", "loops ms", "esper ms", "times faster", "range", "plain evaluation ms", "8 coalitions"):
        page.add_column(column, justify="right")
    for r in results.values():
        spread = f"{r.lowest:.2f} to {r.highest:.2f}"
        times = (f"{r.train_loops_ms:,.0f}", f"{r.train_ms:,.0f}", f"{r.speed_up:.2f}", spread)
        page.add_row(r.name, r.executor, *times, f"{r.evaluation_ms:,.0f}", f"{r.coalitions:.2f} evaluations")
    return page


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
