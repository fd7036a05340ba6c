"""The rules that hold for any executor, to the bit, where hosts run stacked."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tiny
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import Algorithm, SeedStage
from esper.tolaria.executors.fused import FusedExecutor
from tiny import Bench, same_tree
from toys import ToyClient, action, script

Op, S = LifecycleOp, SeedStage
GATE, ADD = Algorithm.GATE, Algorithm.ADD


class LossesCounted(TorchFunctionMode):
    """Counts calls of the loss: one per batch and host where hosts are measured one by one, else one per batch."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.nn.functional.cross_entropy
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_hosts_are_measured_one_by_one_by_default():
    hosts, batches = 3, 2
    outputs = {}
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
        outputs[together] = (
            counted.calls,
            measured.accuracy[found.valid].tolist(),
            executor.committed("test", bench.slots).accuracy[:, 0].tolist(),
        )
    assert outputs[None][0] == outputs[False][0] == hosts * batches
    assert outputs[True][0] == batches  # three hosts with as many states each: one bucket
    assert outputs[None][1:] == outputs[False][1:] == outputs[True][1:]


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_features_in_another_memory_format_train_and_measure_to_the_same(executor):
    outputs = []
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
        outputs.append((runs.evaluate(1, bench.slots, found), runs.state_dict()))
    assert outputs[0][0].accuracy.tolist() == outputs[1][0].accuracy.tolist()
    for name, x in outputs[0][1].items():
        torch.testing.assert_close(outputs[1][1][name], x, atol=1e-6, rtol=1e-5, msg=name)


def test_an_episode_continues_from_a_checkpoint_to_the_same_bit():
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


def test_each_host_of_a_run_equals_that_host_alone():
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_as_host_by_host(dtype):
    # rounding to 8 or 11 bits differs by kernel, so the losses agree to about as much
    known, fused = Bench(2, scaler_dtype=dtype), Bench(2, scaler_dtype=dtype)
    fused.executor = FusedExecutor(fused.executor.data, measures_together=True)
    for bench in (known, fused):
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=GATE)
        bench.grow("r0c1", "norm", S.TRAINING)
    outputs, want = fused.train(2), known.train(2)
    torch.testing.assert_close(outputs.loss, want.loss, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(fused.population.seeds.params, known.population.seeds.params, atol=5e-3, rtol=5e-2)
    assert torch.equal(fused.executor.data.scaler.scale, known.executor.data.scaler.scale)
