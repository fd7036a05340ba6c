"""Networks as they are written elsewhere: memory layouts, buffers that move, random numbers in `forward`."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_streamed import compare, grow_different_seeds
from test_own_blueprints import registered
from torch import Tensor, nn

import tiny
from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.leyline.stages import Algorithm, SeedStage
from esper.tolaria.executors.fused.executor import FusedExecutor
from tiny import SLOTS, Bench, bit_equal

X = tiny.dataset().train.x
EXECUTORS = ("streamed", "fused")
each_executor = pytest.mark.parametrize("executor", EXECUTORS)


class Net(nn.Module):
    """The slots of the tiny task as layers; `between` runs behind the first one."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.r0c0 = nn.Conv2d(1, 4, 3, padding=1)
        self.between = between()
        self.r1c0 = nn.Conv2d(4, 4, 3, padding=1)
        self.r0c1 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self.r0c0(x))
        h = F.relu(self.r0c1(F.relu(self.r1c0(h))))
        return self.head(h.mean(dim=(2, 3)))


def host(model: Callable[[], nn.Module]) -> ModuleHost:
    return ModuleHostSpec.of(model, SLOTS, X[:8]).build(SLOTS, X[:1])


def fused(data):
    return FusedExecutor(data, measures_together=True)


def bench(model: Callable[[], nn.Module], executor: str = "streamed", num_envs: int = 2, **settings) -> Bench:
    made = Bench(num_envs, host=host(model), **settings)
    if executor == "fused":
        made.executor = fused(made.executor.data)
    return made


# -- memory layouts ---------------------------------------------------------------------------------------------------


class ChannelsLast(Net):
    """Every feature map is channels-last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat(1, 1, 1, 1).contiguous(memory_format=torch.channels_last))


class Block(nn.Module):
    """A ConvNeXt block: its output is a permuted view."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm, self.up, self.down = (
            nn.LayerNorm(outputs),
            nn.Linear(outputs, 2 * outputs),
            nn.Linear(2 * outputs, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)


class ConvNeXt(Net):
    def __init__(self) -> None:
        super().__init__()
        self.r0c0, self.r1c0, self.r0c1 = Block(1, 4, 1), Block(4, 4, 1), Block(4, 8, 2)


def channels_last() -> nn.Module:
    net = ChannelsLast()
    return net.to(memory_format=torch.channels_last)


def test_the_features_of_these_networks_are_channels_last():
    for model in (channels_last, ConvNeXt):
        seen = []
        host(model)(X[:4], lambda slot, h, seen=seen: seen.append(h.is_contiguous()) or h)
        assert seen == [False] * 3


@pytest.mark.parametrize(
    ("model", "num_envs", "executor"),
    [(channels_last, 2, "streamed"), (ConvNeXt, 2, "streamed"), (channels_last, 1, "fused")],
)
def test_a_seed_that_begins_with_group_norm_trains_on_channels_last_features(model, num_envs, executor):
    made = bench(model, executor, num_envs)
    for slot in SLOTS:
        made.grow(slot, "norm", SeedStage.TRAINING)
    born = made.seed_params("r0c1")
    told = made.train(2)
    assert torch.isfinite(told.loss).all()
    assert any(not torch.equal(made.seed_params("r0c1")[name], x) for name, x in born.items())


def test_fused_is_streamed_for_channels_last_features():
    compare(fused, grow_different_seeds, num_envs=5, host=host(ConvNeXt))


class Viewing(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, channels)

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h.view(len(h), h.shape[1], -1).mT).mT.reshape(h.shape)


def test_a_blueprint_that_views_its_input_grows_in_channels_last_features_and_is_measured():
    with registered(Viewing):
        made = bench(channels_last)
        made.grow("r0c0", "own", SeedStage.HOLDING, alpha=1.0)
        assert torch.isfinite(made.train().loss).all()
        assert torch.isfinite(made.measure()[1].loss).all()


# -- buffers that a pass writes in place ------------------------------------------------------------------------------


class Counted(nn.Module):
    """Normalization beside a counter, and a mean of the batches."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm(h)
        if self.training:
            self.steps += 1.0
            self.mean.mul_(0.9).add_(h.detach().mean(dim=(0, 2, 3)), alpha=0.1)
        return h + 0.1 * self.mean[:, None, None]


MOVING = [Counted, lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)]


@pytest.mark.parametrize("between", MOVING)
def test_a_host_trains_beside_buffers_that_are_written_in_place(between):
    compare(fused, grow_different_seeds, num_envs=5, host=host(lambda: Normed(between)))
    made = bench(lambda: Normed(between))
    made.train(2)
    if between is Counted:
        assert made.host_params(1)["network.between.steps"] == 6.0  # two steps of three batches


class Normed(Net):
    """Normalization before and behind what moves."""

    def __init__(self, between: Callable[[], nn.Module]) -> None:
        super().__init__(between)
        self.r0c0 = nn.Sequential(self.r0c0, nn.BatchNorm2d(4))
        self.r1c0 = nn.Sequential(self.r1c0, nn.BatchNorm2d(4))


def test_a_moving_buffer_is_that_of_plain_pytorch():
    made = bench(lambda: Normed(Counted), num_envs=1, batches_per_step=1)
    own = {name.removeprefix("network."): x for name, x in made.host_params().items()}
    net = Normed(Counted).train()
    net.load_state_dict(own, strict=False)
    made.executor.data.train_batches(1)
    x = next(iter(made.executor.data._train)).x[0]
    net(x)
    made.train()
    moved = made.host_params()
    assert float(net.between.steps) == 1.0
    torch.testing.assert_close(moved["network.between.mean"], net.between.mean)
    assert float(net.between.mean.abs().max()) > 0.0
    torch.testing.assert_close(moved["network.between.norm.running_var"], net.between.norm.running_var)


@each_executor
def test_a_seed_trains_beside_buffers_that_are_written_in_place(executor):
    with registered(lambda channels: nn.Sequential(nn.Conv2d(channels, channels, 1), Counted(channels))):
        made = bench(Net, executor)
        made.grow("r0c0", "own", SeedStage.HOLDING, alpha=1.0)
        made.train(2)
        row = made.population.seeds.buffers[made.seed_row("r0c0", 1)]
        kind = next(kind for (c, _), kind in made.population.seed_kinds.items() if c == 4 and kind.name == "own")
        assert kind.template.buffers.unpack(row[: kind.template.buffers.total])["1.steps"] == 6.0


class PartlyFrozen(Net):
    """A frozen weight of each host's own, beside trained ones, before and behind normalization."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm2d(4))
        self.r0c0.weight.requires_grad_(False)
        self.r1c0.weight.requires_grad_(False)


def test_fused_is_streamed_for_a_partly_frozen_host_with_normalization():
    compare(fused, grow_different_seeds, num_envs=5, host=host(PartlyFrozen))
