"""Hosts that are stopped: nothing of them changes, and the others train and are measured as beside running ones."""

import numpy as np
import pytest
import torch
from against_streamed import EXECUTORS, bench_of

from esper.leyline.lifecycle import Algorithm, SeedStage
from plain import assert_close
from tiny import SLOTS, Bench, adamw, bit_equal, same_tree

HOSTS, STOPPED = 4, 1


def stop(bench: Bench, hosts: list[int]) -> None:
    stopped = np.isin(np.arange(HOSTS), hosts)
    structure = bench.structure(stopped=stopped)
    structure.sets_valid[stopped] = False
    bench.executor.apply_structure(structure)


def grown(executor: str) -> Bench:
    """All hosts have a held seed with running statistics and a gate, and a hidden one."""
    bench = bench_of(executor, HOSTS)
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0, algorithm=Algorithm.GATE)
    bench.grow("r0c1", "conv_small", SeedStage.TRAINING)
    bench.train(1)
    return bench


def weights(bench: Bench, host: int) -> dict[str, torch.Tensor]:
    """Everything of a host: parameters and buffers of network, seeds and gates."""
    p, rows = bench.population, slice(host * len(SLOTS), (host + 1) * len(SLOTS))
    found = {"host": p.host.params[host], "of host": p.host.buffers[host]}
    found |= {"seeds": p.seeds.params[rows], "of seeds": p.seeds.buffers[rows], "gates": p.gates.params[rows]}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_stopped_host_stays_as_it_is_and_the_others_do_not_notice(executor):
    usual, some = grown(executor), grown(executor)
    before = weights(some, STOPPED)
    assert before["of host"].any() or before["of seeds"].any()
    stop(some, [STOPPED])
    for bench in (usual, some):
        told = bench.train(2)
    assert same_tree(weights(some, STOPPED), before)
    assert not same_tree(weights(usual, STOPPED), before)
    for host in range(HOSTS):
        if host != STOPPED:
            if executor == "fused":  # its kernels round by the number of hosts in a group
                assert_close(weights(some, host), weights(usual, host))
            else:
                assert same_tree(weights(some, host), weights(usual, host)), host
            assert torch.isfinite(told.loss[host])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_stopped_host_is_not_measured_until_the_end(executor):
    bench = grown(executor)
    found, usual = bench.measure()
    stop(bench, [STOPPED])
    measured = bench.executor.evaluate(bench.t, bench.slots, found)
    others = [host for host in range(HOSTS) if host != STOPPED]
    assert bit_equal(measured.accuracy[others], usual.accuracy[others])
    assert bit_equal(measured.loss[others], usual.loss[others])
    kept = bench.executor.committed("val", bench.slots)
    assert torch.isfinite(kept.loss).all()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_all_hosts_may_be_stopped(executor):
    bench = grown(executor)
    before = [weights(bench, host) for host in range(HOSTS)]
    stop(bench, list(range(HOSTS)))
    bench.train(1)
    bench.executor.evaluate(bench.t, bench.slots, bench.coalitions())
    assert all(same_tree(weights(bench, host), before[host]) for host in range(HOSTS))


def test_weight_decay_and_momentum_of_a_stopped_host_stand_still():
    bench = Bench(HOSTS, optimizer=adamw())
    bench.train(1)
    before = weights(bench, STOPPED)
    stop(bench, [STOPPED])
    bench.train(2)
    assert same_tree(weights(bench, STOPPED), before)
