"""Statistics of comparisons: by hand, and against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as scipy_stats

from esper.runs.statistics import (
    Estimate,
    bootstrap,
    interquartile_mean,
    paired_difference,
    probability_of_improvement,
    units_needed,
    units_of,
)

FLOATS = st.floats(-100.0, 100.0)


def array(*values: float) -> np.ndarray:
    return np.array(values)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    # of eight units two at each end: (3 + 4 + 5 + 6) / 4
    assert interquartile_mean(array(8.0, 1.0, -90.0, 3.0, 4.0, 5.0, 6.0, 700.0)) == 4.5
    assert interquartile_mean(array(1.0, 2.0, 9.0)) == 4.0  # of three none


@given(hnp.arrays(np.float64, st.integers(1, 30), elements=FLOATS))
def test_the_interquartile_mean_is_the_trimmed_mean_of_scipy(values):
    assert float(interquartile_mean(values)) == pytest.approx(scipy_stats.trim_mean(values, 0.25))


def test_a_bootstrap_of_two_units_has_them_as_its_ends():
    assert bootstrap([array(1.0, 3.0)]) == Estimate(2.0, 1.0, 3.0)
    assert math.isnan(bootstrap([array(1.0)]).low)


def test_the_interval_agrees_with_scipy():
    values = np.random.default_rng(1).normal(5.0, 2.0, 40)
    theirs = scipy_stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=2)
    ours = bootstrap([values])
    interval = theirs.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=0.05)
    theirs = scipy_stats.bootstrap(
        (values,), lambda x, axis: scipy_stats.trim_mean(x, 0.25, axis=axis), n_resamples=10_000,
        method="percentile", rng=2,
    )  # fmt: skip
    ours = bootstrap([values], interquartile_mean)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.06)


def test_units_are_resampled_within_their_task():
    # tasks that differ by 100 points, without any spread inside of a task
    assert bootstrap([array(0.0, 0.0, 0.0), array(100.0)]) == Estimate(25.0, 25.0, 25.0)
    pooled = bootstrap([array(0.0, 0.0, 0.0, 100.0)])
    assert pooled.high - pooled.low >= 50.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draws = np.random.default_rng(3).normal(0.0, 1.0, (100, 24))
    covered = [not bootstrap([row]).excludes_zero for row in draws]
    assert 0.88 <= np.mean(covered) <= 0.99


def test_differences_are_paired():
    low, high = array(1.0, 50.0, 99.0), array(2.0, 52.0, 102.0)
    assert paired_difference([high], [low]) == Estimate(2.0, 1.0, 3.0)
    assert -paired_difference([high], [low]) == Estimate(-2.0, -3.0, -1.0)
    assert paired_difference([high], [low]).excludes_zero
    assert not paired_difference([high], [high]).excludes_zero


def test_ties_count_half_in_the_probability_of_improvement():
    found = probability_of_improvement([array(1.0, 2.0, 3.0, 4.0)], [array(0.0, 2.0, 4.0, 3.0)])
    assert found.mean == 0.625  # above, equal, below, above
    assert probability_of_improvement([array(2.0)] * 2, [array(1.0)] * 2) == Estimate(1.0, 1.0, 1.0)


@given(hnp.arrays(np.float64, (2, 12), elements=FLOATS))
def test_the_probabilities_of_both_directions_add_up_to_one(pair):
    one, other = (probability_of_improvement([a], [b]) for a, b in ((pair[0], pair[1]), (pair[1], pair[0])))
    assert one.mean + other.mean == pytest.approx(1.0)


def power(n: int, effect: float) -> float:
    """Of a two-sided paired t-test at 5 %, by the noncentral t distribution."""
    critical = scipy_stats.t.ppf(0.975, n - 1)
    shift = effect * math.sqrt(n)
    upper, lower = scipy_stats.nct.sf(critical, n - 1, shift), scipy_stats.nct.cdf(-critical, n - 1, shift)
    return float(upper + lower)


@pytest.mark.parametrize("effect", [0.1, 0.3, 0.5, 1.0])
def test_so_many_pairs_have_a_power_of_eighty_percent(effect):
    n = units_needed(2.0 / effect, 2.0)
    assert power(n, effect) == pytest.approx(0.8, abs=0.02)


def test_the_number_of_pairs_by_hand():
    # (1.959964 + 0.841621)^2 = 7.848880; s / d = 3: 70.64 + 1.92
    assert units_needed(6.0) == 73
    assert units_needed(0.0) == 6


def test_the_units_of_several_runs_are_runs_and_of_one_run_hosts():
    values = np.array([[1.0, 3.0], [5.0, 9.0]])
    assert units_of(values, by_run=True).tolist() == [2.0, 7.0]
    assert units_of(values, by_run=False).tolist() == [1.0, 3.0, 5.0, 9.0]
    assert units_of(values[:1], by_run=True).tolist() == [1.0, 3.0]
