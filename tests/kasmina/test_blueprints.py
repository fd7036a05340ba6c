"""Blueprints: what a seed computes, in numbers worked out by hand, and the registry."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina.blueprints import (
    AbstractBlueprint,
    GateNetwork,
    blueprint_at,
    blueprint_by_name,
    names,
    num_blueprints,
    register,
    selectable,
    transformer,
    unregister,
)
from esper.kasmina.blueprints.cnn import num_groups
from esper.kasmina.blueprints.layers import LayerScale, causal_attention
from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.kasmina.parameters.population import seed_kind
from esper.leyline.errors import ConfigError, RegistryError
from esper.leyline.lifecycle import HostFamily

CNN_NAMES = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")


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


def sequence(*tokens: tuple[float, ...]) -> Tensor:
    """One example [1, T, D]."""
    return torch.tensor([tokens])


def built(name: str, width: int) -> nn.Module:
    return blueprint_by_name(name, HostFamily.TRANSFORMER).build(width).requires_grad_(False)


def test_depthwise_sums_each_channel_over_this_token_and_the_three_before_it():
    seed = built("depthwise", 2)
    seed.conv.weight.zero_()[:, 0] = torch.tensor([[0.0, 0.0, 10.0, 1.0], [100.0, 0.0, 0.0, 0.0]])
    # behind the norm: (-1, 1), (1, -1), (-1, 1), (1, -1)
    h = sequence((0.0, 2.0), (5.0, 3.0), (0.0, 2.0), (5.0, 3.0))
    expected = sequence((-1.0, 0.0), (1.0 - 10.0, 0.0), (-1.0 + 10.0, 0.0), (1.0 - 10.0, 100.0))
    torch.testing.assert_close(seed(h), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("name", "rank"), [("lora", 8), ("lora_large", 32)])
def test_lora_is_a_product_of_two_thin_matrices(name, rank):
    seed = built(name, 2)
    assert tuple(seed.down.weight.shape) == (rank, 2)
    seed.down.weight.zero_()[-1] = torch.tensor([1.0, 2.0])
    seed.up.weight[0, -1] = 3.0
    torch.testing.assert_close(seed(sequence((1.0, 1.0), (0.0, -1.0))), sequence((9.0, 0.0), (-6.0, 0.0)))


@pytest.mark.parametrize(("name", "width"), [("mlp_small", 4), ("mlp", 8)])
def test_an_mlp_is_gelu_between_two_linear_maps(name, width):
    seed = built(name, 2)
    assert tuple(seed.up.weight.shape) == (width, 2)
    for tensor in seed.parameters():
        tensor.zero_()
    seed.up.weight[:2, 0] = torch.tensor([1.0, -1.0])
    seed.down.weight[1, :2] = 1.0
    seed.down.bias[0] = 0.5
    # GELU(1) + GELU(-1) = 0.8413447 - 0.1586553
    torch.testing.assert_close(seed(sequence((1.0, 9.0), (0.0, 9.0))), sequence((0.5, 0.6826895), (0.5, 0.0)))


@pytest.mark.parametrize("name", ["attention", "flex_attention"])
def test_attention_with_equal_scores_is_the_mean_of_the_tokens_so_far(name):
    seed = built(name, 4)
    seed.qkv.weight.zero_()[8:] = torch.eye(4)
    seed.qkv.bias.zero_()
    seed.out.weight.copy_(2.0 * torch.eye(4))
    h = sequence((0.0, 2.0, 1.0, 0.0), (4.0, 6.0, 1.0, 1.0))
    torch.testing.assert_close(seed(h), sequence((0.0, 4.0, 2.0, 0.0), (4.0, 8.0, 2.0, 1.0)))


def test_attention_weighs_tokens_by_the_softmax_of_their_scores():
    seed = built("attention", 4)  # four heads of one value each
    seed.qkv.bias.zero_()
    seed.qkv.weight.copy_(torch.cat((torch.eye(4),) * 3))
    seed.out.weight.copy_(torch.eye(4))
    # of the second token: scores 1 * 2 and 1 * 1, so weights e^2 and e, over their sum
    out = seed(sequence((2.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)))[0, 1]
    torch.testing.assert_close(out, torch.tensor([(2 * math.e**2 + math.e) / (math.e**2 + math.e), 0.0, 0.0, 0.0]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_kernel_with_a_block_mask_computes_the_same_attention():
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 17, 130):  # more than one block of 128
        q, k, v = (torch.randn(2, 4, tokens, 16, generator=generator) for _ in range(3))
        blocks = transformer._causal_blocks(tokens, torch.device("cpu"))
        found = transformer.block_mask_kernel(q, k, v, block_mask=blocks)
        torch.testing.assert_close(found, causal_attention(q, k, v), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dims", [(3,), (3, 4)])
def test_a_layer_scale_has_one_factor_per_channel_of_images_and_of_sequences(dims):
    layer = LayerScale(2)
    with torch.no_grad():
        layer.gamma.copy_(torch.tensor([2.0, -3.0]))
    h = torch.ones(1, 2, *dims) if len(dims) == 2 else torch.ones(1, *dims, 2)
    channels = layer(h)[0, :, 0, 0] if len(dims) == 2 else layer(h)[0, 0]
    assert channels.tolist() == [2.0, -3.0]


@pytest.mark.parametrize("causal", [True, False])
def test_the_gate_of_sequences_sees_the_mean_of_the_tokens_so_far_or_of_all(causal):
    gate = GateNetwork(2, causal).requires_grad_(False)
    for tensor in gate.parameters():
        tensor.zero_()
    gate.hidden.weight[0] = torch.tensor([1.0, 0.0])
    gate.out.weight[0, 0] = 1.0
    weight = gate(sequence((2.0, 5.0), (-2.0, 5.0), (3.0, 5.0)))
    # means 2, 0 and 1; SiLU(2) = 1.7615942, SiLU(1) = 0.7310586
    expected = sequence((1.7615942,), (0.0,), (0.7310586,)) if causal else sequence((0.7310586,))
    torch.testing.assert_close(weight, expected.sigmoid())


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
    assert selectable(HostFamily.TRANSFORMER)[:8] == (2, 3, 4, 8, 9, 10, 11, 12)
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
    unregister("doubling")
    assert num_blueprints() == index
    assert index not in selectable(HostFamily.CNN)
    assert register(doubling) == index


def test_a_second_family_shares_the_index_of_its_name(doubling):
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
    with pytest.raises(RegistryError, match="no family"):
        register(homeless)


def test_unknown_blueprints_are_answered_with_the_nearest():
    with pytest.raises(RegistryError, match="did you mean 'depthwise'"):
        blueprint_by_name("deepwise", HostFamily.CNN)
    with pytest.raises(RegistryError, match="no blueprint 'lora' for cnn"):
        blueprint_by_name("lora", HostFamily.CNN)
    for index in (0, 8, -1, 999):
        with pytest.raises(RegistryError, match=r"1, 2, 3, 4, 5, 6, 7"):
            blueprint_at(index, HostFamily.CNN)


def counting() -> nn.Module:
    class Counting(nn.Conv2d):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    return Counting(2, 2, 1)


def again(modules: Iterator[nn.Module]) -> Callable[[int], nn.Module]:
    return lambda channels: next(modules)


@pytest.mark.parametrize(
    ("network", "init", "said"),
    [
        (lambda c: None, {}, "gives a NoneType; it must return an nn.Module"),
        (lambda: None, {}, "cannot be built for 2 channels: TypeError"),
        (lambda c: nn.Conv2d(c, c, 1), {"wight": 0.0}, "cannot be built for 2 channels: AttributeError"),
        (lambda c: nn.Conv2d(c, c, 1), {"weight": "zero"}, "cannot be built for 2 channels: TypeError"),
        (lambda c: nn.LazyConv2d(c, 1), {}, "has lazy layers; give them their sizes, e.g. from channels=2"),
        (lambda c: nn.Conv2d(c, 2 * c, 1), {}, r"maps features \(2, 2, 4, 4\) to \(2, 4, 4, 4\)"),
        (lambda c: Returning(lambda x: (x, x)), {}, "it gives a tuple, not a tensor"),
        (lambda c: Returning(lambda x: x / 0.0), {}, "gives NaN or infinity for ordinary features"),
        (lambda c: counting(), {}, "attribute 'calls' of .* changes in every forward pass"),
        (again(iter([nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, 1))])), {}, "must build the same layers"),
    ],
)
def test_mistakes_of_a_blueprint_are_named_with_it(network, init, said):
    network.__name__ = "own"
    with pytest.raises(ConfigError, match=said) as refused:
        seed_kind(FunctionBlueprint(HostFamily.CNN, network, init), 2, (2, 4, 4), torch.device("cpu"))
    assert "blueprint 'own'" in str(refused.value)


class Returning(nn.Module):
    """A function of features, and a weight."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight, self._function = nn.Parameter(torch.ones(1)), function

    def forward(self, x: Tensor) -> object:
        return self._function(x * self.weight)


def test_a_function_that_is_defined_again_takes_the_place_of_its_blueprint_and_another_one_does_not():
    def defined(width: int) -> Callable[[int], nn.Module]:
        def again(channels: int) -> nn.Module:
            return nn.Linear(channels, width)

        again.__qualname__ = "again"  # as in the cell of a notebook
        return again

    first, second, other = (FunctionBlueprint(HostFamily.TRANSFORMER, defined(width), {}) for width in (1, 2, 3))
    other.network.__qualname__ = "other"
    index = register(first)
    try:
        assert register(second) == index
        assert blueprint_at(index, HostFamily.TRANSFORMER) is second
        with pytest.raises(RegistryError, match="the blueprint name 'again' is taken"):
            register(other)
    finally:
        unregister("again")
