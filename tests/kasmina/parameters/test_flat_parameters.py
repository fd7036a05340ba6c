"""Flat parameters: rows that are written, trained, kept and cleared without touching each other."""

import pytest
import torch

from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import FlatParameters

CPU = torch.device("cpu")
SGD, ADAMW = OptimizerSpec(kind="sgd"), OptimizerSpec(kind="adamw")
ROWS, PARAMS, BUFFERS = 4, 6, 3


def filled(spec=SGD):
    """Every element holds its own number, optimizer state too."""
    flat = FlatParameters((ROWS, PARAMS, BUFFERS), spec, CPU)
    for k, tensor in enumerate(flat.tensors().values(), start=1):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * k)
    return flat


def copies(flat):
    return {name: tensor.clone() for name, tensor in flat.tensors().items()}


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("spec", [SGD, ADAMW])
def test_a_new_module_leaves_nothing_of_the_one_before_it(spec):
    flat = filled(spec)
    flat.write(rows(2), torch.full((1, 4), 9.0), torch.full((1, 1), 8.0))
    assert flat.params[2].tolist() == [9.0, 9.0, 9.0, 9.0, 0.0, 0.0]
    assert flat.buffers[2].tolist() == [8.0, 0.0, 0.0]
    for name, tensor in flat.tensors().items():
        if name not in ("params", "buffers"):
            assert not tensor[2].any(), name


@pytest.mark.parametrize("spec", [SGD, ADAMW])
def test_clearing_rows_empties_them_and_no_others(spec):
    flat = filled(spec)
    before = copies(flat)
    flat.clear(rows(0, 3))
    for name, tensor in flat.tensors().items():
        assert not tensor[[0, 3]].any(), name
        assert torch.equal(tensor[[1, 2]], before[name][[1, 2]]), name


def test_a_snapshot_brings_weights_and_buffers_back_and_empties_the_optimizer():
    flat = filled(ADAMW)
    flat.save(rows(1, 2))
    before = copies(flat)
    for tensor in flat.tensors().values():
        tensor.add_(1)
    flat.restore(rows(1))
    for name, tensor in flat.tensors().items():
        back = before[name][1] if name in ("params", "buffers") else torch.zeros_like(tensor[1])
        assert torch.equal(tensor[1], back), name
        assert torch.equal(tensor[[0, 2, 3]], before[name][[0, 2, 3]] + 1), name
    assert not flat.snapshot["params"][[0, 3]].any()


def test_the_gradient_of_a_leaf_arrives_in_the_slab_of_gradients():
    working = filled().begin(rows(3, 1), [6, 4])
    (working.leaves[0] * 2.0).sum().backward()
    (working.leaves[1] * 5.0).sum().backward()
    assert working.grad.tolist() == [[2.0] * 6, [5.0] * 4 + [0.0] * 2]


def test_training_a_copy_changes_the_slab_when_it_is_finished_and_not_before():
    flat = filled(ADAMW)
    before = copies(flat)
    working = flat.begin(rows(3, 1), [3, 5])
    assert working.params.shape == (2, 5)
    working.params.add_(0.5)
    working.optimizer.exp_avg.add_(0.25)
    working.optimizer.steps.add_(1)
    assert all(torch.equal(flat.tensors()[name], value) for name, value in before.items())
    flat.finish(working)
    assert torch.equal(flat.params[[3, 1], :5], before["params"][[3, 1], :5] + 0.5)
    assert torch.equal(flat.params[[3, 1], 5], before["params"][[3, 1], 5])
    assert torch.equal(flat.optimizer.exp_avg[[3, 1], :5], before["exp_avg"][[3, 1], :5] + 0.25)
    assert torch.equal(flat.optimizer.steps, before["steps"] + torch.tensor([0, 1, 0, 1]))
    assert torch.equal(flat.params[[0, 2]], before["params"][[0, 2]])


def test_no_rows_are_trained_without_complaint():
    flat = filled()
    before = copies(flat)
    working = flat.begin(rows(), [])
    assert working.params.shape == (0, 0)
    flat.finish(working)
    assert all(torch.equal(flat.tensors()[name], value) for name, value in before.items())
