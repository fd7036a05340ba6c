"""Timed rounds."""

import json

import pytest
import torch

from measured_rounds import OUTSIDE, Setting, Subject, alternating, configured

TOLD = {"task": "synthetic_tiny", "num_envs": 2, "episode_length": 5, "rounds": 3, "schedule_rounds": 3,
        "ppo": {"feature_width": 8, "hidden_width": 8, "update_epochs": 1, "num_minibatches": 1}}  # fmt: skip


def subject(tmp_path, text):
    setting = Setting.parse(text)
    return Subject(configured(TOLD, setting), telemetry=setting.telemetry, folder=tmp_path / "run")


def test_a_setting_names_values_of_a_run_and_whether_it_is_recorded():
    found = Setting.parse("executor=fused,telemetry=on,ppo.update_epochs=2")
    assert (dict(found.values), found.telemetry) == ({"executor": "fused", "ppo": {"update_epochs": 2}}, True)
    assert not Setting.parse("").telemetry


def test_the_parts_of_a_round_sum_to_the_round(tmp_path):
    with subject(tmp_path, "") as run:
        cost = run.round(0)
    assert len(cost.steps) == 5
    assert cost.whole == pytest.approx(cost.reset + cost.rollout + cost.update + cost.records)
    assert sum(cost.phases.values()) == pytest.approx(cost.rollout, rel=1e-6)
    assert {"train", "decide", OUTSIDE} <= cost.phases.keys()
    assert sum(cost.steps) <= cost.rollout


@pytest.mark.slow
def test_recording_changes_what_is_written_and_no_number_that_is_learned(tmp_path):
    silent, recorded = subject(tmp_path, "telemetry=off"), subject(tmp_path, "telemetry=on")
    with silent, recorded:
        costs = alternating([silent, recorded], 1)
    assert [len(own) for own in costs] == [1, 1]  # the first round of each is not counted
    weights = [run.client.state_dict() for run in (silent, recorded)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not (tmp_path / "run" / "summary.json").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()}
    assert {"stage_changed", "episode"} <= kinds
