"""Running statistics: the first rollout is copied, later ones are blended in, nothing is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import CheckpointError
from esper.simic.advantages import (
    ObservationStatistics,
    RunningMeanVar,
    discounted_returns,
    masked_moments,
    normalized,
)
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, feature_dim

ALL = torch.ones(2, 2, dtype=torch.bool)


def scalar_moments(*values: float) -> object:
    x = torch.tensor([values])
    return masked_moments(x, torch.ones_like(x, dtype=torch.bool))


def test_moments_are_those_of_the_valid_rows():
    rows = torch.tensor([[[1.0, 10.0], [3.0, 10.0]], [[float("nan"), 0.0], [8.0, 40.0]]])
    found = masked_moments(rows, torch.tensor([[True, True], [False, True]]))
    # 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3;   10, 10, 40: mean 20, variance (100 + 100 + 400) / 3
    assert found.count == 3
    torch.testing.assert_close(found.mean, torch.tensor([4.0, 20.0], dtype=torch.float64))
    torch.testing.assert_close(found.var, torch.tensor([26 / 3, 200.0], dtype=torch.float64))


def test_the_first_rollout_is_copied_and_the_next_blended_in():
    running = RunningMeanVar(0.75)
    running.update(scalar_moments(1.0, 3.0))
    assert (running.mean, running.var) == (2.0, 1.0)
    running.update(scalar_moments(6.0, 6.0, 10.0, 14.0))  # mean 9, variance (9 + 9 + 1 + 25) / 4 = 11
    assert float(running.mean) == pytest.approx(0.75 * 2 + 0.25 * 9)
    assert float(running.var) == pytest.approx(0.75 * 1 + 0.25 * 11 + 0.75 * 0.25 * 49)


def test_features_are_only_clipped_before_the_first_update():
    running = RunningMeanVar(0.99, (2,))
    found = normalized(torch.tensor([[0.3, -25.0], [12.0, 0.1]]), running.frozen)
    assert torch.equal(found, torch.tensor([[0.3, -10.0], [10.0, 0.1]]))


def test_features_are_centred_scaled_and_clipped_after_it():
    running = RunningMeanVar(0.99, (1,))
    running.update(masked_moments(torch.tensor([[1.0], [3.0]]), torch.ones(2, dtype=torch.bool)))
    found = normalized(torch.tensor([[4.0], [2.0], [1e6]]), running.frozen)
    assert found[:, 0].tolist() == pytest.approx([2.0 / 1.0001**0.5, 0.0, 10.0], abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_rollout_without_valid_or_with_non_finite_rows_changes_nothing(bad):
    running = RunningMeanVar(0.9)
    running.update(scalar_moments(1.0, 3.0))
    before = running.state_dict()
    running.update(masked_moments(torch.tensor([[5.0]]), torch.tensor([[False]])))
    running.update(scalar_moments(1.0, bad))
    assert all(torch.equal(value, before[name]) for name, value in running.state_dict().items())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 7))
def test_two_rollouts_give_equal_statistics_in_any_order_of_their_rows(seed, hosts, steps):
    g = torch.Generator().manual_seed(seed)

    def shuffled(rows: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hosts in another order, and the steps of all hosts among each other."""
        order = torch.randperm(hosts * steps, generator=g)
        return rows.flatten(0, 1)[order].view_as(rows), valid.flatten()[order].view_as(valid)

    running, other = RunningMeanVar(0.99, (3,)), RunningMeanVar(0.99, (3,))
    for scale in (1.0, 1e4):  # the columns differ by orders of magnitude, and some steps are not valid
        rows = scale * torch.randn(hosts, steps, 3, generator=g) * torch.tensor([1e-3, 1.0, 1e3]) + scale
        valid = torch.rand(hosts, steps, generator=g) < 0.8
        valid[0, 0] = True
        running.update(masked_moments(rows, valid))
        other.update(masked_moments(*shuffled(rows, valid)))
    torch.testing.assert_close(other.mean, running.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(other.var, running.var, rtol=1e-9, atol=0)
    x = torch.randn(5, 3, generator=g)
    torch.testing.assert_close(normalized(x, other.frozen), normalized(x, running.frozen), rtol=0, atol=1e-6)


def test_sums_over_many_rows_lose_nothing_of_small_ones():
    # 2^24 + 1 + 1 + ... is 2^24 in float32 whatever the number of ones; in float64 their order is immaterial
    rows = torch.ones(1, 4_097)
    rows[0, 0] = 2.0**24
    for order in (rows, rows.flip(1)):
        assert masked_moments(order, torch.ones_like(order, dtype=torch.bool)).mean == (2.0**24 + 4_096) / 4_097


def test_the_first_rollout_of_rewards_is_scaled_by_its_own_returns():
    rewards = torch.tensor([[1.0, 0, -1, 2], [1, 2, -10, 0]])
    terminal = torch.tensor([[False] * 4, [False, False, True, False]])
    valid = torch.tensor([[True] * 4, [True, True, True, False]])
    moments = masked_moments(discounted_returns(rewards, terminal, torch.zeros_like(valid), valid, 0.995), valid)
    running = RunningMeanVar(0.9)
    scale = running.scale_with(moments)
    assert float(scale) == pytest.approx(3.048926, abs=1e-6)
    running.update(moments)
    assert running.scale_with(scalar_moments(0.0, 100.0)) == scale  # later rollouts: by what came before them


def test_a_constant_return_does_not_divide_by_zero():
    assert float(RunningMeanVar(0.9).scale_with(scalar_moments(2.0, 2.0))) == pytest.approx(1e-4)


def test_statistics_of_observations_are_those_of_hosts_and_of_all_slots_with_a_seed():
    # two hosts with two slots, of which the second of the first host is empty; then a third host that does not count
    rows = torch.zeros(3, feature_dim(2))
    host, slots = rows[:, : len(HOST_FEATURES)], rows[:, len(HOST_FEATURES) :].unflatten(1, (2, len(SLOT_FEATURES)))
    host[:, 3] = torch.tensor([1.0, 3.0, 9.0])
    slots[..., 0] = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])  # occupied
    slots[..., 4] = torch.tensor([[2.0, 90.0], [5.0, 8.0], [70.0, 70.0]])
    statistics = ObservationStatistics(0.9)
    statistics.update(rows, torch.tensor([True, True, False]))
    assert (statistics.host.mean[3], statistics.host.var[3]) == (2.0, 1.0)
    assert (statistics.slot.mean[4], statistics.slot.var[4]) == (5.0, 6.0)  # of 2, 5, 8
    assert statistics.slot.mean[0] == 1.0


@pytest.mark.parametrize("num_slots", [1, 3, 64])
def test_statistics_of_observations_serve_any_number_of_slots(num_slots):
    statistics, generator = ObservationStatistics(0.9), torch.Generator().manual_seed(0)
    rows = torch.rand(4, 5, feature_dim(2), generator=generator) + 0.1  # all slots are occupied
    statistics.update(rows, torch.ones(4, 5, dtype=torch.bool))
    of = statistics.of_slots(num_slots)
    width = len(HOST_FEATURES)
    for found, name in ((of.shift, "shift"), (of.spread, "spread")):
        assert found.shape == (feature_dim(num_slots),)
        assert torch.equal(found[:width], getattr(statistics.host.frozen, name))
        for block in found[width:].split(len(SLOT_FEATURES)):
            assert torch.equal(block, getattr(statistics.slot.frozen, name))


def test_hosts_without_a_seed_leave_the_statistics_of_slots_as_they_are():
    statistics = ObservationStatistics(0.9)
    statistics.update(torch.zeros(2, 3, feature_dim(1)), torch.ones(2, 3, dtype=torch.bool))
    assert (bool(statistics.host.started), bool(statistics.slot.started)) == (True, False)
    other = ObservationStatistics(0.9)
    other.load_state_dict(statistics.state_dict())
    assert (bool(other.host.started), bool(other.slot.started)) == (True, False)


def test_statistics_of_other_features_are_refused():
    with pytest.raises(CheckpointError, match="mean"):
        RunningMeanVar(0.99, (3,)).load_state_dict(RunningMeanVar(0.99, (2,)).state_dict())
