"""The benchmark of whole rounds, with settings of milliseconds."""

import json

import pytest
import torch

import benchmark_hot_path as script
from benchmark_hot_path import Options, Row, complaints, main, row_of
from esper.leyline.errors import ConfigError
from measured_rounds import RoundCost

FAST = "ppo.update_epochs=1,ppo.num_minibatches=1,ppo.feature_width=8,ppo.hidden_width=8"
TINY = {"task": "synthetic_tiny", "hosts": 2, "steps": 4, "rounds": 1, "device": "cpu"}


def cost(scale=1.0):
    """A round of two steps: 1 s of train and 3 s of decide in a rollout of 5 s, 2 s of update, 1 s around it."""
    return RoundCost(
        reset=0.5 * scale, rollout=5.0 * scale, update=2.0 * scale, records=0.5 * scale, steps=[2.0 * scale, scale],
        phases={"train": scale, "measure": 0.5 * scale, "decide": 3.0 * scale, "between": 0.5 * scale},
    )  # fmt: skip


def row(**changes):
    fields = {"setting": "a=1", "eps": 100.0, "eps_env_policy": 0.0, "eps_env": 0.0, "step_ms_p50": 0.0,
              "step_ms_p95": 0.0, "train_samples": 0.0, "val_samples": 0.0, "speed_up": 1.0, "share": {}}  # fmt: skip
    return Row(**(fields | changes))


def test_rates_are_those_of_the_three_scopes():
    found = row_of("x", [cost()], [cost(2.0)], env_steps=16, num_train=10, num_val=5)
    assert (found.eps, found.eps_env_policy, found.eps_env) == (16 / 8, 16 / 5, 16 / 2)
    assert (found.step_ms_p50, found.step_ms_p95) == (1000.0, 2000.0)
    assert (found.train_samples, found.val_samples) == (160 / 1, 80 / 0.5)
    assert found.speed_up == 2.0
    assert sum(found.share.values()) == pytest.approx(1.0)
    assert found.share["update"] == 2 / 8


def test_a_task_without_networks_has_no_examples():
    found = row_of("x", [cost()], [cost()], env_steps=16, num_train=0, num_val=0)
    assert (found.train_samples, found.val_samples) == (0.0, 0.0)


def test_a_run_that_is_too_slow_is_reported():
    assert complaints([row(), row(eps=50.0)], Options(min_eps=100.0)) == []
    assert "at least 101" in complaints([row()], Options(min_eps=101.0))[0]


def test_ten_percent_below_the_baseline_are_accepted_and_more_are_not(tmp_path):
    path = tmp_path / "before.json"
    size = {name: getattr(Options(), name) for name in script.SIZE}
    path.write_text(json.dumps({"config": size, "results": [{"setting": "a=1", "eps": 100.0}]}))
    assert complaints([row(eps=90.0)], Options(baseline=path)) == []
    assert "the baseline has 100.0" in complaints([row(eps=89.9)], Options(baseline=path))[0]
    assert "has none of the settings" in complaints([row(setting="b=1")], Options(baseline=path))[0]
    with pytest.raises(ConfigError, match="use the same options"):
        complaints([row()], Options(baseline=path, hosts=8))


def test_a_file_that_is_no_result_is_refused_as_a_baseline(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="--json"):
        complaints([row()], Options(baseline=tmp_path / "x.json"))


def test_two_settings_are_compared_and_the_best_is_named(tmp_path, capsys):
    path = tmp_path / "now.json"
    code = main(Options(**TINY, compare=(f"executor=streamed,{FAST}", f"executor=fused,{FAST}"), json=path))
    assert code == 0
    content = json.loads(path.read_text())
    assert content["script"] == "benchmark_hot_path"
    assert content["config"]["task"] == "synthetic_tiny"
    first, second = content["results"]
    assert (first["setting"], second["setting"]) == (f"executor=streamed,{FAST}", f"executor=fused,{FAST}")
    assert first["speed_up"] == 1.0
    assert first["eps"] < first["eps_env_policy"] < first["eps_env"]
    assert first["train_samples"] > 0.0
    assert 0.9 < sum(second["share"].values()) <= 1.0 + 1e-9
    best = max((first, second), key=lambda row: row["speed_up"])["setting"]
    assert f"best setting: {best}" in " ".join(capsys.readouterr().out.split())


def test_a_run_below_the_limit_fails(capsys):
    assert main(Options(**{**TINY, "task": "null"}, settings=(FAST,), min_eps=1e9)) == 1
    assert "too slow" in capsys.readouterr().err


def test_an_unknown_setting_is_refused(capsys):
    assert main(Options(**TINY, settings=("exekutor=fused",))) == 2
    assert "executor" in capsys.readouterr().err


def test_omitted_comparisons_are_named():
    told = script.notes(torch.device("cpu"))
    assert any(line.startswith("amp=auto: float32 on a CPU") for line in told)
    assert any(line.startswith("compile=on: takes") for line in told)
