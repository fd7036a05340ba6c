"""Every benchmark on a few hosts: it measures, writes its rows, and fails where a limit is missed."""

import json
from importlib import import_module

import pytest
import torch

import large_record
from benchmark_hot_path import Options, complaints, row_of
from choices import CHOICES
from esper.leyline.errors import ConfigError
from measured_rounds import RoundCost

FAST = "ppo.update_epochs=1,ppo.num_minibatches=1,ppo.feature_width=8,ppo.hidden_width=8"
SETTINGS = (f"executor=streamed,{FAST}", f"executor=fused,{FAST}")
RUN = {"task": "synthetic_tiny", "hosts": 2, "steps": 4, "rounds": 1, "device": "cpu"}
BENCHMARKS = {  # module: (options, those with a limit that is missed)
    "gae": (
        {"hosts": 4, "steps": 5, "repetitions": 1, "calls": 1, "tensor_hosts": 2}, {"min_ratio": 1e9, "max_ms": 0.0},
    ),
    "choices": (
        {"hosts": 2, "many_hosts": 2, "examples": 16, "steps": 4, "passes": 1, "repetitions": 1, "minibatches": (2,),
         "only": tuple(name for name in CHOICES if name != "threads")},  # a second thread may wait long for a core
        None,
    ),
    "gym_step": ({"hosts": 4, "episode_length": 6, "repetitions": 1}, {"max_ratio": 0.0}),
    "benchmark_hot_path": ({**RUN, "compare": SETTINGS}, {"min_eps": 1e9}),
    "profile_hot_path_operations": ({"hosts": (2,), "steps": 4, "repetitions": 2, "device": "cpu"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_writes_what_it_measures_and_fails_where_a_limit_is_missed(name, tmp_path, capsys):
    module, (options, missed) = import_module(name), BENCHMARKS[name]
    path = tmp_path / "result.json"
    assert module.main(module.Options(**options, json=path)) == 0
    report = json.loads(path.read_text())
    assert report.get("rows") or report["results"]
    if missed is not None:
        assert module.main(module.Options(**options, **missed)) == 1


def test_the_queries_of_a_large_record_are_answered(tmp_path, capsys):
    large_record.make(tmp_path / "run", rounds=3)
    assert large_record.measure(tmp_path / "run", 3, limited=False) == []


def cost(scale):
    """A round of two steps: 1 s of train and 3 s of decide in a rollout of 5 s, 2 s of update, 1 s around it."""
    return RoundCost(
        reset=0.5 * scale, rollout=5.0 * scale, update=2.0 * scale, records=0.5 * scale, steps=[2.0 * scale, scale],
        phases={"train": scale, "measure": 0.5 * scale, "decide": 3.0 * scale, "between": 0.5 * scale},
    )  # fmt: skip


def test_rates_are_those_of_the_three_scopes_and_a_loss_of_speed_is_found(tmp_path):
    found = row_of("x", [cost(1.0)], [cost(2.0)], env_steps=16, num_train=10, num_val=5)
    assert (found.eps, found.eps_env_policy, found.eps_env) == (16 / 8, 16 / 5, 16 / 2)
    assert (found.step_ms_p50, found.step_ms_p95) == (1000.0, 2000.0)
    assert (found.train_samples, found.val_samples) == (160 / 1, 80 / 0.5)
    assert found.speed_up == 2.0
    assert found.share["update"] == 2 / 8
    size = {name: getattr(Options(), name) for name in import_module("benchmark_hot_path").SIZE}
    for before, lost in ((2.2, False), (2.3, True)):  # ten percent are accepted
        path = tmp_path / "before.json"
        path.write_text(json.dumps({"config": size, "results": [{"setting": "x", "eps": before}]}))
        assert bool(complaints([found], Options(baseline=path))) == lost
    with pytest.raises(ConfigError, match="use the same options"):
        complaints([found], Options(baseline=path, hosts=8))


def test_a_result_says_where_it_was_measured(tmp_path):
    from script_report import write_result

    write_result(tmp_path / "x.json", "some_script", torch.device("cpu"), {"hosts": 2}, [{"eps": float("nan")}])
    content = json.loads((tmp_path / "x.json").read_text())
    assert content.keys() == {"script", "version", "environment", "config", "results"}
    assert content["results"] == [{"eps": None}]
