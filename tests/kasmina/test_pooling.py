"""2x2 max pooling: what PyTorch's own gives, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from esper.kasmina.hosts.cnn import max_pool_2x2


def test_a_window_gives_its_largest_and_the_gradient_goes_there():
    h = torch.tensor([[1.0, 4.0, 0.0, 0.0], [3.0, 2.0, 0.0, 5.0]], requires_grad=True)
    pooled = max_pool_2x2(h[None])
    assert pooled.tolist() == [[[4.0, 5.0]]]
    (grad,) = torch.autograd.grad(pooled, h, torch.tensor([[[10.0, 20.0]]]))
    assert grad.tolist() == [[0.0, 10.0, 0.0, 0.0], [0.0, 0.0, 0.0, 20.0]]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 5, 4), (1, 1, 4, 7), (3, 2, 2, 2), (1, 2, 3, 3)])
def test_it_agrees_with_the_built_in_one_ties_included(shape):
    generator = torch.Generator().manual_seed(sum(shape))
    h = torch.randint(0, 3, shape, generator=generator).float().requires_grad_()  # many ties
    ours, theirs = max_pool_2x2(h), F.max_pool2d(h, 2)
    assert torch.equal(ours, theirs)
    slope = torch.randn(theirs.shape, generator=generator)
    assert torch.equal(torch.autograd.grad(ours, h, slope)[0], torch.autograd.grad(theirs, h, slope)[0])


def test_a_value_that_is_not_a_number_is_passed_on():
    h = torch.zeros(1, 1, 2, 4)
    h[0, 0, 1, 0] = torch.nan
    assert max_pool_2x2(h).isnan().tolist() == [[[[True, False]]]]


def test_features_in_another_memory_format_pool_to_the_same():
    h = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(max_pool_2x2(h.contiguous(memory_format=torch.channels_last)), max_pool_2x2(h))
