"""The fused executor beside the streamed one: what only stacked hosts can get wrong."""

import numpy as np
import pytest
import torch
from against_streamed import bench_of, compare, of_each_split

import tiny
from esper.leyline.lifecycle import Algorithm, HostFamily, LifecycleOp, SeedStage
from esper.tasks.datasets import Split
from esper.tolaria.coalitions import plan_prefixes
from esper.tolaria.executors.choice import prefers_fused
from esper.tolaria.executors.fused import BlendSlice, FusedExecutor, GroupOutputs, blend_groups, buckets
from tiny import Bench
from toys import ToyClient, action, script


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


def test_hosts_that_branch_differently_share_a_bucket_and_reach_the_sets_of_their_coalitions():
    sets = [np.array([[True, False], [False, False]]), np.array([[False, True], [False, False]])]
    plans = {host: plan_prefixes(rows, (0, 1)) for host, rows in enumerate(sets)}
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


BATCH, HOSTS, FEATURES = 3, 6, (2, 4, 4)
ALPHA = torch.tensor([0.25, 0.5, 0.75, 1.0, 0.4, 0.6])
ADD, MULTIPLY, GATE = Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE


def piece(algorithm, active, first, hosts):
    index = torch.tensor(hosts)
    return BlendSlice(algorithm, active, first, first + len(hosts), index, ALPHA[index].view(-1, 1, 1, 1))


def features(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HOSTS, *FEATURES, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("algorithm", [ADD, MULTIPLY])
def test_the_output_of_a_hidden_seed_is_not_read(algorithm):
    h, delta = features(8), torch.full((BATCH, 1, *FEATURES), torch.inf, dtype=torch.float64)
    group = GroupOutputs((piece(algorithm, False, 0, [2]),), torch.tensor([2]), h[:, [2]], delta, None)
    assert torch.equal(blend_groups(h, [group]), h)


Op, S = LifecycleOp, SeedStage


def test_on_a_cpu_hosts_are_measured_one_by_one_by_default():
    assert not FusedExecutor(Bench(1).executor.data).measures_together


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_features_in_another_memory_format_train_and_measure_to_the_same(executor):
    outputs = []
    for layout in (torch.contiguous_format, torch.channels_last):
        # two channels in memory, so that the formats differ: the images have one
        def stored(of: Split, layout=layout) -> Split:
            return Split(of.x.repeat(1, 2, 1, 1).contiguous(memory_format=layout)[:, :1], of.y)

        bench = bench_of(executor, 2, data=of_each_split(tiny.dataset(), stored))
        bench.grow("r0c0", "conv_light", S.BLENDING, alpha=0.5)
        bench.train()
        outputs.append((bench.measure()[1], bench.executor.state_dict()))
    assert outputs[0][0].accuracy.tolist() == outputs[1][0].accuracy.tolist()
    for name, x in outputs[0][1].items():
        torch.testing.assert_close(outputs[1][1][name], x, atol=1e-6, rtol=1e-5, msg=name)


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
        mine, all_hosts = alone.executor.population, whole.executor.population
        seeds = all_hosts.seeds.params[3 * host : 3 * host + 3]
        torch.testing.assert_close(mine.host.params[0], all_hosts.host.params[host], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mine.seeds.params, seeds, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_as_host_by_host(dtype):
    # rounding to 8 or 11 bits differs by kernel, so the losses agree to about as much
    known, fused = (bench_of(name, 2, scaler_dtype=dtype) for name in ("streamed", "fused"))
    for bench in (known, fused):
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=GATE)
        bench.grow("r0c1", "norm", S.TRAINING)
    outputs, want = fused.train(2), known.train(2)
    torch.testing.assert_close(outputs.loss, want.loss, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(fused.population.seeds.params, known.population.seeds.params, atol=5e-3, rtol=5e-2)
    assert torch.equal(fused.executor.data.scaler.scale, known.executor.data.scaler.scale)
