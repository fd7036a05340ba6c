"""Means of ten rounds, worked out by hand."""

import dataclasses

import pytest

from esper.runs.assembly.values import parse
from esper.telemetry.anomalies import Alarm, Trend


def after(*rounds: float) -> tuple[Trend, list[int]]:
    """The trend after these rounds, and the rounds after which the policy was the best so far."""
    trend, best = Trend(), []
    for number, objective in enumerate(rounds, start=1):
        trend, better = trend.after(objective)
        best += [number] * better
    return trend, best


def test_nobody_is_the_best_before_ten_rounds() -> None:
    trend, best = after(*[90.0] * 9)
    assert (trend.best, best) == (None, [])


def test_the_best_is_the_highest_mean_of_ten_and_not_the_highest_round() -> None:
    # means: rounds 1-10: 10; 2-11: 20 (one round of 110); 3-12: 19; ... 12-21: 5
    trend, best = after(*[10.0] * 10, 110.0, *[0.0] * 10)
    assert (trend.best, best) == (20.0, [10, 11])


def test_an_equal_mean_is_not_better() -> None:
    assert after(*[10.0] * 13)[1] == [10]


@pytest.mark.parametrize(
    ("second", "alarm"),
    [
        (52.125, [Alarm("objective_rises", 2.125, 2.0)]),
        (52.0, []),
        (50.5, [Alarm("objective_stands_still", 0.5, 0.5)]),
        (50.625, []),
        (49.5, [Alarm("objective_stands_still", -0.5, 0.5)]),
        (49.25, []),
        (48.0, []),
        (47.875, [Alarm("objective_falls", -2.125, -2.0)]),
    ],
)
def test_ten_rounds_are_compared_with_the_ten_before(second: float, alarm: list[Alarm]) -> None:
    assert list(after(*[50.0] * 10, *[second] * 10)[0].alarms()) == alarm


def test_the_comparison_is_made_every_ten_rounds_and_of_the_last_twenty() -> None:
    found = [n for n in range(1, 42) if list(after(*[50.0] * n)[0].alarms())]
    assert found == [20, 30, 40]
    assert next(after(*[0.0] * 10, *[50.0] * 20)[0].alarms()).name == "objective_stands_still"


def test_a_trend_survives_being_written() -> None:
    trend, _ = after(*[10.0] * 11)
    assert parse(Trend, dataclasses.asdict(trend)) == trend
