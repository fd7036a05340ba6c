"""Blueprints: what a seed computes, how it starts, and that all of it can learn."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import (
    AbstractBlueprint,
    GateNetwork,
    blueprint_at,
    blueprint_by_name,
    names,
    num_blueprints,
    num_gate_params,
    register,
    selectable,
    unregister,
)
from esper.kasmina.blueprints.cnn import num_groups
from esper.kasmina.parameters.flat_layout import Template
from esper.kasmina.parameters.initialization import build_twice, deterministic_build, fresh_rows, init_table
from esper.leyline.actions import STYLE_ALGORITHM
from esper.leyline.errors import RegistryError
from esper.leyline.random import Stream
from esper.leyline.stages import Algorithm, HostFamily

CNN_NAMES = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")
WIDTHS = (2, 4, 8, 16, 32, 64, 128)
SIZES = (8, 1)

# number of parameters at 8, 16, 32, 64 channels
PARAMETERS = {
    "conv_light": (600, 2352, 9312, 37056),
    "attention": (40, 144, 544, 2112),
    "norm": (17, 33, 65, 129),
    "depthwise": (160, 448, 1408, 4864),
    "bottleneck": (728, 880, 1184, 4544),
    "conv_small": (88, 304, 1120, 4288),
    "conv_heavy": (1192, 4688, 18592, 74048),
}


def newborn(build: Callable[[], nn.Module], birth: dict[str, float], seed: int = 0) -> tuple[Template, Tensor]:
    """A module and one row of weights drawn for it."""
    template = Template(deterministic_build(build))
    table = init_table(build_twice(build), template.parameters, birth)
    return template, fresh_rows(table, seed, Stream.SEED_INIT, torch.tensor([0]), t=1)[0].requires_grad_()


def new_seed(name: str, channels: int) -> tuple[Template, Tensor]:
    blueprint = blueprint_by_name(name, HostFamily.CNN)
    return newborn(lambda: blueprint.build(channels), dict(blueprint.birth))


def features(channels: int, size: int, batch: int = 16) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(channels * 31 + size))


NO_BUFFERS = torch.zeros(0)


@pytest.mark.parametrize("name", CNN_NAMES)
def test_a_blueprint_has_the_tabulated_number_of_parameters(name):
    blueprint = blueprint_by_name(name, HostFamily.CNN)
    assert tuple(blueprint.num_params(c) for c in (8, 16, 32, 64)) == PARAMETERS[name]


@pytest.mark.parametrize("name", CNN_NAMES)
def test_build_already_has_the_constants_that_birth_declares(name):
    blueprint = blueprint_by_name(name, HostFamily.CNN)
    built = blueprint.build(8)
    for parameter, value in blueprint.birth.items():
        torch.testing.assert_close(
            built.get_parameter(parameter), torch.full_like(built.get_parameter(parameter), value)
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", WIDTHS)
@pytest.mark.parametrize("name", CNN_NAMES)
def test_a_newborn_keeps_the_shape_and_is_nearly_silent(name, channels, size):
    template, row = new_seed(name, channels)
    template.bind(row.detach(), NO_BUFFERS)
    h = features(channels, size)
    delta = template(h)
    assert delta.shape == h.shape
    assert delta.dtype == h.dtype
    assert delta.abs().max() <= 0.1 * max(1.0, float(h.abs().max()))


@pytest.mark.parametrize("active", [False, True], ids=["straight-through", "half-blended"])
@pytest.mark.parametrize("algorithm", sorted(set(STYLE_ALGORITHM)), ids=lambda a: a.name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [w if w in (2, 16) else pytest.param(w, marks=pytest.mark.slow) for w in WIDTHS])
@pytest.mark.parametrize("name", CNN_NAMES)
def test_every_parameter_has_a_gradient_within_two_training_steps(name, channels, size, algorithm, active):
    seed, seed_row = new_seed(name, channels)
    gate, gate_row = newborn(lambda: GateNetwork(channels), {}, seed=1)
    h, pull = features(channels, size), features(channels, size).flip(0)
    reached: dict[str, bool] = {}
    for _ in range(2):
        seed.bind(seed_row, NO_BUFFERS)
        gate.bind(gate_row, NO_BUFFERS)
        if active:
            y = blend(h, seed(h), algorithm, torch.tensor(0.5), gate(h))
        else:
            y = blend(h, seed(h.detach()), algorithm, None, gate(h.detach()))
        grads = torch.autograd.grad((y * pull).sum(), (seed_row, gate_row), materialize_grads=True)
        for prefix, template, grad in (("seed.", seed, grads[0]), ("gate.", gate, grads[1])):
            for tensor, value in template.parameters.unpack(grad).items():
                assert value.isfinite().all()
                reached[prefix + tensor] = reached.get(prefix + tensor, False) or bool(value.count_nonzero())
        with torch.no_grad():
            seed_row -= 0.02 * grads[0] / grads[0].norm().clamp(min=1.0)
            gate_row -= 0.02 * grads[1] / grads[1].norm().clamp(min=1.0)
    silent = {tensor for tensor, any_gradient in reached.items() if not any_gradient}
    gate_tensors = {tensor for tensor in reached if tensor.startswith("gate.")}
    assert silent == (set() if algorithm is Algorithm.GATE else gate_tensors)


@pytest.mark.parametrize("channels", WIDTHS)
@pytest.mark.parametrize("name", CNN_NAMES)
def test_the_output_depends_on_the_input_even_on_a_1x1_map(name, channels):
    template, row = new_seed(name, channels)
    row = row.detach()
    for tensor, value in template.parameters.unpack(row).items():
        if tensor in ("excite.weight", "gain.strength"):  # zero at birth, where the answer to any input is zero
            value.fill_(0.5)
    template.bind(row, NO_BUFFERS)
    delta = template(features(channels, 1))
    assert (delta - delta[:1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (2, 1), (8, 1), (16, 1), (24, 1), (32, 2), (48, 3), (64, 4), (128, 8), (1024, 32)]
)
def test_the_group_rule_on_known_widths(channels, groups):
    assert num_groups(channels) == groups


@given(channels=st.integers(1, 2048))
def test_groups_divide_the_channels_and_hold_sixteen_or_all_of_them(channels):
    groups = num_groups(channels)
    assert channels % groups == 0
    assert 1 <= groups <= 32
    assert channels // groups >= min(16, channels)
    larger = [g for g in range(groups + 1, 33) if channels % g == 0 and channels // g >= min(16, channels)]
    assert larger == []


def test_conv_light_is_scaled_relu_of_the_normalized_convolution():
    seed = blueprint_by_name("conv_light", HostFamily.CNN).build(2)
    with torch.no_grad():
        seed.conv.weight.zero_()
        seed.conv.weight[:, :, 1, 1] = torch.eye(2)  # the convolution copies its input
        seed.scale.gamma.copy_(torch.tensor([1.0, -2.0]))
    # one group of 4 values 1, 3, 5, 7: mean 4, population variance 5
    h = torch.tensor([[1.0, 3.0], [5.0, 7.0]]).view(1, 2, 1, 2)
    root = 5.00001**0.5
    expected = torch.tensor([[0.0, 0.0], [-2.0 / root, -6.0 / root]]).view(1, 2, 1, 2)
    torch.testing.assert_close(seed(h), expected)


def test_attention_multiplies_each_channel_by_a_bounded_factor():
    seed = blueprint_by_name("attention", HostFamily.CNN).build(4)  # hidden width 1
    with torch.no_grad():
        seed.squeeze.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        seed.excite.weight.copy_(torch.tensor([[1.0], [0.0], [-100.0], [0.0]]))
        seed.excite.bias.copy_(torch.tensor([0.0, 0.5, 0.0, 0.0]))
    h = torch.ones(1, 4, 2, 2)
    # mean 1, SiLU(1) = 1 / (1 + e^-1) = 0.7310586; tanh(0.7310586) = 0.6237; tanh(0.5) = 0.4621172; tanh(-73) = -1
    torch.testing.assert_close(seed(h)[0, :, 0, 0], torch.tensor([0.62371, 0.46212, -1.0, 0.0]), atol=1e-5, rtol=0)


def test_norm_moves_towards_the_normalized_features():
    seed = blueprint_by_name("norm", HostFamily.CNN).build(2)
    with torch.no_grad():
        seed.gain.strength.fill_(100.0)  # tanh = 1: all the way
    h = torch.tensor([3.0, 7.0]).view(1, 2, 1, 1)
    torch.testing.assert_close((h + seed(h)).flatten(), torch.tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("channels", "count"), [(2, 33), (4, 49), (8, 81), (16, 145), (32, 273), (64, 1057), (128, 4161), (384, 37057)]
)
def test_the_gate_network_has_the_tabulated_number_of_parameters(channels, count):
    assert num_gate_params(channels) == count
    assert sum(p.numel() for p in GateNetwork(channels).parameters()) == count


def test_the_gate_is_one_number_between_zero_and_one_per_example():
    gate = deterministic_build(lambda: GateNetwork(4))(torch.randn(5, 4, 3, 3, generator=torch.Generator()))
    assert gate.shape == (5, 1, 1, 1)
    assert ((gate > 0) & (gate < 1)).all()
    assert gate.unique().numel() == 5


class Doubling(AbstractBlueprint):
    """A user's own blueprint; its batch norm has buffers that are updated in place."""

    name = "doubling"
    family = HostFamily.CNN

    def build(self, channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))


@pytest.fixture
def doubling():
    blueprint = Doubling()
    register(blueprint)
    yield blueprint
    unregister("doubling")


def test_built_in_indices_are_fixed():
    assert selectable(HostFamily.CNN)[:7] == (1, 2, 3, 4, 5, 6, 7)
    assert names()[:8] == ("noop", *CNN_NAMES)
    assert names()[8:13] == ("lora", "lora_large", "mlp_small", "mlp", "flex_attention")
    assert num_blueprints() >= 13
    for index, name in enumerate(CNN_NAMES, start=1):
        assert blueprint_at(index, HostFamily.CNN) is blueprint_by_name(name, HostFamily.CNN)


def test_a_users_blueprint_gets_the_next_index_and_disappears_again(doubling):
    index = num_blueprints() - 1
    assert index >= 13
    assert blueprint_at(index, HostFamily.CNN) is doubling
    assert index in selectable(HostFamily.CNN)
    assert index not in selectable(HostFamily.TRANSFORMER)
    assert doubling.num_params(3) == 9 + 3 + 6
    unregister("doubling")
    assert num_blueprints() == index
    assert index not in selectable(HostFamily.CNN)
    assert register(doubling) == index


def test_registering_the_same_object_again_changes_nothing(doubling):
    before = num_blueprints()
    assert register(doubling) == before - 1
    conv_light = blueprint_by_name("conv_light", HostFamily.CNN)
    assert register(conv_light) == 1
    assert num_blueprints() == before


def test_a_second_topology_shares_the_index_of_its_name(doubling):
    reference = Doubling()
    reference.family = HostFamily.TRANSFORMER
    assert register(reference) == num_blueprints() - 1
    assert blueprint_by_name("doubling", HostFamily.TRANSFORMER) is reference
    assert blueprint_by_name("doubling", HostFamily.CNN) is doubling


def test_a_name_that_is_taken_is_refused(doubling):
    with pytest.raises(RegistryError, match="'doubling' is taken by Doubling for cnn hosts"):
        register(Doubling())
    for name in ("norm", "noop", "lora"):
        other = Doubling()
        other.name = name
        with pytest.raises(RegistryError, match="built in"):
            register(other)


def test_nameless_or_misplaced_blueprints_are_refused():
    nameless = Doubling()
    nameless.name = "two words"
    with pytest.raises(RegistryError, match="identifier"):
        register(nameless)
    homeless = Doubling()
    homeless.family = None
    with pytest.raises(RegistryError, match="no topology"):
        register(homeless)


def test_only_the_last_registration_can_be_taken_back(doubling):
    other = Doubling()
    other.name = "other"
    register(other)
    for name in ("doubling", "norm", "unheard_of"):
        with pytest.raises(RegistryError, match=r"Registered, in order: .*doubling, other"):
            unregister(name)
    unregister("other")


def test_unknown_blueprints_are_answered_with_the_nearest():
    with pytest.raises(RegistryError, match="did you mean 'depthwise'"):
        blueprint_by_name("deepwise", HostFamily.CNN)
    with pytest.raises(RegistryError, match="no blueprint 'lora' for cnn"):
        blueprint_by_name("lora", HostFamily.CNN)
    for index in (0, 8, -1, 999):
        with pytest.raises(RegistryError, match=r"1, 2, 3, 4, 5, 6, 7"):
            blueprint_at(index, HostFamily.CNN)


def test_a_users_batch_norm_keeps_one_set_of_statistics_per_host(doubling):
    template = Template(deterministic_build(lambda: doubling.build(2)))
    rows = fresh_rows(
        init_table(build_twice(lambda: doubling.build(2)), template.parameters, doubling.birth),
        7,
        Stream.SEED_INIT,
        torch.arange(2),
    )
    buffers = template.buffers.pack({"1.running_mean": torch.zeros(2, 2), "1.running_var": torch.ones(2, 2)})
    h = features(2, 4)
    template.train(True)
    template.bind(rows[0], buffers[0])
    template(h)
    plain = doubling.build(2)
    plain.load_state_dict({k: v[0] for k, v in template.parameters.unpack(rows).items()}, strict=False)
    plain(h)
    stats = template.buffers.unpack(buffers)
    torch.testing.assert_close(stats["1.running_mean"][0], plain[1].running_mean)
    torch.testing.assert_close(stats["1.running_var"][0], plain[1].running_var)
    assert torch.equal(stats["1.running_mean"][1], torch.zeros(2))
    assert torch.equal(stats["1.running_var"][1], torch.ones(2))
