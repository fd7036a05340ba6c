"""The comparison of controllers: equal hosts, nobody learns, nothing is changed."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_training_report import NAN, stats

import small_runs
from esper.leyline.errors import CheckpointError, RegistryError
from esper.leyline.manifest import TopologyManifest
from esper.simic.training.checkpoint import checkpoints, load, state_digest
from esper.simic.training.evaluate import Outcome, all_baselines, baseline, evaluate, table, trained
from esper.simic.training.presets import recorded, resolve
from esper.simic.training.tables import comparison, done, operations, rollbacks
from esper.simic.training.values import read_toml
from small_runs import contents, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds on real hosts."""
    path = tmp_path_factory.mktemp("evaluate") / "run"
    assert small_runs.train(path, "tiny", 2) == 0
    return path


def compared(arguments: list[str], path: Path) -> dict[str, Any]:
    """`esper evaluate` with its JSON."""
    assert main(["evaluate", *arguments, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_is_compared_with_the_five_baselines_and_left_as_it_is(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    found = compared([str(run), "--num-envs", "4"], tmp_path / "report.json")
    assert contents(run) == before
    rows = {row["name"]: row for row in found["controllers"]}
    assert set(rows) == {"trained", "wait_only", "random", "fixed_schedule", "heuristic", "static_final"}
    assert (found["seed"], found["num_envs"], found["task"], found["run"]) == (1_000_000, 4, "tiny", str(run))
    assert rows["wait_only"]["gain"] == 0.0
    assert rows["wait_only"]["fossilized"] == 0.0
    assert rows["wait_only"]["growth"] == 1.0
    assert rows["wait_only"]["ops"]["WAIT"] == 4 * 6
    for row in rows.values():
        differences = np.subtract(row["hosts"]["committed"], rows["wait_only"]["hosts"]["committed"])
        assert row["gain"] == pytest.approx(differences.mean())
        assert row["gain_standard_error"] == pytest.approx(differences.std(ddof=1) / 2.0)
        assert row["committed"] == pytest.approx(np.mean(row["hosts"]["committed"]))
        assert row["test"] == pytest.approx(np.mean(row["hosts"]["test"]))
    assert found["controllers"] == sorted(found["controllers"], key=lambda row: -row["committed"])
    out, err = capfd.readouterr()
    for word in (
        "controller",
        "committed",
        "test",
        "vs wait_only",
        "growth",
        "return",
        "fossils",
        "germinate",
        "trained",
    ):
        assert word in out
    assert "heuristic, 4 hosts of tiny" in err


@pytest.mark.slow
def test_the_same_evaluation_twice_gives_the_same_numbers(run: Path, tmp_path: Path) -> None:
    first = compared([str(run), "wait_only", "--num-envs", "2"], tmp_path / "a.json")
    assert compared([str(run), "wait_only", "--num-envs", "2"], tmp_path / "b.json") == first
    other = compared([str(run), "wait_only", "--num-envs", "2", "--seed", "7"], tmp_path / "c.json")
    assert other["controllers"] != first["controllers"]


def test_a_baseline_does_not_depend_on_who_else_is_compared(run: Path, tmp_path: Path) -> None:
    alone = compared(
        ["random", "--task", "faulty_null", "--episode-length", "8", "--num-envs", "3"], tmp_path / "a.json"
    )
    names = ["heuristic", "random", "wait_only"]
    among = compared([*names, "--task", "faulty_null", "--episode-length", "8", "--num-envs", "3"], tmp_path / "b.json")
    assert {row["name"] for row in among["controllers"]} == set(names)
    row = {row["name"]: row for row in alone["controllers"]}["random"]
    assert row in among["controllers"]
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
    controller = trained(run, config).controller
    with pytest.raises(CheckpointError, match="head_sizes"):
        evaluate(config, [controller], run_seed=1, num_envs=1)


def test_an_unknown_baseline_is_refused() -> None:
    config = resolve({"task": "null", "episode_length": 2})
    with pytest.raises(RegistryError, match="unknown baseline 'lazy'"):
        evaluate(config, [baseline("lazy", config)], run_seed=1, num_envs=1)


def outcome(name: str, committed: list[float], test: list[float]) -> Outcome:
    return Outcome(name, stats(committed_acc=np.array(committed)), np.array(test))


def test_differences_are_paired_host_by_host() -> None:
    rows = {
        row.name: row
        for row in table([outcome("wait_only", [10.0, 50.0], [0.0, 0.0]), outcome("x", [13.0, 54.0], [1.0, 3.0])])
    }
    # differences 3 and 4: mean 3.5, standard deviation 0.7071, standard error 0.5
    assert rows["x"].gain == 3.5
    assert rows["x"].gain_standard_error == pytest.approx(0.5)
    assert rows["x"].committed_std == pytest.approx(28.991378)
    assert (rows["x"].test_gain, rows["x"].test_gain_standard_error) == (2.0, pytest.approx(1.0))
    assert rows["wait_only"].gain == rows["wait_only"].gain_standard_error == 0.0


def test_without_the_reference_there_is_no_difference() -> None:
    (row,) = table([outcome("x", [13.0, 54.0], [1.0, 3.0])])
    assert math.isnan(row.gain)
    assert math.isnan(row.test_gain_standard_error)


def test_one_host_has_a_mean_and_no_spread() -> None:
    (row,) = table([outcome("wait_only", [13.0], [1.0])])
    assert row.committed == 13.0
    assert math.isnan(row.committed_std)
    assert row.gain == 0.0
    assert math.isnan(row.gain_standard_error)


def test_a_host_without_an_accuracy_leaves_the_means_to_the_others() -> None:
    rows = {
        row.name: row
        for row in table([outcome("wait_only", [10.0, NAN], [0.0, 0.0]), outcome("x", [NAN, 54.0], [1.0, 3.0])])
    }
    assert rows["x"].committed == 54.0
    assert math.isnan(rows["x"].gain)  # no host has both
    assert rows["wait_only"].gain == 0.0


def test_the_best_comes_first_and_one_that_was_not_measured_last() -> None:
    found = table([outcome("a", [NAN], [0.0]), outcome("b", [1.0], [0.0]), outcome("c", [2.0], [0.0])])
    assert [row.name for row in found] == ["c", "b", "a"]


def test_the_tables_fit_into_eighty_columns() -> None:
    from rich.console import Console

    rows = table([outcome(name, [90.0, 100.0], [99.0, 90.0]) for name in all_baselines()])
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(comparison(rows), operations(rows))
    text = console.export_text()
    assert "…" not in text
    assert "fixed_schedule" in text
    assert max(map(len, text.splitlines())) <= 80


def printed(*tables: object) -> str:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*tables)
    return console.export_text()


def test_a_controller_of_which_nothing_was_measured_has_a_dash_and_never_nan() -> None:
    rows = table([outcome("wait_only", [10.0, 20.0], [0.0, 0.0]), outcome("x", [NAN, NAN], [NAN, NAN])])
    text = printed(comparison(rows))
    assert "nan" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("x"))
    assert line.split()[:4] == ["x", "-", "-", "-"]


def test_hosts_that_were_rolled_back_are_told_below_the_tables() -> None:
    whole = Outcome("whole", stats(committed_acc=np.array([1.0, 2.0]), rollbacks=np.array([0, 0])), np.zeros(2))
    once = Outcome("once", stats(committed_acc=np.array([1.0, 2.0]), rollbacks=np.array([1, 0])), np.zeros(2))
    often = Outcome("often", stats(committed_acc=np.array([NAN, 2.0]), rollbacks=np.array([2, 1])), np.zeros(2))
    rows = {row.name: row for row in table([whole, once, often])}
    assert rows["often"].committed == 2.0
    assert rollbacks([rows["whole"], rows["once"], rows["often"]]) == [
        "once: hosts were rolled back once.",
        "often: hosts were rolled back 3 times; 1 of 2 without an accuracy are left out of its means.",
    ]


def test_a_run_that_ends_with_every_host_rolled_back_says_so_with_a_dash() -> None:
    said = done(
        {
            "final_val_accuracy_mean": NAN,
            "final_test_accuracy_mean": 40.0,
            "growth_ratio_mean": 1.25,
            "env_steps_per_second": 20.4,
        }
    )
    assert said == ("done: accuracy - (validation), 40.00 (test, committed); growth 1.25x; 20 env-steps/s with updates")


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
        TopologyManifest.of(structure)


def test_with_a_run_static_final_has_the_structure_of_the_trained_controller(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = compared(["fixed_schedule", "static_final", str(run), "--num-envs", "2"], tmp_path / "report.json")
    rows = {row["name"]: row for row in found["controllers"]}
    assert rows["static_final"]["structures"] == rows["trained"]["structures"]
    grown = any(structure["slots"] for structure in rows["trained"]["structures"])
    said = "the structure that trained ended with, host by host" if grown else "trained ended without a permanent seed"
    assert f"static_final: {said}" in capfd.readouterr().out


def test_static_final_of_a_controller_that_kept_nothing_is_wait_only_to_the_bit() -> None:
    config = resolve({"task": "tiny", "episode_length": 5, "workers": 1})
    idle = baseline("wait_only", config)[1]
    found = evaluate(
        config, [("idle", idle), baseline("static_final", config), baseline("wait_only", config)],
        run_seed=3, num_envs=3,
    )  # fmt: skip
    assert found[0].grown == (TopologyManifest(),) * 3
    _, static, waits = found
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
        assert "none is named that grows; name a run directory, or one of random," in capfd.readouterr().err


@pytest.mark.slow
def test_the_best_policy_stays_and_can_be_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    assert small_runs.train(path, "null", 4) == 0
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1", "--best"]) == 2
    assert "has no best checkpoint" in capfd.readouterr().err
    assert small_runs.resume(path, "--rounds", "14") == 0
    best = load(path / "checkpoints" / "best")
    lines = small_runs.records(path)["metrics.jsonl"]
    means = {n: np.mean([line["committed_accuracy_mean"] for line in lines[n - 10 : n]]) for n in range(10, 15)}
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
