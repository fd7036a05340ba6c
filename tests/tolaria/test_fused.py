"""The fused executor gives what the streamed one gives: losses, gradients, weights, measurements, whole runs."""

import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import registry
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError
from esper.leyline.record import named_tensors
from esper.leyline.stages import Algorithm, AlphaMode, SeedStage, Topology
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.fused_prefixes import buckets
from esper.tolaria.prefixes import plan_prefixes
from tiny import Bench, engine
from toys import ToyClient, script

ALL = [registry.blueprint_at(i, Topology.CNN).name for i in registry.selectable(Topology.CNN)]
HIDDEN, BLENDING, HOLDING, FOSSILIZED = (
    (SeedStage.TRAINING, 0.0),
    (SeedStage.BLENDING, 0.4),
    (SeedStage.HOLDING, 1.0),
    (SeedStage.FOSSILIZED, 1.0),
)


def same_pass(a, b, atol=2e-5):
    for (name, x), (_, y) in zip(named_tensors(a), named_tensors(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-4, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")


def population_state(bench):
    return {k: v.clone() for k, v in bench.population.state_dict().items()}


def compare(grow, *, num_envs=3, epochs=2):
    """Grow the same seeds on two benches, train one streamed and one fused, and compare everything."""
    streamed, other = Bench(num_envs), Bench(num_envs)
    for bench in (streamed, other):
        grow(bench)
    fused = FusedExecutor(other.executor, measures_together=True)
    for t in range(1, epochs + 1):
        told, want = fused.train_epoch(t, other.slots), streamed.executor.train_epoch(t, streamed.slots)
        same_pass(told, want)
    for name, want in population_state(streamed).items():
        torch.testing.assert_close(other.population.state_dict()[name], want, atol=2e-5, rtol=1e-3, msg=name)
    found, want = streamed.measure(fossils_as_players=True)
    other.executor.settle(other.structure(found))
    told = fused.evaluate(epochs, other.slots, found)
    torch.testing.assert_close(told.accuracy[found.valid], want.accuracy[found.valid], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(told.loss, want.loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.test(other.slots), streamed.executor.test(streamed.slots), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("algorithm", [Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE])
@pytest.mark.parametrize(("stage", "alpha"), [HIDDEN, BLENDING, HOLDING, FOSSILIZED])
@pytest.mark.parametrize("blueprint", ALL)
def test_every_blueprint_trains_and_measures_as_host_by_host(blueprint, stage, alpha, algorithm):
    compare(lambda bench: bench.grow("r0c1", blueprint, stage, alpha=alpha, algorithm=algorithm), epochs=1)


def test_different_seeds_in_different_hosts_do_not_meet():
    def grow(bench):
        bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[0, 3])
        bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0, hosts=[2])
        bench.grow("r0c0", "norm", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.MULTIPLY, hosts=[4])
        bench.grow("r0c1", "attention", SeedStage.FOSSILIZED, alpha=1.0, algorithm=Algorithm.GATE, hosts=[0, 1, 4])
        bench.grow("r1c0", "bottleneck", SeedStage.HOLDING, alpha=1.0, hosts=[0, 2, 4])
        bench.grow("r1c0", "depthwise", SeedStage.TRAINING, algorithm=Algorithm.GATE, hosts=[3])

    compare(grow, num_envs=5)


def test_a_frozen_seed_keeps_its_weights_while_the_others_of_its_kind_learn():
    def grow(bench):
        bench.grow("r0c0", "conv_small", SeedStage.BLENDING, alpha=0.5)
        bench.set("r0c0", hosts=[1], alpha_mode=int(AlphaMode.DOWN))

    compare(grow)


def test_one_host_alone_is_the_same_as_among_many():
    def grow(bench):
        bench.grow("r0c1", "conv_heavy", SeedStage.HOLDING, alpha=1.0)

    alone, many = Bench(1), Bench(6)
    for bench in (alone, many):
        grow(bench)
        FusedExecutor(bench.executor, measures_together=True).train_epoch(1, bench.slots)
    torch.testing.assert_close(many.population.host.params[:1], alone.population.host.params, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(many.population.seeds.params[1:2], alone.population.seeds.params[1:2])


def test_measuring_in_small_pieces_changes_no_count(monkeypatch):
    bench = Bench(3)
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0)
    bench.grow("r1c0", "conv_small", SeedStage.HOLDING, alpha=1.0, hosts=[0, 2])
    found = bench.coalitions()
    bench.executor.settle(bench.structure(found))
    fused = FusedExecutor(bench.executor, measures_together=True)
    whole = fused.evaluate(1, bench.slots, found)
    monkeypatch.setattr("esper.tolaria.executors.fused._CHUNK_FLOATS", 1)
    pieces = fused.evaluate(1, bench.slots, found)
    assert torch.equal(whole.accuracy[found.valid], pieces.accuracy[found.valid])


def test_hosts_that_part_differently_travel_in_one_bucket_and_arrive_where_they_should():
    sets = [np.array([[True, False], [False, False]]), np.array([[False, True], [False, False]])]
    plans = [plan_prefixes(rows, (0, 1)) for rows in sets]
    (bucket,) = buckets(plans, (0, 1))
    assert bucket.hosts.tolist() == [0, 1]
    assert bucket.steps[0].common() is None
    # host 0 parts at slot 0, host 1 at slot 1; each walk ends in the set of its coalition
    for host, rows in enumerate(sets):
        states = [frozenset()]
        for slot, step in sorted(bucket.steps.items()):
            pairs = zip(step.parent[:, host], step.on[:, host], strict=True)
            states = [states[p] | {slot} if on else states[p] for p, on in pairs]
        reached = [states[s] for s in plans[host].state_of_coalition]
        assert reached == [frozenset(np.flatnonzero(row).tolist()) for row in rows]


def test_a_whole_run_goes_the_same_way_fused_and_streamed():
    germinate = (0, 1, 2, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    second = (2, 4, 1, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    fossilize = (0, 0, 2, 1, 2, 0, 0, int(LifecycleOp.FOSSILIZE))
    plan = {1: germinate, 4: second, 7: {0: fossilize, 2: fossilize}}
    told = {}
    for name in ("streamed", "fused"):
        seen = []
        run = engine(3, 9, executor=name, on_step=seen.append)
        client = ToyClient(run.spec, script(3, 9, plan))
        run.reset(client, 0)
        run.rollout(client)
        told[name] = seen, run.test(), run.executor.state_dict()
    for a, b in zip(told["streamed"][0], told["fused"][0], strict=True):
        assert np.array_equal(a.stage, b.stage)
        np.testing.assert_allclose(a.val_loss, b.val_loss, atol=2e-3)
        np.testing.assert_allclose(a.train_loss, b.train_loss, atol=2e-3)
    assert told["fused"][0][-1].stage[0].tolist()[0] == SeedStage.FOSSILIZED


def test_an_unknown_host_layer_is_refused_by_name_of_the_way_out(monkeypatch):
    monkeypatch.setattr("esper.tolaria.executors.choice.can_fuse", lambda population: False)
    with pytest.raises(ConfigError, match="streamed"):
        engine(2, 4, executor="fused")
