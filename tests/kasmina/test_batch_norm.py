"""Batch normalization of many channels: PyTorch's own values, gradients and statistics."""

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.batch_norm import normalize_batch


def test_four_values_are_normalized_by_hand():
    x = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]])  # mean 4, biased variance 5
    found = normalize_batch(x, torch.tensor([2.0]), torch.tensor([1.0]), 0.0)
    assert found.mean.item() == 4.0
    assert found.var.item() == pytest.approx(5.0)
    want = 1.0 + 2.0 * (x - 4.0) / 5.0**0.5
    torch.testing.assert_close(found.y, want)


@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (16, 24, 4, 4), (2, 1, 8, 8), (3, 7, 1, 1)])
def test_values_gradients_and_statistics_are_those_of_the_built_in_one(shape):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3.0 + 5.0).requires_grad_()
    weight, bias = (torch.randn(shape[1], generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    mean, var = torch.zeros(shape[1], dtype=torch.float64), torch.ones(shape[1], dtype=torch.float64)
    ours = normalize_batch(x, weight, bias, 1e-5)
    theirs = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=1e-5)
    torch.testing.assert_close(ours.y, theirs)
    torch.testing.assert_close(ours.mean, mean)
    count = x.numel() // shape[1]
    torch.testing.assert_close(ours.var * count / (count - 1), var)
    slope = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaves = (x, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(ours.y, leaves, slope), torch.autograd.grad(theirs, leaves, slope))


def test_a_constant_channel_gives_its_bias():
    found = normalize_batch(torch.full((4, 1, 2, 2), 7.0), torch.ones(1), torch.tensor([0.25]), 1e-5)
    assert found.y.unique().tolist() == [0.25]


def test_values_far_from_zero_keep_their_variance():
    x = 1e4 + torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    found = normalize_batch(x, torch.ones(2), torch.zeros(2), 1e-5)
    torch.testing.assert_close(found.var, x.double().var(dim=(0, 2, 3), correction=0).float(), rtol=1e-3, atol=0.0)
