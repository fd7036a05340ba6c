"""Statistics, results, verdict and tables of a comparison, with numbers worked out by hand."""

import dataclasses
import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rich.console import Console
from scipy import stats as scipy_stats
from test_runs_report import NAN, WEIGHTS, stats

from esper.runs.assembly.presets import resolve
from esper.runs.evaluation.comparison import legend, pages, rollbacks
from esper.runs.evaluation.controllers import all_baselines, known_names
from esper.runs.evaluation.results import (
    ControllerResult,
    Estimate,
    Outcome,
    Size,
    TrainingCost,
    estimate,
    interquartile_mean,
    probability_of_improvement,
    results,
    units_needed,
    verdict,
)
from esper.runs.evaluation.tables import done, short
from esper.tasks.losses import Classification, NextToken

SIX = Size(1, 6, True)


def printed(*tables: object) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*tables)
    return console.export_text()


def outcome(name: str, *committed: float, fossil_params: Sequence[int] = (0, 0)) -> Outcome:
    """Hosts of 1000 parameters: J is their accuracy unless fossils are given."""
    found = stats(
        committed_acc=np.array(committed),
        fossil_params=np.resize(np.array(fossil_params), len(committed)),
        host_params=np.full(len(committed), 1000),
        compute=np.ones(len(committed)),
        rollbacks=np.zeros(len(committed), dtype=np.int64),
    )
    return Outcome(name=name, stats=found, test_acc=np.array(committed) - 1.0, val=np.array([committed]))


def table_of(*outcomes: Outcome) -> list[ControllerResult]:
    return results({one.name: [one] for one in outcomes}, WEIGHTS, Classification(10), by_run=True)


def rows_of(*outcomes: Outcome) -> dict[str, ControllerResult]:
    return {row.name: row for row in table_of(*outcomes)}


def test_differences_in_j_are_paired_host_by_host() -> None:
    rows = rows_of(outcome("wait_only", 10.0, 50.0), outcome("x", 13.0, 54.0, fossil_params=(0, 500)))
    # differences 3 and 4 - 3 ln(1.5) = 2.783605; a bootstrap of two hosts has these two as its ends
    row = rows["x"]
    assert dataclasses.astuple(row.difference) == pytest.approx((2.891802, 2.783605, 3.0), abs=1e-6)
    assert row.committed_std == pytest.approx(28.991378)
    assert row.objective == pytest.approx(33.5 - 1.216395 / 2, abs=1e-6)
    assert row.test_objective == pytest.approx(row.objective - 1.0)  # accuracy on the test split is 1 below
    assert row.difference_test == row.difference
    assert row.improvement == Estimate(1.0, 1.0, 1.0)
    assert rows["wait_only"].difference == Estimate(0.0, 0.0, 0.0)
    assert rows["wait_only"].improvement.mean == 0.5


def test_with_several_runs_the_statistics_are_of_runs() -> None:
    trained = [outcome("trained", 10.0, 20.0), outcome("trained", 30.0, 50.0)]
    waits = [outcome("wait_only", 10.0, 10.0), outcome("wait_only", 20.0, 20.0)]
    rows = results({"trained": trained, "wait_only": waits}, WEIGHTS, Classification(10), by_run=True)
    assert rows[0].units == [15.0, 40.0]
    assert rows[0].objective == 27.5
    assert rows[0].objective_std == pytest.approx(25.0 / math.sqrt(2.0))
    assert rows[0].hosts["objective"] == [10.0, 20.0, 30.0, 50.0]
    assert rows[1].difference == Estimate(-12.5, -20.0, -5.0)  # of the runs: -5 and -20
    by_host = results({"trained": trained, "wait_only": waits}, WEIGHTS, Classification(10), by_run=False)
    assert by_host[1].units == [10.0, 10.0, 20.0, 20.0]
    assert by_host[1].difference.mean == -12.5


def test_one_host_has_a_mean_and_no_spread() -> None:
    rows = rows_of(outcome("wait_only", 13.0), outcome("x", 14.0))
    assert (rows["x"].committed, rows["x"].difference.mean) == (14.0, pytest.approx(1.0))
    assert math.isnan(rows["x"].objective_std)
    assert math.isnan(rows["x"].difference.low)
    assert rows["x"].needed is None
    lines = printed(*pages(list(rows.values()))).splitlines()
    assert lines[1].split() == ["x", "14.00", "14.00", "+1.00", "100", "%"]
    assert verdict(list(rows.values()), Size(1, 1, False)) == (
        "1 host cannot show whether x differs from wait_only: +1.00 in 100·J on 1 host; +1.00 with test accuracy. "
        "At least 6 hosts are needed."
    )


def test_the_run_comes_first_then_the_strongest_constant_schedule_then_the_others_by_j() -> None:
    one = {"wait_only": 1.0, "fixed_schedule": 2.0, "random": 5.0, "trained": 0.0, "fixed_schedule_fill": 3.0}
    found = table_of(*(outcome(name, value, value) for name, value in one.items()))
    assert [row.name for row in found] == ["trained", "fixed_schedule_fill", "random", "fixed_schedule", "wait_only"]


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ((10.0, 11.0) * 3, "the best baseline, b, is better than trained: +3.50 in 100·J on 6 hosts, "),
        ((15.0, 16.0) * 3, "the best baseline, b, is worse than trained: -1.50 in 100·J on 6 hosts, "),
        ((13.0, 16.0) * 3, "the best baseline, b, does not differ significantly from trained: -0.50 in 100·J on 6 "
                           "hosts, "),
    ],
)  # fmt: skip
def test_the_last_line_says_how_the_run_compares_to_the_best_baseline(trained: tuple[float, ...], said: str) -> None:
    rows = table_of(outcome("a", *[11.0] * 6), outcome("b", *[14.0] * 6), outcome("trained", *trained))
    found = verdict(rows, SIX)
    assert found.startswith(said)
    (line,) = (line for line in printed(*pages(rows)).splitlines() if line.startswith("b ") and "%" in line)
    assert f" {said.partition(': ')[2].split()[0]} [" in line  # the table has the same number
    assert f", better in {line.split()[-2]} % of hosts" in found
    assert "95 % interval" in found
    assert "over hosts" in found
    # s = 1.643168: 2.801585^2 (s / 2)^2 = 5.30, and 1.92
    assert ("To detect a difference of 2, 8 hosts would be needed." in found) == ("not differ" in said)
    assert found.endswith("One run says nothing about other training seeds; a claim needs 10 runs.")


def test_too_few_runs_that_agree_are_not_called_significant() -> None:
    def runs(name: str, *values: float) -> list[Outcome]:
        return [outcome(name, value, value) for value in values]

    few = results(
        {"trained": runs("trained", 2.0, 3.0, 4.0), "wait_only": runs("wait_only", 1, 1, 1)},
        WEIGHTS,
        Classification(10),
        by_run=True,
    )
    assert few[1].difference.excludes_zero
    assert verdict(few, Size(3, 2, True)) == (
        "3 runs cannot show whether the best baseline, wait_only, differs from trained: -2.00 in 100·J on 3 runs of 2 "
        "hosts, better in 0 % of runs; -2.00 with test accuracy. At least 6 runs are needed. 3 runs are few; a claim "
        "needs 10."
    )
    assert "[" not in printed(*pages(few))  # an interval of so few runs excludes 0 by chance
    enough = {"trained": runs("trained", *range(2, 12)), "wait_only": runs("wait_only", *[1] * 10)}
    found = verdict(results(enough, WEIGHTS, Classification(10), by_run=True), Size(10, 2, True))
    assert found.startswith("the best baseline, wait_only, is worse than trained: -5.50 in 100·J on 10 runs of 2 hosts")
    assert found.endswith("with test accuracy.")


def test_beside_a_baseline_with_a_finished_structure_the_best_of_the_others_is_named_too() -> None:
    rows = table_of(
        outcome("a", *[12.0] * 6), outcome("static_final", *[14.0] * 6), outcome("trained", *(13.0, 12.5) * 3)
    )
    found = verdict(rows, SIX)
    assert found.startswith("the best baseline, static_final, is better than trained: +1.25 in 100·J on 6 hosts, ")
    other = "static_final has its structure from the first step; a, the best of the others, is worse than trained: "
    assert f" {other}-0.75 in 100·J on 6 hosts" in found


def test_without_a_run_the_last_line_compares_the_best_baseline_to_waiting() -> None:
    idle, size = outcome("wait_only", *[11.0] * 6), Size(1, 6, False)
    worse, better = outcome("a", *[10.0] * 6), outcome("a", *[12.0, 13.0] * 3)
    assert verdict(table_of(idle, worse), size) == "No baseline is better than wait_only on 6 hosts."
    found = verdict(table_of(idle, better), size)
    assert found.startswith("a is better than wait_only: +1.50 in 100·J on 6 hosts")
    assert found.endswith("better in 100 % of hosts; +1.50 with test accuracy.")


def test_the_tables_fit_into_eighty_columns() -> None:
    names = dict.fromkeys(("trained", *known_names(), *all_baselines(resolve({"task": "null"}), with_run=True)))
    cost = TrainingCost(*(np.full(shape, x) for shape, x in ((2, 999_499.0), ((1, 2), 8.88e17), ((1, 2), 999.94e12))))
    outcomes = [outcome(name, 100.0, 10.0 if name == "trained" else 99.0, fossil_params=(98_000,)) for name in names]
    rows = table_of(*(dataclasses.replace(one, cost=cost) for one in outcomes))
    text = printed(*pages(rows)) + legend("hosts")
    assert "…" not in text
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= 80


def test_large_numbers_are_short() -> None:
    numbers = (NAN, 0.0, 7.0, 999.0, 5_376.0, 171_400.0, 9.96e6, 3.2e9, 4e12, 2.5e15)
    assert [short(x) for x in numbers] == [
        *("-", "0", "7", "999", "5.4k", "171k", "10.0M", "3.2G", "4.0T", "2.5P")
    ]  # fmt: skip


def test_hosts_that_were_rolled_back_are_told_below_the_tables() -> None:
    marked = {"wait_only": (0, 0), "whole": (0, 0), "once": (1, 0), "often": (2, 1)}
    outcomes = [
        Outcome(name=name, stats=stats(rollbacks=np.array(times)), test_acc=np.zeros(2), val=np.zeros((1, 2)))
        for name, times in marked.items()
    ]
    rows = rows_of(*outcomes)
    assert rollbacks([rows["whole"], rows["once"], rows["often"]]) == [
        "once: hosts were rolled back once.",
        "often: hosts were rolled back 3 times.",
    ]


def test_the_last_line_of_a_run_names_one_network_and_says_of_how_many_hosts() -> None:
    found = {
        "num_envs": 16,
        "final_objective_mean": 58.412,
        "final_objective_std": 3.25,
        "final_committed_accuracy_mean": 59.0,
        "final_test_accuracy_mean": 57.5,
        "growth_ratio_mean": 1.25,
        "env_steps_per_second": 20.4,
        "memory_bytes": {"allocated": None, "reserved": None, "peak": 468_000_000},
        "best_host": None,
        "final_perplexity": None,
    }
    assert done(found) == (
        "done: 100·J 58.41 ± 3.25; committed validation 59.00, committed test 57.50; growth 1.25x; 16 hosts; "
        "20 env-steps/s with updates, 468 MB peak memory"
    )
    alone = done(found | {"num_envs": 1, "final_objective_std": NAN})
    assert alone.startswith("done: 100·J 58.41; committed")
    assert "; 1 host; " in alone
    best = {"round": 17, "host": 3, "objective": 92.314, "val": 93.0, "test": 91.25, "growth": 1.257}
    assert done(found | {"best_host": best | {"perplexity": None}}).splitlines()[1] == (
        "best host of all rounds: host 3 of round 17, 100·J 92.31; validation 93.00, chosen by it; test 91.25; "
        "growth 1.26x"
    )
    last, of_text = done(found | {"final_perplexity": 5.125, "best_host": best | {"perplexity": 4.5}}).splitlines()
    assert "committed test 57.50; validation perplexity 5.12; growth" in last
    assert "test 91.25; validation perplexity 4.50; growth" in of_text


def test_texts_have_a_table_of_their_perplexities() -> None:
    # losses of 1 and 2 nats per token: exp(1.5) = 4.4817
    one = {"wait_only": [outcome("wait_only", 10.0, 20.0)]}
    (row,) = results(one, WEIGHTS, NextToken(50), by_run=False)
    assert (row.loss, row.perplexity) == pytest.approx((1.5, 4.481689))
    assert row.hosts["loss"] == [1.0, 2.0]
    assert "controller loss perplexity wait_only 1.5000 4.48" in " ".join(printed(*pages([row])).split())
    (row,) = results(one, WEIGHTS, Classification(50), by_run=False)
    assert math.isnan(row.perplexity)


# -- statistics --------------------------------------------------------------------------------------------------------

FLOATS = st.floats(-100.0, 100.0)


def array(*values: float) -> np.ndarray:
    return np.array(values)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    # of eight units two at each end: (3 + 4 + 5 + 6) / 4
    assert interquartile_mean(array(9.0, 1.0, -90.0, 3.0, 4.0, 5.0, 6.0, 700.0)) == 4.5
    assert interquartile_mean(array(1.0, 2.0, 9.0)) == 4.0  # of three none


def test_the_interval_of_two_units_has_them_as_its_ends_and_that_of_one_does_not_exist():
    assert estimate(array(1.0, 3.0)) == Estimate(2.0, 1.0, 3.0)
    assert math.isnan(estimate(array(1.0)).low)
    assert estimate(array(1.0, 3.0)).excludes_zero
    assert not estimate(array(-1.0, 3.0)).excludes_zero


@pytest.mark.parametrize("statistic", [np.mean, interquartile_mean])
@pytest.mark.parametrize(
    ("values", "inside"),
    [
        ((2.0,) * 6, (2.0, 2.0)),  # BCa divides by a spread of 0
        ((0.0,) * 9 + (100.0,), (0.0, 60.0)),  # the interquartile mean is the same without any one of the units
        ((1e-300, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 1e-300)),
    ],
)
def test_units_of_which_bca_knows_no_interval_have_a_finite_one(statistic, values, inside):
    found = estimate(array(*values), statistic)
    assert inside[0] <= found.low <= found.mean <= found.high <= inside[1]


def test_the_interval_of_a_skewed_sample_is_corrected_and_reproducible():
    values = np.random.default_rng(5).exponential(10.0, 20)
    found = estimate(values)
    resampled = np.random.default_rng(6).choice(values, (10_000, 20)).mean(axis=1)
    low, high = np.percentile(resampled, (2.5, 97.5))
    assert 0.1 < found.low - low < 2.0  # BCa moves both ends towards the long tail
    assert 0.1 < found.high - high < 3.0
    assert estimate(values) == found


@given(hnp.arrays(np.float64, (2, 12), elements=FLOATS))
@settings(max_examples=20)
def test_ties_count_half_in_the_probability_of_improvement(pair):
    one, other = (probability_of_improvement(a, b) for a, b in ((pair[0], pair[1]), (pair[1], pair[0])))
    assert one.mean + other.mean == pytest.approx(1.0)
    found = probability_of_improvement(array(1.0, 2.0, 3.0, 4.0), array(0.0, 2.0, 4.0, 3.0))
    assert found.mean == 0.625  # above, equal, below, above


def power(n: int, effect: float) -> float:
    """Of a two-sided paired t-test at 5 %, by the noncentral t distribution."""
    critical = scipy_stats.t.ppf(0.975, n - 1)
    shift = effect * math.sqrt(n)
    upper, lower = scipy_stats.nct.sf(critical, n - 1, shift), scipy_stats.nct.cdf(-critical, n - 1, shift)
    return float(upper + lower)


@pytest.mark.parametrize("effect", [0.1, 0.3, 0.5, 1.0])
def test_so_many_pairs_have_a_power_of_eighty_percent(effect):
    assert power(units_needed(2.0 / effect, 2.0), effect) == pytest.approx(0.8, abs=0.02)


def test_the_number_of_pairs_by_hand():
    # (1.959964 + 0.841621)^2 = 7.848880; s / d = 3: 70.64 + 1.92
    assert units_needed(6.0) == 73
    assert units_needed(0.0) == 6
