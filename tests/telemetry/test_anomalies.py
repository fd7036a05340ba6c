"""Each anomaly is found in a record that has the fault, and in no healthy one. Numbers are worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.telemetry import anomalies
from esper.telemetry.anomalies import RULES, Alarm, of_flags, of_trend, of_update, rule_of, share_between
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


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        *(("stored_log_prob_error", 0.1), ("approx_kl", 0.2), ("explained_variance", -0.75)),
        *(("hidden_rms", 1e-7), ("cell_rms", 12.0), ("cell_rms", 0.0), ("grad_norm", 0.0), ("entropy_op", 0.07)),
        *(("entropy_parameters", 0.04), ("nonfinite_minibatches", 1.0), ("actions_outside_mask", 1.0)),
        ("nonfinite_logits", 1.0),
    ],
)
def test_an_update_beyond_a_threshold_is_found(written: Written, metric: str, value: float) -> None:
    assert written.change([7], **{metric: value}).found() == [(metric, 7, None, value)]


def test_a_gradient_that_is_always_clipped_hard_is_found(written: Written) -> None:
    # limit 0.5, threshold 20 times as much: ten rounds above 10
    assert written.change(range(11, 21), grad_norm=12.0).found() == [("gradient_always_clipped", 20, None, 24.0)]


def test_one_small_gradient_among_ten_is_enough(written: Written) -> None:
    assert written.change(range(12, 21), grad_norm=12.0).found() == []


def test_a_critic_that_became_constant_is_found(written: Written) -> None:
    found = written.change(range(1, 11), value_std=0.01, return_std=1.0).found()
    assert found == [("value_collapse", 10, None, 0.01)]


def test_a_recurrent_state_at_its_limits_is_found(written: Written) -> None:
    assert written.change([3], hidden_rms=0.95).found() == [("lstm_saturated", 3, None, 0.95)]


def test_a_policy_that_only_waits_is_found(written: Written) -> None:
    written.p_wait[10:] = [0.98] * 10
    ((kind, number, host, value),) = written.found()
    assert (kind, number, host) == ("policy_waits", 20, None)
    assert value == pytest.approx(0.98)


def test_waiting_where_nothing_else_is_legal_is_not_an_anomaly(written: Written) -> None:
    written.p_wait[10:] = [1.0] * 10
    assert written.found() == []


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


def test_memory_that_grows_is_found(written: Written) -> None:
    written.change([20], memory_bytes={"peak": 1600})
    assert written.found() == [("memory_grows", 20, None, 1.6)]


def test_an_objective_that_falls_or_stands_still_is_found(tmp_path: Path) -> None:
    falling = Written(tmp_path / "falling").change(range(1, 11), objective_mean=60.0)
    falling.change(range(11, 21), objective_mean=55.0)
    assert falling.found() == [("objective_falls", 20, None, -5.0)]
    level = Written(tmp_path / "level").change(range(1, 21), objective_mean=60.0)
    assert level.found() == [("objective_stands_still", 20, None, 0.0)]


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
