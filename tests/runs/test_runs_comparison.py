"""The comparison of controllers: equal hosts, nobody learns, nothing is changed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import small_runs
from esper.leyline.errors import CheckpointError, ConfigError, RegistryError
from esper.leyline.manifest import GrowthManifest
from esper.runs.build import dataset_of
from esper.runs.checkpoint import checkpoints, load, state_digest
from esper.runs.config import RunConfig
from esper.runs.controllers import Controller, all_baselines, baseline, derived, trained
from esper.runs.outcomes import Outcome, run_controller
from esper.runs.presets import recorded, resolve
from esper.runs.values import read_toml
from esper.tamiyo.baselines import BASELINES
from esper.tasks.null import best_schedule_value
from small_runs import contents, main, without_times

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds on real hosts."""
    path = tmp_path_factory.mktemp("evaluate") / "run"
    assert small_runs.train(path, "tiny", 2) == 0
    return path


def outcome_of(controller: Controller, config: RunConfig, hosts: int = 1, seed: int = 1) -> Outcome:
    return run_controller(config, dataset_of(config, CPU), CPU, controller, run_seed=seed, num_envs=hosts)


def compared(arguments: list[str], path: Path) -> dict[str, Any]:
    """`esper evaluate` with its JSON."""
    assert main(["evaluate", *arguments, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_is_compared_with_every_baseline_and_left_as_it_is(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    found = compared([str(run), "--num-envs", "4"], tmp_path / "report.json")
    assert contents(run) == before
    rows = {row["name"]: row for row in found["controllers"]}
    assert set(rows) == {"trained", *BASELINES, "untrained", "static_common", "big_host"}
    assert (found["seed"], found["num_envs"], found["task"], found["run"]) == (1_000_000, 4, "tiny", str(run))
    assert found["reference"] == "trained"
    assert rows["wait_only"]["fossilized"] == 0.0
    assert rows["wait_only"]["growth"] == 1.0
    assert rows["wait_only"]["ops"]["WAIT"] == 4 * 6
    for row in rows.values():
        hosts = row["hosts"]
        # the hosts have more than 200 parameters, so that J is the accuracy less 3 ln(growth)
        price = 3.0 * np.log(hosts["growth"])
        np.testing.assert_allclose(hosts["objective"], np.subtract(hosts["committed"], price))
        np.testing.assert_allclose(hosts["test_objective"], np.subtract(hosts["test"], price))
        differences = np.subtract(hosts["objective"], rows["trained"]["hosts"]["objective"])
        assert row["difference"]["mean"] == pytest.approx(differences.mean())
        assert row["objective"] == pytest.approx(np.mean(hosts["objective"]))
        assert row["committed"] == pytest.approx(np.mean(hosts["committed"]))
        assert row["test"] == pytest.approx(np.mean(hosts["test"]))
    out, err = capfd.readouterr()
    for word in ("controller", "100·J", "vs trained", "val", "test", "growth", "germinate", *rows):
        assert word in out
    assert out.splitlines()[-1] == found["verdict"]
    assert "the best baseline, " in found["verdict"]
    assert "heuristic, 4 hosts of tiny" in err


@pytest.mark.slow
def test_the_same_evaluation_twice_gives_the_same_numbers(run: Path, tmp_path: Path) -> None:
    first, again = (compared([str(run), "wait_only", "--num-envs", "2"], tmp_path / name) for name in ("a", "b"))
    for found in (first, again):
        found["controllers"] = [without_times(row) for row in found["controllers"]]
    assert first == again
    other = compared([str(run), "wait_only", "--num-envs", "2", "--seed", "7"], tmp_path / "c.json")
    assert other["controllers"] != first["controllers"]


def test_a_baseline_does_not_depend_on_who_else_is_compared(run: Path, tmp_path: Path) -> None:
    alone = compared(
        ["random", "--task", "faulty_null", "--episode-length", "8", "--num-envs", "3"], tmp_path / "a.json"
    )
    names = ["heuristic", "random", "wait_only"]
    among = compared([*names, "--task", "faulty_null", "--episode-length", "8", "--num-envs", "3"], tmp_path / "b.json")
    assert {row["name"] for row in among["controllers"]} == set(names)
    one, other = (
        next(without_times(row) for row in of["controllers"] if row["name"] == "random") for of in (alone, among)
    )
    assert one == other
    assert {row["name"] for row in alone["controllers"]} == {"random", "wait_only"}  # the reference is always there


def test_the_controller_of_a_run_that_was_stopped_inside_an_episode_can_be_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with small_runs.interrupted_at(2, 3):
        assert small_runs.train(path) == 130
    before = contents(path)
    found = compared([str(path), "wait_only", "--num-envs", "5"], tmp_path / "report.json")
    assert len(found["controllers"][0]["hosts"]["test"]) == 5
    assert contents(path) == before


def test_a_damaged_newest_checkpoint_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    assert small_runs.train(path, "null", 2) == 0
    (path / "checkpoints/round-00002/state.safetensors").write_bytes(b"")
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1"]) == 0
    assert "round-00002/state.safetensors does not match its checksum" in capfd.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    config = recorded(read_toml(run / "config.toml"))
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        trained(tmp_path, config)


def test_a_policy_of_another_shape_is_refused(run: Path) -> None:
    config = recorded(read_toml(run / "config.toml") | {"slots": ["r0c0", "r0c1"]})
    with pytest.raises(CheckpointError, match="head_sizes"):
        outcome_of(trained(run, config).controller, config)


def test_an_unknown_baseline_is_refused() -> None:
    config = resolve({"task": "null", "episode_length": 2})
    with pytest.raises(RegistryError, match="unknown baseline 'lazy'"):
        baseline("lazy", config)


def test_the_null_task_is_compared_with_its_best_schedule_and_no_other_task_can_be(tmp_path: Path) -> None:
    size = ["--num-envs", "2", "--episode-length", "24"]
    found = compared(["best_schedule", "--task", "null", *size], tmp_path / "report.json")
    rows = {row["name"]: row for row in found["controllers"]}
    assert set(rows) == {"best_schedule", "wait_only"}
    assert rows["best_schedule"]["committed"] == pytest.approx(best_schedule_value(24, 10, 3), abs=1e-4)
    assert "best_schedule" in all_baselines(resolve({"task": "null"}), with_run=False)
    tiny = resolve({"task": "tiny"})
    assert all_baselines(tiny, with_run=False) == BASELINES
    with pytest.raises(ConfigError, match="the best schedule of task 'tiny' is not known; leave best_schedule out"):
        baseline("best_schedule", tiny)


@pytest.mark.slow
def test_static_final_has_the_structure_of_the_controller_it_is_named_with_from_the_start(tmp_path: Path) -> None:
    names = ["static_final", "fixed_schedule_fill", "heuristic"]
    size = ["--task", "faulty_null", "--episode-length", "30", "--num-envs", "3"]
    found = compared([*names, *size], tmp_path / "report.json")
    rows = {row["name"]: row for row in found["controllers"]}
    assert set(rows) == {*names, "wait_only"}
    source = rows["fixed_schedule_fill"]["structures"]
    # the second host is rolled back in step 5, and a schedule does not germinate a lost seed again
    assert [len(structure["slots"]) for structure in source] == [3, 1, 3]
    assert rows["static_final"]["structures"] == source
    assert rows["static_final"]["ops"]["WAIT"] == 3 * 30 - 1  # one host is rolled back in one step
    assert rows["static_final"]["growth"] == rows["fixed_schedule_fill"]["growth"] > 1.0
    assert rows["static_final"]["committed"] > rows["wait_only"]["committed"]
    for structure in source:
        GrowthManifest.of(structure)


def test_with_a_run_static_final_has_the_structure_of_the_trained_controller(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = compared(["fixed_schedule", "static_final", str(run), "--num-envs", "2"], tmp_path / "report.json")
    rows = {row["name"]: row for row in found["controllers"]}
    assert rows["static_final"]["structures"] == rows["trained"]["structures"]
    grown = any(structure["slots"] for structure in rows["trained"]["structures"])
    said = "each host has the final structure of trained" if grown else "trained ended without fossilized seeds"
    assert f"static_final: {said}" in capfd.readouterr().out


def test_static_final_of_a_controller_that_kept_nothing_is_wait_only_to_the_bit() -> None:
    config = resolve({"task": "tiny", "episode_length": 5, "workers": 1})
    source = outcome_of(baseline("wait_only", config), config, hosts=3, seed=3)
    assert source.grown == (GrowthManifest(),) * 3
    params = source.stats.host_params
    planted = derived("static_final", config, "idle", source.grown, params)
    static, waits = (outcome_of(c, config, hosts=3, seed=3) for c in (planted, baseline("wait_only", config)))
    assert (static.name, waits.name) == ("static_final", "wait_only")
    assert np.array_equal(static.test_acc, waits.test_acc)
    for field in dataclasses.fields(static.stats):
        one, other = getattr(static.stats, field.name), getattr(waits.stats, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), field.name
    assert len({*waits.stats.committed_acc.tolist(), *waits.test_acc.tolist()}) > 2  # real hosts that differ


def test_static_final_of_nobody_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for names in (["static_final"], ["wait_only", "static_final"]):
        assert main(["evaluate", *names, "--task", "null"]) == 2
        assert "none is named; add a run directory, one of random," in capfd.readouterr().err


@pytest.mark.slow
def test_the_best_policy_stays_and_can_be_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    assert small_runs.train(path, "null", 4) == 0
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1", "--best"]) == 2
    assert "has no best checkpoint" in capfd.readouterr().err
    assert small_runs.resume(path, "--rounds", "14") == 0
    best = load(path / "checkpoints" / "best")
    lines = small_runs.records(path)["metrics.jsonl"]
    means = {n: np.mean([line["objective_mean"] for line in lines[n - 10 : n]]) for n in range(10, 15)}
    assert best.header.rounds_done == max(means, key=lambda n: (means[n], -n))
    assert best.header.trend.best == pytest.approx(max(means.values()))
    found = compared([str(path), "wait_only", "--num-envs", "2", "--best"], tmp_path / "best.json")
    assert found["trained"] == f"after {best.header.rounds_done} rounds"
    assert compared([str(path), "wait_only", "--num-envs", "2"], tmp_path / "b.json")["trained"] == "after 14 rounds"
    # the same run without an interruption has the same best policy
    assert small_runs.train(whole, "null", 14) == 0
    assert load(whole / "checkpoints" / "best").header.trend == best.header.trend
    assert state_digest(load(whole / "checkpoints" / "best").state) == state_digest(best.state)
    # it is as guarded as the others, and stands in for them
    for other in checkpoints(path / "checkpoints"):
        (other / "state.safetensors").write_bytes(b"")
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1"]) == 0
    assert f"Using the one after {best.header.rounds_done} rounds instead." in capfd.readouterr().err
    (path / "checkpoints" / "best" / "header.json").write_text("{}")
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1", "--best"]) == 2
    assert "best/header.json does not match its checksum" in capfd.readouterr().err
