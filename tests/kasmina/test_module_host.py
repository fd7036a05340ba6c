"""A user's network as a host: what the probe finds, and the forward pass with slots."""

import copy
import functools
import pickle
import warnings

import cloudpickle
import pytest
import torch
from torch import nn

from esper.kasmina.hosts.host import Host, HostSpec
from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import Population
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from user_networks import MLP, Encoder, Padded, ResNet8, Sensors, Skip, Tagger, Tied

CPU = torch.device("cpu")
SLOTS = ("layer2", "stem", "layer1")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IMAGES = normal(8, 3, 12, 12)
TOKENS = torch.randint(0, 11, (8, 7), generator=torch.Generator().manual_seed(0))


@functools.cache
def resnet() -> ModuleHostSpec:
    return ModuleHostSpec.of(ResNet8, SLOTS, IMAGES)


def host(spec: ModuleHostSpec, *slots: str) -> ModuleHost:
    example = torch.zeros(1, *spec.facts.inputs)
    return deterministic_build(lambda: spec.build(slots or [p.slot_id for p in spec.points()], example)).eval()


def test_the_probe_finds_slots_in_the_users_order_with_their_place_in_the_forward_pass():
    spec = resnet()
    assert isinstance(spec, HostSpec)
    assert spec.family is HostFamily.CNN
    found = [(p.slot_id, p.channels, p.order) for p in spec.points()]
    assert found == [
        ("layer2", 16, 0),
        ("stem", 8, 1),
        ("layer1", 8, 2),
    ]
    assert host(spec).execution_order() == ("stem", "layer1", "layer2")
    assert all(0.0 < p.position < 1.0 for p in spec.points())


def test_the_probe_finds_sizes():
    spec = resnet()
    # stem 216 + 16; layer1 2 * 576 + 32; layer2 1152 + 2304 + 64 + 128 + 32; layer3 4608 + 9216 + 128 + 512 + 64
    assert spec.num_params() == 232 + 1184 + 3680 + 14528 + 330
    assert spec.num_params() == sum(p.numel() for p in host(spec).parameters())
    built = host(spec)
    assert [built.features(p) for p in spec.points()] == [(16, 6, 6), (8, 12, 12), (8, 12, 12)]
    assert built.largest_activation == 8 * 12 * 12


def test_features_of_convolutions_over_time_are_transposed_for_seeds():
    spec = ModuleHostSpec.of(Sensors, ["r0c0", "r1c0", "r0c1", "tokens"], normal(8, 2, 10))
    assert spec.family is HostFamily.TRANSFORMER
    found = [(p.slot_id, p.channels, p.transposed) for p in spec.points()]
    assert found == [("r0c0", 4, True), ("r1c0", 4, True), ("r0c1", 8, True), ("tokens", 6, False)]
    built, seen = host(spec), {}
    assert [built.features(p) for p in spec.points()] == [(10, 4), (10, 4), (5, 8), (5, 6)]
    x = normal(3, 2, 10)

    def shifted(slot, h):  # by another number for each channel
        seen[slot] = tuple(h.shape)
        return h + torch.arange(h.shape[-1]) if slot == "r0c0" else h

    found = built(x, shifted)
    assert seen == {"r0c0": (3, 10, 4), "r1c0": (3, 10, 4), "r0c1": (3, 5, 8), "tokens": (3, 5, 6)}
    network = built.network
    network.r0c0.register_forward_hook(lambda layer, args, h: h + torch.arange(4)[:, None])
    assert torch.equal(found, network(x))


@pytest.mark.parametrize(
    ("model", "transposed"),
    [
        (lambda: nn.Sequential(nn.Conv1d(5, 5, 1), nn.ReLU()), True),
        (lambda: nn.Sequential(nn.Conv1d(5, 7, 1), nn.BatchNorm1d(7), nn.AvgPool1d(2)), True),
        (lambda: nn.Sequential(nn.Conv1d(5, 7, 1), nn.Flatten(2), nn.Linear(6, 6)), False),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.GroupNorm(1, 5)), True),
        (lambda: nn.LayerNorm(6), False),
        (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), False),
    ],
)
def test_the_last_layer_shows_where_the_channels_of_features_are(model, transposed):
    network = nn.Sequential(model(), nn.Flatten(), nn.LazyLinear(2))
    spec = ModuleHostSpec.of(lambda: copy.deepcopy(network), ["0"], normal(8, 5, 6))
    assert [p.transposed for p in spec.points()] == [transposed]


PADDING = TOKENS.clamp(min=1) * (torch.arange(7) < torch.tensor([7, 3, 5, 2, 7, 4, 6, 1])[:, None])


def test_an_encoder_with_padding_runs_without_nested_tensors():
    spec = ModuleHostSpec.of(Padded, ["encoder.layers.0", "encoder"], PADDING)
    assert [p.channels for p in spec.points()] == [8, 8]
    with torch.no_grad():
        found = host(spec)(PADDING, lambda slot, h: h)
        want = deterministic_build(Padded).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors
            torch.testing.assert_close(found, want(PADDING))


def test_an_encoder_whose_padding_counts_is_another_one_in_evaluation_and_refused():
    with pytest.raises(ConfigError, match="sets what is masked as padding to 0, in training it does not, and outputs"):
        ModuleHostSpec.of(functools.partial(Padded, pools_padding=True), ["encoder"], PADDING)
    ModuleHostSpec.of(functools.partial(Padded, pools_padding=True), ["encoder"], PADDING.clamp(min=1))


def test_sizes_do_not_depend_on_the_number_of_examples():
    assert ModuleHostSpec.of(ResNet8, SLOTS, IMAGES[:1]) == ModuleHostSpec.of(ResNet8, SLOTS, IMAGES[:5]) == resnet()


def test_the_inputs_count_among_the_activations():
    spec = ModuleHostSpec.of(MLP, ["body.0"], normal(8, 6))
    assert spec.facts.largest_activation == 12
    spec = ModuleHostSpec.of(lambda: nn.Sequential(nn.Linear(30, 4), nn.Linear(4, 2)), ["0"], normal(8, 30))
    assert spec.facts.largest_activation == 30


def test_without_seeds_the_host_is_the_users_network():
    built = host(resnet())
    assert isinstance(built, Host)
    alone = deterministic_build(ResNet8)
    alone.load_state_dict(built.network.state_dict(), strict=False)
    assert torch.equal(built(IMAGES, lambda slot, h: h), alone.eval()(IMAGES))
    assert torch.equal(built.train()(IMAGES, lambda slot, h: h), alone.train()(IMAGES))


def test_the_network_continues_with_what_apply_returns():
    built = host(resnet())
    net = built.network
    h = net.layer2(net.layer1(net.stem(IMAGES) * 2.0) + 1.0) - 3.0
    expected = net.head(net.layer3(h).mean((2, 3)))
    change = {"stem": lambda h: h * 2.0, "layer1": lambda h: h + 1.0, "layer2": lambda h: h - 3.0}
    torch.testing.assert_close(built(IMAGES, lambda slot, h: change[slot](h)), expected)


def test_no_hook_stays_behind_a_pass_even_if_it_fails():
    built = host(resnet())
    built(IMAGES, lambda slot, h: h)
    with pytest.raises(ZeroDivisionError):
        built(IMAGES, lambda slot, h: h * (1 / 0))
    assert not any(layer._forward_hooks for layer in built.modules())


class Moody(Skip):
    """Leaves out `b` where the inputs are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.max()) < 50.0 else self.head(self.a(x).mean((2, 3)))


def test_a_pass_that_leaves_out_a_slot_is_refused():
    x = normal(8, 2, 5, 5)
    built = host(ModuleHostSpec.of(Moody, ["b", "a"], x))
    with pytest.raises(ConfigError, match="Moody met the slots a, but the probe met a, b; the path through"):
        built(100.0 * x, lambda slot, h: h)


class Hooked(Skip):
    """The user's own hook doubles the output of `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, out: 2.0 * out)


def test_hooks_of_the_user_run_before_the_slot_and_stay():
    x = normal(8, 2, 5, 5)
    built = host(ModuleHostSpec.of(Hooked, ["b"], x))
    seen = []
    built(x, lambda slot, h: seen.append(h) or h)
    a = torch.relu(built.network.a(x))
    expected = 2.0 * nn.functional.conv2d(a, built.network.b.weight, built.network.b.bias, padding=1)
    torch.testing.assert_close(seen[0], expected)
    assert len(built.network.b._forward_hooks) == 1


def test_a_spec_can_be_pickled_and_compared():
    assert pickle.loads(pickle.dumps(resnet())) == resnet()
    narrow = ModuleHostSpec.of(lambda: ResNet8(width=4), SLOTS, IMAGES)
    again = pickle.loads(cloudpickle.dumps(narrow))
    assert again.facts == narrow.facts != resnet().facts
    assert torch.equal(host(again)(IMAGES, lambda slot, h: h), host(narrow)(IMAGES, lambda slot, h: h))


def test_a_vector_is_a_sequence_of_one_token():
    x = normal(8, 6)
    spec = ModuleHostSpec.of(MLP, ["body.3", "body.0"], x)
    built, met = host(spec), []
    out = built(x, lambda slot, h: met.append((slot, tuple(h.shape))) or h + 1.0)
    assert spec.family is HostFamily.TRANSFORMER
    assert [built.features(point) for point in spec.points()] == [(1, 12), (1, 12)]
    assert met == [("body.0", (8, 1, 12)), ("body.3", (8, 1, 12))]
    body = built.network.body
    expected = built.network.out(body[3](body[2](body[1](body[0](x) + 1.0))) + 1.0)
    torch.testing.assert_close(out, expected)


def test_the_layers_of_an_encoder_are_slots_in_training_and_in_its_fast_evaluation():
    slots = ["encoder.layers.1.linear1", "encoder.layers.0", "embed"]
    spec = ModuleHostSpec.of(Encoder, slots, TOKENS)
    built = host(spec)
    assert spec.family is HostFamily.TRANSFORMER
    assert [built.features(point) for point in spec.points()] == [(7, 16), (7, 8), (7, 8)]
    for training in (False, True):
        met = []
        with torch.no_grad():
            out = built.train(training)(TOKENS, lambda slot, h, met=met: met.append(slot) or h)
        assert met == ["embed", "encoder.layers.0", "encoder.layers.1.linear1"]
        torch.testing.assert_close(out, built.network(TOKENS))


class Flatten(ResNet8):
    """Without the number of rows of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(torch.flatten(self.pool(h), 1))


class Averaging(MLP):
    """Would average the states of an example instead of failing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).view(len(x), -1, 12).mean(1))


@pytest.mark.parametrize(
    ("model", "slots", "example", "shares"),
    [
        (ResNet8, ["layer3"], IMAGES, False),  # followed by .view(x.shape[0], -1)
        (Flatten, ["stem", "layer1", "layer2", "layer3"], IMAGES, True),
        (Flatten, ["layer2.conv1"], IMAGES, False),
        (Skip, ["a"], normal(8, 2, 5, 5), True),
        (Skip, ["b"], normal(8, 2, 5, 5), False),
        (Skip, ["a", "b"], normal(8, 2, 5, 5), False),
        (MLP, ["body.0", "body.2"], normal(8, 6), True),
        (Averaging, ["body.0"], normal(8, 6), False),
        (Encoder, ["embed", "encoder.layers.0"], TOKENS, True),
        (Encoder, ["encoder.layers.0.linear2"], TOKENS, False),
    ],
)
def test_prefixes_are_shared_where_nothing_passes_by_the_slot(model, slots, example, shares):
    assert host(ModuleHostSpec.of(model, slots, example)).shares_prefixes is shares


def test_only_enabled_slots_decide_whether_prefixes_are_shared():
    spec = ModuleHostSpec.of(Skip, ["a", "b"], normal(8, 2, 5, 5))
    assert host(spec, "a").shares_prefixes
    assert not host(spec, "a", "b").shares_prefixes


def test_shared_prefixes_give_the_outputs_of_separate_passes():
    x = normal(8, 2, 5, 5)
    built = host(ModuleHostSpec.of(Skip, ["a"], x))
    both = built(x, lambda slot, h: torch.cat((h, 3.0 * h)))
    separate = (built(x, lambda slot, h: h), built(x, lambda slot, h: 3.0 * h))
    torch.testing.assert_close(both, torch.cat(separate))


class Orthogonal(Skip):
    """Weights that no table of intervals describes."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.orthogonal_(self.head.weight)


def rows_of(spec: ModuleHostSpec, num_envs: int, offset: int = 0) -> torch.Tensor:
    population = Population(host(spec), OptimizerSpec(), num_envs=num_envs, run_seed=3, device=CPU,
        host_ids=torch.arange(offset, offset + num_envs),
    )  # fmt: skip
    population.reset(episode=2)
    weights = population.host_kind.template.parameters.unpack(population.host.params)
    return weights["network.head.weight"].clone()


def test_each_host_of_a_population_is_initialized_by_the_users_code():
    spec = ModuleHostSpec.of(Orthogonal, ["a"], normal(8, 2, 5, 5))
    weights = rows_of(spec, 3)
    torch.testing.assert_close(weights @ weights.mT, torch.eye(3).expand(3, 3, 3), atol=1e-5, rtol=0.0)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(rows_of(spec, 1, offset=2)[0], weights[2])


def test_data_of_another_shape_than_the_example_are_refused():
    with pytest.raises(ConfigError, match=r"inputs \[3, 16, 16\], but the network was probed with \[3, 12, 12\]"):
        resnet().build(["stem"], torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize(
    ("model", "slot", "example", "causal"),
    [
        (lambda: Tagger(both=False), "into", torch.randn(16, 6, 4, generator=torch.Generator()), True),
        (lambda: Tagger(both=True), "into", torch.randn(16, 6, 4, generator=torch.Generator()), False),
        (Tied, "mix", torch.arange(112).reshape(16, 7) ** 2 % 5, True),  # token by token
        (Encoder, "encoder", torch.arange(112).reshape(16, 7) ** 2 % 5, False),  # one answer for the sequence
    ],
)
def test_a_host_is_causal_if_no_output_depends_on_later_positions(model, slot, example, causal):
    assert ModuleHostSpec.of(model, [slot], example).facts.causal is causal
