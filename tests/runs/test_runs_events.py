"""Event lines, from reports made by hand."""

import numpy as np
import pytest
from test_runs_report import NAN, WEIGHTS, stats, step

from esper.leyline.lifecycle import Cause, HostFamily, SeedStage
from esper.leyline.messages import EngineSpec
from esper.runs.records import round_events, step_events
from esper.telemetry.anomalies import Alarm, Trend, of_update
from esper.tolaria.governor import PanicReason

SPEC = EngineSpec(
    run_seed=0,
    num_envs=2,
    slot_ids=("r0c0", "r0c1"),
    episode_length=8,
    family=HostFamily.CNN,
    selectable=(1, 2),
    blueprint_names=("noop", "conv_light", "attention"),
    host_offset=10,
)


def moves(*changes: tuple[int, int, SeedStage, SeedStage, Cause]) -> np.ndarray:
    found = np.zeros((3, 2, 2), dtype=np.int64)
    for host, slot, *what in changes:
        found[:, host, slot] = what
    return found


def gates(asked: dict[tuple[int, int], tuple[int, int, float, int]]) -> dict[str, np.ndarray]:
    """Gate, whether it was passed, score and failed checks of the seeds that asked one."""
    found = step()
    fields = {name: getattr(found, name) for name in ("gate", "gate_passed", "gate_score", "failed_checks")}
    for place, values in asked.items():
        for field, value in zip(fields.values(), values, strict=True):
            field[place] = value
    return fields


def test_a_slot_that_moved_twice_has_two_events_in_order() -> None:
    report = step(
        episode=2,
        t=3,
        blueprint=np.array([[-1, -1], [2, -1]]),
        serial=np.array([[0, 0], [7, 0]]),
        alpha=np.array([[0.0, 0.0], [0.25, 0.0]]),
        op_moves=moves((1, 0, SeedStage.DORMANT, SeedStage.GERMINATED, Cause.OP)),
        tick_moves=moves((1, 0, SeedStage.GERMINATED, SeedStage.TRAINING, Cause.AUTO)),
    )
    first, second = step_events([report], SPEC)
    assert first == {
        "kind": "stage_changed", "round": 3, "t": 3, "host": 11, "slot": "r0c0", "serial": 7, "blueprint": "attention",
        "from": "DORMANT", "to": "GERMINATED", "cause": "OP", "alpha": 0.25,
        "contribution": None, "gate": None, "score": None,
    }  # fmt: skip
    assert (second["from"], second["to"], second["cause"]) == ("GERMINATED", "TRAINING", "AUTO")


def test_a_move_says_which_gate_let_it_pass_and_how_well() -> None:
    report = step(
        **gates({(0, 0): (2, 1, 0.25, 0), (1, 1): (5, 1, 0.75, 0)}),
        tick_moves=moves((0, 0, SeedStage.TRAINING, SeedStage.BLENDING, Cause.AUTO)),
        op_moves=moves((1, 1, SeedStage.HOLDING, SeedStage.FOSSILIZED, Cause.OP)),
    )
    fossilized, blended = step_events([report], SPEC)
    assert (fossilized["to"], fossilized["gate"], fossilized["score"]) == ("FOSSILIZED", "G5", 0.75)
    assert (blended["to"], blended["gate"], blended["score"]) == ("BLENDING", "G2", 0.25)


def test_a_rollback_says_why_and_what_was_lost() -> None:
    report = step(
        t=5,
        panic_reason=np.array([0, PanicReason.DIVERGENCE]),
        panic_loss=np.array([0.0, 90.0]),
        panic_strikes=np.array([0, 3]),
        panic_thresholds=np.array([[0.0, 0.0, 0.0], [11.5, 3.0, 4.0]]),
        rolled_back=np.array([[False, False], [True, False]]),
        row_marked=np.array([False, True]),
    )
    assert list(step_events([report], SPEC)) == [
        {
            "kind": "rollback", "round": 1, "t": 5, "host": 11, "reason": "divergence", "loss": 90.0,
            "thresholds": [11.5, 3.0, 4.0], "strikes": 3, "pruned": ["r0c0"],
            "row_marked": True,
        }
    ]  # fmt: skip


def test_a_refused_fossilization_is_reported_and_a_gate_that_keeps_waiting_is_not() -> None:
    asked = gates(
        {
            (0, 0): (5, 0, 0.25, 6),  # asked by FOSSILIZE, failed
            (0, 1): (2, 0, 0.5, 1),  # a gate that is asked in every step
            (1, 0): (5, 1, 1.0, 0),  # passed
        }
    )
    (event,) = step_events([step(**asked)], SPEC)
    assert (event["kind"], event["gate"], event["score"], event["failed_checks"]) == ("refused", "G5", 0.25, 6)
    assert (event["host"], event["slot"]) == (10, "r0c0")


def test_the_events_of_several_steps_are_those_of_each_in_turn() -> None:
    germinated = moves((1, 0, SeedStage.DORMANT, SeedStage.GERMINATED, Cause.OP))
    trained = moves((1, 0, SeedStage.GERMINATED, SeedStage.TRAINING, Cause.AUTO))
    asked = gates({(0, 0): (5, 0, 0.25, 6)})
    reports = [
        step(t=3, op_moves=germinated, tick_moves=trained, **asked),
        step(t=4),
        step(t=5, panic_reason=np.array([0, PanicReason.DIVERGENCE]), tick_moves=germinated, **asked),
        step(t=6, op_moves=trained, contribution=np.array([[NAN, NAN], [1.5, NAN]])),
    ]
    together = list(step_events(reports, SPEC))
    assert together == [event for report in reports for event in step_events([report], SPEC)]
    assert [(event["t"], event["kind"]) for event in together] == [
        (3, "stage_changed"), (3, "stage_changed"), (3, "refused"),
        (5, "rollback"), (5, "stage_changed"), (5, "refused"),
        (6, "stage_changed"),
    ]  # fmt: skip
    assert together[-1]["contribution"] == 1.5


def test_the_end_of_a_round_says_what_each_host_came_to() -> None:
    found = list(round_events(stats(), {"lr": 0.1}, SPEC, Trend(), WEIGHTS))
    shares = [(event["host"], event["slot"], event["value"]) for event in found if event["kind"] == "shapley"]
    assert shares == [(10, "r0c0", 4.0), (10, "r0c1", 2.0)]
    episodes = [event for event in found if event["kind"] == "episode"]
    assert [(event["round"], event["t"], event["host"]) for event in episodes] == [(5, 8, 10), (5, 8, 11)]
    assert episodes[0]["objective"] == pytest.approx(38.7836, abs=1e-4)  # 40 - 3 ln(1.5)
    assert episodes[0]["shaped_return"] == 1.0
    assert episodes[1]["committed_accuracy"] == 60.0
    assert episodes[1]["rollbacks"] == 3
    assert episodes[0]["ops"] == {
        "WAIT": 5, "GERMINATE": 2, "SET_ALPHA_TARGET": 0, "PRUNE": 0, "FOSSILIZE": 1, "ADVANCE": 0,
    }  # fmt: skip
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "value", "threshold"),
    [
        ("stored_log_prob_error", 0.02, 0.01),
        ("explained_variance", -0.6, -0.5),
        ("hidden_rms", 10.5, 10.0),
        ("cell_rms", 1e-7, 1e-6),
        ("nonfinite_minibatches", 1.0, 0.0),
        ("actions_outside_mask", 1.0, 0.0),
        ("nonfinite_logits", 1.0, 0.0),
        ("entropy_op", 0.07, 0.08),
        ("entropy_parameters", 0.04, 0.05),
    ],
)
def test_each_detector_has_its_threshold(name: str, value: float, threshold: float) -> None:
    assert list(of_update({name: value})) == [Alarm(name, value, threshold)]
    assert list(of_update({name: threshold})) == []
    assert list(of_update({name: NAN})) == []


def test_steps_that_the_reward_marked_are_an_alarm_of_their_host() -> None:
    found = list(round_events(stats(flags=np.array([[0, 3], [1, 0]])), {}, SPEC, Trend(), WEIGHTS))
    assert [event for event in found if event["kind"] == "alarm"] == [
        {"kind": "alarm", "round": 5, "t": 8, "host": 10, "name": "entangled_steps", "value": 3.0, "threshold": 0.0},
        {
            "kind": "alarm", "round": 5, "t": 8, "host": 11, "name": "attribution_ratio_steps", "value": 1.0,
            "threshold": 0.0,
        },
    ]  # fmt: skip
