"""Hosts with frozen parameters: streamed and fused agree, and what is frozen keeps every bit."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_streamed import TWELVE, bench_of, compare, fused, grow_different_seeds, host_of, in_every_stage_and_blend
from torch import Tensor, nn

import tiny
from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.kasmina.parameters.stacking import StackedBatchNorm, StackedConv2d
from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import SeedStage
from tiny import SGD, SLOTS, Bench, bit_equal, same_tree
from toys import ToyClient
from user_networks import BACKBONE, Backbone


def host(**settings: bool) -> ModuleHost:
    return host_of(lambda: Backbone(**settings))


@pytest.mark.parametrize("settings", [{}, {"loads": False, "still": True}, {"head": False}])
def test_fused_is_streamed_for_frozen_hosts(settings):
    compare(fused, grow_different_seeds, num_envs=5, host=host(**settings))


def test_fused_is_streamed_for_a_seed_behind_and_before_frozen_layers_in_every_stage_and_blend():
    grow = in_every_stage_and_blend("conv_light", "r1c0")
    compare(fused, grow, num_envs=TWELVE, epochs=1, host=host(), optimizer=tiny.adamw())


@pytest.mark.parametrize("executor", ["streamed", "fused"])
@pytest.mark.parametrize("optimizer", [SGD, tiny.adamw()], ids=["sgd", "adamw"])
def test_what_is_frozen_keeps_every_bit_and_has_no_optimizer_state(executor, optimizer):
    bench = bench_of(executor, 2, host=host(), optimizer=optimizer)
    p = bench.population
    bench.grow("r1c0", "conv_light", SeedStage.HOLDING, alpha=1.0)
    before, shared = bench.host_params(1), copy.deepcopy(p.host_kind.template.shared)
    bench.train(3)
    after = bench.host_params(1)
    changed = {name.removeprefix("network.") for name in before if not bit_equal(before[name], after[name])}
    # statistics of a frozen normalization move in train mode, as in PyTorch
    assert changed == {"r0c0.1.running_mean", "r0c0.1.running_var", "r0c1.bias", "head.weight", "head.bias"}
    assert set(shared) == {f"network.{name}" for name in ("r0c0.0.weight", "r0c0.0.bias", "r1c0.weight", "r1c0.bias")}
    assert all(bit_equal(p.host_kind.template.shared[name], value) for name, value in shared.items())
    assert p.host.params.shape[1] == p.host_kind.template.parameters.total == 16 + 32 + 16  # of 8 + 24 + 3
    assert p.host_params == sum(x.numel() for x in Backbone().parameters())


def test_frozen_convolutions_are_plain_ones_with_one_tensor_for_all_hosts():
    bench = Bench(3, host=host())
    executor = fused(bench.executor.data)
    stacked = executor.stacked_modules.host
    net, template = stacked.module.network, bench.population.host_kind.template
    assert type(net.r1c0) is nn.Conv2d
    assert type(net.r0c1) is StackedConv2d
    assert type(net.r0c0[1]) is StackedBatchNorm
    assert net.r1c0.weight is template.shared["network.r1c0.weight"]


@pytest.mark.parametrize("still", [False, True])
def test_a_frozen_host_is_trained_as_plain_pytorch_trains_it(still):
    bench = Bench(1, host=host(still=still))
    own = bench.host_params()
    net = Backbone(still=still).train()
    net.load_state_dict({name.removeprefix("network."): x for name, x in own.items()}, strict=False)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=SGD.host_lr, momentum=0.9, weight_decay=5e-4)
    for x, y in bench.executor.data.train_batches(1):
        optimizer.zero_grad()
        F.cross_entropy(net(x[0]), y[0]).backward()
        torch.nn.utils.clip_grad_norm_(trained, SGD.grad_clip)
        optimizer.step()
    bench.train()
    state = net.state_dict()
    for name, found in bench.host_params().items():
        torch.testing.assert_close(found, state[name.removeprefix("network.")], atol=1e-6, rtol=1e-5)
    moved = bench.host_params()["network.r0c0.1.running_mean"]
    assert torch.equal(moved, own["network.r0c0.1.running_mean"]) is still


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_host_with_nothing_to_train_is_measured_and_trains_its_seeds(executor):
    bench = bench_of(executor, 2, host=host(head=False))
    alone = bench.train()
    assert torch.isfinite(alone.loss).all()
    bench.grow("r1c0", "conv_light", SeedStage.TRAINING, hosts=[1])
    born = bench.seed_params("r1c0", 1)
    told = bench.train()
    assert told.grad_norm[1, SLOTS.index("r1c0")] > 0.0
    assert told.grad_ratio[1, SLOTS.index("r1c0")] == 0.0  # there is no gradient of the host to compare with
    assert all(not torch.equal(bench.seed_params("r1c0", 1)[name], value) for name, value in born.items())
    assert torch.isfinite(bench.measure()[1].accuracy[:, 0]).all()


class Guarded(Backbone):
    """Runs its stem under no_grad, as fine-tuners often do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.r0c0(x)
        h = F.relu(self.r0c1(F.relu(self.r1c0(h))))
        return self.head(h.mean(dim=(2, 3)))


def test_a_seed_learns_at_the_end_of_layers_that_run_without_gradients():
    bench = Bench(1, host=host_of(Guarded))
    bench.grow("r0c0", "conv_light", SeedStage.BLENDING, alpha=0.5)
    assert bench.train().grad_norm[0, 0] > 0.0
    compare(fused, grow_different_seeds, num_envs=5, host=host_of(Guarded))


def test_a_checkpoint_goes_on_with_the_same_backbone_alone():
    bench = Bench(2, host=host())
    bench.train()
    state = {name: x.clone() for name, x in bench.executor.state_dict().items()}
    again = Bench(2, host=host())
    again.executor.load_state_dict(state)
    assert same_tree(again.executor.state_dict(), state)
    before = BACKBONE["r1c0.weight"].clone()
    try:
        BACKBONE["r1c0.weight"][0, 0, 0, 0] += 1.0
        with pytest.raises(CheckpointError, match="other frozen parameters than when the checkpoint was written"):
            Bench(2, host=host()).executor.load_state_dict(state)
    finally:
        BACKBONE["r1c0.weight"].copy_(before)


def test_a_host_that_is_frozen_as_a_whole_passes_an_episode():
    spec = ModuleHostSpec.of(lambda: Backbone(head=False), SLOTS, tiny.dataset().train.x[:8])
    engine = tiny.engine(2, 4, of=tiny.task(host=spec))
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    stats = engine.rollout(client)
    assert (stats.host_params == sum(p.numel() for p in Backbone().parameters())).all()
    assert np.isfinite(stats.committed_acc).all()


def test_the_memory_of_shared_weights_does_not_grow_with_the_hosts():
    two, four = (sum(x.nbytes for x in Bench(n, host=host()).population.state_dict().values()) for n in (2, 4))
    row = sum(x.nbytes for x in Bench(1, host=host()).population.state_dict().values()) - 8  # the digest
    assert four - two == 2 * row
    trained = Bench(2, host=host()).population.host
    assert trained.buffers.shape[1] == 16 * 4 + 288  # normalization, weights beside a trained bias
