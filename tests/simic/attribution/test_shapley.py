import itertools
import math

import pytest
import torch

from esper.simic.shapley import shapley_values


def average_over_orders(accuracy: list[float], num_seeds: int) -> list[float]:
    """What each seed adds when it joins, averaged over all orders of joining."""
    totals = [0.0] * num_seeds
    for order in itertools.permutations(range(num_seeds)):
        present = 0
        for rank in order:
            totals[rank] += accuracy[present | 1 << rank] - accuracy[present]
            present |= 1 << rank
    return [total / math.factorial(num_seeds) for total in totals]


def test_two_seeds_share_what_they_add_together_equally():
    # f: none 50, first 60, second 55, both 75; the surplus of 10 is shared
    values = shapley_values(torch.tensor([[50.0, 60.0, 55.0, 75.0]]), torch.tensor([[True, True]]))
    torch.testing.assert_close(values, torch.tensor([[15.0, 10.0]]))


def test_values_stand_at_the_slots_of_the_seeds():
    acc = torch.tensor([[50.0, 60.0, 55.0, 75.0, torch.nan, torch.nan, torch.nan, torch.nan]])
    values = shapley_values(acc, torch.tensor([[True, False, True]]))
    assert values.nan_to_num(-1.0).tolist() == [[15.0, -1.0, 10.0]]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 6, 9])
def test_values_agree_with_the_average_over_orders_and_sum_to_the_whole_gain(num_slots):
    generator = torch.Generator().manual_seed(num_slots)
    width = min(num_slots, 6)
    live = torch.rand(12, num_slots, generator=generator) < 0.5
    live &= live.cumsum(dim=1) <= width
    acc = 100 * torch.rand(12, 2**width, generator=generator, dtype=torch.float64)
    for host, count in enumerate(live.sum(dim=1).tolist()):
        acc[host, 2**count :] = torch.nan
    values = shapley_values(acc, live)
    for host in range(12):
        count = int(live[host].sum())
        want = average_over_orders(acc[host].tolist(), count)
        assert values[host][live[host]].tolist() == pytest.approx(want, abs=1e-9)
        assert values[host][~live[host]].isnan().all()
        gain = float(acc[host, 2**count - 1] - acc[host, 0])
        assert math.fsum(want) == pytest.approx(gain, abs=1e-9)
        assert float(values[host].nansum()) == pytest.approx(gain, abs=1e-9)


def test_a_host_with_more_seeds_than_subsets_were_evaluated_for_is_missing():
    acc = torch.rand(1, 64)
    assert shapley_values(acc, torch.ones(1, 7, dtype=torch.bool)).isnan().all()


def test_a_subset_that_was_not_measured_makes_its_host_missing_and_no_other():
    acc = torch.tensor([[50.0, torch.nan, 55.0, 75.0], [50.0, 60.0, 55.0, 75.0]])
    missing = shapley_values(acc, torch.ones(2, 2, dtype=torch.bool)).isnan().all(dim=1)
    assert missing.tolist() == [True, False]


def test_without_subsets_everything_is_missing():
    values = shapley_values(torch.zeros(2, 0), torch.ones(2, 3, dtype=torch.bool))
    assert values.shape == (2, 3)
    assert values.isnan().all()
