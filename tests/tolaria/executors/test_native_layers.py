"""Normalizations, activation functions, pooling, padding and resizing as instructions give what PyTorch gives."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import cnn
from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import both_graphs, by_instructions, disagreement
from esper.tolaria.executors.native.layers import fused_batch_norm, fused_normalization
from esper.tolaria.executors.native.trace import BATCH, NoRuleError, trace

MAPS = (4, 6, 5)


class Of(nn.Module):
    """A function of a layer's output, so that gradients flow to the layer too."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x * 1.0, *self.layers)


def agree(module, *features, batches=((7, None), (40, 16))):
    """Whether module and instructions agree in double precision, whole and in chunks, and in single precision."""
    if not isinstance(module, nn.Module):
        module = Of(module)
    graphs = both_graphs(Template(copy.deepcopy(module)), torch.randn(BATCH, *features))
    for examples, chunk in batches:
        assert disagreement(module, torch.randn(examples, *features), chunk=chunk, graphs=graphs) is None
    x = torch.randn(33, *features)
    assert disagreement(module, x, dtype=torch.float32, tolerance=1e-4, graphs=graphs) is None


def targets(module, *features):
    graph = trace(Template(copy.deepcopy(module)), torch.randn(BATCH, *features), training=True)
    return [node.target for node in graph.nodes]


# -- activation functions ----------------------------------------------------------------------------------------------

FUNCTIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.5),
    "leaky_relu": F.leaky_relu,
    "leaky_relu that turns": lambda x: F.leaky_relu(x, -0.1),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.6),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "softplus with a threshold": lambda x: F.softplus(x, 3.0, 2.0),
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: (x * x + 0.1).log(),
    "log1p": lambda x: (x * x).log1p(),
    "sqrt": lambda x: (x * x + 0.1).sqrt(),
    "rsqrt": lambda x: (x * x + 0.1).rsqrt(),
    "reciprocal": lambda x: 1 / (x * x + 0.2),
    "abs": torch.abs,
    "sign": lambda x: x * x.sign(),
    "square": torch.square,
    "powers": lambda x: x**1 + x**2 + x**3 + x**4 + x**5 + (x + 3) ** -1 + (x * x + 1) ** 0.75 + 2**x,
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0.2) + x.clamp(max=0.3),
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "glu": lambda x: F.glu(x, 1),
    "softmax": lambda x: F.softmax(x, 1) + F.softmax(x, 2),
    "log_softmax": lambda x: F.log_softmax(x, -1) + F.log_softmax(x, 1),
    "in place": lambda x: (
        F.relu(x + x, inplace=True) + F.leaky_relu(2 * x, inplace=True) + F.relu6(x + 1, inplace=True)
    ),
    "results used twice": lambda x: (y := F.gelu(x)) * y + F.relu(y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_function_gives_what_pytorch_gives(name):
    agree(FUNCTIONS[name], 4, 3, batches=((37, None),))


ACCURATE = {
    **{
        name: f for name, f in FUNCTIONS.items() if "powers" not in name and "log_softmax" not in name and name != "glu"
    },
    "softmax": lambda x: F.softmax(x, -1),
    "power": lambda x: (x * x + 0.1) ** 0.75,
}


@pytest.mark.parametrize("name", ACCURATE)
def test_an_activation_function_is_accurate_in_single_precision(name):
    x = torch.linspace(-12.0, 12.0, 997).view(1, 1, -1)
    graph = trace(Template(Of(ACCURATE[name])), x.expand(BATCH, 1, -1).clone(), training=False)
    none = torch.zeros(0)
    found = by_instructions(graph, none, none, x, training=False).outputs.double()
    want = ACCURATE[name](x.double())
    assert torch.allclose(found, want, rtol=2e-6, atol=1e-6)


CORNERS = {
    name: FUNCTIONS[name]
    for name in (
        "relu", "relu6", "leaky_relu", "elu", "selu", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus",
        "abs", "sqrt", "exp", "softshrink", "hardshrink", "threshold", "clamp",
    )
} | {"log": lambda x: (x + 0.0).log(), "hardtanh": F.hardtanh}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_corners_infinities_and_nan_are_treated_as_in_pytorch(name):
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, 0.1, 1e30, -1e30]]).double()
    x = torch.cat([x, torch.tensor([[torch.inf, -torch.inf, torch.nan]]).double()], 1)
    graph = trace(Template(Of(CORNERS[name])), x.float().expand(BATCH, -1).clone(), training=True)
    none = torch.zeros(0).double()
    found = by_instructions(graph, none, none, x, training=True)
    leaf = x.clone().requires_grad_()
    y = CORNERS[name](leaf)
    (grad,) = torch.autograd.grad(y, leaf, torch.linspace(-1.0, 1.0, 101)[: y.numel()].double().view(y.shape))
    assert torch.allclose(found.outputs, y, equal_nan=True)
    assert torch.allclose(found.input_grads, grad, atol=1e-7, equal_nan=True)


def test_a_prelu_has_one_slope_or_one_for_each_channel():
    agree(nn.Sequential(nn.PReLU(4), nn.PReLU()), *MAPS)
    agree(nn.PReLU(4), 4)


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


def parts(x):
    return x.reshape(-1, *x.shape[2:])


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((2, 5))]
)
def test_parts_of_examples_may_be_normalized_as_if_they_were_examples(norm):
    agree(Of(lambda x, norm: F.relu(norm(parts(x)) + parts(x)).view(x.shape), norm), 3, 4, 2, 5)
    agree(Of(lambda x, norm: F.relu(norm(parts(x))).view(x.shape), norm), 3, 4, 2, 5)


STATISTICS = {
    "largest": lambda x: (
        x.amax((2, 3), keepdim=True) + F.relu(x).amax(1, keepdim=True) + F.relu(x).amax((1, 2, 3), True)
    ),
    "smallest": lambda x: x.amin(2) + F.relu(x).min(2)[0],
    "first of the largest": lambda x: x.max(1)[0] + F.relu(x).max(1)[0],
    "larger": lambda x: torch.maximum(x, x.flip(1)) + torch.maximum(F.relu(x), x.mean(1, keepdim=True) * 0.0),
    "smaller": lambda x: torch.minimum(x, x.mean(1, keepdim=True)),
    "logsumexp": lambda x: x.logsumexp((2, 3), keepdim=True) + x.logsumexp(1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=1) + F.normalize(x, p=1, dim=2),
    "norm": lambda x: x.norm(dim=1),
    "nothing to normalize": lambda x: F.normalize(F.relu(x - 9), dim=1) + F.relu(x - 9).std(1, keepdim=True),
    "variance": lambda x: x.var((2, 3), keepdim=True) + x.var(-1, unbiased=False, keepdim=True),
    "deviation": lambda x: x.std(-1) + sum(torch.var_mean(x, dim=3)),
    "logarithms": lambda x: (x * x + 0.1).log2() + (x * x + 0.1).log10() + torch.exp2(x),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_norms_and_variances_give_what_pytorch_gives(name):
    agree(STATISTICS[name], *MAPS, batches=((40, 16),))


def test_running_statistics_of_single_examples_are_refused():
    with pytest.raises(NoRuleError, match="running statistics of single examples"):
        disagreement(nn.InstanceNorm2d(4, track_running_stats=True), torch.randn(7, *MAPS))


# -- pooling and moving pixels -----------------------------------------------------------------------------------------

MOVED = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "overlapping max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max, ceil": lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "dilated max": lambda x: F.max_pool2d(x, 2, 2, 1, 2, ceil_mode=True),
    "max of equals": lambda x: F.max_pool2d(F.relu(x), 2) + F.max_pool2d(F.relu(x), 3, 1, 1)[:, :, :3, :2],
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average without padding": lambda x: F.avg_pool2d(x, (2, 3), (2, 1), (1, 0), True, False),
    "average with a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive average of some": lambda x: F.adaptive_avg_pool2d(x, (9, None)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (4, 3)),
    "largest": lambda x: F.adaptive_max_pool2d(x, 1),
    "area": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :4, :4], 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest by a factor": lambda x: F.interpolate(x, scale_factor=(0.6, 1.1)),
    "nearest by size": lambda x: F.interpolate(x, size=(9, 4)),
    "nearest exact": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear by a factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear, aligned": lambda x: F.interpolate(x, size=(1, 9), mode="bilinear", align_corners=True),
    "zeros": lambda x: F.pad(x, (1, 2)),
    "constants": lambda x: F.pad(x, (1, 0, 2, 1, 0, 1), value=3.0),
    "cropped": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "reflected": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "replicated": lambda x: F.pad(x, (1, 3, 2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 3, 2, 1), mode="circular"),
    "flipped": lambda x: x.flip(-1) + x.flip((1, 3)),
    "rolled": lambda x: x.roll((2, -1), (1, 2)),
}
MOVED_ROWS = {
    "max": lambda x: F.max_pool1d(x, 2),
    "average": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "mean": lambda x: F.adaptive_avg_pool1d(x, 1),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 3) + F.adaptive_max_pool1d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "linear": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "reflected": lambda x: F.pad(x, (2, 1), mode="reflect"),
}


@pytest.mark.parametrize("name", MOVED)
def test_images_are_pooled_resized_and_padded_as_in_pytorch(name):
    agree(MOVED[name], *MAPS, batches=((40, 16),))


@pytest.mark.parametrize("name", MOVED_ROWS)
def test_rows_are_pooled_resized_and_padded_as_in_pytorch(name):
    agree(MOVED_ROWS[name], 4, 7, batches=((7, None),))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LocalResponseNorm(3),
        nn.MaxPool3d(2),
        nn.MaxPool3d(3, 2, 1, ceil_mode=True),
        nn.AvgPool3d(3, 2, 1),
        nn.AvgPool3d((1, 2, 3), (2, 1, 2), ceil_mode=True, count_include_pad=False),
        nn.AdaptiveAvgPool3d(1),
    ],
)
def test_volumes_are_pooled_as_in_pytorch(layer):
    agree(layer, 2, 5, 6, 5, batches=((7, None),))


def test_images_of_parts_of_examples_are_pooled_and_shuffled():
    agree(lambda x: F.max_pool2d(parts(x), 2).reshape(len(x), -1), 3, 4, 4, 4)
    agree(lambda x: F.pixel_shuffle(parts(x), 2).reshape(len(x), -1), 3, 4, 4, 4)


def test_a_maximum_that_is_nan_wins():
    graph = trace(Template(Of(lambda x: F.max_pool2d(x, 3, 1))), torch.randn(BATCH, 1, 4, 4), training=True)
    x = torch.randn(3, 1, 4, 4).double()
    x[0, 0, 1, 2], x[1, 0, 0, 0], x[2, 0, 3, 3] = torch.nan, torch.inf, -torch.inf
    found = by_instructions(graph, x[0, 0, 0, :0], x[0, 0, 0, :0], x, training=True)
    assert torch.equal(found.outputs.nan_to_num(9.0), F.max_pool2d(x, 3, 1).nan_to_num(9.0))


def test_examples_are_never_moved():
    for function in (lambda x: x.flip(0), lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), lambda x: F.softmax(x, 0)):
        with pytest.raises(NoRuleError, match="examples"):
            disagreement(Of(function), torch.randn(7, 4, 3))
