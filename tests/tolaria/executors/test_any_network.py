"""Networks as they are written elsewhere: memory layouts, buffers that move, random numbers in `forward`."""

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_streamed import bench_of, compare, fused, grow_different_seeds, host_of
from test_own_blueprints import registered
from torch import Tensor, nn

import tiny
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.leyline.errors import ConfigError, StackingError
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.leyline.random import Stream, generator_seeds, seeded_generators
from tiny import SLOTS, Bench, bit_equal, same_tree

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


def bench(model: Callable[[], nn.Module], executor: str = "streamed", num_envs: int = 2, **settings) -> Bench:
    return bench_of(executor, num_envs, host=host_of(model), **settings)


def plain_twin(made: Bench, model: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of a bench's one host without esper, and its first training batch."""
    net = model().train()
    net.load_state_dict({name.removeprefix("network."): x for name, x in made.host_params().items()}, strict=False)
    batch = next(iter(made.executor.data.train_batches(1)))
    return net, batch.x[0], batch.y[0]


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
        host_of(model)(X[:4], lambda slot, h, seen=seen: seen.append(h.is_contiguous()) or h)
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


class Normed(Net):
    """Normalization before and behind what moves."""

    def __init__(self, between: Callable[[], nn.Module]) -> None:
        super().__init__(between)
        self.r0c0 = nn.Sequential(self.r0c0, nn.BatchNorm2d(4))
        self.r1c0 = nn.Sequential(self.r1c0, nn.BatchNorm2d(4))


def test_a_moving_buffer_is_that_of_plain_pytorch():
    made = bench(lambda: Normed(Counted), num_envs=1, batches_per_step=1)
    net, x, _ = plain_twin(made, lambda: Normed(Counted))
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


# -- random numbers in `forward` --------------------------------------------------------------------------------------


class Lambda(nn.Module):
    """A function of features and mode as a module."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h, self.training)


class Tail(Net):
    """`tail` runs on the features [B, T, 8] in front of the head."""

    def __init__(self, tail: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tail = tail()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.r0c1(F.relu(self.r1c0(self.r0c0(x))))).flatten(2).mT
        out = self.tail(h)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(dim=1))


class LayerDrop(Net):
    """Leaves out a layer, which is a slot, by the generator of Python."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(x)
        if not self.training or random.random() > 0.5:
            h = h + self.r1c0(h)
        return self.head(F.relu(self.r0c1(h)).mean(dim=(2, 3)))


def drop_path(h: Tensor, training: bool) -> Tensor:
    return h * torch.bernoulli(torch.full((len(h), 1, 1, 1), 0.8)) / 0.8 if training else h


def numpy_noise(h: Tensor, training: bool) -> Tensor:
    return h * (1.0 + 0.1 * float(np.random.rand())) if training else h


def attention(h: Tensor, training: bool) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2 if training else 0.0)


def reparameterized(h: Tensor, training: bool) -> Tensor:
    return h + torch.exp(0.1 * h) * torch.randn_like(h)


DRAWING = {
    "functional dropout": lambda: Net(lambda: Lambda(lambda h, training: F.dropout(h, 0.2, training))),
    "alpha dropout": lambda: Net(lambda: nn.AlphaDropout(0.2)),
    "drop path": lambda: Net(lambda: Lambda(drop_path)),
    "numpy": lambda: Net(lambda: Lambda(numpy_noise)),
    "layer drop": LayerDrop,
    "attention": lambda: Tail(lambda: Lambda(attention)),
    "rare attention": lambda: Tail(lambda: Attending()),
    "lstm": lambda: Tail(lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)),
    "reparameterization": lambda: Tail(lambda: Lambda(reparameterized)),
}


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, 0.2, add_zero_attn=True, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attend(h, h, h)[0]


def grown(model: Callable[[], nn.Module], num_envs: int, seed: int = 0, **settings: int) -> Bench:
    """Two epochs and a measurement, while the global generators are somewhere, where they stay."""
    made = bench(model, num_envs=num_envs, **settings)
    made.grow("r1c0", "conv_light", SeedStage.HOLDING, alpha=1.0)
    made.grow("r0c1", "conv_light", SeedStage.TRAINING)
    with seeded_generators(seed) as used:
        made.train(2)
        made.measured = made.measure()[1]
        assert not used()
    return made


@pytest.mark.parametrize("model", DRAWING.values(), ids=DRAWING)
def test_a_host_that_draws_is_known(model):
    assert host_of(model).global_rng


@pytest.mark.parametrize("kind", ["functional dropout", "numpy", "layer drop"])
def test_a_host_that_draws_trains_alike_alone_and_among_others(kind):
    model = DRAWING[kind]
    several, again, alone = grown(model, 3), grown(model, 3, seed=1), grown(model, 1, host_offset=2)
    assert same_tree(several.executor.state_dict(), again.executor.state_dict())
    assert bit_equal(several.population.host.params[2:], alone.population.host.params)
    assert bit_equal(several.population.seeds.params[6:], alone.population.seeds.params)
    assert torch.equal(several.measured.loss[2:], alone.measured.loss)
    assert torch.equal(several.executor.evaluate(2, several.slots, several.coalitions()).loss, several.measured.loss)


def test_the_numbers_of_a_host_are_its_own_in_every_pass():
    drawn: list[float] = []

    def note(h: Tensor, training: bool) -> Tensor:
        drawn.append(float(torch.rand(())))
        return h

    made = bench(lambda: Net(lambda: Lambda(note)), num_envs=2)
    drawn.clear()
    made.train(2)
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 3  # epochs, hosts, batches
    drawn.clear()
    made.measure()
    first = drawn.copy()
    made.train()
    drawn.clear()
    made.measure()
    assert drawn == first  # measurements of all steps meet the same numbers


def test_a_trained_pass_that_draws_is_that_of_plain_pytorch_under_the_same_seed():
    made = bench(DRAWING["functional dropout"], num_envs=1, batches_per_step=1)
    net, x, y = plain_twin(made, DRAWING["functional dropout"])
    key = {"episode": 3, "t": 1, "slot": len(SLOTS), "block": 0}
    with seeded_generators(generator_seeds(5, Stream.FORWARD_PASS, torch.tensor([0]), **key)[0]):
        want = F.cross_entropy(net(x), y)
    assert made.train().loss.item() == pytest.approx(want.item(), rel=1e-6)


def test_a_host_that_draws_runs_one_by_one_and_says_so_only_where_it_was_asked_for_more():
    spec = ModuleHostSpec.of(DRAWING["drop path"], SLOTS, X[:8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny.engine(2, 4, of=tiny.task(host=spec), executor="auto").config.executor == "streamed"
    with pytest.raises(StackingError, match=r"the host draws from the global random generators .* 'streamed'"):
        tiny.engine(2, 4, of=tiny.task(host=spec), executor="fused")


class Hooked(nn.Module):
    """Its hook keeps features of the network that was built, whatever is copied from it."""

    def __init__(self) -> None:
        super().__init__()
        self.r0c0, self.head, self.kept = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3), {}
        self.r0c0.register_forward_hook(lambda layer, inputs, output: self.kept.update(found=output))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.r0c0(x).mean((2, 3)) + self.kept["found"].amax((2, 3)))


@pytest.mark.filterwarnings("ignore:the (native|fused) executor cannot run these hosts; a slower one will")
def test_a_host_whose_copies_do_not_run_runs_one_by_one():
    spec = ModuleHostSpec.of(Hooked, ["r0c0"], X[:8])
    task = tiny.task(host=spec, enabled=("r0c0",))
    assert tiny.engine(2, 4, of=task, executor="auto").config.executor == "streamed"
    with pytest.raises(StackingError, match=r"cannot be copied by copy\.deepcopy .* use executor 'streamed'"):
        tiny.engine(2, 4, of=task, executor="fused")
    with pytest.raises(ConfigError, match=r"compiled C\+\+ cannot run the host: PyTorch cannot run it"):
        tiny.engine(2, 4, of=task, executor="native")


class Dropping(nn.Module):
    """Half of the time a layer of the blueprint does not run, by the generator of Python."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(F.dropout(h, 0.5)) if random.random() < 0.5 else h


def test_a_blueprint_that_draws_trains_alike_alone_and_among_others_and_does_not_move_the_host():
    with registered(Dropping):
        benches = bench(Net, num_envs=3), bench(Net, num_envs=1, host_offset=2), bench(LayerDrop), bench(LayerDrop)
        several, alone, with_seed, without = benches
        for made in benches[:3]:
            made.grow("r0c0", "own", SeedStage.HOLDING if made is not with_seed else SeedStage.TRAINING,
                      alpha=0.0 if made is with_seed else 1.0)  # fmt: skip
        for made in benches:
            made.train(2)
        assert bit_equal(several.population.seeds.params[6:], alone.population.seeds.params)
        assert bit_equal(several.population.host.params[2:], alone.population.host.params)
        assert torch.equal(several.measure()[1].loss[2:], alone.measure()[1].loss)
        assert bit_equal(with_seed.population.host.params, without.population.host.params)
        with pytest.raises(StackingError, match="blueprint 'own' draws from the global random generators"):
            fused(bench(Net).executor.data)


# -- in-place operations, lazy, compiled and old-style layers ---------------------------------------------------------


class InPlace(Net):
    """Each slot is edited behind it, in one of three ways."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.r1c0(self.between(self.r0c0(x))), inplace=True)
        h = self.r0c1(h)
        h += 1.0
        return self.head(h.mean(dim=(2, 3)))


class OutOfPlace(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.r1c0(F.relu(self.r0c0(x))))
        return self.head((self.r0c1(h) + 1.0).mean(dim=(2, 3)))


@pytest.mark.parametrize("algorithm", [Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE])
def test_a_host_that_edits_its_slots_in_place_is_one_that_does_not(algorithm):
    benches = bench(InPlace), bench(OutOfPlace)
    assert host_of(InPlace).spec.facts.edited == (True, True, True)
    assert not any(host_of(OutOfPlace).spec.facts.edited)
    for made in benches:
        made.grow("r0c0", "conv_light", SeedStage.BLENDING, alpha=0.5, algorithm=algorithm)
        made.grow("r1c0", "conv_light", SeedStage.TRAINING, algorithm=algorithm, hosts=[0])
        made.grow("r0c1", "norm", SeedStage.HOLDING, alpha=1.0, algorithm=algorithm)
        made.train(2)
    (a, _), (b, _) = ((of.executor.state_dict(), of) for of in benches)
    assert same_tree(a, b)
    first, second = (of.measure(shapley=True)[1] for of in benches)
    assert torch.equal(first.loss, second.loss)


LIKE_STREAMED = {
    "channels-last features": ConvNeXt,
    "a counter and a mean": lambda: Normed(Counted),
    "moving statistics": lambda: Normed(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "partly frozen": PartlyFrozen,
    "edited in place": InPlace,
}


@pytest.mark.parametrize("model", LIKE_STREAMED.values(), ids=LIKE_STREAMED)
def test_fused_is_streamed_for_a_network_that_writes_where_it_likes(model):
    compare(fused, grow_different_seeds, num_envs=5, host=host_of(model))


class Late(Net):
    """Lazy layers, and one that the first pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.r1c0, self.head = nn.LazyConv2d(4, 3, padding=1), None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.r0c1(F.relu(self.r1c0(self.r0c0(x))))).mean(dim=(2, 3))
        if self.head is None:
            self.head = nn.Linear(h.shape[1], 3)
        return self.head(h)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Conv2d(4, 4, 1))


def compiled() -> nn.Module:
    net = torch.compile(Net(lambda: torch.compile(nn.BatchNorm2d(4), backend="eager")), backend="eager")
    net.r1c0.compile(backend="eager")
    return net


@pytest.mark.parametrize("model", [Late, lambda: Net(old_weight_norm), compiled], ids=["lazy", "old", "compiled"])
def test_lazy_old_and_compiled_layers_train(model):
    several, alone = grown(model, 3), grown(model, 1, host_offset=2)
    assert bit_equal(several.population.host.params[2:], alone.population.host.params)
    weights = several.population.host_kind.template.parameters.unpack(several.population.host.params)
    assert all(not torch.equal(x[0], x[1]) for name, x in weights.items() if name.endswith(("weight", "weight_v")))
    assert not any("_orig_mod" in name for name in weights)


def test_an_old_weight_norm_trains_as_in_plain_pytorch():
    made = bench(lambda: Net(old_weight_norm), num_envs=1, batches_per_step=1)
    net, x, y = plain_twin(made, lambda: Net(old_weight_norm))
    F.cross_entropy(net(x), y).backward()
    before = made.host_params()["network.between.weight_v"]
    made.train()
    moved = made.host_params()["network.between.weight_v"] - before
    direction = F.cosine_similarity(moved.flatten(), -net.between.weight_v.grad.flatten(), dim=0)
    assert direction.item() > 0.99  # beside it there is weight decay
