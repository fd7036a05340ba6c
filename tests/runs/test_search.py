"""The search for baselines, on scripted hosts whose best schedule is known."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.runs.assembly.presets import resolve
from esper.runs.evaluation.search import (
    TrainingHosts,
    adjusted,
    best_rules,
    default_budget,
    default_num_envs,
    halve,
    neighbour,
    number_of_rungs,
    passes_of,
    random_rules,
    ranked,
    search,
    shuffled,
    tune,
)
from esper.tamiyo.baselines import Heuristic, HeuristicRules
from esper.tamiyo.schedules import Plan
from esper.tasks.null import NullSpec
from esper.tasks.registry import register_task, task_by_name
from hindsight import best_schedule_value
from small_runs import main

SHORT = replace(task_by_name("null"), name="short_null", episode_length=14, min_training_epochs=1)
register_task(SHORT)
register_task(replace(SHORT, name="noisy_null", script=NullSpec(sigma=2.0)))
BOTTLENECK, NORM, SMALL = 5, 3, 6


def hosts(num_envs: int, task: str = "short_null") -> TrainingHosts:
    return TrainingHosts(resolve({"task": task}), num_envs)


def everywhere(blueprint: int, start: int = 1) -> Plan:
    return Plan(seeds=tuple((slot, blueprint) for slot in range(3)), start=start)


def test_a_search_finds_the_best_schedule_of_the_null_task_within_its_budget():
    found = search(resolve({"task": "short_null"}), budget=64 * 14 * 10, num_envs=64)
    # F* of the null task, less the price of three bottlenecks: 3 ln(1 + 3 x 880 / 10,000)
    best = best_schedule_value(14, 1, 3) - 3.0 * np.log(1.264)
    assert found.schedule.objective == pytest.approx(best, abs=1e-3)
    assert dict(found.schedule.policy.seeds) == dict.fromkeys(range(3), BOTTLENECK)
    assert found.schedule.policy.start == 1
    assert found.waiting == pytest.approx(50.0 * (1.0 - np.exp(-1.4)), abs=1e-3)
    assert found.env_steps <= 64 * 14 * 10
    assert found.rule is None  # scripted hosts without noise show the same features


@pytest.mark.slow
@pytest.mark.parametrize(("num_envs", "passes"), [(2, 10), (3, 13)])
def test_a_search_never_spends_more_than_its_budget(num_envs, passes):
    found = search(resolve({"task": "noisy_null"}), budget=num_envs * 14 * passes + 13, num_envs=num_envs)
    assert num_envs * 14 * (passes - 4) <= found.env_steps <= num_envs * 14 * passes


def test_equal_seeds_find_equal_schedules_and_rules():
    config = resolve({"task": "noisy_null"})
    first, again = (search(config, budget=8 * 14 * 10, num_envs=8).report() for _ in range(2))
    assert first == again
    assert first["rule"] is not None


def test_plans_are_compared_on_the_same_hosts_where_the_passes_suffice():
    # noise is the same for all candidates of a host, so that J of two plans differs by the same number on every host
    found = ranked(hosts(4, "noisy_null"), [everywhere(NORM), everywhere(BOTTLENECK), Plan()], 6)
    assert [len(result.policy.seeds) for result in found] == [3, 3, 0]
    assert found[0].policy == everywhere(BOTTLENECK)
    assert {result.values.size for result in found} == {8}  # 6 passes of 3 plans: two episodes of four hosts
    errors = {round(result.error, 4) for result in found}
    assert len(errors) == 1


@pytest.mark.parametrize(("passes", "number"), [(2, 4), (5, 8)])
def test_side_by_side_each_plan_gets_what_it_gets_alone(passes, number):
    # 7 plans in 2 and 5 - 1 passes (one of 5 is spent on waiting): 4 and 2 groups of 16 hosts
    plans = [everywhere(kind, start) for kind in (BOTTLENECK, NORM, SMALL) for start in (1, 2)] + [Plan()]
    shared = ranked(hosts(16), plans, passes)
    assert {result.values.size for result in shared} == {number}
    alone = hosts(1)
    for result in shared:
        assert alone.follow(result.policy, 0).tolist() == [pytest.approx(result.objective, abs=1e-3)]


def test_what_waiting_hosts_explain_is_taken_out():
    # each host adds the same to all plans and to waiting: slope 1, and both plans differ by 10 on all hosts
    control = np.array([[1.0, 3.0], [7.0, 9.0]])
    values = np.array([[41.0, 43.0], [57.0, 59.0]])
    assert adjusted(values, control, 5.0).tolist() == [[45.0, 45.0], [55.0, 55.0]]
    # no common part: the slope within plans is 0 (2 x 1 - 2 x 1), nothing changes
    crossed = np.array([[41.0, 43.0], [59.0, 57.0]])
    assert adjusted(crossed, control, 5.0).tolist() == crossed.tolist()
    same = np.full((2, 2), 5.0)
    assert adjusted(values, same, 5.0).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("plans", "passes", "rungs"),
    [(197, 29, 3), (197, 4, 2), (197, 3, 1), (8, 29, 1), (20, 29, 2), (33, 29, 3)],
)
def test_the_budget_and_the_number_of_plans_limit_the_rungs(plans, passes, rungs):
    assert number_of_rungs(plans, passes, keep=8) == rungs


def test_a_quarter_of_the_plans_survives_each_rung():
    plans = [everywhere(kind) for kind in range(1, 8)]
    plans += [Plan(seeds=((slot, kind),)) for slot in range(3) for kind in range(1, 8)]
    found = halve(hosts(16), plans, 10, keep=1)
    # a share of 3 passes of eight plans on two hosts each; then 6 and 2 plans, and the pass that is left over
    assert [len(rung) for rung in found] == [24, 6, 2]
    assert found[-1][0].policy == everywhere(BOTTLENECK)
    assert found[0][0].values.size < found[1][0].values.size < found[2][0].values.size
    assert (
        found[2][0].values.size == 32
    )  # 3 + 1 passes of two plans; without the pass left over, one episode of 16 hosts


def test_the_order_of_candidates_depends_on_the_seed_alone():
    plans = [everywhere(kind) for kind in range(1, 8)]
    assert shuffled(plans, 3, 0) == shuffled(plans, 3, 0)
    assert shuffled(plans, 3, 0) != shuffled(plans, 3, 1)
    assert set(shuffled(plans, 3, 0)) == set(plans)


def test_the_best_rule_in_hindsight_takes_the_better_schedule_on_each_side():
    # eight hosts; the first plan is better by 10 where the accuracy is below 5, the second where it is not; the third
    # plan begins in step 1 and is not a choice for a rule of step 3
    accuracy = np.arange(1.0, 9.0)
    values = np.array([[60.0] * 4 + [50.0] * 4, [50.0] * 4 + [60.0] * 4, [99.0] * 8])
    plans = [everywhere(NORM, 3), everywhere(BOTTLENECK, 3), everywhere(NORM, 1)]
    missing = np.full(8, np.nan)
    (rule,) = best_rules(plans, values, {(3, "val_acc"): accuracy, (3, "acc_slope"): missing}, 3)
    # the median, 4.5, is the only quantile that divides them so
    assert (rule.feature, rule.step, rule.threshold) == ("val_acc", 3, 4.5)
    assert (rule.below, rule.above) == (plans[0], plans[1])


def test_rules_that_decide_alike_are_one():
    values, feature = np.array([[1.0] * 4 + [2.0] * 4, [2.0] * 4 + [1.0] * 4]), np.arange(8.0)
    plans = [everywhere(NORM), everywhere(BOTTLENECK)]
    rules = best_rules(plans, values, {(1, "val_acc"): feature, (1, "best_acc"): feature}, 3)
    assert [(rule.below, rule.above) for rule in rules] == [(plans[1], plans[0])]


def test_hosts_that_do_not_differ_or_are_few_give_no_rule():
    plans = [everywhere(NORM), everywhere(BOTTLENECK)]
    assert best_rules(plans, np.ones((2, 8)), {(1, "val_acc"): np.full(8, 7.0)}, 3) == []
    assert best_rules(plans, np.ones((2, 7)), {(1, "val_acc"): np.arange(7.0)}, 3) == []  # at least four on each side


def test_the_default_budget_is_that_of_a_training_run():
    config = resolve({"task": "null", "preset": "small"})
    assert default_budget(config) == 100 * 16 * 60
    # forty passes of 60 steps: 96,000 / 2,400 = 40 hosts
    assert [default_num_envs(config, budget) for budget in (9_600, 96_000, 10**6)] == [16, 40, 256]
    assert default_num_envs(resolve({"task": "digits"}), 10**6) == 16


def test_a_budget_of_too_few_episodes_is_refused():
    with pytest.raises(ConfigError, match=r"9,599 env-steps is 9 episodes of 16 hosts x 60 steps.*--budget 9600"):
        passes_of(9_599, 16, 60)


def test_what_a_search_writes_is_compared_with_baselines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "found"
    assert main(["search", "noisy_null", "--num-envs", "16", "--out", str(folder)]) == 0
    printed = capfd.readouterr().out
    assert "esper: search on noisy_null, budget 2,240 env-steps = 10 passes of 16 hosts x 14 steps, seed 0" in printed
    assert "16 new training hosts: in step 1, if " in printed
    files = [str(folder / name) for name in ("best_schedule.json", "best_rule.json")]
    report = json.loads((folder / "search.json").read_text())
    assert report["env_steps"] == 2240
    assert {row["stage"] for row in report["stages"]} == {"grid", "neighbours"}
    assert main(["evaluate", *files, "--task", "noisy_null", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capfd.readouterr().out)["controllers"]}
    assert set(rows) == {"best_schedule.json", "best_rule.json", "wait_only"}
    # the noise of 16 hosts has a standard error of half a point
    assert rows["best_schedule.json"]["objective"] == pytest.approx(report["schedule"]["objective"], abs=3.0)
    assert rows["best_rule.json"]["objective"] == pytest.approx(report["rule"]["objective"], abs=3.0)


def test_policy_files_that_cannot_be_used_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path / "gone.json"), "--task", "null"]) == 2
    assert "gone.json cannot be read" in capfd.readouterr().err
    assert main(["evaluate", "a/rule.json", "b/rule.json", "--task", "null"]) == 2
    assert "several policy files are named rule.json" in capfd.readouterr().err


def test_a_search_that_cannot_begin_leaves_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["search", "null", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "name another with --out" in capfd.readouterr().err
    assert main(["search", "null", "--budget", "100", "--out", str(tmp_path / "new")]) == 2
    assert "a search needs 10" in capfd.readouterr().err
    assert main(["search", "fashion_mnist", "--num-envs", "4", "--data-dir", str(tmp_path / "none"),
                 "--out", str(tmp_path / "new")]) == 2  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- the heuristic -----------------------------------------------------------------------------------------------------

TASK = register_task(replace(task_by_name("null"), name="tuned_null", episode_length=30, min_training_epochs=2)).name
BUDGET = 4 * 30 * 60  # 60 passes of 4 hosts


@pytest.mark.slow
def test_tuned_rules_are_better_than_the_defaults_and_cost_no_more_than_the_budget():
    tuned = tune(resolve({"task": TASK}), budget=BUDGET, num_envs=4)
    hosts = TrainingHosts(resolve({"task": TASK}), 4)
    default = hosts.measure(Heuristic(hosts.spec), 0).mean()
    assert tuned.heuristic.objective > default + 1.0
    assert tuned.env_steps <= BUDGET
    assert [stage for stage, _ in tuned.stages] == ["random", "neighbours", "neighbours", "confirmation"]
    assert [len(results) for _, results in tuned.stages] == [24, 12, 12, 5]
    # scripted hosts without noise are equal, so the rules have the same J on other hosts
    again = hosts.measure(Heuristic(hosts.spec, tuned.heuristic.policy), 7)
    np.testing.assert_allclose(again, tuned.heuristic.objective, atol=1e-4)


@pytest.mark.slow
def test_equal_seeds_tune_alike():
    first, again = (tune(resolve({"task": TASK}), budget=4 * 30 * 10, num_envs=4).report() for _ in range(2))
    assert first == again


def test_a_neighbour_differs_in_at_most_one_choice():
    generator, own = torch.Generator().manual_seed(0), TrainingHosts(resolve({"task": TASK}), 4).spec
    parent = random_rules(own, generator)
    for _ in range(50):
        other = asdict(neighbour([parent], own, generator))
        assert sum(other[name] != value for name, value in asdict(parent).items()) <= 1


def test_drawn_rules_use_what_the_run_allows():
    generator, own = torch.Generator().manual_seed(0), TrainingHosts(resolve({"task": TASK}), 4).spec
    drawn = [random_rules(own, generator) for _ in range(50)]
    assert {b for rules in drawn for b in rules.blueprints} == set(own.selectable)
    assert {len(rules.slots) for rules in drawn} == {1, 2, 3}
    assert len(set(drawn)) > 45
    assert HeuristicRules() not in drawn


def test_the_command_writes_a_file_that_evaluate_compares(tmp_path: Path, capsys):
    command = ["search", "null", "--heuristic", "--episode-length", "20", "--num-envs", "2", "--budget", "400"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "judged after" in shown.out + shown.err
    report = json.loads((tmp_path / "heuristic_search.json").read_text())
    assert report["env_steps"] <= 400
    file = str(tmp_path / "best_heuristic.json")
    short = ["--task", "null", "--episode-length", "20", "--num-envs", "2"]
    assert main(["evaluate", file, "wait_only", *short]) == 0
