"""Floating-point operations of one example."""

import pytest
import torch
from torch import nn

from esper.kasmina.parameters.flops import flops_of_example


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_weights_that_a_pass_computes_are_shared_by_the_batch(batch):
    weight, left, right = torch.randn(6, 4), torch.randn(6, 2), torch.randn(2, 4)
    found = flops_of_example(lambda x: x @ (weight + left @ right), torch.randn(8, 6), batch)
    assert found == round(2 * 6 * 4 + 2 * 6 * 2 * 4 / batch)


def test_of_examples_that_cost_different_amounts_it_is_the_mean_of_full_batches():
    layer = nn.Linear(3, 5)

    def run(x: torch.Tensor) -> None:  # as many steps as the first number of an example says
        for example in x:
            for _ in range(int(example[0])):
                layer(example)

    lengths = torch.tensor([1.0, 2.0, 3.0, 6.0])[:, None].expand(4, 3)
    assert flops_of_example(run, lengths, 4) == flops_of_example(run, lengths, 2) == 3 * 2 * 3 * 5
    assert flops_of_example(run, lengths, 6) == round((1 + 2 + 3 + 6 + 1 + 2) / 6 * 2 * 3 * 5)
