"""Activation functions, softmax, extremes and variances as instructions give what PyTorch gives."""

import pytest
import torch
import torch.nn.functional as F
from native_agreement import MAPS, Of, agree
from torch import nn

from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import by_instructions
from esper.tolaria.executors.native.trace import BATCH, trace

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
    "exp": torch.exp,
    "log": lambda x: (x * x + 0.1).log(),
    "sqrt": lambda x: (x * x + 0.1).sqrt(),
    "rsqrt": lambda x: (x * x + 0.1).rsqrt(),
    "reciprocal": lambda x: 1 / (x * x + 0.2),
    "abs": torch.abs,
    "sign": lambda x: x * x.sign(),
    "square": torch.square,
    "powers": lambda x: x**1 + x**2 + x**3 + x**4 + x**5 + (x + 3) ** -1 + (x * x + 1) ** 0.75,
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
    "results added twice": lambda x: (y := x * x) + x.sin() + y,
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
        "abs", "sqrt", "exp", "clamp",
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
}


@pytest.mark.parametrize("name", STATISTICS)
def test_norms_and_variances_give_what_pytorch_gives(name):
    agree(STATISTICS[name], *MAPS, batches=((40, 16),))
