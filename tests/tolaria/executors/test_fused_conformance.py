"""The rules that hold for any executor, to the bit, where hosts run stacked."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tiny
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import Algorithm, AlphaMode, SeedStage
from esper.tolaria.executors.fused.executor import FusedExecutor
from tiny import Bench, same_tree
from toys import ToyClient, action, script

Op, S = LifecycleOp, SeedStage
GATE, ADD = Algorithm.GATE, Algorithm.ADD


def fused(num_envs: int = 3, together: bool = True, **settings: object) -> tuple[Bench, FusedExecutor]:
    bench = Bench(num_envs, **settings)
    return bench, FusedExecutor(bench.executor.data, measures_together=together)


def rows(bench: Bench, row: int) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state of one seed and its gate; copies."""
    both = (("seed", bench.population.seeds), ("gate", bench.population.gates))
    return {f"{part}.{name}": x[row].clone() for part, slab in both for name, x in slab.tensors().items()}


@pytest.mark.parametrize("together", [True, False])
def test_measuring_changes_no_tensor_and_no_generator(together):
    bench, executor = fused(together=together)
    bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0)
    bench.grow("r1c0", "conv_heavy", S.BLENDING, alpha=0.6, algorithm=GATE, hosts=[0, 2])
    executor.train_epoch(1, bench.slots)
    found = bench.coalitions(shapley=True)
    executor.apply_structure(bench.structure(found))
    before = {name: x.clone() for name, x in executor.state_dict().items()}
    generator = torch.random.get_rng_state()
    executor.evaluate(1, bench.slots, found)
    executor.committed_accuracy("test", bench.slots)
    assert same_tree(executor.state_dict(), before)
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize("together", [True, False])
def test_training_after_measuring_updates_batch_statistics_again(together):
    trees = []
    for measures in (False, True):
        bench, executor = fused(together=together)
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0)
        executor.train_epoch(1, bench.slots)
        found = bench.coalitions()
        executor.apply_structure(bench.structure(found))
        if measures:
            executor.evaluate(1, bench.slots, found)
        executor.train_epoch(2, bench.slots)
        trees.append({name: x.clone() for name, x in executor.state_dict().items()})
    assert same_tree(*trees)


class LossesCounted(TorchFunctionMode):
    """Counts calls of the loss: one per batch and host where hosts are measured one by one, else one per batch."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.nn.functional.cross_entropy
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_hosts_are_measured_one_by_one_unless_told_otherwise():
    hosts, batches = 3, 2
    told = {}
    for together in (None, False, True):
        bench = Bench(hosts)
        executor = FusedExecutor(bench.executor.data, **({} if together is None else {"measures_together": together}))
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0)
        bench.grow("r1c0", "norm", S.FOSSILIZED, alpha=1.0)
        executor.train_epoch(1, bench.slots)
        found = bench.coalitions()
        executor.apply_structure(bench.structure(found))
        with LossesCounted() as counted:
            measured = executor.evaluate(1, bench.slots, found)
        told[together] = (
            counted.calls,
            measured.accuracy[found.valid].tolist(),
            executor.committed_accuracy("test", bench.slots).tolist(),
        )
    assert told[None][0] == told[False][0] == hosts * batches
    assert told[True][0] == batches  # three hosts with as many states each: one bucket
    assert told[None][1:] == told[False][1:] == told[True][1:]


@pytest.mark.parametrize("algorithm", [ADD, Algorithm.MULTIPLY, GATE])
def test_a_falling_seed_is_frozen_to_the_bit_while_its_host_and_its_like_learn(algorithm):
    bench, executor = fused(2)
    bench.grow("r1c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=algorithm)
    executor.train_epoch(1, bench.slots)
    falling, other = bench.seed_row("r1c0", 0), bench.seed_row("r1c0", 1)
    frozen = rows(bench, falling)
    assert bool(frozen["seed.momentum"].any())
    for t, alpha in enumerate((0.8, 0.4), start=2):
        bench.set("r1c0", 0, stage=int(S.BLENDING), alpha=alpha, alpha_mode=int(AlphaMode.DOWN))
        trainable, host = rows(bench, other), bench.host_params(0)
        executor.train_epoch(t, bench.slots)
        assert same_tree(rows(bench, falling), frozen)
        assert not torch.equal(rows(bench, other)["seed.params"], trainable["seed.params"])
        assert not same_tree(bench.host_params(0), host)


def test_a_gate_that_is_not_in_use_is_not_stepped():
    bench, executor = fused(2)
    bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=GATE)
    executor.train_epoch(1, bench.slots)
    bench.set("r0c0", 0, algorithm=int(ADD))
    unused, used = (rows(bench, bench.seed_row("r0c0", host)) for host in (0, 1))
    executor.train_epoch(2, bench.slots)
    now = [rows(bench, bench.seed_row("r0c0", host)) for host in (0, 1)]
    for name in (name for name in unused if name.startswith("gate.")):
        assert torch.equal(now[0][name], unused[name]), name
    assert not torch.equal(now[1]["gate.params"], used["gate.params"])
    assert not torch.equal(now[0]["seed.params"], unused["seed.params"])


@pytest.mark.parametrize("stage", [S.GERMINATED, S.DORMANT])
def test_seeds_that_are_not_trained_yet_stay_as_they_were_born(stage):
    bench, executor = fused(2)
    bench.grow("r0c1", "conv_light", S.GERMINATED)
    bench.set("r0c1", 0, stage=int(stage))
    born = rows(bench, bench.seed_row("r0c1", 0))
    executor.train_epoch(1, bench.slots)
    assert same_tree(rows(bench, bench.seed_row("r0c1", 0)), born)


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_features_in_another_memory_format_train_and_measure_to_the_same(executor):
    told = []
    for layout in (torch.contiguous_format, torch.channels_last):
        data = tiny.dataset()
        # two channels in memory, so that the formats differ: the images have one
        splits = {
            name: dataclasses.replace(
                data.split(name), x=data.split(name).x.repeat(1, 2, 1, 1).contiguous(memory_format=layout)[:, :1]
            )
            for name in ("train", "val", "test")
        }
        bench = Bench(2, data=dataclasses.replace(data, **splits))
        runs = FusedExecutor(bench.executor.data, measures_together=True) if executor == "fused" else bench.executor
        bench.grow("r0c0", "conv_light", S.BLENDING, alpha=0.5)
        runs.train_epoch(1, bench.slots)
        found = bench.coalitions()
        runs.apply_structure(bench.structure(found))
        told.append((runs.evaluate(1, bench.slots, found), runs.state_dict()))
    assert told[0][0].accuracy.tolist() == told[1][0].accuracy.tolist()
    for name, x in told[0][1].items():
        torch.testing.assert_close(told[1][1][name], x, atol=1e-6, rtol=1e-5, msg=name)


def test_an_episode_that_is_taken_up_again_goes_on_to_the_same_bit():
    length = 9
    plan = {t: action(Op.GERMINATE, slot=t // 2, style=t, tempo=0, blueprint=t) for t in (1, 3)}
    plan |= {5: action(Op.PRUNE, slot=0, alpha_speed=1), 7: {0: action(Op.FOSSILIZE, slot=1)}}
    whole = tiny.engine(3, length, executor="fused", rules={"sequential": False})
    client = ToyClient(whole.spec, script(3, length, plan))
    whole.reset(client, 4)
    for _ in range(6):
        whole.step(client)
    saved, policy = whole.state_dict(), client.state_dict()
    whole.rollout(client)
    other = tiny.engine(3, length, executor="fused", rules={"sequential": False})
    again = ToyClient(other.spec, script(3, length, plan))
    other.load_state_dict(saved, again)
    again.load_state_dict(policy)
    other.rollout(again)
    assert same_tree(other.state_dict(), whole.state_dict())


def test_the_seeds_and_hosts_of_a_run_are_those_of_every_host_alone():
    length = 7
    plan = {1: action(Op.GERMINATE, slot=0, tempo=0), 3: {1: action(Op.GERMINATE, slot=2, blueprint=4, style=3)}}
    whole = tiny.engine(3, length, executor="fused", rules={"sequential": False})
    client = ToyClient(whole.spec, script(3, length, plan))
    whole.reset(client, 0)
    stats = whole.rollout(client)
    for host in range(3):
        alone = tiny.engine(1, length, executor="fused", host_offset=host, rules={"sequential": False})
        own = ToyClient(alone.spec, script(3, length, plan)[:, host : host + 1])
        alone.reset(own, 0)
        found = alone.rollout(own)
        assert found.stage.tolist() == stats.stage[host : host + 1].tolist()
        torch.testing.assert_close(
            alone.executor.population.host.params[0], whole.executor.population.host.params[host], atol=1e-5, rtol=1e-4
        )
        torch.testing.assert_close(
            alone.executor.population.seeds.params,
            whole.executor.population.seeds.params[3 * host : 3 * host + 3],
            atol=1e-5,
            rtol=1e-4,
        )
