"""The static executor gives what the others give: births, losses, gradients, weights, measurements, whole runs."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError
from esper.leyline.stages import Algorithm, AlphaMode, HostFamily, SeedStage
from esper.leyline.tensor_dataclass import named_tensors
from esper.tasks.objectives import MeanSquaredError
from esper.tasks.presets import NULL
from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.static.executor import StaticExecutor
from esper.tolaria.runtime import HostReadCounter
from tiny import Bench, same_tree
from toys import ToyClient, action, script

Op, S = LifecycleOp, SeedStage
ALL = [registry.blueprint_at(i, HostFamily.CNN).name for i in registry.selectable(HostFamily.CNN)]
ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)
STAGES = ((S.TRAINING, 0.0), (S.BLENDING, 0.4), (S.HOLDING, 1.0), (S.FOSSILIZED, 1.0))


class StaticBench(Bench):
    """A bench whose hosts are run by the static executor."""

    def __init__(self, num_envs: int = 1, **settings: object) -> None:
        super().__init__(num_envs, **settings)
        self.executor = StaticExecutor(self.executor.data)


class FusedBench(Bench):
    """A bench whose hosts are run by the fused executor."""

    def __init__(self, num_envs: int = 1, **settings: object) -> None:
        super().__init__(num_envs, **settings)
        self.executor = FusedExecutor(self.executor.data, measures_together=True)


def compare(grow, *, num_envs=3, epochs=2, reference=Bench, atol=2e-5, **settings):
    """Grow the same seeds on two benches, train and measure both, and compare everything."""
    known, static = reference(num_envs, **settings), StaticBench(num_envs, **settings)
    for bench in (known, static):
        grow(bench)
    assert same_tree(static.population.state_dict(), known.population.state_dict()), "born otherwise"
    for _ in range(epochs):
        outputs, want = static.train(), known.train()
        for (name, x), (_, y) in zip(named_tensors(outputs), named_tensors(want), strict=True):
            torch.testing.assert_close(x, y, atol=atol, rtol=1e-4, equal_nan=True, msg=lambda text, n=name: n + text)
    for name, want in known.population.state_dict().items():
        torch.testing.assert_close(static.population.state_dict()[name], want, atol=atol, rtol=1e-3, msg=name)
    (found, outputs), (_, want) = (bench.measure(fossils_as_players=True) for bench in (static, known))
    torch.testing.assert_close(outputs.accuracy[found.valid], want.accuracy[found.valid], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(outputs.loss, want.loss, atol=1e-4, rtol=1e-4)
    test = static.executor.committed("test", static.slots).accuracy[:, 0]
    torch.testing.assert_close(test, known.executor.committed("test", known.slots).accuracy[:, 0], atol=1e-4, rtol=0.0)
    return static


@pytest.mark.parametrize("blueprint", ALL)
def test_every_blueprint_in_every_stage_and_blend_trains_and_measures_as_host_by_host(blueprint):
    ways = list(itertools.product(STAGES, ALGORITHMS))

    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(ways):
            bench.grow("r0c1", blueprint, stage, alpha=alpha, algorithm=algorithm, hosts=[n])

    compare(grow, num_envs=len(ways), epochs=1)


def mixed(bench):
    """A seed in every third place; neighbours differ in all, and one of each kind falls."""
    for n in range(bench.population.num_envs):
        for s, slot in enumerate(tiny.SLOTS):
            number = 3 * n + s
            if number % 4 == 3:
                continue
            stage, alpha = STAGES[number % 5 % 4]
            algorithm = ALGORITHMS[(number // 2) % 3]
            bench.grow(slot, ALL[number % len(ALL)], stage, alpha=alpha, algorithm=algorithm, hosts=[n])
            if number % 7 == 5 and alpha:
                bench.set(slot, [n], stage=int(S.BLENDING), alpha_mode=int(AlphaMode.DOWN))


@pytest.mark.slow
@pytest.mark.parametrize("reference", [Bench, FusedBench])
@pytest.mark.parametrize("num_envs", [1, 33])
def test_different_seeds_in_different_hosts_are_independent(num_envs, reference):
    compare(mixed, num_envs=num_envs, reference=reference, epochs=1)


def test_adamw_counts_the_steps_of_trained_rows_only():
    static = compare(mixed, num_envs=5, optimizer=tiny.adamw())
    steps = static.population.seeds.optimizer.steps.view(5, 3)
    assert {*steps.unique().tolist()} == {0, 6}


@pytest.mark.parametrize("stacked", [StaticBench, FusedBench])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_as_host_by_host(dtype, stacked):
    # rounding to 8 or 11 bits differs by kernel, so the losses agree to about as much
    def grow(bench):
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=Algorithm.GATE)
        bench.grow("r0c1", "norm", S.TRAINING)

    known, static = Bench(2, scaler_dtype=dtype), stacked(2, scaler_dtype=dtype)
    for bench in (known, static):
        grow(bench)
    outputs, want = static.train(2), known.train(2)
    torch.testing.assert_close(outputs.loss, want.loss, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(static.population.seeds.params, known.population.seeds.params, atol=5e-3, rtol=5e-2)
    assert torch.equal(static.executor.data.scaler.scale, known.executor.data.scaler.scale)


# -- to the bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
def test_unused_rows_and_the_padding_of_small_seeds_are_never_read(garbage):
    outputs = []
    for filler in (0.0, garbage):
        bench = StaticBench(3)
        bench.grow("r0c0", "conv_light", S.BLENDING, alpha=0.5, hosts=[0])
        bench.grow("r0c1", "norm", S.TRAINING, hosts=[1])
        seeds = bench.population.seeds.params
        widths = dict.fromkeys(range(9), 0)
        for slot, name, host in (("r0c0", "conv_light", 0), ("r0c1", "norm", 1)):
            kind = bench.population.seed_kinds[tiny.CHANNELS[slot], registry.names().index(name)]
            widths[bench.seed_row(slot, host)] = kind.template.parameters.total
        for row, width in widths.items():
            seeds[row, width:] = filler
        bench.population.gates.params.fill_(filler)
        passed = bench.train(2)
        _, measured = bench.measure()
        own = [seeds[row, :width].clone() for row, width in widths.items()]
        outputs.append((named_tensors(passed), named_tensors(measured), bench.population.host.tensors().items(), own))
        for row, width in widths.items():
            assert tiny.bit_equal(seeds[row, width:], torch.full_like(seeds[row, width:], filler))
    (*clean, clean_seeds), (*dirty, dirty_seeds) = outputs
    for a, b in zip(clean, dirty, strict=True):
        assert same_tree(dict(a), dict(b))
    for a, b in zip(clean_seeds, dirty_seeds, strict=True):
        assert tiny.bit_equal(a, b)


# -- blueprints of users --------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """Running statistics, a layer that no stacking rule knows, and an unused parameter."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.PReLU()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(h))


class Stacked(nn.Module):
    """Running statistics, and layers that are all known."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)  # the norm would take a bias away again
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(h))


class Negative(nn.Module):
    """No parameter at all."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return -0.1 * h


def blueprint_of(build, title):
    class Own(AbstractBlueprint):
        name = title
        family = HostFamily.CNN

        def build(self, channels: int) -> nn.Module:
            return build(channels)

    return Own()


@pytest.fixture
def own() -> Iterator[tuple[str, ...]]:
    kinds = {"test_normalized": Normalized, "test_stacked": Stacked, "test_negative": lambda channels: Negative()}
    for name, build in kinds.items():
        registry.register(blueprint_of(build, name))
    yield tuple(kinds)
    for name in reversed(kinds):
        registry.unregister(name)


@pytest.mark.parametrize("reference", [Bench, FusedBench])
def test_user_blueprints_run_among_the_others(own, reference):
    def grow(bench):
        for i, (stage, alpha) in enumerate(STAGES):
            for n, name in enumerate((*own, "conv_light"), start=4 * i):
                bench.grow("r0c1", name, stage, alpha=alpha, hosts=[n])
        bench.grow("r0c0", "test_stacked", S.HOLDING, alpha=1.0, hosts=[3])

    static = compare(grow, num_envs=17, epochs=1, reference=reference)
    statistics = static.population.seeds.buffers.view(17, 3, -1).any(dim=2)
    assert statistics.tolist() == [[n == 3, n < 16 and n % 4 in (0, 1), False] for n in range(17)]


# -- whole runs -----------------------------------------------------------------------------------------------------

LIFE = {
    1: action(Op.GERMINATE, slot=0, tempo=0, style=0),
    2: {2: action(Op.PRUNE, slot=0, alpha_speed=0)},
    4: action(Op.GERMINATE, slot=2, tempo=0, style=3, blueprint=4),
    7: {0: action(Op.FOSSILIZE, slot=0), 1: action(Op.PRUNE, slot=0, alpha_speed=1)},
}


STATIC = {"executor": "fused", "graph": "static"}


def run(settings, length=10):
    reports = []
    engine = tiny.engine(3, length, on_step=reports.append, rules={"sequential": False}, **settings)
    client = ToyClient(engine.spec, script(3, 10, LIFE)[:length])
    engine.reset(client, 0)
    return engine, client, reports


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_whole_run_is_the_same_with_a_static_and_a_dynamic_graph(executor):
    outputs = []
    for settings in ({"executor": executor}, STATIC):
        engine, client, reports = run(settings)
        stats = engine.rollout(client)
        outputs.append((reports, stats, engine.test(), engine.executor.state_dict()))
    (grouped, want, test, state), (static, found, static_test, static_state) = outputs
    assert [report.t for report in static] == list(range(1, 11))
    for a, b in zip(grouped, static, strict=True):
        for name in ("stage", "blueprint", "serial", "alpha", "effective_op", "op_moves", "tick_moves", "actions"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), (a.t, name)
        for name in ("val_loss", "train_loss"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-3)
    assert grouped[-1].stage[0, 0] == S.FOSSILIZED
    assert np.array_equal(found.ops, want.ops)
    torch.testing.assert_close(static_test, test, atol=5.1, rtol=0.0)  # one of 20 examples
    for name in ("population.seeds.params", "population.host.params"):
        torch.testing.assert_close(static_state[name], state[name], atol=5e-3, rtol=5e-2)
    # a seed that was pruned left nothing
    assert not static_state["population.seeds.params"].view(3, 3, -1)[2, 0].any()


@pytest.mark.slow
def test_each_host_of_a_run_equals_that_host_alone():
    whole, client, _ = run(STATIC, length=6)
    stats = whole.rollout(client)
    for host in range(3):
        alone = tiny.engine(1, 6, host_offset=host, rules={"sequential": False}, **STATIC)
        own = ToyClient(alone.spec, client.actions[:, host : host + 1])
        alone.reset(own, 0)
        assert alone.rollout(own).stage.tolist() == stats.stage[host : host + 1].tolist()
        for name, mine in alone.executor.population.state_dict().items():
            size = len(mine)
            theirs = whole.executor.population.state_dict()[name][host * size : (host + 1) * size]
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3, msg=name)


# -- reads, reports, stops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_steps_of_an_episode_read_nothing_and_its_end_reads_their_reports(listens):
    engine, client, reports = run(STATIC, length=6)
    if not listens:
        engine.on_step = None
    with HostReadCounter() as start:
        engine.reset(client, 1)
    assert (start.intended, start.unintended) == (0, [])
    for t in range(1, 7):
        with HostReadCounter() as reads:
            engine.step(client)
        assert (t, reads.intended, reads.unintended) == (t, 0, [])
        assert reports == []
    with HostReadCounter() as rest:
        stats = engine.rollout(client)
    # the reports of all steps, where somebody listens, and the statistics of the episode
    assert (rest.intended, rest.unintended) == (1 + listens, [])
    assert stats.cost.reads == listens
    assert [report.t for report in reports] == list(range(1, 7)) * listens


@pytest.mark.slow
def test_a_stopped_rollout_reports_its_steps_and_continues_to_the_same_bit():
    whole, client, wanted = run(STATIC)
    stats = whole.rollout(client)
    engine, other, reports = run(STATIC)
    assert engine.rollout(other, should_stop=lambda: engine.t == 4) is None
    assert [report.t for report in reports] == [1, 2, 3, 4]
    again = engine.rollout(other)
    for mine, theirs in zip(reports, wanted, strict=True):
        assert same_tree(*({k: torch.tensor(v) for k, v in vars(r).items()} for r in (mine, theirs))), mine.t
    assert again.returns.tolist() == stats.returns.tolist()
    assert same_tree(engine.state_dict(), whole.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 6])
def test_an_episode_continues_from_a_checkpoint_to_the_same_bit(at):
    whole, client, reports = run(STATIC)
    for _ in range(at):
        whole.step(client)
    saved, policy = whole.state_dict(), client.state_dict()
    assert [report.t for report in reports] == list(range(1, at + 1))  # saving tells what happened so far
    whole.rollout(client)
    other, again, resumed = run(STATIC)
    with HostReadCounter() as reads:
        other.load_state_dict(saved, again)
    assert reads.intended == 0
    again.load_state_dict(policy)
    other.rollout(again)
    assert same_tree(other.state_dict(), whole.state_dict())
    for mine, theirs in zip(resumed, reports[at:], strict=True):
        assert same_tree(*({k: torch.tensor(v) for k, v in vars(r).items()} for r in (mine, theirs))), mine.t


def test_a_checkpoint_of_a_dynamic_graph_continues_with_a_static_one():
    grouped, client, _ = run({"executor": "fused"})
    for _ in range(5):
        grouped.step(client)
    saved, policy = grouped.state_dict(), client.state_dict()
    want = grouped.rollout(client)
    static, other, _ = run(STATIC)
    static.load_state_dict(saved, other)
    other.load_state_dict(policy)
    stats = static.rollout(other)
    assert np.array_equal(stats.stage, want.stage)
    for name, x in grouped.executor.state_dict().items():
        torch.testing.assert_close(static.executor.state_dict()[name], x, atol=5e-3, rtol=5e-2, msg=name)


def test_a_listener_that_raises_loses_one_report_and_nothing_else():
    engine, client, _ = run(STATIC)
    reported = []

    def listen(report):
        if report.t == 3 and not reported.count(-3):
            reported.append(-3)
            raise RuntimeError("the disk is full")
        reported.append(report.t)

    engine.on_step = listen
    with pytest.raises(RuntimeError, match="disk"):
        engine.rollout(client)
    assert reported == [1, 2, -3]
    engine.apply_structure()
    assert reported == [1, 2, -3, *range(4, 11)]
    assert engine.rollout(client).cost.steps == 0


# -- settings -------------------------------------------------------------------------------------------------------


def test_a_static_graph_that_cannot_run_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"set executor to 'auto' or 'fused', or graph to 'dynamic'"):
        tiny.engine(graph="static", executor="streamed")
    with pytest.raises(ConfigError, match="'null' runs no networks"):
        tiny.engine(of=NULL, graph="static", executor="auto")
    with pytest.raises(ConfigError, match="CNNHost and Classification only, not CNNHost and MeanSquaredError"):
        StaticExecutor(Bench(1, objective=MeanSquaredError(1.0)).executor.data)


@pytest.mark.parametrize("executor", ["auto", "fused"])
def test_a_static_graph_runs_hosts_stacked_whatever_the_size_of_images(executor):
    engine = tiny.engine(graph="static", executor=executor)
    assert isinstance(engine.executor, StaticExecutor)
    assert (engine.config.executor, engine.config.graph) == ("fused", "static")
