"""Every rule gives what its module gives in PyTorch: value, gradients of input and weights, running statistics."""

import re

import pytest
import torch
from native_bench import DOUBLE, assert_same, check, random_features
from torch import nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.cnn import ChannelAttention, NormShift
from esper.kasmina.blueprints.layers import GateNetwork, LayerScale
from esper.kasmina.parameters.layout import buffer_layout, drop_batch_counters, parameter_layout
from esper.leyline.lifecycle import HostFamily
from esper.tolaria.executors.native import networks
from esper.tolaria.executors.native.networks import by_instructions, by_torch, disagreement
from esper.tolaria.executors.native.program import (
    RULES,
    Activation,
    Operation,
    Place,
    ShapeError,
    activation,
    batch_norm_relu,
    convolution,
    group_norm,
    layer_scale,
    linear,
    max_pool,
    mean_space,
    problem,
)

BUILT_IN = [registry.blueprint_at(i, HostFamily.CNN) for i in registry.selectable(HostFamily.CNN)]
SHAPES = [(5, 4, 4), (16, 2, 2), (37, 8, 5), (64, 1, 1)]  # lanes, height, width: full rows and ragged ones


def type_name(value):
    return type(value).__name__ if isinstance(value, nn.Module) else None


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)))


def tied():
    module = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    module[1].weight = module[0].weight
    return module


def hooked():
    module = nn.Sequential(nn.Conv2d(4, 4, 1))
    module[0].register_forward_hook(lambda layer, given, y: 2 * y)
    return module


def own_forward():
    module = nn.ReLU()
    module.forward = torch.neg
    return module


def other_parts():
    module = ChannelAttention(4)
    module.act = nn.Tanh()
    return module


def affineless_shift():
    module = NormShift(4)
    module.norm = nn.GroupNorm(1, 4, affine=False)
    return module


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
@pytest.mark.parametrize("trainable", [True, False])
def test_a_batch_norm_uses_the_statistics_of_the_batch_in_training_and_the_running_ones_in_evaluation(
    batch, height, width, trainable
):
    norm = nn.BatchNorm2d(6)
    drop_batch_counters(norm)
    norm.running_mean.copy_(random_features(6, seed=3))
    norm.running_var.copy_(random_features(6, seed=4).square() + 0.1)
    layout_of_buffers, layout, x = buffer_layout(norm), parameter_layout(norm), random_features(batch, 6, height, width)
    buffers, row = layout_of_buffers.pack(dict(norm.named_buffers())).double(), random_features(layout.total)
    mode = {"trainable": trainable, "input_grad": trainable}
    found = by_instructions(batch_norm_relu, norm, layout, row, x, buffers=buffers, **mode)
    plain, values = nn.Sequential(norm, nn.ReLU()), row.masked_fill(layout.padding_mask, 0.0)
    assert_same(found, by_torch(plain, parameter_layout(plain), values, x, **mode))
    norm.double().train(trainable)(x)
    for name, value in layout_of_buffers.unpack(buffers).items():
        torch.testing.assert_close(value, norm.get_buffer(name), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("module", [GateNetwork(8), *[b.build(8) for b in BUILT_IN]], ids=type_name)
@pytest.mark.parametrize(("batch", "size"), [(5, 6), (64, 4), (33, 2)])
@pytest.mark.parametrize("trainable", [True, False])
def test_seeds_and_gates_have_rules(module, batch, size, trainable):
    assert problem(module) is None
    check(module, (batch, 8, size, size), trainable=trainable, input_grad=False)


def test_a_layer_that_comes_twice_runs_twice():
    act = nn.ReLU()
    module = nn.Sequential(nn.Conv2d(4, 4, 1), act, nn.Conv2d(4, 4, 1), act)
    assert problem(module) is None
    check(module, (5, 4, 3, 3))


@pytest.mark.parametrize("where", [0, 500])
def test_an_outlier_does_not_spoil_the_moments_of_a_group_norm(where):
    norm = nn.GroupNorm(1, 16)
    layout, x = parameter_layout(norm), random_features(19, 16, 8, 8).float()
    x.flatten(1)[:, where] = 1e4
    row = layout.pack(dict(norm.named_parameters()))
    found = by_instructions(group_norm, norm, layout, row, x, trainable=False)
    torch.testing.assert_close(found.y.double(), norm.double()(x.double()).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(18, 3, 4, 6), (18, 3, 5, 5), (7, 2, 2, 3), (3, 1, 2, 2)])
def test_pooling_gives_the_first_of_equals_and_leaves_out_an_odd_border(shape):
    x = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(0)).double()  # many ties
    check(nn.MaxPool2d(2), shape, x=x, rule=lambda a, module, weights, h: max_pool(a, h))


def test_pooling_passes_on_what_is_not_a_number():
    x, pool = torch.zeros(2, 1, 2, 4, dtype=DOUBLE), nn.MaxPool2d(2)
    x[0, 0, 1, 0] = x[1, 0, 0, 2] = torch.nan
    layout = parameter_layout(pool)
    found = by_instructions(lambda a, m, w, h: max_pool(a, h), pool, layout, torch.zeros(0, dtype=DOUBLE), x)
    assert found.y.isnan().flatten(1).tolist() == [[True, False], [False, True]]


def test_the_mean_over_space_and_a_linear_layer():
    head = nn.Linear(6, 10)

    def rule(a, module, weights, h):
        mean, mean_backward = mean_space(a, h)
        y, backward = linear(a, module, weights, mean)
        return y, lambda g, input_grad: mean_backward(backward(g, True), input_grad)

    check(head, (40, 6, 3, 2), rule=rule, reference=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head))


# -- what has no rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(4, 4, 5, padding=2), "Conv2d"),
        (nn.Conv2d(4, 4, 3), "Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2), "Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2), "Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), "Conv2d"),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), "Conv2d"),  # with a bias
        (nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), "Conv2d"),
        (nn.GroupNorm(2, 4, affine=False), "group norms without weights"),
        (nn.Sequential(), "no layers"),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout()), r"1 \(Dropout\)"),
        (nn.Sequential(nn.Linear(4, 4)), "Linear as a seed or in a sequence"),
        (nn.Sequential(ChannelAttention(4)), "ChannelAttention as a part"),
        (nn.BatchNorm2d(4), "BatchNorm2d"),
        (nn.GELU(), "GELU"),
        (parametrized(), "ParametrizedConv2d"),
        (tied(), "1.weight is the same parameter as another"),
        (hooked(), r"0 \(Conv2d\) has hooks"),
        (own_forward(), r"it \(ReLU\) has a forward pass of its own"),
        (other_parts(), "ChannelAttention is not made of squeeze, act, excite"),
        (affineless_shift(), "group norms without weights"),
    ],
    ids=type_name,
)
def test_what_is_not_exactly_what_a_rule_knows_has_none(module, reason):
    assert re.search(reason, problem(module))


def test_the_module_and_its_instructions_agree_about_every_blueprint():
    assert {disagreement(blueprint.build(3), 3) for blueprint in BUILT_IN} == {None}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(4, 1, 1), r"it makes \(3, 1, 5, 4\) of features \(3, 4, 5, 4\)"),
        (nn.Conv2d(4, 8, 1), r"it makes \(3, 8, 5, 4\)"),
        (nn.GroupNorm(2, 8), "PyTorch refuses features"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)), "writes into its input"),
    ],
)
def test_a_seed_that_does_not_fit_its_slot_is_left_to_pytorch(module, reason):
    assert problem(module) is None
    assert re.search(reason, disagreement(module, 4))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (activation(Activation.TANH), "its output differs from PyTorch's in training mode"),
        (
            lambda a, *given: (activation(Activation.SIGMOID) if a.trainable else activation(Activation.TANH))(
                a, *given
            ),
            "its output differs from PyTorch's in evaluation mode",
        ),
    ],
)
def test_a_rule_that_is_wrong_is_found_by_the_trial(monkeypatch, wrong, reason):
    monkeypatch.setattr(networks, "RULES", {nn.Sigmoid: wrong})
    assert disagreement(nn.Sigmoid(), 4) == reason


def test_wrong_gradients_are_found_by_the_trial(monkeypatch):
    def doubled(a, module, weights, x):
        y, backward = RULES[LayerScale](a, module, weights, x)

        def wrong(g, input_grad):
            a.emit(Operation.BLEND, g, g, None, Place(networks._ONES, 0), g, sizes=(g.size, 0))  # g := g + 1 g
            return backward(g, input_grad)

        return y, wrong

    monkeypatch.setattr(networks, "RULES", {LayerScale: doubled})
    assert disagreement(LayerScale(4), 4) == "its gradients differ from PyTorch's"


@pytest.mark.parametrize(
    "rule", [convolution, group_norm, layer_scale], ids=["convolution", "group_norm", "layer_scale"]
)
def test_layers_that_do_not_fit_their_features_are_refused_when_a_program_is_made(rule):
    module = {convolution: nn.Conv2d(8, 8, 1), group_norm: nn.GroupNorm(2, 8), layer_scale: LayerScale(8)}[rule]
    layout = parameter_layout(module)
    with pytest.raises(ShapeError, match=r"found \(8,.*expected \((8, )?4,"):
        by_instructions(rule, module, layout, random_features(layout.total), random_features(2, 4, 3, 3))
