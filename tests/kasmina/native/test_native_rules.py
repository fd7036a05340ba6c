"""Every rule gives what its module gives in PyTorch: value, gradients of input and weights, running statistics."""

import pytest
import torch
from native_bench import DOUBLE, assert_same, by_torch, random_features, random_module, run_rule
from torch import nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.cnn import ChannelAttention, NormShift
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.native.rules import batch_norm, linear, max_pool, mean_space
from esper.kasmina.native.seeds import has_rule
from esper.kasmina.stacking import drop_batch_counters
from esper.leyline.stages import Topology

BUILT_IN = [registry.blueprint_at(i, Topology.CNN) for i in registry.selectable(Topology.CNN)]
SHAPES = [(5, 4, 4), (16, 2, 2), (37, 8, 5), (64, 1, 1)]  # lanes, height, width: full rows and ragged ones


def check(module, shape, *, wanted=True, rule=None):
    random_module(module)
    x = random_features(*shape)
    slope = random_features(*module(x).shape, seed=2)
    ours = run_rule(module, x, slope, wanted=wanted, rule=rule)
    assert_same(ours, by_torch(module, x, slope))


@pytest.mark.parametrize(("batch", "height", "width"), SHAPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 8), (8, 8), (3, 5), (9, 17), (12, 4)])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution(batch, height, width, inputs, outputs, kernel, bias):
    check(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias), (batch, inputs, height, width))


@pytest.mark.parametrize(("inputs", "outputs", "kernel"), [(40, 24, 3), (48, 80, 1)])
def test_a_convolution_whose_weights_and_features_do_not_fit_the_first_cache(inputs, outputs, kernel):
    check(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), (33, inputs, 18, 20))


@pytest.mark.parametrize(("batch", "height", "width"), SHAPES)
@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_depthwise_convolution(batch, height, width, channels, kernel):
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
    check(conv, (batch, channels, height, width))


@pytest.mark.parametrize(("batch", "height", "width"), SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_a_batch_norm_that_learns(batch, height, width, relu):
    norm = nn.BatchNorm2d(6)
    drop_batch_counters(norm)
    random_module(norm)
    x, slope = random_features(batch, 6, height, width), random_features(batch, 6, height, width, seed=2)

    def rule(a, module, weights, h):
        return batch_norm(a, module, weights, h, relu=relu)

    ours = run_rule(norm, x, slope, wanted=True, rule=rule)
    whole = nn.Sequential(norm, nn.ReLU()) if relu else nn.Sequential(norm)
    theirs = by_torch(whole, x, slope)
    theirs.of_weights = {name.partition(".")[2]: g for name, g in theirs.of_weights.items()}
    theirs.buffers = {name.partition(".")[2]: b for name, b in theirs.buffers.items()}
    assert_same(ours, theirs)


@pytest.mark.parametrize("relu", [False, True])
def test_a_batch_norm_that_measures_takes_its_running_statistics(relu):
    norm = nn.BatchNorm2d(6)
    drop_batch_counters(norm)
    random_module(norm)
    norm.running_mean.copy_(random_features(6, seed=3))
    norm.running_var.copy_(random_features(6, seed=4).square() + 0.1)
    x = random_features(21, 6, 3, 3)

    def rule(a, module, weights, h):
        return batch_norm(a, module, weights, h, relu=relu)

    ours = run_rule(norm, x, x, wanted=False, learns=False, rule=rule)
    want = norm.eval()(x)
    torch.testing.assert_close(ours.y, want.relu() if relu else want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("batch", "height", "width"), SHAPES[:3])
@pytest.mark.parametrize(("groups", "channels"), [(1, 8), (2, 8), (4, 4)])
@pytest.mark.parametrize("after", [[], [nn.ReLU], [LayerScale], [nn.ReLU, LayerScale]])
def test_a_group_norm_with_what_follows_it(batch, height, width, groups, channels, after):
    layers = [layer(channels) if layer is LayerScale else layer() for layer in after]
    check(nn.Sequential(nn.GroupNorm(groups, channels), *layers), (batch, channels, height, width))


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), LayerScale(6)])
def test_layers_without_neighbours(layer):
    check(nn.Sequential(nn.Conv2d(6, 6, 1, bias=False), layer), (19, 6, 3, 2))
    check(nn.Sequential(layer, nn.Conv2d(6, 6, 1, bias=False)), (19, 6, 3, 2))


@pytest.mark.parametrize("blueprint", BUILT_IN, ids=lambda blueprint: blueprint.name)
@pytest.mark.parametrize(("channels", "batch", "size"), [(4, 5, 6), (16, 64, 4), (32, 33, 2)])
def test_every_blueprint_has_a_rule(blueprint, channels, batch, size):
    module = blueprint.build(channels)
    assert has_rule(module)
    check(module, (batch, channels, size, size), wanted=False)


@pytest.mark.parametrize("module", [ChannelAttention(8), NormShift(8), GateNetwork(8), *[b.build(8) for b in BUILT_IN]])
def test_seeds_and_gates_put_out_the_same_where_nothing_learns(module):
    random_module(module)
    x = random_features(17, 8, 4, 4)
    ours = run_rule(module, x, x, wanted=False, learns=False)
    torch.testing.assert_close(ours.y, module(x).view_as(ours.y), rtol=1e-9, atol=1e-9)


def test_a_gate():
    check(GateNetwork(8), (21, 8, 4, 4), wanted=False)


@pytest.mark.parametrize("shape", [(18, 3, 4, 6), (18, 3, 5, 5), (7, 2, 2, 3), (3, 1, 2, 2)])
def test_pooling_gives_the_first_of_equals_and_leaves_out_an_odd_border(shape):
    pool = nn.MaxPool2d(2)
    x = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(0)).double()  # many ties
    slope = random_features(*pool(x).shape, seed=2)
    ours = run_rule(pool, x, slope, wanted=True, rule=lambda a, module, weights, h: max_pool(a, h))
    assert_same(ours, by_torch(pool, x, slope))


def test_pooling_passes_on_what_is_not_a_number():
    x = torch.zeros(2, 1, 2, 4, dtype=DOUBLE)
    x[0, 0, 1, 0] = x[1, 0, 0, 2] = torch.nan
    ours = run_rule(nn.MaxPool2d(2), x, x[..., :1, :2], wanted=False, rule=lambda a, m, w, h: max_pool(a, h))
    assert ours.y.isnan().flatten(1).tolist() == [[True, False], [False, True]]


def test_the_mean_over_space_and_a_linear_layer():
    head = random_module(nn.Linear(6, 10))
    x, slope = random_features(40, 6, 3, 2), random_features(40, 10, seed=2)

    def rule(a, module, weights, h):
        mean, back_mean = mean_space(a, h)
        y, back = linear(a, module, weights, mean)
        return y, lambda g, wanted: back_mean(back(g, True), wanted)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = head

        def forward(self, h):
            return self.linear(h.mean(dim=(2, 3)))

    theirs = by_torch(Head(), x, slope)
    theirs.of_weights = {name.partition(".")[2]: g for name, g in theirs.of_weights.items()}
    assert_same(run_rule(head, x, slope[..., None, None], wanted=True, rule=rule), theirs)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),  # with a bias
        nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
        nn.GroupNorm(2, 4, affine=False),
        nn.Sequential(),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout()),
        nn.Sequential(ChannelAttention(4)),
        nn.BatchNorm2d(4),
        nn.GELU(),
    ],
)
def test_what_no_rule_covers_has_none(module):
    assert not has_rule(module)
