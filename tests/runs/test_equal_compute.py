"""Comparisons at equal compute: what a budget buys, and what comes of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import small_runs
import tiny
from esper.leyline.architecture import Architecture
from esper.runs.assembly.assemble import dataset_of
from esper.runs.assembly.presets import resolve
from esper.runs.evaluation.controllers import baseline, fixed
from esper.runs.evaluation.outcomes import run_controller
from esper.runs.evaluation.races import RacePlan, best_of, raced, write_plans
from esper.runs.evaluation.results import Outcome, spent
from esper.simic.rewards.reward_config import RewardConfig
from esper.tasks.instances import MixedImages
from esper.tasks.registry import register_task
from small_runs import main

CPU = torch.device("cpu")
assert small_runs
register_task(tiny.task(name="one_slot", enabled=("r0c1",)))
register_task(tiny.task(name="mixed_tiny", batches_per_step=2, instances=MixedImages(num_classes=3, classes=(2, 3))))
STRUCTURES = tuple(Architecture.of_lines(lines) for lines in ([], ["r0c1 norm ADD"], ["r0c1 conv_light ADD"]))
SIZE = ["--task", "one_slot", "--episode-length", "4", "--num-envs", "6"]


def config(task: str = "one_slot", steps: int = 4) -> Any:
    return resolve({"task": task, "episode_length": steps, "executor": "streamed"})


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of the structures, on the hosts that a comparison of task one_slot meets."""
    own = resolve({"task": "one_slot", "episode_length": 4})
    data = dataset_of(own, CPU)
    return [run_controller(own, data, CPU, fixed([of], own), run_seed=1_000_000, num_envs=6) for of in STRUCTURES]


@pytest.fixture
def plans(tmp_path: Path, outcomes: list[Outcome]) -> Path:
    """A file with a cheap portfolio, an expensive one, and a halving in between."""
    costs = [spent(one) for one in outcomes]
    one, three = (RacePlan(structures=STRUCTURES[:n], flops=sum(costs[:n]), objective=n) for n in (1, 3))
    halving = RacePlan(structures=STRUCTURES, rungs=(2,), flops=0.6 * sum(costs), objective=2)
    write_plans(tmp_path / "portfolio.json", {"portfolio": (one, three), "halving": (halving,)}, "one_slot", 4, {})
    return tmp_path / "portfolio.json"


def test_a_repetition_trains_the_same_instances_from_other_weights() -> None:
    own = config("mixed_tiny", 2)
    data = dataset_of(own, CPU)
    first, second = (
        run_controller(own, data, CPU, baseline("wait_only", own), run_seed=5, num_envs=8, repetition=i) for i in (0, 1)
    )
    assert len(set(first.stats.instance["classes"].tolist())) == 2
    assert np.array_equal(first.stats.instance["classes"], second.stats.instance["classes"])
    assert first.cost is not None
    assert second.cost is not None
    assert np.array_equal(first.cost.measuring, second.cost.measuring)  # as many validation examples
    assert not np.array_equal(first.val, second.val)


def test_a_budget_pays_for_as_many_runs_as_fit_and_no_more(outcomes: list[Outcome]) -> None:
    passes = [[one] for one in outcomes]
    costs = [spent(one) for one in outcomes]
    found = list(best_of("x", "run", iter(passes), RewardConfig(), sum(costs[:2]), every_step=True))
    assert [(entry.label, entry.tried) for entry in found] == [("one run", 1), ("best of 2 runs", 2)]
    assert found[1].flops == pytest.approx(sum(costs[:2]))
    assert list(best_of("x", "run", iter(passes), RewardConfig(), 0.99 * costs[0], every_step=True)) == []


@pytest.mark.slow
def test_every_controller_is_compared_at_the_budget(
    tmp_path: Path, plans: Path, outcomes: list[Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    costs = [spent(one) for one in outcomes]
    budget, out = 0.9 * sum(costs), tmp_path / "out"
    options = [*SIZE, "--flops-per-host", str(budget), "--out", str(out)]
    command = ["evaluate", str(plans), "random_search", "hill_climbing", "random", *options]
    assert main(command) == 0
    report = json.loads((out / "evaluation.json").read_text())
    equal = report["equal_compute"]
    rows = {row["name"]: row for row in equal["controllers"]}
    assert set(rows) == {"portfolio", "halving", "random_search", "hill_climbing", "random", "wait_only"}
    assert equal["labels"]["hill_climbing"].startswith("1 climb, each with one more random seed in ")
    means = [point["flops"] for point in equal["curves"]["hill_climbing"]]
    assert len(means) > 1
    assert means == sorted(means)
    # the portfolio of three does not fit, but its halving does, whose numbers are those of the race over its structures
    race = raced("halving", outcomes, RewardConfig(), (2,))
    assert rows["halving"]["hosts"]["test"] == pytest.approx(race.test_acc.tolist())
    assert rows["halving"]["training_flops"] + rows["halving"]["measuring_flops"] == pytest.approx(spent(race))
    assert rows["portfolio"]["hosts"]["test"] == pytest.approx(outcomes[0].test_acc.tolist())
    number = math.floor(budget / costs[0])
    assert number >= 2
    assert equal["labels"]["wait_only"] == f"best of {number} runs"
    assert rows["wait_only"]["training_flops"] + rows["wait_only"]["measuring_flops"] == pytest.approx(
        number * costs[0]
    )
    curve = equal["curves"]["wait_only"]
    assert [point["flops"] for point in curve] == pytest.approx([(i + 1) * costs[0] for i in range(number)])
    means = [point["objective"] for point in curve]
    assert means == sorted(means)  # the best of more runs is no worse, by validation
    assert all(row["training_flops"] + row["measuring_flops"] <= budget for row in rows.values())
    best = max(rows, key=lambda name: rows[name]["objective"])
    differences = np.subtract(*(rows[name]["hosts"]["objective"] for name in (best, "wait_only")))
    assert rows[best]["difference"]["mean"] == pytest.approx(differences.mean())
    assert equal["verdict"].startswith("At equal compute, at most ")
    shown = capfd.readouterr().out
    assert shown.splitlines()[-1] == equal["verdict"]
    assert "halving: 3 structures, the worse half stops at step 2: none; r0c1 norm; r0c1 conv_light." in shown
    assert (out / "compute.png").stat().st_size > 10_000
    capfd.readouterr()
    assert main(command) == 0  # all of it is found again
    again = json.loads((out / "evaluation.json").read_text())
    assert again["equal_compute"] == equal
    reused, of = map(int, capfd.readouterr().err.split(" outcomes were found")[0].split()[-3::2])
    assert reused == of


def test_a_race_without_a_budget_spends_three_plain_runs(
    plans: Path, outcomes: list[Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(plans), *SIZE, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    rows = {row["name"]: row for row in report["controllers"]}
    assert report["equal_compute"] is None
    assert set(rows) == {"portfolio", "halving", "wait_only"}
    assert any(note.startswith("portfolio: ") for note in report["notes"])
    affordable = [plan for plan in (1, 3) if sum(spent(one) for one in outcomes[:plan]) <= 3 * spent(outcomes[0])]
    expected = spent(raced("portfolio", outcomes[: affordable[-1]], RewardConfig()))
    assert rows["portfolio"]["training_flops"] + rows["portfolio"]["measuring_flops"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["random", *SIZE, "--flops-per-host", "1000"], "--flops-per-host is 1.0k, but the host alone takes"),
        (["random", *SIZE, "--flops-per-host", "-1"], "--flops-per-host is -1; give the FLOPs that a host may spend"),
        (["portfolio", *SIZE], "no plans of portfolio and halving are known for task 'one_slot'"),
        (["random_search", "--task", "null"], "the hosts of task 'null' are not networks, so nothing costs FLOPs"),
        (["random", "--task", "null", "--flops-per-host", "1e9"], "so nothing costs FLOPs; leave --flops-per-host out"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *arguments]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_budget_below_the_host_alone_is_refused_before_it_is_trained_if_that_is_known(
    tmp_path: Path, outcomes: list[Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    cost = outcomes[0].cost
    training = float(cost.training.sum(axis=0).mean())
    assert training < spent(outcomes[0])
    for budget, stored in ((0.99 * training, 0), (0.5 * (training + spent(outcomes[0])), 1)):
        out = tmp_path / str(stored)
        assert main(["evaluate", "random", *SIZE, "--flops-per-host", str(budget), "--out", str(out)]) == 2
        assert "but the host alone takes" in capfd.readouterr().err
        assert sum(path.suffix == ".npz" for path in out.rglob("*")) == stored


def test_a_controller_that_spends_more_in_one_run_is_left_out_with_a_sentence(
    tmp_path: Path, outcomes: list[Outcome]
) -> None:
    budget = 1.05 * spent(outcomes[0])
    policy = {
        "format": "esper policy 1", "kind": "schedule", "task": "one_slot", "found": {},
        "schedule": {"name": "early", "lines": [
            {"step": 1, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}]},
    }  # fmt: skip
    (tmp_path / "early.json").write_text(json.dumps(policy))
    options = [*SIZE, "--flops-per-host", str(budget), "--out", str(tmp_path / "out")]
    assert main(["evaluate", str(tmp_path / "early.json"), *options]) == 0
    equal = json.loads((tmp_path / "out" / "evaluation.json").read_text())["equal_compute"]
    assert [row["name"] for row in equal["controllers"]] == ["wait_only"]
    (sentence,) = equal["excluded"]
    assert sentence.startswith("early.json: a single training spends more than ")


@pytest.mark.slow
def test_a_search_of_portfolios_continues_and_its_file_is_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    size = ["--portfolio", "--episode-length", "4", "--budget", str(8 * 8 * 4)]
    assert main(["search", "one_slot", *size, "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "budget 256 env-steps = 8 structures on 8 hosts x 4 steps" in shown
    assert len(list((out / "structures" / "outcomes").iterdir())) == 8
    found = json.loads((out / "portfolio.json").read_text())
    first = (out / "portfolio.json").read_bytes()
    assert found["found"]["env_steps"] == 256
    objectives = [plan["objective"] for plan in found["halving"]]
    assert objectives == sorted(objectives)
    (out / "portfolio.json").unlink()
    assert main(["search", "one_slot", *size, "--out", str(out)]) == 0  # from the stored structures
    assert (out / "portfolio.json").read_bytes() == first
    assert main(["evaluate", str(out / "portfolio.json"), *SIZE]) == 0
    assert main(["search", "one_slot", "--portfolio", "--episode-length", "4", "--budget", "100"]) == 2
    assert "a search of portfolios needs 8 hosts: give --budget 256" in capfd.readouterr().err
    assert main(["search", "null", "--portfolio"]) == 2
    assert "are not networks" in capfd.readouterr().err
