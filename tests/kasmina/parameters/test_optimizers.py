"""Optimizers on rows of hosts, against the optimizers of torch row by row."""

import pytest
import torch
from torch import nn

from esper.kasmina.parameters.optimizers import (
    OptimizerSpec,
    clip_factor,
    host_decay_mask,
    init_state,
    schedule_factor,
    step_rows,
)
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import named_tensors

ROWS, LENGTH, STEPS = 3, 32, 8
MATRIX = torch.arange(LENGTH) < 20
KINDS = ("sgd", "adam", "adamw")


def draw(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed))


def torch_optimizer(spec: OptimizerSpec, row: torch.Tensor, lr: float, decayed: bool) -> torch.optim.Optimizer:
    """torch's own optimizer of one row; the first 20 elements stand for a matrix."""
    matrix, rest = nn.Parameter(row[:20].clone()), nn.Parameter(row[20:].clone())
    if spec.kind == "sgd":
        decay = spec.sgd_weight_decay if decayed else 0.0
        return torch.optim.SGD([matrix, rest], lr=lr, momentum=spec.momentum, weight_decay=decay)
    groups = [{"params": [matrix], "weight_decay": spec.adamw_weight_decay if decayed else 0.0},
              {"params": [rest], "weight_decay": 0.0}]  # fmt: skip
    kind = torch.optim.Adam if spec.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=lr, betas=spec.betas, eps=spec.eps)


def step_of_torch(reference: torch.optim.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
    matrix, rest = (p for group in reference.param_groups for p in group["params"])
    matrix.grad, rest.grad = gradient[:20].clone(), gradient[20:].clone()
    reference.step()
    return torch.cat((matrix.detach(), rest.detach()))


@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_as_under_the_optimizer_of_torch(kind, decayed):
    spec = OptimizerSpec(kind=kind)
    params = draw(0)
    references = [torch_optimizer(spec, row, 0.02, decayed) for row in params]
    state = init_state(spec, params)
    mask = host_decay_mask(spec, MATRIX) if decayed else None
    for step in range(STEPS):
        gradient = draw(step + 1) * 10.0 ** (step % 3 - 1)
        expected = torch.stack([step_of_torch(t, g) for t, g in zip(references, gradient, strict=True)])
        step_rows(spec, params, gradient.clone(), state, 0.02, mask)
        torch.testing.assert_close(params, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_idle_rows_keep_every_bit_even_with_gradients_that_are_no_numbers(kind):
    spec = OptimizerSpec(kind=kind)
    params = draw(0)
    params[1, 0] = -0.0
    state = init_state(spec, params)
    mask = host_decay_mask(spec, MATRIX)
    step_rows(spec, params, draw(1), state, 0.02, mask)
    before = {name: value.clone() for name, value in (("params", params), *named_tensors(state))}
    gradient = draw(2)
    gradient[1] = float("nan")
    step_rows(spec, params, gradient, state, 0.02, mask, torch.tensor([True, False, True]))
    for name, value in (("params", params), *named_tensors(state)):
        old = before[name]
        bits = torch.int32 if value.is_floating_point() else value.dtype
        assert torch.equal(value[1].view(bits), old[1].view(bits)), name
        assert value.isfinite().all(), name
        assert not torch.equal(value[0], old[0]), name
        assert not torch.equal(value[2], old[2]), name


@pytest.mark.parametrize("max_norm", [1e-6, 0.5, 1.0, 1e3])
def test_each_row_is_clipped_by_its_own_norm_as_torch_does(max_norm):
    gradient = draw(3) * torch.tensor([[1e-6], [1.0], [100.0]])
    expected = gradient.clone()
    for row in expected:
        parameter = nn.Parameter(torch.zeros(LENGTH))
        parameter.grad = row
        nn.utils.clip_grad_norm_([parameter], max_norm)
    clipped = gradient * clip_factor(gradient.norm(dim=1), max_norm)[:, None]
    torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0.0)


def test_small_norms_are_left_alone_and_a_norm_of_three_millionths_is_clipped_to_a_quarter_of_one():
    norms = torch.tensor([0.0, 3e-6, 1.0])
    # 1e-6 / (3e-6 + 1e-6) = 0.25
    torch.testing.assert_close(clip_factor(norms, 1e-6), torch.tensor([1.0, 0.25, 1e-6]))


def torch_scheduler(optimizer, spec, length):
    """The schedulers of torch that `schedule_factor` names."""
    rest, of = length - spec.warmup, torch.optim.lr_scheduler
    falling = {
        "constant": lambda: of.ConstantLR(optimizer, 1.0),
        "cosine": lambda: of.CosineAnnealingLR(optimizer, T_max=rest),
        "linear": lambda: of.LinearLR(optimizer, 1.0, 0.0, total_iters=rest),
    }[spec.schedule]
    if not spec.warmup:
        return falling()
    rising = of.LinearLR(optimizer, 1 / (spec.warmup + 1), total_iters=spec.warmup)
    return of.SequentialLR(optimizer, [rising, falling()], milestones=[spec.warmup])


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_factors_are_those_of_the_schedulers_of_torch(schedule, warmup):
    spec, length = OptimizerSpec(schedule=schedule, warmup=warmup), 12
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, expected = torch_scheduler(optimizer, spec, length), []
    for _ in range(length):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [schedule_factor(spec, t, length) for t in range(1, length + 1)] == pytest.approx(expected, abs=1e-12)


def test_the_factors_of_a_seed_begin_to_fall_with_its_birth():
    spec = OptimizerSpec(schedule="linear", warmup=2)
    assert [schedule_factor(spec, t, 8, born=4) for t in range(5, 9)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert schedule_factor(spec, 8, 8, born=8) == schedule_factor(OptimizerSpec(schedule="cosine"), 1, 1, born=1) == 1.0
    # born in the warm-up, it rises with the host
    assert [schedule_factor(spec, t, 8, born=1) for t in range(2, 9)] == pytest.approx(
        [schedule_factor(spec, t, 8) for t in range(2, 9)]
    )


def test_a_warmup_as_long_as_the_episode_is_refused():
    OptimizerSpec(warmup=11).require_length(12)
    with pytest.raises(ConfigError, match=r"warmup is 12, but an episode has 12 control steps.*at most 11"):
        OptimizerSpec(warmup=12).require_length(12)
