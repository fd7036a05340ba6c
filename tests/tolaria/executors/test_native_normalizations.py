"""Normalizations, and what is fused with them, give as instructions what PyTorch gives."""

import copy

import pytest
import torch
import torch.nn.functional as F
from native_agreement import MAPS, Of, agree, parts, targets
from torch import nn

from esper.kasmina.blueprints import cnn
from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import by_instructions, disagreement
from esper.tolaria.executors.native.normalizations import fused_batch_norm, fused_normalization
from esper.tolaria.executors.native.trace import BATCH, NoRuleError, trace

# -- normalizations ----------------------------------------------------------------------------------------------------


def residual(convolve, norm, x, *, act=F.relu, how="in place"):
    shortcut = x * 2.0
    y = norm(convolve(x))
    if how == "in place":
        y += shortcut
    else:
        y = y + shortcut if how == "right" else shortcut + y
    return act(y) + shortcut


def block(norm, **options):
    return Of(lambda x, *layers: residual(*layers, x, **options), nn.Conv2d(4, 4, 1), norm)


def fixed(x, convolve, norm):
    return F.batch_norm(convolve(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)


NORMALIZED = {
    "batch": nn.BatchNorm2d(4),
    "batch, no weights": nn.BatchNorm2d(4, affine=False, momentum=0.3),
    "batch, no statistics": nn.BatchNorm2d(4, track_running_stats=False),
    "batch, neither": nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "group": nn.GroupNorm(2, 4),
    "group, no weights": nn.GroupNorm(1, 4, affine=False),
    "instance": nn.InstanceNorm2d(4),
    "instance with weights": nn.InstanceNorm2d(4, affine=True),
    "layer": nn.LayerNorm(5),
    "layer, two axes, no bias": nn.LayerNorm((6, 5), bias=False),
    "layer, three axes, no weights": nn.LayerNorm(MAPS, elementwise_affine=False),
    "rms": nn.RMSNorm(5),
    "rms, two axes": nn.RMSNorm((6, 5), eps=0.1, elementwise_affine=False),
}
AFTER = {
    "nothing": nn.Identity(), "relu": nn.ReLU(inplace=True), "relu6": nn.ReLU6(), "hardtanh": nn.Hardtanh(-1.0, 0.7),
    "silu": nn.SiLU(), "hardswish": nn.Hardswish(),
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMALIZED)
def test_a_normalization_after_a_convolution_gives_what_pytorch_gives(norm):
    agree(nn.Sequential(nn.Conv2d(4, 4, 1), NORMALIZED[norm]), *MAPS)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_an_activation_function_is_part_of_a_normalization(norm, after):
    module = nn.Sequential(nn.Conv2d(4, 4, 1), NORMALIZED[norm], AFTER[after])
    agree(module, *MAPS, batches=((40, 16),))
    assert bool({fused_batch_norm, fused_normalization} & set(targets(module, *MAPS))) == (after != "nothing")


@pytest.mark.parametrize("how", ["in place", "left", "right"])
def test_a_residual_is_part_of_a_batch_norm(how):
    module = block(nn.BatchNorm2d(4), how=how)
    agree(module, *MAPS)
    assert fused_batch_norm in targets(module, *MAPS)
    assert torch.ops.aten.relu.default not in targets(module, *MAPS)


@pytest.mark.parametrize("act", [F.relu6, F.silu, torch.tanh])
def test_other_functions_may_follow_a_residual(act):
    agree(block(nn.BatchNorm2d(4), act=act), *MAPS)
    agree(block(nn.GroupNorm(2, 4), act=act), *MAPS, batches=((7, None),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c, n: n(F.relu(n(c(x)))),  # the same layer twice
        lambda x, c, n: F.relu(n(c(x))) + F.relu(n(x)),
        lambda x, c, n: (lambda y, z: F.relu(y) + z)(n(c(x)), n(x)),  # running statistics keep their order
        lambda x, c, n: (lambda a: F.relu(n(a) + a))(c(x)),  # a residual that is also the input
        lambda x, c, n: F.relu(n(c(x)) + x.mean((2, 3), keepdim=True)),  # a residual that is broadcast
        lambda x, c, n: (lambda y, z: F.relu(y) + n(z) + y)(n(c(x)), x),  # read twice: no fusion
    ],
)
def test_a_batch_norm_may_be_used_in_any_way(function):
    agree(Of(function, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), *MAPS)


def test_a_residual_that_is_edited_stays_edited():
    def edits(x, convolve, norm):
        h = convolve(x)
        y = norm(x)
        h += y
        return F.relu(h) * h

    agree(Of(edits, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), *MAPS)


def test_an_edit_between_a_normalization_and_what_follows_it_comes_after_the_normalization():
    def edits(x, norm):
        h = x * 2.0
        y = norm(h)
        h.mul_(x)
        return F.relu(y) + h

    module, x = Of(edits, nn.GroupNorm(2, 4, affine=False)), torch.randn(3, *MAPS)
    graph, none = trace(Template(copy.deepcopy(module)), torch.randn(BATCH, *MAPS), training=False), torch.zeros(0)
    assert torch.allclose(by_instructions(graph, none, none, x, training=False).outputs, module(x), atol=1e-5)


def test_a_normalization_by_fixed_statistics_has_gradients():
    agree(Of(fixed, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), *MAPS)
    agree(Of(lambda *of: F.silu(fixed(*of)), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), *MAPS)
    agree(Of(lambda x, *of: F.relu(fixed(x, *of) + x), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), *MAPS)


def test_normalizations_take_features_of_any_number_of_axes():
    agree(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), 4)
    agree(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.GroupNorm(2, 4)), 4, 5)
    agree(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.RMSNorm(6)), 4)


def test_layers_may_be_normalized_when_examples_come_second():
    agree(Of(lambda x, norm: norm(x.transpose(0, 1)).transpose(0, 1), nn.LayerNorm(4)), 3, 4)


@pytest.mark.parametrize("blueprint", [cnn.conv_light, cnn.norm, cnn.bottleneck, cnn.conv_heavy])
def test_the_branches_of_blueprints_agree(blueprint):
    agree(blueprint(16), 16, 4, 4, batches=((7, None),))
    assert not {torch.ops.aten.relu.default, torch.ops.aten.mul.Tensor} & set(targets(cnn.conv_light(16), 16, 4, 4))


def test_a_factor_after_a_normalization_is_part_of_it():
    agree(nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.SiLU(), LayerScale(4)), *MAPS)
    agree(nn.Sequential(nn.LayerNorm(4), nn.ReLU(), LayerScale(4)), 3, 4)
    agree(
        Of(lambda x, norm, c: norm(x) * (c.weight.view(4, 1, 1) + 1.0), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1)), *MAPS
    )


class Weighted(nn.Module):
    """A function of x, and of weights that are computed in the forward pass."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x):
        return self.function(x * 1.0, self.weight * 2.0, self.bias + 1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True) + x),
        lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)) * b.view(4, 1, 1),
        lambda x, w, b: F.rms_norm(F.relu(F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b)), (4,), b),
    ],
)
def test_weights_of_a_normalization_may_be_computed_in_the_forward_pass(function):
    agree(Weighted(function), *MAPS)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((2, 5))]
)
def test_parts_of_examples_may_be_normalized_as_if_they_were_examples(norm):
    agree(Of(lambda x, norm: F.relu(norm(parts(x)) + parts(x)).view(x.shape), norm), 3, 4, 2, 5)
    agree(Of(lambda x, norm: F.relu(norm(parts(x))).view(x.shape), norm), 3, 4, 2, 5)


def test_running_statistics_of_single_examples_are_refused():
    with pytest.raises(NoRuleError, match="running statistics of single examples"):
        disagreement(nn.InstanceNorm2d(4, track_running_stats=True), torch.randn(7, *MAPS))
