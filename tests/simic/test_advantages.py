"""Generalized advantage estimation, return accumulators and normalization against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.simic.advantages import (
    compute_gae,
    discounted_returns,
    normalize_advantages,
    paired_rewards,
)

GAMMA, LAMBDA = 0.995, 0.98


def rows(*lists: list[float]) -> torch.Tensor:
    return torch.tensor(lists, dtype=torch.float64)


def flags(length: int, *true_at: int) -> torch.Tensor:
    out = torch.zeros(1, length, dtype=torch.bool)
    out[0, list(true_at)] = True
    return out


def scalar_gae(r, v, b, terminal, truncated, valid, gamma, lam):
    """The recursion as one writes it down, for one host."""
    out, trace, onward = [0.0] * len(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        if not valid[t]:  # a step in which time passed, and nothing was decided
            trace, onward = gamma * trace, gamma * onward
            continue
        value_after = 0.0 if terminal[t] else b[t] if truncated[t] else onward
        decay = 0.0 if terminal[t] or truncated[t] else gamma * lam
        trace, onward = (r[t] + gamma * value_after - v[t]) + decay * trace, v[t]
        out[t] = trace
    return out


WORKED = {
    # rewards, values, terminal steps, truncated steps with their bootstrap values, invalid steps -> advantages
    "a row that is cut off bootstraps from the stored value": (
        [1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2], (), {3: 0.6}, (), [1.974540, 1.104030, 1.236315, 2.397]),
    "nothing follows a terminal step": (
        [1, 2, -10], [0.5, 0.4, 0.3], (2,), {}, (), [-7.044219, -8.145030, -10.3]),
    "a rollback in the middle separates two segments": (
        [1, -10, 7, 1, 0, 2], [0.5, 0.4, 9.0, 0.3, 0.2, 0.1], (1,), {5: 0.6}, (2,),
        [-9.24304, -10.4, 0.0, 3.1752, 2.334325, 2.497]),
    "a truncation in the middle cuts the trace there": (
        [1, 0, -1, 2, 1, 0], [0.5, 0.4, 0.3, 0.2, 0.1, 0], (5,), {2: 0.7}, (),
        [0.225207, -0.689973, -0.6035, 2.77709, 0.9, 0.0]),
    "what is both terminal and truncated counts as terminal": ([1.0], [0.25], (0,), {0: 5.0}, (), [0.75]),
}  # fmt: skip


@pytest.mark.parametrize(("r", "v", "terminal", "truncated", "invalid", "want"), WORKED.values(), ids=WORKED)
def test_the_worked_examples_of_advantages(r, v, terminal, truncated, invalid, want):
    bootstrap = rows([truncated.get(t, 0.0) for t in range(len(r))])
    ends = flags(len(r), *terminal), flags(len(r), *truncated), ~flags(len(r), *invalid)
    assert compute_gae(rows(r), rows(v), bootstrap, *ends, GAMMA, LAMBDA)[0].tolist() == pytest.approx(want, abs=1e-6)


def test_value_is_carried_across_a_step_that_is_not_valid_and_costs_one_discount_more():
    # gamma = lambda = 1/2: after step 2 comes 1/2 * 0.6; its advantage 3 - 0.6 arrives with 1/4 * 1/2
    numbers = rows([1, 0, 0, 3]), rows([0.5, 9.0, 9.0, 0.6]), torch.zeros(1, 4, dtype=torch.float64)
    found = compute_gae(*numbers, flags(4, 3), flags(4), ~flags(4, 2), 0.5, 0.5)[0].tolist()
    # step 1: 0 + 1/2 * 0.3 - 9 + 1/4 * 1/2 * 2.4; step 0: 1 + 1/2 * 9 - 1/2 + 1/4 * (-8.55)
    assert found == pytest.approx([2.8625, -8.55, 0.0, 2.4])


number = st.floats(-100, 100, allow_nan=False, width=64)


@st.composite
def rollouts(draw):
    hosts, steps = draw(st.integers(1, 4)), draw(st.integers(1, 9))

    def table(element):
        return draw(st.lists(st.lists(element, min_size=steps, max_size=steps), min_size=hosts, max_size=hosts))

    return [table(number) for _ in range(3)] + [table(st.booleans()) for _ in range(3)]


def tensors_of(rollout):
    return [torch.tensor(x, dtype=torch.float64 if i < 3 else torch.bool) for i, x in enumerate(rollout)]


def random_rollout(hosts, steps, dtype):
    generator = torch.Generator().manual_seed(hosts + steps)
    numbers = [torch.randn(hosts, steps, generator=generator, dtype=dtype) for _ in range(3)]
    return numbers + [torch.rand(hosts, steps, generator=generator) < share for share in (0.1, 0.1, 0.9)]


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_the_batched_scan_equals_a_scalar_loop_bit_for_bit(rollout, gamma, lam):
    r, v, b, terminal, truncated, valid = rollout
    found = compute_gae(*tensors_of(rollout), gamma, lam).tolist()
    assert found == [scalar_gae(*host, gamma, lam) for host in zip(r, v, b, terminal, truncated, valid, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rollout_stays_as_it_is(dtype):
    rollout = random_rollout(5, 9, dtype)
    copies = [x.clone() for x in rollout]
    compute_gae(*rollout, GAMMA, LAMBDA)
    assert all(torch.equal(x, copy) for x, copy in zip(rollout, copies, strict=True))


def test_rewards_whose_time_axis_is_not_the_last_in_memory_give_the_same():
    rollout = random_rollout(5, 9, torch.float64)
    turned = [x.t().contiguous().t() for x in rollout]
    assert torch.equal(compute_gae(*turned, GAMMA, LAMBDA), compute_gae(*rollout, GAMMA, LAMBDA))


def test_return_accumulators_run_forward_in_time():
    rewards = rows([1, 0, -1, 2], [1, 2, -10, 0])
    terminal = torch.cat((flags(4), flags(4, 2)))
    valid = torch.cat((flags(4, 0, 1, 2, 3), flags(4, 0, 1, 2)))
    found = discounted_returns(rewards, terminal, torch.zeros_like(valid), valid, GAMMA)
    want = [[1, 0.995, -0.009975, 1.990075], [1, 2.995, -7.019975, 0]]
    torch.testing.assert_close(found, rows(*want), atol=1e-6, rtol=0)


def test_return_accumulators_start_anew_after_ends_and_wait_where_a_step_is_not_valid():
    # terminal at 0, truncated at 2, row 4 not valid
    found = discounted_returns(rows([1, 2, 3, 4, 99, 5, 6]), flags(7, 0), flags(7, 2), ~flags(7, 4), gamma=0.5)
    assert found[0].tolist() == [1, 2, 4, 4, 2, 6, 9]


def test_advantages_are_normalized_over_the_valid_steps_of_all_hosts():
    advantages = rows([1.97454, 1.10403, 1.236315, 2.397], [-7.044219, -8.14503, -10.3, 1e6])
    valid = torch.cat((~flags(4), ~flags(4, 3)))
    found = normalize_advantages(advantages, valid, 0.1)
    assert float(found.mean) == pytest.approx(-2.682481, abs=1e-6)
    assert float(found.std) == pytest.approx(5.127996, abs=1e-6)
    assert not found.floored
    want = rows([0.908156, 0.7384, 0.764196, 0.990539], [-0.850574, -1.065241, -1.485477, 0])
    torch.testing.assert_close(found.advantages, want, atol=1e-6, rtol=0)


def test_a_small_deviation_is_raised_to_the_floor_and_flagged():
    found = normalize_advantages(rows([0.01, -0.01]), ~flags(2), 0.1)
    assert found.floored
    assert found.advantages[0].tolist() == pytest.approx([0.1, -0.1], abs=1e-7)


def test_a_rollout_without_a_valid_step_has_advantages_of_zero():
    found = normalize_advantages(rows([math.nan, 3.0]), flags(2), 0.1)
    assert found.advantages.tolist() == [[0.0, 0.0]]


# -- copies of a host ------------------------------------------------------------------------------------------------


def test_a_reward_counts_by_its_difference_from_the_mean_of_the_other_copies():
    rewards = rows(
        [1.0, 2.0], [10.0, 20.0], [4.0, 2.0], [30.0, 0.0], [7.0, 5.0], [50.0, 10.0]
    )  # hosts 0, 2, 4; 1, 3, 5
    paired = paired_rewards(rewards, torch.ones(6, 2, dtype=torch.bool), 3)
    want = rows([-4.5, -1.5], [-30.0, 15.0], [0.0, -1.5], [0.0, -15.0], [4.5, 3.0], [30.0, 0.0])
    assert torch.equal(paired, want)


def test_an_invalid_step_of_a_copy_counts_as_nothing():
    valid = torch.tensor([[True], [False], [True]])
    assert paired_rewards(rows([2.0], [100.0], [4.0]), valid, 3).tolist()[::2] == [[0.0], [3.0]]


def test_paired_rewards_of_copies_that_do_the_same_vanish():
    rewards = torch.randn(4, 5).repeat(3, 1)
    paired = paired_rewards(rewards, torch.ones(12, 5, dtype=torch.bool), 3)
    torch.testing.assert_close(paired, torch.zeros(12, 5), atol=1e-6, rtol=0.0)
