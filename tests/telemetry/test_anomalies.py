"""Each anomaly is found in a record that has the fault, and in no healthy one. Numbers are worked out by hand."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.runs.assembly.values import parse
from esper.telemetry import anomalies
from esper.telemetry.anomalies import RULES, Alarm, Trend, of_flags, of_trend, of_update, rule_of, share_between
from esper.telemetry.record.reader import open_record
from esper.telemetry.record.writer import Rows
from esper.telemetry.run_directory import RunDirectory

HOSTS, ROUNDS = 8, 20
METRICS = {
    "approx_kl": 0.005, "stored_log_prob_error": 1e-6, "explained_variance": 0.6, "grad_norm": 3.0,
    "value_std": 0.5, "return_std": 1.0, "hidden_rms": 0.4, "cell_rms": 1.0, "entropy_op": 0.5,
    "entropy_slot": 0.0, "entropy_parameters": 0.4,
    "nonfinite_minibatches": 0.0, "actions_outside_mask": 0.0, "nonfinite_logits": 0.0,
}  # fmt: skip
"""Of a healthy update."""


class Written:
    """A record of 20 rounds of 8 hosts that a test changes before it is written.

    `rounds` are lines of metrics.jsonl, `episodes` events; `p_wait` by round; `flagged` steps (round, host).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds: list[dict[str, Any]] = [
            {"round": n, "objective_mean": 50.0 + n, "memory_bytes": {"peak": 1000}, **METRICS}
            for n in range(1, ROUNDS + 1)
        ]
        self.episodes: list[dict[str, Any]] = [
            {"kind": "episode", "round": n, "host": h, "rollbacks": 0, "shaped_return": float(h)}
            for n in range(1, ROUNDS + 1)
            for h in range(HOSTS)
        ]
        self.p_wait = [0.8] * ROUNDS
        self.flagged: list[tuple[int, int]] = []

    def change(self, rounds: Sequence[int], **values: object) -> "Written":
        for n in rounds:
            self.rounds[n - 1].update(values)
        return self

    def found(self) -> list[tuple[str, int, int | None, float]]:
        """Kind, round, host and value of each anomaly."""
        with RunDirectory.create(self.path, {"episode_length": 1, "ppo": {"max_grad_norm": 0.5}}) as run:
            for number, line in enumerate(self.rounds, start=1):
                if not self.flagged and set(self.p_wait) == {0.8}:  # parts take most of the time
                    run.write_metrics(line)
                    continue
                at = {"round": np.full(HOSTS, number, np.int32), "host": np.arange(HOSTS, dtype=np.int32)}
                columns = at | {
                    "t": np.ones(HOSTS, dtype=np.int32),
                    "op": np.zeros(HOSTS, dtype=np.int8),
                    "p_wait": np.full(HOSTS, self.p_wait[number - 1], dtype=np.float32),
                    "flag_entangled": np.array([(number, host) in self.flagged for host in range(HOSTS)]),
                }
                digests = run.write_parts([Rows("steps", columns, {"op": ["WAIT"]})], number, 1)
                run.write_metrics(line | {"record": digests})
            run.write_events([{"kind": "run_started"}, *self.episodes])
        with open_record([self.path]) as record:
            rows = record.query("SELECT * FROM anomalies")
            assert all(row["message"] and row["advice"] for row in rows)
            assert record.warnings == []
        return [(row["kind"], row["round"], row["host"], row["value"]) for row in rows]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run")


def test_an_update_beyond_a_threshold_is_found(written: Written) -> None:
    wrong = [
        *(("stored_log_prob_error", 0.1), ("approx_kl", 0.2), ("explained_variance", -0.75)),
        *(("hidden_rms", 1e-7), ("cell_rms", 12.0), ("cell_rms", 0.0), ("grad_norm", 0.0), ("entropy_op", 0.07)),
        *(("entropy_parameters", 0.04), ("nonfinite_minibatches", 1.0), ("actions_outside_mask", 1.0)),
        ("nonfinite_logits", 1.0),
    ]
    for number, (metric, value) in enumerate(wrong, start=1):
        written.change([number], **{metric: value})
    assert written.found() == [(metric, number, None, value) for number, (metric, value) in enumerate(wrong, start=1)]


@pytest.mark.parametrize(
    ("rounds", "values", "found"),
    [
        # limit 0.5, threshold 20 times as much: ten rounds above 10, and one small gradient among them is enough
        (range(11, 21), {"grad_norm": 12.0}, [("gradient_always_clipped", 20, None, 24.0)]),
        (range(12, 21), {"grad_norm": 12.0}, []),
        (range(1, 11), {"value_std": 0.01, "return_std": 1.0}, [("value_collapse", 10, None, 0.01)]),
        ([3], {"hidden_rms": 0.95}, [("lstm_saturated", 3, None, 0.95)]),
        ([20], {"memory_bytes": {"peak": 1600}}, [("memory_grows", 20, None, 1.6)]),
        (range(11, 21), {"objective_mean": 45.0}, [("objective_falls", 20, None, -10.5)]),  # after 51 to 60
        (range(1, 21), {"objective_mean": 60.0}, [("objective_stands_still", 20, None, 0.0)]),
    ],
)
def test_what_several_rounds_have_in_common_is_found(
    written: Written, rounds: Sequence[int], values: dict[str, object], found: list[tuple[object, ...]]
) -> None:
    assert written.change(rounds, **values).found() == found


@pytest.mark.parametrize(("p_wait", "found"), [(0.98, ["policy_waits"]), (1.0, [])])  # at 1 nothing else is legal
def test_a_policy_that_only_waits_is_found(written: Written, p_wait: float, found: list[str]) -> None:
    written.p_wait[10:] = [p_wait] * 10
    assert [(kind, number, host) for kind, number, host, _ in written.found()] == [(kind, 20, None) for kind in found]


def test_many_rolled_back_hosts_are_found(written: Written) -> None:
    for host in (0, 3, 6):
        written.episodes[host]["rollbacks"] = 1
    assert written.found() == [("rollbacks", 1, None, 0.375)]


def test_rollbacks_that_make_the_return_are_found(written: Written) -> None:
    # two of eight hosts at -10, the others at 0: all of the variance is between the groups
    for host in range(HOSTS):
        written.episodes[host] |= {"rollbacks": int(host < 2), "shaped_return": -10.0 * (host < 2)}
    ((kind, number, _, value),) = written.found()
    assert (kind, number) == ("rollbacks_dominate_return", 1)
    assert value == pytest.approx(1.0)


def test_steps_that_game_the_reward_are_found_by_host(written: Written) -> None:
    written.flagged = [(2, 5), (4, 1)]
    assert written.found() == [("entangled_steps", 2, 5, 1.0), ("entangled_steps", 4, 1, 1.0)]


def test_the_share_of_the_variance_between_two_groups() -> None:
    # values 0, 2 | 4, 6: means 1 and 5, variance 5, share 1/2 · 1/2 · 16 / 5
    assert share_between([True, True, False, False], [0.0, 2.0, 4.0, 6.0]) == pytest.approx(0.8)
    assert math.isnan(share_between([True, False, False], [1.0, 2.0, 3.0]))  # one host tells nothing
    assert math.isnan(share_between([True, True, False, False], [1.0] * 4))


def test_missing_metrics_raise_nothing() -> None:
    assert list(of_update({name: math.nan for name in RULES})) == []
    assert list(of_flags({"entangled": 0})) == []
    assert list(of_trend(20, [1.0] * 19)) == []


def test_a_policy_that_is_made_certain_need_not_explore():
    found = [list(of_update({"entropy_op": 0.01, "inverse_temperature": beta})) for beta in (1.0, 1.5)]
    assert [alarm.name for alarm in found[0]] == ["entropy_op"]
    assert found[1] == []


def test_every_alarm_has_a_rule() -> None:
    extremes: list[Mapping[str, float]] = [dict.fromkeys(RULES, 1e9), dict.fromkeys(RULES, -1e9)]
    alarms = [alarm for metrics in extremes for alarm in of_update(metrics)]
    assert {alarm.name for alarm in alarms} == {*anomalies._ABOVE, *anomalies._BELOW}
    assert all(
        rule_of(alarm).advice for alarm in [*alarms, *of_flags({"own": 2}), Alarm("objective_falls", -3.0, -2.0)]
    )


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
