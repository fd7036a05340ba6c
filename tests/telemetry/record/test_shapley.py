import itertools
import math
import random

import pytest

from esper.telemetry.record.schema import shapley_values


def average_over_orders(worth: list[float], num_players: int) -> list[float]:
    """What each player adds on joining, averaged over all orders of joining."""
    totals = [0.0] * num_players
    for order in itertools.permutations(range(num_players)):
        present = 0
        for player in order:
            totals[player] += worth[present | 1 << player] - worth[present]
            present |= 1 << player
    return [total / math.factorial(num_players) for total in totals]


@pytest.mark.parametrize("num_players", [0, 1, 2, 3, 4, 5, 6])
def test_values_agree_with_the_average_over_orders_and_sum_to_the_whole_gain(num_players):
    drawn = random.Random(num_players)
    for _ in range(3):
        worth = [100 * drawn.random() for _ in range(2**num_players)]
        values = shapley_values(worth)
        assert values == pytest.approx(average_over_orders(worth, num_players), abs=1e-9)
        assert math.fsum(values) == pytest.approx(worth[-1] - worth[0], abs=1e-9)


def test_a_coalition_that_was_not_measured_makes_values_missing():
    assert all(map(math.isnan, shapley_values([50.0, math.nan, 55.0, 75.0])))
