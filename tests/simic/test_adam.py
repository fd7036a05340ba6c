"""Adam on a flat vector: the steps of the framework's optimizer, and steps that are not taken."""

import pytest
import torch

from esper.simic.ppo import adam_step, clip_by_norm, flatten, initial_adam_state, subtract_

YES, NO = torch.tensor(True), torch.tensor(False)


def parameters(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in [(3, 4), (4,), ()]]


def test_ten_steps_agree_with_the_framework():
    ours, theirs = parameters(0), [p.clone().requires_grad_() for p in parameters(0)]
    state = initial_adam_state(ours)
    reference = torch.optim.Adam(theirs, lr=0.01, eps=1e-5)
    for step in range(10):
        gradients = parameters(step + 1)
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        reference.step()
        difference, state = adam_step(flatten(gradients), state, YES, lr=0.01, eps=1e-5)
        subtract_(ours, difference)
    assert state.step == 10
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_a_step_that_is_not_taken_changes_no_bit(poison):
    values = [*parameters(0), torch.tensor([-0.0, 0.0])]
    before = [p.clone() for p in values]
    _, state = adam_step(flatten(values) + 1, initial_adam_state(values), YES, lr=0.1, eps=1e-5)
    difference, after = adam_step(torch.full_like(state.exp_avg, poison), state, NO, lr=0.1, eps=1e-5)
    subtract_(values, difference)
    assert all(torch.equal(p.view(torch.int32), b.view(torch.int32)) for p, b in zip(values, before, strict=True))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(getattr(after, name), getattr(state, name)), name


def test_only_gradients_above_the_limit_are_clipped():
    gradient = torch.tensor([3.0, 4.0])
    norm = torch.tensor(5.0, dtype=torch.float64)
    torch.testing.assert_close(clip_by_norm(gradient, norm, 1.0), torch.tensor([0.6, 0.8]))
    assert torch.equal(clip_by_norm(gradient, norm, 6.0), gradient)
    # beside a small limit the constant is seen: 1e-6 / (3e-6 + 1e-6) = 1/4
    small = clip_by_norm(torch.tensor([3e-6]), torch.tensor(3e-6, dtype=torch.float64), 1e-6)
    torch.testing.assert_close(small, torch.tensor([0.75e-6]), rtol=1e-5, atol=0.0)
