"""The comparison of controllers: equal hosts, nobody learns, nothing is changed."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_runs_report import NAN, WEIGHTS, stats

import small_runs
from esper.leyline.errors import CheckpointError, ConfigError, RegistryError
from esper.leyline.manifest import GrowthManifest
from esper.runs.checkpoint import checkpoints, load, state_digest
from esper.runs.evaluate import (
    Difference,
    Outcome,
    Row,
    all_baselines,
    baseline,
    evaluate,
    table,
    trained,
    verdict,
)
from esper.runs.presets import recorded, resolve
from esper.runs.tables import LEGEND, comparison, done, operations, rollbacks
from esper.runs.values import read_toml
from esper.tamiyo.baselines import BASELINES
from esper.tasks.null import best_schedule_value
from small_runs import contents, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds on real hosts."""
    path = tmp_path_factory.mktemp("evaluate") / "run"
    assert small_runs.train(path, "tiny", 2) == 0
    return path


def printed(*tables: object) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*tables)
    return console.export_text()


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
    assert set(rows) == {"trained", *BASELINES}
    assert (found["seed"], found["num_envs"], found["task"], found["run"]) == (1_000_000, 4, "tiny", str(run))
    assert found["reference"] == "trained"
    assert rows["wait_only"]["fossilized"] == 0.0
    assert rows["wait_only"]["growth"] == 1.0
    assert rows["wait_only"]["ops"]["WAIT"] == 4 * 6
    for row in rows.values():
        hosts = row["hosts"]
        # the hosts have more than 200 parameters, so that J is the accuracy less 3 ln(growth)
        np.testing.assert_allclose(hosts["objective"], np.subtract(hosts["committed"], 3.0 * np.log(hosts["growth"])))
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


def outcome(name: str, *committed: float, fossil_params: tuple[int, ...] = (0, 0)) -> Outcome:
    """Hosts of 1000 parameters; with two of them J is the accuracy of `stats`' hosts unless fossils are given."""
    params = np.array(fossil_params[: len(committed)])
    found = stats(committed_acc=np.array(committed), fossil_params=params, host_params=np.full(len(committed), 1000))
    return Outcome(name, found, np.array(committed) - 1.0)


def rows_of(*outcomes: Outcome) -> dict[str, Row]:
    return {row.name: row for row in table(list(outcomes), WEIGHTS)}


def test_differences_in_j_are_paired_host_by_host() -> None:
    rows = rows_of(outcome("wait_only", 10.0, 50.0), outcome("x", 13.0, 54.0, fossil_params=(0, 500)))
    # differences 3 and 4 - 3 ln(1.5) = 2.783605; a bootstrap of two hosts has these two as its ends
    assert dataclasses.astuple(rows["x"].difference) == pytest.approx((2.891802, 2.783605, 3.0), abs=1e-6)
    assert rows["x"].committed_std == pytest.approx(28.991378)
    assert rows["x"].objective == pytest.approx(33.5 - 1.216395 / 2, abs=1e-6)
    assert rows["wait_only"].difference == Difference(0.0, 0.0, 0.0)


def test_one_host_has_a_mean_and_no_spread() -> None:
    rows = rows_of(outcome("wait_only", 13.0), outcome("x", 14.0))
    assert (rows["x"].committed, rows["x"].difference.mean) == (14.0, pytest.approx(1.0))
    assert math.isnan(rows["x"].objective_std)
    assert math.isnan(rows["x"].difference.low)
    assert printed(comparison(list(rows.values()))).splitlines()[1].split() == [
        "x",
        "14.00",
        "+1.00",
        "14.00",
        "13.00",
        "1.00x",
    ]
    assert verdict(list(rows.values())) == "x does not differ significantly from wait_only: +1.00 in 100·J on 1 host."


def test_the_run_comes_first_then_the_strongest_constant_schedule_then_the_others_by_j() -> None:
    one = {"wait_only": 1.0, "fixed_schedule": 2.0, "random": 5.0, "trained": 0.0, "fixed_schedule_fill": 3.0}
    found = table([outcome(name, value, value) for name, value in one.items()], WEIGHTS)
    assert [row.name for row in found] == ["trained", "fixed_schedule_fill", "random", "fixed_schedule", "wait_only"]


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ((10.0, 11.0), "trained is worse than the best baseline, b: -3.50 in 100·J on 2 hosts, "
                       "95 % interval -4.00 to -3.00."),
        ((15.0, 16.0), "trained is better than the best baseline, b: +1.50 in 100·J on 2 hosts, "
                       "95 % interval +1.00 to +2.00."),
        ((13.0, 16.0), "trained does not differ significantly from the best baseline, b: +0.50 in 100·J on 2 hosts, "
                       "95 % interval -1.00 to +2.00."),
    ],
)  # fmt: skip
def test_the_last_line_says_how_the_run_compares_to_the_best_baseline(trained: tuple[float, float], said: str) -> None:
    rows = table([outcome("a", 11.0, 11.0), outcome("b", 14.0, 14.0), outcome("trained", *trained)], WEIGHTS)
    assert verdict(rows) == said


def test_without_a_run_the_last_line_compares_the_best_baseline_to_waiting() -> None:
    idle = outcome("wait_only", 11.0, 11.0)
    assert (
        verdict(table([idle, outcome("a", 10.0, 10.0)], WEIGHTS)) == "No baseline is better than wait_only on 2 hosts."
    )
    assert verdict(table([idle, outcome("a", 12.0, 13.0)], WEIGHTS)).startswith("a is better than wait_only: +1.50 in")


def test_the_null_task_is_compared_with_its_best_schedule_and_no_other_task_can_be(tmp_path: Path) -> None:
    size = ["--num-envs", "2", "--episode-length", "24"]
    found = compared(["best_schedule", "--task", "null", *size], tmp_path / "report.json")
    rows = {row["name"]: row for row in found["controllers"]}
    assert set(rows) == {"best_schedule", "wait_only"}
    assert rows["best_schedule"]["committed"] == pytest.approx(best_schedule_value(24, 10, 3), abs=1e-4)
    assert "best_schedule" in all_baselines(resolve({"task": "null"}))
    tiny = resolve({"task": "tiny"})
    assert all_baselines(tiny) == BASELINES
    with pytest.raises(ConfigError, match="the best schedule of task 'tiny' is not known; leave best_schedule out"):
        baseline("best_schedule", tiny)


def test_the_tables_fit_into_eighty_columns() -> None:
    names = ("trained", *all_baselines(resolve({"task": "null"})))
    rows = table([outcome(name, 100.0, 10.0 if name == "trained" else 99.0) for name in names], WEIGHTS)
    text = printed(comparison(rows), operations(rows)) + LEGEND
    assert "…" not in text
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= 80


def test_hosts_that_were_rolled_back_are_told_below_the_tables() -> None:
    marked = {"whole": (0, 0), "once": (1, 0), "often": (2, 1)}
    idle = outcome("wait_only", 1.0, 2.0)
    outcomes = [Outcome(name, stats(rollbacks=np.array(times)), np.zeros(2)) for name, times in marked.items()]
    rows = rows_of(dataclasses.replace(idle, stats=stats(rollbacks=np.array([0, 0]))), *outcomes)
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
    }
    assert done(found) == (
        "done: 100·J 58.41 ± 3.25; committed validation 59.00, committed test 57.50; growth 1.25x; 16 hosts; "
        "20 env-steps/s with updates, 468 MB peak memory"
    )
    alone = done(found | {"num_envs": 1, "final_objective_std": NAN})
    assert alone.startswith("done: 100·J 58.41; committed")
    assert "; 1 host; " in alone


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
    idle = baseline("wait_only", config)[1]
    found = evaluate(
        config, [("idle", idle), baseline("static_final", config), baseline("wait_only", config)],
        run_seed=3, num_envs=3,
    )  # fmt: skip
    assert found[0].grown == (GrowthManifest(),) * 3
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
