"""An executor beside the streamed one, on the same seeds: passes, weights, measurements, whole runs.

The streamed result of a case is computed once for all executors.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.leyline.lifecycle import Algorithm, AlphaMode, HostFamily, LifecycleOp, SeedStage
from esper.leyline.tensor_dataclass import named_tensors
from esper.tasks.datasets import Dataset, Split
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from tiny import SLOTS, Bench, adamw, dataset, engine, same_tree
from toys import ToyClient, script

ALL = [registry.blueprint_at(i, HostFamily.CNN).name for i in registry.selectable(HostFamily.CNN)]
CONDITIONS = [
    (SeedStage.TRAINING, 0.0),
    (SeedStage.BLENDING, 0.4),
    (SeedStage.HOLDING, 1.0),
    (SeedStage.FOSSILIZED, 1.0),
]
ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)


def fused(data):
    """All hosts at once, in measurements too."""
    return FusedExecutor(data, measures_together=True)


EXECUTORS = {"streamed": StreamedExecutor, "fused": fused, "native": NativeExecutor}


def bench_of(executor: str, num_envs: int = 1, **settings: Any) -> Bench:
    """A bench whose hosts this executor runs."""
    bench = Bench(num_envs, **settings)
    bench.executor = EXECUTORS[executor](bench.executor.data)
    return bench


def of_each_split(data: Dataset, change: Callable[[Split], Split]) -> Dataset:
    """A data set with other splits."""
    return replace(data, **{name: change(data.split(name)) for name in ("train", "val", "test")})


def host_of(model: Callable[[], nn.Module], x: Tensor | None = None) -> ModuleHost:
    """A user's network with the usual slots, for inputs like x [8 or more, ...]; None: the tiny images."""
    x = dataset().train.x if x is None else x
    return ModuleHostSpec.of(model, SLOTS, x[:8]).build(SLOTS, x[:1])


class Case(NamedTuple):
    """What grows on N hosts, for how many epochs, with which settings of the bench."""

    grow: Callable[[Bench], None]
    num_envs: int = 3
    epochs: int = 2
    settings: tuple[tuple[str, Any], ...] = ()

    def bench(self) -> Bench:
        bench = Bench(self.num_envs, **dict(self.settings))
        self.grow(bench)
        return bench


TWELVE = len(CONDITIONS) * len(ALGORITHMS)


def in_every_stage_and_blend(blueprint: str, slot: str = "r0c1") -> Callable[[Bench], None]:
    """Grows the same seed in twelve hosts, each in another stage or with another blend."""

    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(itertools.product(CONDITIONS, ALGORITHMS)):
            bench.grow(slot, blueprint, stage, alpha=alpha, algorithm=algorithm, hosts=[n])

    return grow


def grow_different_seeds(bench):
    """In five hosts, so that no two of them are alike."""
    bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[0, 3])
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0, hosts=[2])
    bench.grow("r0c0", "norm", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.MULTIPLY, hosts=[4])
    bench.grow("r0c1", "attention", SeedStage.FOSSILIZED, alpha=1.0, algorithm=Algorithm.GATE, hosts=[0, 1, 4])
    bench.grow("r1c0", "bottleneck", SeedStage.HOLDING, alpha=1.0, hosts=[0, 2, 4])
    bench.grow("r1c0", "depthwise", SeedStage.TRAINING, algorithm=Algorithm.GATE, hosts=[3])


def grow_frozen(bench):
    """The seed of host 1 keeps its weights while the others of its kind learn."""
    bench.grow("r0c0", "conv_small", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.GATE)
    bench.set("r0c0", hosts=[1], alpha_mode=int(AlphaMode.DOWN))


def each_of(blueprints: list[str]) -> Callable[[Bench], None]:
    """Grows two of these blueprints in each of as many hosts, all of them in both slots."""

    def grow(bench):
        for n, name in enumerate(blueprints):
            stage, alpha = CONDITIONS[n % 4]
            bench.grow("r0c0", name, stage, alpha=alpha, algorithm=ALGORITHMS[n % 3], hosts=[n])
            algorithm = ALGORITHMS[n // 3 % 3]
            bench.grow("r0c1", blueprints[n - 1], SeedStage.HOLDING, alpha=0.7, algorithm=algorithm, hosts=[n])

    return grow


CASES = {
    **{name: Case(in_every_stage_and_blend(name), TWELVE, epochs=1) for name in ("conv_light", "norm", "attention")},
    "every blueprint": Case(each_of(ALL), len(ALL)),
    "different seeds": Case(grow_different_seeds, num_envs=5),
    "two moments": Case(grow_different_seeds, num_envs=5, settings=(("optimizer", adamw()),)),
    "a frozen seed": Case(grow_frozen),
}


def same_pass(a, b, atol=2e-5):
    for (name, x), (_, y) in zip(named_tensors(a), named_tensors(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-4, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")


class Streamed(NamedTuple):
    """The hosts before training, the passes, the hosts after them, and what was measured."""

    start: dict[str, torch.Tensor]
    passes: list[Any]
    end: dict[str, torch.Tensor]
    found: Any
    measured: Any
    committed: Any


def streamed(case: Case) -> Streamed:
    """The case host by host."""
    bench = case.bench()
    start = {name: x.clone() for name, x in bench.population.state_dict().items()}
    passes = [bench.executor.train_epoch(t, bench.slots) for t in range(1, case.epochs + 1)]
    end = {name: x.clone() for name, x in bench.population.state_dict().items()}
    found, measured = bench.measure(fossils_as_players=True)
    return Streamed(start, passes, end, found, measured, bench.executor.committed("test", bench.slots))


streamed_once = cache(streamed)
"""For the cases of the table."""


def compare(wrap, grow, *, num_envs=3, epochs=2, **settings):
    """Train and measure what `grow` grows as `wrap` says, and compare all with the streamed executor."""
    case = Case(grow, num_envs, epochs, tuple(settings.items()))
    bench = case.bench()  # before training changes a host that both are made of
    compare_bench(wrap, bench, streamed(case), epochs)


def compare_case(wrap, case: Case):
    """The same for a case of the table, which is streamed once for all executors."""
    compare_bench(wrap, case.bench(), streamed_once(case), case.epochs)


def compare_bench(wrap, bench: Bench, want: Streamed, epochs: int):
    """Train and measure a bench as `wrap` says; `want` is the same streamed."""
    assert same_tree(bench.population.state_dict(), want.start), "they start with other weights"
    executor = wrap(bench.executor.data)
    for t, expected in enumerate(want.passes, start=1):
        same_pass(executor.train_epoch(t, bench.slots), expected)
    for name, value in want.end.items():
        torch.testing.assert_close(bench.population.state_dict()[name], value, atol=2e-5, rtol=1e-3, msg=name)
    valid = want.found.valid
    executor.apply_structure(bench.structure(want.found))
    outputs = executor.evaluate(epochs, bench.slots, want.found)
    torch.testing.assert_close(outputs.accuracy[valid], want.measured.accuracy[valid], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(outputs.loss, want.measured.loss, atol=1e-4, rtol=1e-4)
    committed = executor.committed("test", bench.slots)
    torch.testing.assert_close(committed.accuracy, want.committed.accuracy, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(committed.loss, want.committed.loss, atol=1e-4, rtol=1e-4)


@cache
def whole_run(executor):
    """Reports of the steps, test accuracies and state of an episode in which seeds grow up and become permanent."""
    germinate = (0, 1, 2, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    second = (2, 4, 1, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    fossilize = (0, 0, 2, 1, 2, 0, 0, int(LifecycleOp.FOSSILIZE))
    plan = {1: germinate, 4: second, 7: {0: fossilize, 2: fossilize}}
    seen = []
    run = engine(3, 9, executor=executor, on_step=seen.append)
    client = ToyClient(run.spec, script(3, 9, plan))
    run.reset(client, 0)
    run.rollout(client)
    return seen, run.test(), run.executor.state_dict()


def compare_whole_runs(executor):
    """The same episode streamed and otherwise."""
    want, outputs = whole_run("streamed")[0], whole_run(executor)[0]
    for a, b in zip(want, outputs, strict=True):
        assert np.array_equal(a.stage, b.stage)
        np.testing.assert_allclose(a.val_loss, b.val_loss, atol=2e-3)
        np.testing.assert_allclose(a.train_loss, b.train_loss, atol=2e-3)
    assert outputs[-1].stage[0].tolist()[0] == SeedStage.FOSSILIZED
