"""Blending: values and gradients of every algorithm, at every weight."""

import math

import pytest
import torch
from torch import nn

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import GateNetwork, blueprint_by_name
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.lifecycle import Algorithm, HostFamily

ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)
GATE_VALUE = 0.25


def image(*values: float) -> torch.Tensor:
    """One example of one channel."""
    return torch.tensor(values).view(1, 1, 1, -1)


def random_image(seed: int, batch: int = 3, channels: int = 4) -> torch.Tensor:
    return torch.randn(batch, channels, 5, 5, generator=torch.Generator().manual_seed(seed))


def conv_seed(channels: int = 4) -> nn.Module:
    """After some training: the layer scale of a newborn one is 0, so that its other weights have no gradient yet."""
    seed = deterministic_build(lambda: blueprint_by_name("conv_light", HostFamily.CNN).build(channels))
    nn.init.constant_(seed.scale.gamma, 0.01)
    return seed


def hidden(h, seed, algorithm, gate=None):
    x = h.detach()
    return blend(h, seed(x), algorithm, None, None if gate is None else gate(x))


def gate_network(channels: int = 4) -> nn.Module:
    return deterministic_build(lambda: GateNetwork(channels))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm.ADD, (1.0 + 0.5 * 0.2, -2.0 + 0.5 * 3.0)),
        (Algorithm.MULTIPLY, (1.0 + 0.5 * math.tanh(0.2), -2.0 * (1.0 + 0.5 * math.tanh(3.0)))),
        (Algorithm.GATE, (1.0 + 0.5 * 0.25 * 0.2, -2.0 + 0.5 * 0.25 * 3.0)),
    ],
)
def test_values_are_those_worked_out_by_hand(algorithm, expected):
    y = blend(image(1.0, -2.0), image(0.2, 3.0), algorithm, torch.tensor(0.5), image(GATE_VALUE))
    torch.testing.assert_close(y, image(*expected))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_weight_per_example_equals_separate_passes(algorithm):
    h, delta = random_image(0), random_image(1)
    gate = torch.tensor([0.1, 0.6, 0.9]).view(3, 1, 1, 1)
    alpha = torch.tensor([0.0, 0.3, 1.0])
    together = blend(h, delta, algorithm, alpha.view(3, 1, 1, 1), gate)
    for i in range(3):
        one = slice(i, i + 1)
        torch.testing.assert_close(together[one], blend(h[one], delta[one], algorithm, alpha[i], gate[one]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_seed_that_is_not_isolated_adds_its_own_gradient(algorithm):
    """All partial derivatives against numerical ones, in float64, for seed, gate and host."""
    torch.manual_seed(0)
    h = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    gate_weight = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def network(h, weight, gate_weight):
        gate = (h.mean((2, 3)) @ gate_weight).sigmoid().view(-1, 1, 1, 1)
        return blend(h, torch.conv2d(h, weight), algorithm, torch.tensor(0.7), gate)

    assert torch.autograd.gradcheck(network, (h, weight, gate_weight))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_training_seed_changes_no_bit_of_the_features(algorithm):
    h = random_image(4)
    h[0, 0, 0] = torch.tensor([0.0, -0.0, 1e-45, float("inf"), -3.0])
    y = hidden(h, conv_seed(), algorithm, gate_network())
    assert torch.equal(y.view(torch.int32), h.view(torch.int32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_host_learns_as_if_there_were_no_training_seed(algorithm):
    host = nn.Conv2d(4, 4, 3)
    x, pull = random_image(5), random_image(6)[:, :, :3, :3]
    without = torch.autograd.grad((host(x) * pull).sum(), host.parameters())
    with_seed = torch.autograd.grad(
        (hidden(host(x), conv_seed(), algorithm, gate_network()) * pull).sum(), host.parameters()
    )
    assert all(torch.equal(a, b) for a, b in zip(without, with_seed, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_training_seed_learns_as_if_it_were_heard_at_full_weight(algorithm):
    h, pull, seed, gate = random_image(7), random_image(8), conv_seed(), gate_network()
    weights = [*seed.parameters(), *(gate.parameters() if algorithm is Algorithm.GATE else ())]
    quiet = torch.autograd.grad((hidden(h, seed, algorithm, gate) * pull).sum(), weights)
    active = torch.autograd.grad((blend(h, seed(h), algorithm, torch.tensor(1.0), gate(h)) * pull).sum(), weights)
    for a, b in zip(quiet, active, strict=True):
        torch.testing.assert_close(a, b)
        assert a.count_nonzero() > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_result_has_the_dtype_of_the_features(algorithm):
    h, delta, gate = random_image(0).bfloat16(), random_image(1), torch.full((3, 1, 1, 1), 0.5)
    assert blend(h, delta, algorithm, torch.tensor(0.5), gate).dtype == torch.bfloat16
    assert hidden(h, lambda x: x.float(), algorithm, lambda x: gate).dtype == torch.bfloat16


def test_an_algorithm_outside_the_set_is_refused():
    h = random_image(0)
    with pytest.raises(ValueError, match="expected ADD, MULTIPLY or GATE"):
        blend(h, h, Algorithm.NONE, torch.tensor(1.0))
    with pytest.raises(ValueError, match="expected ADD, MULTIPLY or GATE"):
        hidden(h, nn.Identity(), Algorithm.NONE)
