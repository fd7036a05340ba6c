"""Tuning the heuristic, on scripted hosts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.messages import EngineSpec
from esper.runs.heuristic_search import neighbour, random_rules, tune
from esper.runs.presets import resolve
from esper.runs.search_hosts import TrainingHosts
from esper.tamiyo.heuristic import Heuristic, HeuristicRules
from esper.tasks.registry import register_task, task_by_name
from small_runs import main

TASK = register_task(replace(task_by_name("null"), name="tuned_null", episode_length=30, min_training_epochs=2)).name
BUDGET = 4 * 30 * 60  # 60 passes of 4 hosts


def spec() -> EngineSpec:
    return TrainingHosts(resolve({"task": TASK}), 4).spec


@pytest.mark.slow
def test_tuned_rules_are_better_than_the_defaults_and_cost_no_more_than_the_budget():
    tuned = tune(resolve({"task": TASK}), budget=BUDGET, num_envs=4)
    hosts = TrainingHosts(resolve({"task": TASK}), 4)
    default = hosts.measure(Heuristic(hosts.spec), 0).mean()
    assert tuned.finalists[0].objective > default + 1.0
    assert tuned.env_steps <= BUDGET
    assert [stage for stage, _ in tuned.stages] == ["random", "neighbours", "neighbours", "confirmation"]
    assert [len(results) for _, results in tuned.stages] == [24, 12, 12, 5]
    # scripted hosts without noise are equal, so the rules have the same J on other hosts
    again = hosts.measure(Heuristic(hosts.spec, tuned.finalists[0].rules), 7)
    np.testing.assert_allclose(again, tuned.finalists[0].objective, atol=1e-4)


def test_equal_seeds_tune_alike():
    found = [tune(resolve({"task": TASK}), budget=4 * 30 * 10, num_envs=4).finalists for _ in range(2)]
    assert [tried.rules for tried in found[0]] == [tried.rules for tried in found[1]]


def test_a_neighbour_differs_in_at_most_one_choice():
    generator, told = torch.Generator().manual_seed(0), spec()
    parent = random_rules(told, generator)
    for _ in range(50):
        other = asdict(neighbour([parent], told, generator))
        assert sum(other[name] != value for name, value in asdict(parent).items()) <= 1


def test_drawn_rules_use_what_the_run_allows():
    generator, told = torch.Generator().manual_seed(0), spec()
    drawn = [random_rules(told, generator) for _ in range(50)]
    assert {b for rules in drawn for b in rules.blueprints} == set(told.selectable)
    assert {len(rules.slots) for rules in drawn} == {1, 2, 3}
    assert len(set(drawn)) > 45
    assert HeuristicRules() not in drawn


def test_the_command_writes_a_file_that_evaluate_compares(tmp_path: Path, capsys):
    command = ["search", "null", "--heuristic", "--episode-length", "20", "--num-envs", "2", "--budget", "400"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "kept above" in told.out + told.err
    report = json.loads((tmp_path / "heuristic_search.json").read_text())
    assert report["env_steps"] <= 400
    file = str(tmp_path / "best_heuristic.json")
    short = ["--task", "null", "--episode-length", "20", "--num-envs", "2"]
    assert main(["evaluate", file, "wait_only", *short]) == 0
