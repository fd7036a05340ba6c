"""Esper on networks that nobody has prepared, against training loops in plain PyTorch.

A control step is 8 batches of training and a validation of 256 examples for each of N hosts, here on the whole network
with its seeds. Both sides start from the same weights and take the same examples in the same order, with the same
optimizer and clipping; the losses of their first step are compared. Plain is the fastest of these loops, with one
thread or with all:

    eager      as one writes it
    tuned      fused optimizer step, images and networks in channels_last (but not with a seed that begins with a norm)
    compiled   the same by torch.compile, on request

All run in turn in one process; a ratio is taken within each repetition, and the result is the median.

    python benchmarks/own_networks.py                                    all networks, executor auto
    python benchmarks/own_networks.py --only resnet --executors native streamed --compile
    python benchmarks/own_networks.py --quick                            a minute, to see that it works
    python benchmarks/own_networks.py --device cuda --hosts 16           on a GPU
    python benchmarks/own_networks.py --programs                         how long a program for a new structure takes
"""

import copy
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import Population
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.leyline.messages import Objective, SlotState
from esper.leyline.tensor_dataclass import replace as changed
from esper.leyline.tensor_dataclass import tree_map
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import Classification, Custom, NextToken
from esper.tasks.registry import TaskSpec
from esper.telemetry.machine import environment
from esper.tolaria.build import build_engine
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.engine_config import EngineConfig, ExecutorChoice
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import Executor, Structure, empty_structure
from esper.tolaria.runtime import choose_device, keep_freed_memory, usable_cores
from own_nets import GPT, LSTM, MLP, MobileNet, ResNet8, UNet, pixel_loss
from peak import flop_of_training, fma_peak
from plain_nets import Data, Grown, GrownBlock, Loss, PlainLoops

CPU = torch.device("cpu")
CLASSES, VOCABULARY = 10, 65
_NEAR = 1.1
"""Loops that took at most so many times as long as the fastest one when they were tried are measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with its data.

    Attributes:
        slots: of the network, in action order. seeds: a blueprint for each, if they are planted.
        x: shape of an input; of tokens if there is one axis and `tokens`. draws: whether training is random.
        channels: of the features at each slot.
    """

    name: str
    model: Callable[[], nn.Module]
    slots: tuple[str, ...]
    objective: Objective
    x: tuple[int, ...]
    batch: int
    hosts: int = 8
    tokens: bool = False
    draws: bool = False
    seeds: tuple[str, ...] = ()
    channels: tuple[int, ...] = ()

    @property
    def images(self) -> bool:
        """Whether inputs are [B, C, H, W]."""
        return len(self.x) == 3

    @property
    def loss(self) -> Loss | None:
        """The loss of a loop, if it is not cross-entropy."""
        own = self.objective
        return (lambda outputs, targets: own.loss(outputs, targets).mean()) if isinstance(own, Custom) else None

    def split(self, count: int, seed: int) -> Split:
        """Random examples."""
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            text = torch.randint(VOCABULARY, (count, self.x[0] + 1), generator=generator)
            return Split(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        x = torch.randn(count, *self.x, generator=generator)
        if isinstance(self.objective, Custom):
            return Split(x, (x > 0).float())
        return Split(x, torch.arange(count) % CLASSES)


def cases() -> list[Case]:
    """All of them."""
    layers, classes = ("layer1", "layer2", "layer3"), Classification(CLASSES)
    found = []
    for width in (8, 16):
        for batch in (32, 128):
            plain = Case(
                name=f"ResNet-8, width {width}, batch {batch}", model=partial(ResNet8, width), slots=layers,
                objective=classes, x=(3, 32, 32), batch=batch, channels=(width, 2 * width, 4 * width),
            )  # fmt: skip
            seeded = replace(plain, name=f"{plain.name}, 3 seeds", seeds=("conv_light", "depthwise", "norm"))
            found += [plain, seeded]
    for batch in (32, 128):
        found.append(Case(
            name=f"MobileNet, batch {batch}", model=MobileNet, slots=("layer1", "layer3"), objective=classes,
            x=(3, 32, 32), batch=batch,
        ))  # fmt: skip
    for batch in (32, 128):
        found.append(Case(
            name=f"MLP 64-128-128-10, batch {batch}", model=MLP, slots=("layers.0",), objective=classes, x=(64,),
            batch=batch, hosts=64,
        ))  # fmt: skip
    for dropout in (0.0, 0.1):
        for batch in (16, 32):
            found.append(Case(
                name=f"GPT 4 x 64, dropout {dropout:g}, batch {batch}", model=partial(GPT, dropout),
                slots=("h.1", "h.3"), objective=NextToken(VOCABULARY), x=(128,), batch=batch, tokens=True,
                draws=dropout > 0,
            ))  # fmt: skip
    found.append(Case(
        name="MLP 64-128-128-64, own loss, batch 32", model=partial(MLP, (64, 128, 128, 64)), slots=("layers.0",),
        objective=Custom(loss=pixel_loss, blind_loss=math.log(2)), x=(64,), batch=32, hosts=64,
    ))  # fmt: skip
    found.append(Case(
        name="U-Net, own loss, batch 32", model=UNet, slots=("down1", "middle"),
        objective=Custom(loss=pixel_loss, blind_loss=math.log(2)), x=(1, 32, 32), batch=32,
    ))  # fmt: skip
    found.append(Case(
        name="LSTM of 64, batch 32", model=LSTM, slots=("norm",), objective=NextToken(VOCABULARY), x=(64,), batch=32,
        tokens=True,
    ))  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare esper with plain training loops on users' networks."""

    only: tuple[str, ...] = ()
    """Networks whose names contain one of these, in any case of letters; all if not given."""
    executors: tuple[ExecutorChoice, ...] = ("auto",)
    """Those of esper."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    hosts: int | None = None
    """Number of hosts; that of each case if not given."""
    compile: bool = False
    """Loops by torch.compile as well, which takes minutes."""
    batches: int = 8
    """Of training, in a control step."""
    val_examples: int = 256
    """Of a validation."""
    repetitions: int = 5
    """Measurements of each; a first one is not counted."""
    threads: int = usable_cores()
    """Threads of the loops, and those that esper takes."""
    quick: bool = False
    """One repetition of a few short cases."""
    programs: bool = False
    """Measure how long programs of new structures take instead."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one network: milliseconds and CPU seconds of a control step, and ratios within a repetition."""

    name: str
    executor: str
    plain: str
    plain_ms: float
    esper_ms: float
    ratio: float
    lowest: float
    highest: float
    plain_cpu: float
    esper_cpu: float


# -- esper -------------------------------------------------------------------------------------------------------------


def task_of(case: Case, options: Options) -> TaskSpec:
    """The task; it is not registered."""
    train, val = case.split(case.batch * options.batches, 0), case.split(options.val_examples, 1)
    spec = ModuleHostSpec.of(case.model, case.slots, train.x[:8])
    data = Dataset(
        identity={"name": case.name}, train=train, val=val, test=val,
        num_classes=CLASSES if isinstance(case.objective, Classification) else 0,
    )  # fmt: skip
    return TaskSpec(
        name=case.name, description="Random examples, for benchmarks.", family=spec.family, host=spec,
        load=lambda folder, seed: data, enabled=case.slots, objective=case.objective, episode_length=16,
        batch_train=case.batch, batch_val=min(128, options.val_examples), min_training_epochs=1,
        optimizer=OptimizerSpec(kind="adamw", host_lr=1e-3, seed_lr=1e-3),
    )  # fmt: skip


@dataclass(frozen=True)
class Hosts:
    """The hosts of a case under one executor."""

    executor: Executor
    taken: str
    slots: SlotState
    full: Coalitions

    @classmethod
    def build(cls, case: Case, task: TaskSpec, executor: ExecutorChoice, device: torch.device = CPU) -> "Hosts":
        """Episode 0, with the seeds of the case in their slots."""
        config = EngineConfig(num_envs=case.hosts, slots=task.enabled, episode_length=8, executor=executor)
        assert task.load is not None
        torch.set_num_threads(1)
        engine = build_engine(config, task, task.load(None, 0).to(device), device)
        engine.executor.reset(0)
        slots, full, structure = planted(case, device)
        engine.executor.apply_structure(structure)
        return cls(engine.executor, engine.config.executor, slots, full)

    def train(self) -> Tensor:
        """One epoch; the loss of each host."""
        torch.set_num_threads(1)
        return self.executor.train_epoch(1, self.slots).loss

    def step(self) -> tuple[Tensor, Tensor]:
        """One epoch and a validation; the losses of each host."""
        return self.train(), self.executor.evaluate(1, self.slots, self.full).loss


def planted(case: Case, device: torch.device) -> tuple[SlotState, Coalitions, Structure]:
    """The seeds of a case in every host, added in full; and the whole network as the one coalition that is measured."""
    n, s = case.hosts, len(case.slots)
    holds = np.full((n, s), bool(case.seeds))
    stage = np.where(holds, SeedStage.HOLDING, SeedStage.DORMANT).astype(np.int64)
    alpha = holds.astype(np.float32)
    names = registry.names()
    blueprint = np.tile([names.index(name) for name in case.seeds] or [-1] * s, (n, 1))
    found = enumerate_coalitions(torch.from_numpy(stage), torch.from_numpy(holds))
    full = changed(found, sets=found.sets[:, :1], valid=found.valid[:, :1])
    structure = replace(
        empty_structure(n, s), stage=stage, blueprint=blueprint, algorithm=np.full((n, s), int(Algorithm.ADD)),
        alpha=alpha, germinated=holds, sets=full.sets.numpy(), sets_valid=full.valid.numpy(),
    )  # fmt: skip
    fields = {name: torch.from_numpy(getattr(structure, name)) for name in ("stage", "blueprint", "algorithm", "alpha")}
    slots = changed(empty_slots(n, s, CPU), **fields)
    return tree_map(lambda x: x.to(device), slots), tree_map(lambda x: x.to(device), full), structure


# -- plain -------------------------------------------------------------------------------------------------------------


def nets_of(case: Case, population: Population) -> list[nn.Module]:
    """Plain networks with the weights of the hosts and of their seeds."""
    grown = [
        Grown(slot=slot, blueprint=name, channels=channels, blend="ADD", alpha=1.0)
        for slot, name, channels in zip(case.slots, case.seeds, case.channels, strict=False)
    ]
    nets = []
    for n in range(case.hosts):
        net = case.model()
        for g in grown:
            net.seeds[g.slot] = GrownBlock(g, images=True)
        found = {
            name.removeprefix("network."): value
            for name, value in population.host_kind.template.parameters.unpack(population.host.params[n]).items()
        }
        for s, g in enumerate(grown):
            kind = population.seed_kinds[g.channels, registry.names().index(g.blueprint)]
            row = population.seeds.params[n * population.num_slots + s]
            for name, value in kind.template.parameters.unpack(row[: kind.template.parameters.total]).items():
                found[f"seeds.{g.slot}.seed.{name}"] = value
        net.to(population.device)
        own = dict(net.named_parameters())
        assert own.keys() == found.keys(), sorted(own.keys() ^ found.keys())
        with torch.no_grad():
            for name, value in found.items():
                own[name].copy_(value)
        nets.append(net)
    return nets


def ways_of(case: Case, task: TaskSpec, executor: NetworkExecutor, options: Options) -> dict[str, Callable[[], object]]:
    """Each way of training and measuring the same in plain PyTorch."""
    data, order = executor.data, executor.data.train_batches(1).order
    assert order is not None
    device = executor.population.device
    splits = ((split.x.to(device), split.y.to(device)) for split in (data.dataset.train, data.dataset.val))
    plain = Data(
        train=next(splits), val=next(splits), orders=order.to(device), batch_train=case.batch, batch_val=task.batch_val
    )
    nets = nets_of(case, data.population)
    # PyTorch's group norm crashes on such features if their gradient is not needed, as with a seed that begins with it
    last = case.images and "norm" not in case.seeds
    kinds = {"eager": {"fused": False}, "tuned": {"channels_last": last}}
    if options.compile:
        kinds["compiled"] = {"channels_last": last, "compiled": True}
    ways = {}
    for name, settings in kinds.items():
        for threads in sorted({1, options.threads} if device == CPU else {1}):
            loops = PlainLoops(
                [copy.deepcopy(net) for net in nets], plain, adamw=True, lr=task.optimizer.host_lr, loss=case.loss,
                **settings,
            )  # fmt: skip
            place = f"{threads} thread{'s' * (threads > 1)}" if device == CPU else "GPU"
            ways[f"{name}, {place}"] = partial(_plain_step, loops, threads)
    return ways


def _plain_step(loops: PlainLoops, threads: int) -> tuple[Tensor, Tensor]:
    """An epoch and a validation of all networks; their losses."""
    torch.set_num_threads(threads)
    train = loops.train()
    return torch.tensor(train), torch.tensor([loss for loss, _ in loops.evaluate()])


# -- both --------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall milliseconds, the work of a GPU included, and CPU seconds."""
    cpu, began = time.process_time(), time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - began)
    return ms, time.process_time() - cpu


def check_same(case: Case, name: str, found: object, want: object) -> None:
    """Raise AssertionError unless two ways computed the same: losses of training, then of the validation after it."""
    assert isinstance(found, tuple)
    assert isinstance(want, tuple)
    coarse = case.draws or torch.cuda.is_initialized()  # masks differ; convolutions of a GPU round to TF32
    limits = {"training": 0.02 if coarse else 2e-4, "validation": 0.02 if coarse else 2e-3}
    for (what, limit), a, b in zip(limits.items(), found, want, strict=True):
        off = float(((a.cpu() - b.cpu()) / b.cpu()).abs().max())
        assert off < limit, f"{case.name}: the {what} losses of {name} are off by {off:.1e}"


def compared(case: Case, executors: tuple[ExecutorChoice, ...], options: Options) -> list[Row]:
    """Each executor against the fastest loop."""
    task = task_of(case, options)
    device = choose_device(options.device)
    alone = Hosts.build(case, task, "streamed", device)
    assert isinstance(alone.executor, NetworkExecutor)
    plain = ways_of(case, task, alone.executor, options)
    losses, tried = {}, {}
    for name, way in plain.items():
        losses[name] = way()
        tried[name] = timed(way)[0]
    want = losses[next(iter(plain))]
    for name, found in losses.items():
        check_same(case, name, found, want)
    kept = {name: way for name, way in plain.items() if tried[name] <= _NEAR * min(tried.values())}
    rows = []
    for executor in executors:
        try:
            hosts = Hosts.build(case, task, executor, device)
        except ConfigError as error:
            print(f"{case.name}: {error}", file=sys.stderr, flush=True)
            continue
        check_same(case, hosts.taken, hosts.step(), want)
        ways: dict[str, Callable[[], object]] = {"esper": hosts.step, **kept}
        found = []
        for i in range(options.repetitions + 1):
            names = list(ways)[:: 1 if i % 2 else -1]
            times = {name: timed(ways[name]) for name in names}
            found += [times] if i or options.quick else []
        best = [min(kept, key=lambda name, times=times: times[name][0]) for times in found]
        ratios = [times[name][0] / times["esper"][0] for times, name in zip(found, best, strict=True)]
        rows.append(Row(
            name=f"{case.hosts} x {case.name}", executor=hosts.taken, plain=statistics.mode(best),
            plain_ms=statistics.median(times[name][0] for times, name in zip(found, best, strict=True)),
            esper_ms=statistics.median(times["esper"][0] for times in found), ratio=statistics.median(ratios),
            lowest=min(ratios), highest=max(ratios),
            plain_cpu=statistics.median(times[name][1] for times, name in zip(found, best, strict=True)),
            esper_cpu=statistics.median(times["esper"][1] for times in found),
        ))  # fmt: skip
    return rows


def share_of_peak(case: Case, options: Options, executor: ExecutorChoice) -> str:
    """How much of what a core can do esper does in training, with one worker."""
    task = task_of(case, options)
    hosts = Hosts.build(case, task, executor)
    net, x, y = case.model(), *((of := case.split(case.batch, 0)).x, of.y)
    operations = flop_of_training(lambda: F.cross_entropy(net(x), y).backward()) * case.hosts * options.batches
    hosts.train()
    seconds = min(timed(hosts.train)[1] for _ in range(max(2, options.repetitions)))
    peak = fma_peak()
    rate = operations / seconds / 1e9
    share = f"{rate:.1f} GFLOP/s of one core in training, {100 * rate / peak:.0f} % of its peak of {peak:.0f}"
    return f"{case.hosts} x {case.name}, {hosts.taken}: {share}"


def writing_ms(case: Case, options: Options, count: int = 100) -> str:
    """How much CPU time it takes to write the program of a new structure."""
    from esper.tolaria.executors.native.executor import NativeExecutor

    hosts = Hosts.build(case, task_of(case, options), "native")
    assert isinstance(hosts.executor, NativeExecutor)
    networks, population, r = hosts.executor._networks, hosts.executor.population, random.Random(0)
    known = [index for _, index in population.seed_kinds if registry.names()[index] not in networks.refused]
    times = []
    for _ in range(count):
        code = np.full((len(case.slots), 5), -1, dtype=np.int64)
        for row in code:
            if r.random() < 0.8:
                algorithm, trainable = r.choice((Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)), r.random() < 0.7
                row[:] = r.choice(known), algorithm, True, trainable, trainable and algorithm == Algorithm.GATE
        began = time.process_time()
        networks._write_training(code.tobytes())
        times.append(1e3 * (time.process_time() - began))
    bare = np.full((len(case.slots), 5), -1, dtype=np.int64).tobytes()
    began = time.process_time()
    networks._write_training(bare)
    alone = 1e3 * (time.process_time() - began)
    return (
        f"{case.name}: the program of a new structure takes {statistics.median(times):.1f} ms (median of {count}; "
        f"largest {max(times):.1f}; without seeds {alone:.1f})"
    )


def markdown(rows: list[Row], machine: dict[str, str | int]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| hosts | executor | fastest loop | loop ms | esper ms | times faster | range | loop CPU s | esper CPU s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        numbers = f"{r.plain_ms:,.0f} | {r.esper_ms:,.0f} | {r.ratio:.2f} | {r.lowest:.2f} to {r.highest:.2f}"
        lines.append(f"| {r.name} | {r.executor} | {r.plain} | {numbers} | {r.plain_cpu:.2f} | {r.esper_cpu:.2f} |")
    return "\n".join([*lines, "", ", ".join(f"{name} {value}" for name, value in machine.items())])


def main(options: Options) -> int:
    """Measure and print."""
    keep_freed_memory()
    torch._dynamo.config.cache_size_limit = 256
    if options.quick:
        options = replace(options, repetitions=1, batches=2, val_examples=64)
    chosen = [
        replace(case, hosts=2 if options.quick else options.hosts or case.hosts) for case in cases()
        if not options.only or any(word.lower() in case.name.lower() for word in options.only)
    ]  # fmt: skip
    if options.quick and not options.only:
        chosen = [
            case for case in chosen if case.batch <= 32 and "width 16" not in case.name and "batch 32" in case.name
        ]
    if options.programs:
        for case in chosen:
            if case.batch == 32 and not case.seeds and case.name.startswith(("ResNet", "GPT", "MLP", "Mobile")):
                print(writing_ms(case, options), flush=True)
        return 0
    rows = []
    for case in chosen:
        for row in compared(case, options.executors, options):
            rows.append(row)
            times = f"{row.esper_ms:,.0f} ms, {row.ratio:.2f} times as fast ({row.lowest:.2f} to {row.highest:.2f})"
            print(f"{row.name}, {row.executor}: {times} as {row.plain}", file=sys.stderr, flush=True)
    machine = environment(choose_device(options.device))
    print(markdown(rows, {**machine, "threads": options.threads}))
    for case in chosen:
        if options.device == "cpu" and case.name.startswith("ResNet-8") and not case.seeds:
            for executor in options.executors:
                print(share_of_peak(case, options, executor))
    if options.json is not None:
        found = {"environment": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
