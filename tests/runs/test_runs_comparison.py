"""The comparison of controllers: equal hosts, nobody learns, nothing is changed."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import small_runs
import tiny
from esper.leyline.architecture import Architecture
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import state_digest
from esper.runs.assembly.assemble import assemble, dataset_of, engine_of
from esper.runs.assembly.presets import config_of_run, resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import Controller, all_baselines, baseline, derived, trained
from esper.runs.evaluation.outcomes import run_controller
from esper.runs.evaluation.results import Outcome
from esper.runs.state_file import read_state
from esper.runs.training import best_host
from esper.runs.training.checkpoint import BEST, checkpoints, load
from esper.tamiyo.baselines import BASELINES
from esper.tasks.datasets import Dataset, Split
from esper.tasks.registry import register_task, registered
from hindsight import best_schedule_value
from small_runs import contents, main, without_times

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path]) -> Path:
    """A run of two rounds on real hosts."""
    return shared_run("tiny", 2)


def outcome_of(controller: Controller, config: RunConfig, hosts: int = 1, seed: int = 1) -> Outcome:
    return run_controller(config, dataset_of(config, CPU), CPU, controller, run_seed=seed, num_envs=hosts)


def compared(arguments: list[str], path: Path) -> dict[str, Any]:
    """`esper evaluate` with its JSON; "rows" are those of the controllers by name."""
    assert main(["evaluate", *arguments, "--out", str(path.with_suffix(""))]) == 0
    found: dict[str, Any] = json.loads((path.with_suffix("") / "evaluation.json").read_text())
    return found | {"rows": {row["name"]: row for row in found["controllers"]}}


def test_a_run_is_compared_with_every_baseline_and_left_as_it_is(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)
    asked = []
    monkeypatch.setattr(
        "esper.runs.evaluation.comparison.require_memory", lambda *of, **more: asked.append((of[1].host, more))
    )
    found = compared([str(run), "--num-envs", "2"], tmp_path / "report.json")
    assert contents(run) == before
    assert [more["num_envs"] for _, more in asked] == [2, 2]
    assert asked[0][1]["available"] == asked[1][1]["available"] > 0  # before any host took memory
    assert asked[0][0] == tiny.HOST
    assert asked[1][0].num_params() >= tiny.HOST.num_params()  # those of big_host
    rows = found["rows"]
    assert set(rows) == {"trained", *BASELINES, "untrained", "static_common", "big_host"}
    assert (found["seed"], found["num_envs"], found["task"], found["run"]) == (1_000_000, 2, "tiny", str(run))
    assert found["reference"] == "trained"
    assert rows["wait_only"]["fossilized"] == 0.0
    assert rows["wait_only"]["growth"] == 1.0
    assert rows["wait_only"]["ops"]["WAIT"] == 2 * 6
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
    assert rows["static_final"]["architectures"] == rows["trained"]["architectures"]
    grown = any(structure["slots"] for structure in rows["trained"]["architectures"])
    said = "each host has the final architecture of trained" if grown else "trained ended without fossilized seeds"
    assert f"static_final: {said}" in out
    assert "heuristic, 2 hosts of tiny" in err


def test_a_baseline_does_not_depend_on_who_else_is_compared(run: Path, tmp_path: Path) -> None:
    size, names = (
        ["--task", "faulty_null", "--episode-length", "8", "--num-envs", "3"],
        {"heuristic", "random", "wait_only"},
    )
    alone, among = compared(["random", *size], tmp_path / "a.json"), compared([*names, *size], tmp_path / "b.json")
    assert without_times(alone["rows"]["random"]) == without_times(among["rows"]["random"])
    assert among["rows"].keys() == names
    assert alone["rows"].keys() == {"random", "wait_only"}  # the reference is always there
    waiting = compared(["wait_only", *size], tmp_path / "c.json")
    assert without_times(waiting["rows"]["wait_only"]) == without_times(among["rows"]["wait_only"])
    assert waiting["rows"].keys() == {"wait_only"}


def test_the_controller_of_a_run_that_was_stopped_inside_an_episode_can_be_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with small_runs.interrupted_at(2, 3):
        assert small_runs.train(path) == 130
    before = contents(path)
    found = compared([str(path), "wait_only", "--num-envs", "5"], tmp_path / "report.json")
    assert len(found["controllers"][0]["hosts"]["test"]) == 5
    assert contents(path) == before


def test_the_null_task_is_compared_with_its_best_schedule_and_no_other_task_can_be(tmp_path: Path) -> None:
    size = ["--num-envs", "2", "--episode-length", "24"]
    found = compared(["best_schedule", "--task", "null", *size], tmp_path / "report.json")
    rows = found["rows"]
    assert set(rows) == {"best_schedule", "wait_only"}
    assert rows["best_schedule"]["committed"] == pytest.approx(best_schedule_value(24, 10, 3), abs=1e-4)
    assert "best_schedule" in all_baselines(resolve({"task": "null"}), with_run=False)
    tiny = resolve({"task": "tiny"})
    assert all_baselines(tiny, with_run=False) == BASELINES
    with pytest.raises(
        ConfigError,
        match="the best schedule of task 'tiny' is not known for these slots and steps; leave best_schedule out",
    ):
        baseline("best_schedule", tiny)


@pytest.mark.slow
def test_static_final_has_the_structure_of_the_controller_it_is_named_with_from_the_start(tmp_path: Path) -> None:
    names = ["static_final", "fixed_schedule_fill", "heuristic"]
    size = ["--task", "faulty_null", "--episode-length", "30", "--num-envs", "3"]
    found = compared([*names, *size], tmp_path / "report.json")
    rows = found["rows"]
    assert set(rows) == {*names, "wait_only"}
    source = rows["fixed_schedule_fill"]["architectures"]
    # the second host is rolled back in step 5, and a schedule does not germinate a lost seed again
    assert [len(structure["slots"]) for structure in source] == [3, 1, 3]
    assert rows["static_final"]["architectures"] == source
    assert rows["static_final"]["ops"]["WAIT"] == 3 * 30 - 1  # one host is rolled back in one step
    assert rows["static_final"]["growth"] == rows["fixed_schedule_fill"]["growth"] > 1.0
    assert rows["static_final"]["committed"] > rows["wait_only"]["committed"]
    for structure in source:
        Architecture.of(structure)


def test_static_final_of_a_controller_that_kept_nothing_is_wait_only_to_the_bit() -> None:
    config = resolve({"task": "tiny", "episode_length": 5})
    source = outcome_of(baseline("wait_only", config), config, hosts=3, seed=3)
    assert source.grown == (Architecture(),) * 3
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
    best = load(path / "checkpoints" / BEST)
    lines = small_runs.records(path)["metrics.jsonl"]
    means = {n: np.mean([line["objective_mean"] for line in lines[n - 10 : n]]) for n in range(10, 15)}
    assert best.header.rounds_done == max(means, key=lambda n: (means[n], -n))
    assert best.header.trend.best == pytest.approx(max(means.values()))
    found = compared([str(path), "wait_only", "--num-envs", "2", "--best"], tmp_path / "best.json")
    assert found["trained"] == f"after {best.header.rounds_done} rounds"
    assert compared([str(path), "wait_only", "--num-envs", "2"], tmp_path / "b.json")["trained"] == "after 14 rounds"
    # the same run without an interruption has the same best policy
    assert small_runs.train(whole, "null", 14) == 0
    assert load(whole / "checkpoints" / BEST).header.trend == best.header.trend
    assert state_digest(load(whole / "checkpoints" / BEST).state) == state_digest(best.state)
    # it is as guarded as the others, and stands in for them
    for other in checkpoints(path / "checkpoints"):
        other.write_bytes(b"")
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1"]) == 0
    assert f"Using the one after {best.header.rounds_done} rounds instead." in capfd.readouterr().err
    (path / "checkpoints" / BEST).write_text("{}")
    assert main(["evaluate", str(path), "wait_only", "--num-envs", "1", "--best"]) == 2
    assert "best.safetensors cannot be read" in capfd.readouterr().err


# -- several runs, other tasks, derived baselines ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds(shared_run: Callable[..., Path]) -> list[str]:
    """Two runs on scripted hosts that differ in their seed."""
    return [str(shared_run("null", 1, *seed)) for seed in ((), ("--seed", "1"))]


@pytest.mark.slow
def test_several_runs_are_one_controller_and_each_meets_its_own_hosts(
    seeds: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    together = compared([*seeds, "heuristic", "static_final", "--num-envs", "3"], tmp_path / "both.json")
    out = capfd.readouterr().out
    assert [group["seed"] for group in together["groups"]] == [1_000_000, 1_000_001]
    assert [group["training_seed"] for group in together["groups"]] == [0, 1]
    assert together["unit"] == "run"
    rows = together["rows"]
    alone = [compared([run, "heuristic", "--num-envs", "3"], tmp_path / "one.json") for run in seeds]
    for name in ("trained", "heuristic"):
        parts = [one["rows"][name]["hosts"]["objective"] for one in alone]
        assert rows[name]["hosts"]["objective"] == [*parts[0], *parts[1]]
        assert rows[name]["units"] == pytest.approx([np.mean(part) for part in parts])
    means = [row["units"] for row in (rows["heuristic"], rows["trained"])]
    assert rows["heuristic"]["difference"]["mean"] == pytest.approx(np.subtract(*means).mean())
    assert "3 hosts of each of the seeds 1000000, 1000001" in out
    assert "2 runs are few; a claim needs 10." in out


def test_runs_of_different_conditions_are_refused_with_what_differs(
    seeds: list[str], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(seeds[0], tmp_path / "again")
    assert main(["evaluate", *seeds, str(tmp_path / "again")]) == 2
    assert "were both trained with seed 0, so they are not independent" in capfd.readouterr().err
    assert main(["evaluate", *seeds, str(run)]) == 2
    assert "are not runs of one condition: " in capfd.readouterr().err
    for options, said in (
        (("--set", "ppo.lr=0.1"), "ppo.lr 0.0005 was trained with seed 0 and objective, ppo.lr 0.1 with 2; they are"),
        (("--episode-length", "9"), "condition: episode_length is 8 in the first and 9 in the other"),
    ):
        other = tmp_path / options[1]
        assert small_runs.train(other, "null", 1, "--seed", "2", *options) == 0
        assert main(["evaluate", seeds[0], str(other)]) == 2
        assert said in capfd.readouterr().err
    assert main(["evaluate", *seeds, "--seed", "5"]) == 2
    assert "1 seed given for 2 runs; give one for each run, or leave --seed out" in capfd.readouterr().err
    assert main(["evaluate", *seeds, "--seed", "5", "--seed", "5"]) == 2
    assert "the seeds 5, 5 are not all different" in capfd.readouterr().err


def test_baselines_can_meet_the_hosts_of_several_seeds(tmp_path: Path) -> None:
    size = ["--task", "tiny", "--episode-length", "2", "--num-envs", "3"]
    both = compared(["random", *size, "--seed", "4", "--seed", "9"], tmp_path / "a.json")
    one = compared(["random", *size, "--seed", "9"], tmp_path / "b.json")
    rows, alone = (of["rows"]["random"] for of in (both, one))
    assert both["unit"] == "host"
    assert rows["hosts"]["objective"][3:] == alone["hosts"]["objective"]
    assert rows["hosts"]["objective"][:3] != alone["hosts"]["objective"]


@pytest.mark.slow
def test_a_controller_plays_other_tasks_steps_and_slots(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    found = compared(
        [str(run), "untrained", "--task", "faulty_null", "--episode-length", "9", "--num-envs", "3"],
        tmp_path / "a.json",
    )
    assert (found["task"], found["episode_length"], found["seed"]) == ("faulty_null", 9, 1_000_000)
    assert set(found["rows"]) == {"trained", "untrained", "wait_only"}
    assert sum(found["controllers"][0]["ops"].values()) >= 3 * 9 - 1  # one host is rolled back in one step
    longer = compared([str(run), "wait_only", "--episode-length", "7", "--num-envs", "2"], tmp_path / "b.json")
    assert (longer["task"], longer["episode_length"]) == ("tiny", 7)
    assert sum(longer["controllers"][0]["ops"].values()) == 2 * 7
    with registered(tiny.task(name="second_slot", enabled=("r0c1",))):
        fewer = compared([str(run), "--task", "second_slot", "wait_only", "--num-envs", "2"], tmp_path / "c.json")
        assert sum(fewer["controllers"][0]["ops"].values()) == 2 * fewer["episode_length"]
    assert contents(run) == before


@pytest.mark.slow
def test_several_tasks_give_the_comparisons_of_each_by_itself(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = ["random", "--episode-length", "4", "--num-envs", "2"]
    tasks = ["--task", "tiny", "--task", "faulty_null"]
    assert main(["evaluate", str(run), *size, *tasks, "--out", str(tmp_path / "out")]) == 0
    shown = capfd.readouterr().out
    both = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert shown.index("tiny") < shown.index("faulty_null")
    for found, task in zip(both, ("tiny", "faulty_null"), strict=True):
        alone = compared([str(run), *size, "--task", task], tmp_path / "one.json")
        assert [row["hosts"]["objective"] for row in found["controllers"]] == [
            row["hosts"]["objective"] for row in alone["controllers"]
        ]
        assert (found["task"], found["verdict"]) == (task, alone["verdict"])
    assert main(["evaluate", "random", "--task", "tiny", "--task", "tiny"]) == 2
    assert "the tasks tiny, tiny are not all different" in capfd.readouterr().err


def test_an_untrained_controller_is_that_of_the_run_before_its_first_update(run: Path) -> None:
    config = config_of_run(run)
    engine = engine_of(config, dataset_of(config, CPU), CPU)
    own, other_seed, later = (
        controller.make(engine.spec).state_dict()
        for controller in (
            baseline("untrained", config),
            baseline("untrained", dataclasses.replace(config, seed=1)),
            trained(run, config).controller,
        )
    )
    at_first = {name: x for name, x in assemble(config, CPU).client.state_dict().items() if name.startswith("network.")}
    assert at_first
    assert all(torch.equal(x, own[name]) for name, x in at_first.items())
    for different in (other_seed, later):
        assert not all(torch.equal(x, different[name]) for name, x in at_first.items())


def test_static_common_is_the_most_frequent_structure() -> None:
    config = resolve({"task": "tiny", "episode_length": 3})
    rare, common = (Architecture.of_lines([line]) for line in ("r0c0 norm ADD", "r0c1 norm MULTIPLY"))
    controller = derived("static_common", config, "x", [rare, common, common], np.ones(3))
    assert controller.note == "static_common: r0c1 norm MULTIPLY (2 of 3 hosts of x)."
    assert outcome_of(controller, config, hosts=4).grown == (common,) * 4


@pytest.mark.slow
def test_a_big_host_has_as_many_parameters_as_the_controller_ends_with_and_is_charged_for_them() -> None:
    config = resolve({"task": "tiny", "episode_length": 3})
    host = config.task_spec().host
    assert host is not None
    # 9 b + 2 b + 18 b^2 + 4 b + 6 b + 3: 375 for b = 4, 558 for 5, 777 for 6
    assert host.num_params() == 375
    controller = derived("big_host", config, "x", (), np.array([500.0, 800.0]))  # a mean of 650
    assert controller.note == "big_host: CNN 5-10, 3x3, 558 parameters; x ends with 650."
    found = outcome_of(controller, config, hosts=2)
    assert found.stats.host_params.tolist() == [375, 375]
    assert found.stats.fossil_params.tolist() == [183, 183]
    assert found.stats.growth.tolist() == pytest.approx([558 / 375] * 2)
    assert found.grown == (Architecture(),) * 2
    same = derived("big_host", config, "x", (), np.array([375.0]))
    assert np.array_equal(
        outcome_of(same, config, hosts=2).stats.committed_acc,
        outcome_of(baseline("wait_only", config), config, hosts=2).stats.committed_acc,
    )


def test_hosts_without_networks_cannot_be_widened(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "big_host", "heuristic", "--task", "null", "--num-envs", "1"]) == 2
    assert "the hosts of task 'null' cannot be widened; leave big_host out" in capfd.readouterr().err


# -- the test split ----------------------------------------------------------------------------------------------------

_other_test_split = False


def _with_another_test_split(folder: Path | None, seed: int) -> Dataset:
    """The data of the tiny task; on demand with other pixels and labels in the test split alone."""
    del folder, seed
    data = tiny.dataset()
    if not _other_test_split:
        return data
    changed = Split(-2.0 * data.test.x, (data.test.y + 1) % tiny.CLASSES)
    return dataclasses.replace(data, test=changed)


register_task(tiny.task(name="split_tiny", load=_with_another_test_split))


@pytest.mark.slow
def test_the_test_split_decides_nothing_but_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, reports = (tmp_path / "a", tmp_path / "b"), []
    for path, changed in zip(runs, (False, True), strict=True):
        monkeypatch.setattr(sys.modules[__name__], "_other_test_split", changed)
        options = ["--task", "split_tiny", *small_runs.OPTIONS["tiny"][2:]]
        assert main(["train", "--rounds", "2", "--out", str(path), *options]) == 0
        reports.append(compared([str(path), "--num-envs", "3"], tmp_path / f"report-{path.name}.json"))
    bests = [best_host.read(path / "checkpoints") for path in runs]  # the file says its test accuracy too
    assert dataclasses.replace(bests[0], test=bests[1].test) == bests[1]
    assert state_digest(bests[0].state) == state_digest(bests[1].state)
    for name in ("round-00001.safetensors", "round-00002.safetensors"):
        (header, state), (other_header, other_state) = (read_state(path / "checkpoints" / name) for path in runs)
        assert state_digest(state) == state_digest(other_state)
        differing = {key for key in header if header[key] != other_header[key]}
        assert differing <= {"cursor", "total"}  # lengths of files, and seconds
    lines = [small_runs.records(path) for path in runs]
    for found in lines:  # the last event repeats the summary
        assert found["events.jsonl"].pop()["kind"] == "run_finished"
    assert lines[0] == lines[1]
    first, second = (small_runs.summary(path) for path in runs)
    assert first.pop("best_host") | {"test": None} == second.pop("best_host") | {"test": None}
    assert {name for name in first if first[name] != second[name]} == {"final_test_accuracy_mean"}
    changed_rows = 0
    for one, other in zip(*(report["controllers"] for report in reports), strict=True):
        differing = {name for name in one if one[name] != other[name]} - {"seconds", "hosts"}
        assert differing <= {"test", "test_std", "test_objective", "difference_test"}
        hosts = {name for name in one["hosts"] if one["hosts"][name] != other["hosts"][name]}
        assert hosts <= {"test", "test_objective"}
        changed_rows += "test" in hosts
    assert changed_rows > len(reports[0]["controllers"]) // 2
