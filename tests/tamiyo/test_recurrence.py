"""The recurrence over whole sequences: what one step after another gives, and the gradient that autograd finds."""

import pytest
import torch

from esper.tamiyo import network
from esper.tamiyo.network import lstm_sequence
from reference.recurrence import lstm_steps

HOSTS, STEPS, WIDTH = 3, 5, 4


def drawn(hosts=HOSTS, steps=STEPS, width=WIDTH, dtype=torch.float64, seed=0):
    """Gates, first state, resets and recurrent weight, in the order of the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    reset = torch.rand(hosts, steps, generator=generator) < 0.3
    return normal(hosts, steps, 4 * width), normal(hosts, width), normal(hosts, width), reset, normal(4 * width, width)


def gradients(form, given, grad):
    """Gradients of gates, first state and weight."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    learning = [x for x in leaves if x.requires_grad]
    return torch.autograd.grad(form(*leaves), learning, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hosts", [1, 3, 40])
def test_it_is_the_cell_step_after_step_to_the_bit(hosts, dtype):
    given = drawn(hosts, steps=7, width=16, dtype=dtype)
    assert torch.equal(lstm_sequence(*given), lstm_steps(*given))


@pytest.mark.parametrize("block", [1, 80, 10**6])  # numbers: one step, some of them, all
@pytest.mark.parametrize(("hosts", "steps"), [(1, 1), (1, 6), (6, 1), (4, 9)])
def test_its_gradients_are_those_of_autograd(hosts, steps, block, monkeypatch):
    monkeypatch.setattr(network, "_BLOCK", block)
    given = drawn(hosts, steps, width=8)
    grad = torch.randn(hosts, steps, 8, dtype=torch.float64)
    for got, want in zip(gradients(lstm_sequence, given, grad), gradients(lstm_steps, given, grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_what_it_is_given_stays_as_it_was():
    for hosts in (1, 3):
        given = drawn(hosts)
        before = [x.clone() for x in given]
        grad = torch.ones(hosts, STEPS, WIDTH, dtype=torch.float64)
        gradients(lstm_sequence, given, grad)
        lstm_sequence(*given)
        assert all(map(torch.equal, given, before))
