"""Hosts in several processes are the same hosts: in every step, in checkpoints, and when something goes wrong."""

import gc
import os
import pickle
import signal
import threading
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiny
from dry_run import CountedReads
from esper.kasmina.blueprints import AbstractBlueprint, registry
from esper.leyline.errors import CheckpointError, ConfigError, WorkerError
from esper.leyline.lifecycle import HostFamily, LifecycleOp
from esper.tasks.registry import TaskSpec
from esper.tolaria.executors.protocol import empty_structure
from esper.tolaria.executors.sharded import (
    Call,
    ShardedExecutor,
    ShardRunner,
    answered,
    bounds,
    concatenated,
    part_of,
    portable,
    shard_of,
)
from esper.tolaria.runtime import host_read, reads_so_far
from toys import ToyClient, action, script

LENGTH = 6
PLAN = {
    1: action(LifecycleOp.GERMINATE, slot=0, style=3),
    2: action(LifecycleOp.GERMINATE, slot=1, blueprint=2),
    3: action(LifecycleOp.ADVANCE, slot=0),
    5: action(LifecycleOp.PRUNE, slot=1),
}


COSINE = tiny.task(optimizer=replace(tiny.SGD, schedule="cosine", warmup=1))


def engine(workers, num_envs=3, **settings):
    """With scheduled learning rates, and another one for each host."""
    rules, factors = {"sequential": False, "min_blending_epochs": 1}, [0.5 + 0.5 * n for n in range(num_envs)]
    chosen = {"of": COSINE, "lr_factors": factors, **settings}
    return tiny.engine(num_envs, LENGTH, workers=workers, rules=rules, **chosen)


def episode(built, number=0):
    """Rewards, state and test accuracy of one episode."""
    client = ToyClient(built.spec, script(built.spec.num_envs, LENGTH, PLAN))
    built.reset(client, number)
    stats = built.rollout(client)
    return stats, built.state_dict(), built.test()


@pytest.fixture(scope="module")
def shared():
    """Three hosts in two processes: two here, one there."""
    built = engine(2)
    yield built
    built.executor.close()


def test_streamed_hosts_are_bit_for_bit_those_of_one_process(shared):
    stats, state, accuracy = episode(shared, 4)
    want_stats, want_state, want_accuracy = episode(engine(1), 4)
    assert isinstance(shared.executor, ShardedExecutor)
    assert tiny.same_tree(state, want_state)
    assert tiny.bit_equal(accuracy, want_accuracy)
    for name in ("returns", "val_acc", "committed_acc", "growth", "stage", "blueprint", "ops"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(want_stats, name), err_msg=name)
    assert (stats.germinated >= 2).all()


@pytest.mark.slow
def test_fused_hosts_agree_up_to_rounding():
    one, two = engine(1, executor="fused"), engine(2, executor="fused")
    for built in (one, two):
        client = ToyClient(built.spec, script(3, LENGTH, PLAN))
        built.reset(client, 0)
        for _ in range(3):
            built.step(client)
    want, got = one.state_dict(), two.state_dict()
    assert want.keys() == got.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], atol=1e-4, rtol=1e-3, equal_nan=True, msg=name)
    two.executor.close()


@pytest.mark.parametrize("direction", ["one process to two", "two processes to one"])
def test_an_episode_goes_on_bit_for_bit_with_another_number_of_workers(shared, direction):
    first, second = (engine(1), shared) if direction == "one process to two" else (shared, engine(1))
    client = ToyClient(first.spec, script(3, LENGTH, PLAN))
    first.reset(client, 2)
    for _ in range(3):
        first.step(client)
    saved = first.state_dict()
    first.rollout(client)
    want = first.state_dict()
    heir = ToyClient(second.spec, script(3, LENGTH, PLAN))
    second.load_state_dict(saved, heir)
    second.rollout(heir)
    assert tiny.same_tree(second.state_dict(), want)


def test_a_step_still_reads_the_device_once_and_a_worker_hands_over_its_measurements_without_a_read(shared):
    client = ToyClient(shared.spec, script(3, LENGTH, PLAN))
    shared.reset(client, 0)
    for _ in range(2):
        with CountedReads() as reads:
            shared.step(client)
        assert reads.number == 1  # those of the worker included
    # the same calls in this process
    shared.executor.reset(0)
    with CountedReads() as reads:
        for call in (Call("train_epoch", (1,)), Call("measure", (1,))):
            answer = pickle.loads(pickle.dumps(answered(shared.executor._own, call)))
    assert (reads.number, answer.reads, answer.raised) == (0, 0, None)
    assert {name: x.shape for name, x in answer.outputs.items()} == {"accuracy": (2, 1), "loss": (2,)}


def test_what_a_worker_reads_is_counted_by_the_main_process(shared):
    ours, theirs = Pipe()
    runner = ShardRunner(shared.executor._own.executor, replace(shared.config, num_envs=2))
    runner.reading = lambda: {name: torch.from_numpy(host_read(torch.arange(3))[0]) for name in "abc"}
    theirs.send_bytes(pickle.dumps(answered(runner, Call("reading"))))
    before = reads_so_far()
    with CountedReads() as reads:
        answer = replace(shared.executor._workers[0], pipe=ours).receive()
    assert (answer.reads, reads.number, reads_so_far() - before) == (3, 3, 3)
    assert answer.outputs["c"].tolist() == [0, 1, 2]
    for end in (ours, theirs):
        end.close()


def test_the_config_names_the_workers_that_were_taken(shared):
    assert shared.config.workers == 2
    alone = engine(8, num_envs=1)
    assert alone.config.workers == 1
    assert not isinstance(alone.executor, ShardedExecutor)
    with pytest.raises(ConfigError, match="workers is 0; it must be at least 1"):
        engine(0)


def test_what_a_worker_raises_is_raised_here_and_the_next_call_works(shared):
    episode(shared)
    state = shared.executor.state_dict()
    broken = {name: value for name, value in state.items() if name != "episode"}
    with pytest.raises(CheckpointError, match="episode"):
        shared.executor.load_state_dict(broken)
    with pytest.raises(CheckpointError, match="rows, which 3 hosts cannot share equally"):
        shared.executor.load_state_dict({name: x[:-1] if x.dim() else x for name, x in state.items()})
    worker = shared.executor._workers[0]
    worker.send(Call("nonsense", ()))
    raised = worker.receive().raised
    assert isinstance(raised, AttributeError)
    assert raised.__notes__[-1] == "raised in the process that runs host 2."
    assert "sharded.py" in raised.__notes__[0]  # where it was raised there
    shared.executor.load_state_dict(state)
    assert tiny.same_tree(shared.executor.state_dict(), state)


def test_a_worker_that_was_killed_is_an_error_with_the_way_out():
    built = engine(2)
    built.executor.reset(0)
    (worker,) = built.executor._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"host 2 ended \(killed by signal 9\).*last checkpoint.*workers = 1"):
        built.reset(ToyClient(built.spec), 1)
    built.executor.close()


@pytest.mark.slow
def test_workers_ignore_ctrl_c_and_end_with_their_executor():
    built = engine(2)
    (worker,) = built.executor._workers
    for number in (signal.SIGINT, signal.SIGTERM):  # while it starts
        os.kill(worker.process.pid, number)
    built.executor.reset(0)
    for number in (signal.SIGINT, signal.SIGTERM):  # while it waits
        os.kill(worker.process.pid, number)
    built.executor.reset(1)
    process = worker.process
    del built, worker
    gc.collect()
    assert process.poll() == -signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Locked(TaskSpec):
    """A task that cannot be copied."""

    lock: object = field(default_factory=threading.Lock)


def test_a_task_that_cannot_be_sent_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"task 'tiny' cannot be sent to another process .*workers = 1"):
        engine(2, of=Locked(**vars(tiny.task())))


def test_every_call_raises_the_reason_why_hosts_could_not_be_built(shared):
    shard = shard_of(replace(shared.config, num_envs=1, host_offset=2, workers=1), tiny.task(), tiny.dataset())
    other = replace(shard, config=replace(shard.config, slots=("r0c0", "r9c9")))
    built = ShardedExecutor(shared.executor._own, 2, [other], prepare=gc.collect)
    for episode in (0, 1):
        with pytest.raises(ConfigError, match="r9c9"):
            built.reset(episode)
    built.close()


class Moss(AbstractBlueprint):
    """A blueprint that only this module knows."""

    name = "moss"
    family = HostFamily.CNN
    init: ClassVar = {"weight": 0.0, "bias": 0.0}

    def build(self, channels):
        return nn.Conv2d(channels, channels, 1)


@pytest.mark.slow
def test_a_worker_knows_the_blueprints_that_were_registered_here():
    index = registry.register(Moss())
    try:
        plan = {1: action(LifecycleOp.GERMINATE, slot=0, blueprint=index)}
        states = []
        for workers in (1, 2):
            built = engine(workers, num_envs=2)
            built.reset(client := ToyClient(built.spec, script(2, LENGTH, plan)), 0)
            for _ in range(3):
                built.step(client)
            states.append(built.state_dict())
        assert tiny.same_tree(*states)
        assert (built.state.slots.blueprint[:, 0] == index).all()
    finally:
        registry.unregister("moss")


def test_a_shard_travels_without_the_loader_of_its_task(shared):
    task = tiny.task(load=lambda folder, seed: tiny.dataset())
    shard = pickle.loads(pickle.dumps(shard_of(shared.config, task, tiny.dataset())))
    assert shard.task.host == task.host
    assert torch.equal(shard.dataset.train.x, tiny.dataset().train.x)


def test_an_error_that_cannot_be_unpickled_becomes_a_runtime_error_with_its_text():
    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    error = OddError(1, 2)
    error.add_note("where it was")
    sent = portable(error)
    assert (type(sent), str(sent), sent.__notes__) == (RuntimeError, "OddError: 1 and 2", ["where it was"])
    same = portable(ConfigError("no"))
    assert isinstance(same, ConfigError)


@given(st.integers(1, 40), st.integers(1, 40))
def test_shards_follow_each_other_and_differ_by_one_host_at_most(num_envs, workers):
    workers = min(workers, num_envs)
    parts = bounds(num_envs, workers)
    sizes = [end - begin for begin, end in parts]
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert sum(sizes) == num_envs
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_rows_of_shards_are_concatenated_and_scalars_are_taken_once():
    parts = [{"a": torch.tensor([1.0, 2.0]), "t": torch.tensor(3)}, {"a": torch.tensor([4.0]), "t": torch.tensor(3)}]
    found = concatenated(parts)
    assert found["a"].tolist() == [1.0, 2.0, 4.0]
    assert found["t"].item() == 3
    structure = empty_structure(4, 2)
    structure.stage[:] = np.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(part_of(structure, 1, 3).stage, [[2, 3], [4, 5]])
    assert part_of(structure, 1, 3).t == structure.t
