"""Lines of steps, from a report made by hand and from a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_runs_events import SPEC
from test_runs_report import step

import small_runs
from esper.leyline.actions import LifecycleOp
from esper.runs.checkpoint import checkpoints
from esper.runs.step_lines import step_lines
from small_runs import records, summary


def test_a_line_says_what_was_measured_decided_and_paid() -> None:
    actions = np.array([[0] * 8, [1, 2, 2, 1, 2, 0, 0, int(LifecycleOp.GERMINATE)]])
    waits, grows = step_lines(step(actions=actions), SPEC, ("potential", "rent"))
    assert grows == {
        "kind": "step", "round": 1, "t": 1, "host": 11, "val_acc": 60.0, "val_loss": 1.0, "train_loss": 1.0,
        "committed_acc": 60.0, "total_params": 1200, "coalitions": 4, "op": "GERMINATE", "slot": "r0c1",
        "blueprint": "attention", "style": 2, "tempo": 1, "alpha_target": 2, "alpha_speed": 0, "alpha_curve": 0,
        "effective_op": "GERMINATE", "success": True, "value": -1.0, "op_probability": pytest.approx(0.5),
        "reward": 1.5, "terms": {"potential": 2.0, "rent": -0.5}, "flags": ["ransomware"],
    }  # fmt: skip
    assert (waits["op"], waits["op_probability"], waits["terms"], waits["flags"]) == (
        "WAIT",
        1.0,
        {"potential": 0.5},
        [],
    )


def test_an_op_that_took_no_effect_is_no_success_and_one_of_a_rolled_back_host_is_none() -> None:
    refused = np.array([[0] * 7 + [int(LifecycleOp.FOSSILIZE)]] * 2)
    report = step(actions=refused, effective_op=np.array([0, 0]), panic_reason=np.array([0, 1]))
    first, second = step_lines(report, SPEC, ("a", "b"))
    assert (first["op"], first["effective_op"], first["success"]) == ("FOSSILIZE", "WAIT", False)
    assert (second["op"], second["reward"]) == (None, None)
    assert "effective_op" not in second


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]


def test_a_run_that_records_its_steps_comes_to_the_same_and_can_be_continued(tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    assert small_runs.train(off, "null", 2) == 0
    with small_runs.interrupted_at(2, 3):
        assert small_runs.train(on, "null", 2, "--set", "record_steps=true") == 130
    assert small_runs.resume(on) == 0
    assert not (off / "steps.jsonl").exists()
    assert (records(on), summary(on)) == (records(off), summary(off))
    found = lines(on)
    assert [(x["round"], x["t"], x["host"]) for x in found] == [
        (r, t, n) for r in (1, 2) for t in range(1, 9) for n in range(3)
    ]
    paid: dict[object, float] = {}
    for x in found:
        if x["round"] == 2 and x["op"] is not None and x["host"] != 1:  # host 1 is rolled back
            paid[x["host"]] = paid.get(x["host"], 0.0) + sum(x["terms"].values())
            assert sum(x["terms"].values()) == pytest.approx(x["reward"], abs=1e-6)
    returns = {
        e["host"]: e["shaped_return"] for e in records(on)["events.jsonl"] if e["kind"] == "episode" and e["round"] == 2
    }
    for host, total in paid.items():
        assert total == pytest.approx(returns[host], abs=1e-5)
    (lost,) = (x for x in found if x["round"] == 1 and x["op"] is None)
    (rollback,) = (e for e in records(on)["events.jsonl"] if e["kind"] == "rollback" and e["round"] == 1)
    assert (lost["host"], lost["t"]) == (rollback["host"], rollback["t"]) == (1, 5)
    assert rollback["row_marked"]


def test_steps_that_are_no_longer_recorded_are_cut_off_with_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert small_runs.train(path, "null", 2, "--set", "record_steps=true") == 0
    (checkpoints(path / "checkpoints")[0] / "header.json").unlink()
    assert small_runs.resume(path, "--set", "record_steps=false") == 0
    assert {x["round"] for x in lines(path)} == {1}


def test_a_round_says_how_long_each_phase_took_and_how_much_memory_there_was(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert small_runs.train(path, "null", 2) == 0
    for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        phases = line["phase_milliseconds"]
        assert {
            "apply_structure",
            "train",
            "measure",
            "observe",
            "decide",
            "execute",
            "reward",
            "end_step",
        } == phases.keys()
        assert 0.0 < sum(phases.values()) <= 1000.0 * line["seconds"]
        assert line["memory_bytes"]["peak"] > 2**20


def test_the_last_event_of_a_run_says_what_it_came_to(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert small_runs.train(path, "null", 1) == 0
    assert small_runs.resume(path, "--rounds", "2") == 0
    events = records(path)["events.jsonl"]
    (finished,) = (e for e in events if e["kind"] == "run_finished")  # that of the first part was cut off
    assert finished == events[-1]
    assert summary(path).items() <= finished.items()
    assert (finished["round"], finished["host"], finished["dropped_records"]) == (2, -1, 0)
