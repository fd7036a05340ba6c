"""The fused executor gives what the streamed one gives: losses, gradients, weights, measurements, whole runs."""

import numpy as np
import pytest
import torch
from against_streamed import compare

from esper.leyline.stages import Algorithm, HostFamily, SeedStage
from esper.tolaria.coalitions import plan_prefixes
from esper.tolaria.executors.choice import prefers_fused
from esper.tolaria.executors.fused import FusedExecutor, buckets
from tiny import Bench


def test_where_the_family_allows_it_active_seeds_send_gradients_into_the_host_and_hidden_ones_do_not():
    def grow(bench):
        bench.population.family = HostFamily.TRANSFORMER
        bench.grow("r0c1", "conv_light", SeedStage.HOLDING, alpha=1.0, hosts=[0, 4])
        bench.grow("r0c1", "conv_light", SeedStage.TRAINING, hosts=[1, 5])
        bench.grow("r0c1", "conv_light", SeedStage.TRAINING, algorithm=Algorithm.GATE, hosts=[2])
        bench.grow("r0c1", "conv_light", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.GATE, hosts=[3, 6])

    def fused(data):
        data.population.family = HostFamily.CNN  # the family of its blueprints
        executor = FusedExecutor(data)
        data.population.family = HostFamily.TRANSFORMER
        return executor

    compare(fused, grow, num_envs=7)
    below = []  # first layers of hosts with an active seed further up, in either family
    for family in (HostFamily.CNN, HostFamily.TRANSFORMER):
        bench = Bench(1)
        bench.population.family = family
        bench.grow("r0c1", "conv_light", SeedStage.HOLDING, alpha=1.0)
        bench.train()
        below.append(bench.host_params()["blocks.0.conv.weight"])
    assert not torch.equal(*below)


def test_one_host_alone_is_the_same_as_among_many():
    def grow(bench):
        bench.grow("r0c1", "conv_heavy", SeedStage.HOLDING, alpha=1.0)

    alone, many = Bench(1), Bench(6)
    for bench in (alone, many):
        grow(bench)
        FusedExecutor(bench.executor.data, measures_together=True).train_epoch(1, bench.slots)
    torch.testing.assert_close(many.population.host.params[:1], alone.population.host.params, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(many.population.seeds.params[1:2], alone.population.seeds.params[1:2])


def test_hosts_that_branch_differently_share_a_bucket_and_reach_the_sets_of_their_coalitions():
    sets = [np.array([[True, False], [False, False]]), np.array([[False, True], [False, False]])]
    plans = [plan_prefixes(rows, (0, 1)) for rows in sets]
    (bucket,) = buckets(plans, (0, 1), 2, torch.device("cpu"))
    assert bucket.hosts.tolist() == [0, 1]
    assert bucket.steps[0].common is None
    # host 0 branches at slot 0, host 1 at slot 1; each ends in the set of its coalition
    for host, rows in enumerate(sets):
        states = [frozenset()]
        for slot, step in sorted(bucket.steps.items()):
            pairs = zip(step.parent[:, host], step.on[:, host], strict=True)
            states = [states[p] | {slot} if on else states[p] for p, on in pairs]
        reached = [states[s] for s in plans[host].state_of_coalition]
        assert reached == [frozenset(np.flatnonzero(row).tolist()) for row in rows]


@pytest.mark.parametrize(
    ("batch", "device", "fused"),
    [(2048, "cpu", True), (2049, "cpu", False), (2049, "cuda", True)],
)
def test_small_activations_run_fused_on_a_cpu_and_all_on_a_gpu(batch, device, fused):
    data = Bench(1).executor.data
    data.host.largest_activation = 128  # floats of 4 bytes: 1 MiB for 2048 examples
    data.batch_train, data.population.device = batch, torch.device(device)
    assert prefers_fused(data) is fused
