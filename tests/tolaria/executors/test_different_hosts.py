"""Hosts with examples, labels and learning rates of their own, in every executor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from against_streamed import EXECUTORS, bench_of, compare

import tiny
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import LifecycleOp, SeedStage
from esper.tasks.datasets import RandomFunction
from esper.tasks.instances import MixedImages
from esper.tasks.losses import Classification
from esper.tolaria.executors.fused import FusedExecutor
from tiny import CLASSES
from toys import ToyClient, script

MIXED = MixedImages(
    num_classes=CLASSES, classes=(2, CLASSES), fractions=(1.0, 0.3), noises=(0.0, 0.3), lr_factors=(1.0, 0.25)
)
SETTINGS = {"instances": MIXED, "batches_per_step": 3, "objective": Classification(CLASSES)}
BY_HOST = "fused, measured by host"
OTHERS = {**EXECUTORS, BY_HOST: lambda data: FusedExecutor(data, measures_together=False)}


def grown(bench):
    bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[0, 1])
    bench.grow("r0c1", "depthwise", SeedStage.HOLDING, alpha=1.0, hosts=[1, 2, 3])


@pytest.mark.parametrize(
    ("name", "optimizer"), [("native", "sgd"), ("native", "adamw"), ("fused", "adamw"), (BY_HOST, "sgd")]
)
def test_every_executor_is_the_streamed_one(name, optimizer):
    spec = OptimizerSpec(kind=optimizer, host_lr=0.01, seed_lr=0.02)
    compare(OTHERS[name], grown, num_envs=6, epochs=2, optimizer=spec, **SETTINGS)


@pytest.mark.parametrize(
    ("name", "hosts"), [("native", SETTINGS), ("fused", SETTINGS), (BY_HOST, SETTINGS), ("fused", {})]
)
def test_every_executor_measures_the_same_share_of_the_examples(name, hosts):
    compare(OTHERS[name], grown, num_envs=4, epochs=1, measured_share=0.3, **hosts)


@pytest.mark.parametrize("name", ["native", "fused"])
@pytest.mark.parametrize(
    ("last", "examples", "end"),
    [("merge", 33, (16, 33)), ("drop", 33, (16, 32)), ("drop", 47, (16, 32)), ("keep", 33, (32, 33))],
)
def test_batches_of_sixteen_are_merged_dropped_or_kept_in_every_executor(last, examples, end, name):
    settings = {"data": tiny.dataset(train=examples), "last_batch": last}
    assert tiny.Bench(**settings).executor.data.train_batches(1).bounds[-1] == end
    compare(OTHERS[name], grown, num_envs=4, epochs=1, **settings)


def task(**changes):
    return tiny.task(instances=MIXED, batches_per_step=3, **changes)


def episode(num_envs, **config):
    """The states and properties after a short episode in which every host grows the same."""
    engine = tiny.engine(num_envs, 4, of=task(), **config)
    germinate = (0, 1, 2, 1, 2, 0, 0, int(LifecycleOp.GERMINATE))
    client = ToyClient(engine.spec, script(num_envs, 4, {1: {n: germinate for n in range(num_envs)}}))
    engine.reset(client, 1)
    return engine.rollout(client)


def test_a_host_is_trained_alike_alone_and_among_others():
    together, alone = episode(4), episode(1, host_offset=2)
    assert together.val_acc[2] == alone.val_acc[0]
    assert together.committed_acc[2] == alone.committed_acc[0]
    for name, values in together.instance.items():
        assert values[2] == alone.instance[name][0]


NOISE = RandomFunction(lambda x: x + 0.5 * torch.randn_like(x))


def trained(executor, num_envs, *, offset=0, augmentation=NOISE):
    """Parameters [N, P] of the hosts after two steps with a plain function as augmentation."""
    data = replace(tiny.dataset(), augmentation=augmentation)
    bench = bench_of(executor, num_envs, data=data, host_offset=offset)
    bench.train(2)
    return bench.population.host.params


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_function_that_draws_augments_a_host_alike_alone_and_as_one_of_three(executor):
    together = trained(executor, 3)
    torch.testing.assert_close(together, trained("streamed", 3), atol=2e-5, rtol=1e-3)
    for host in range(3):
        torch.testing.assert_close(trained(executor, 1, offset=host)[0], together[host], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(together, trained(executor, 3, augmentation=None), atol=1e-4)


def test_copies_are_the_same_host():
    copies, hosts = episode(4, distinct_hosts=2), episode(2)
    for n in range(4):
        assert copies.val_acc[n] == hosts.val_acc[n % 2]
        assert copies.returns[n] == hosts.returns[n % 2]
    assert any(values[0] != values[1] for values in hosts.instance.values())


def test_copies_of_scripted_hosts_are_the_same_host():
    from esper.tasks.registry import task_by_name

    null = task_by_name("null")
    noisy = replace(null, script=replace(null.script, sigma=1.0))
    engine = tiny.engine(6, 5, of=noisy, distinct_hosts=3)
    engine.reset(ToyClient(engine.spec, script(6, 5, {})), 0)
    stats = engine.rollout(ToyClient(engine.spec, script(6, 5, {})))
    assert np.array_equal(stats.val_acc[:3], stats.val_acc[3:])
    assert len(set(stats.val_acc.tolist())) == 3


def test_the_test_split_is_that_of_the_host():
    engine = tiny.engine(3, 2, of=task())
    client = ToyClient(engine.spec, script(3, 2, {}))
    engine.reset(client, 0)
    engine.rollout(client)
    data = engine.executor.data
    chosen = data.evaluation("test").chosen
    assert chosen is not None
    hits = engine.test().double() / 100.0 * chosen.count
    assert torch.allclose(hits, hits.round(), atol=1e-3)


def test_a_task_with_instances_needs_a_number_of_batches():
    with pytest.raises(ConfigError, match="training splits of different sizes; set batches_per_step"):
        tiny.task(instances=MIXED)
