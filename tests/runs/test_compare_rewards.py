"""Several rewards side by side: what is paired, what J it is, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esper
from esper.cli import main
from esper.runs.assembly.presets import config_of_run
from esper.runs.evaluation.comparison import compare
from esper.runs.evaluation.rewards import RewardComparison, _by_reward, compare_rewards, differ_in_learning
from esper.telemetry.progress import RunConsole

PRICY = {"reward.objective_growth_weight": 0.3}
SMALL = {
    **{"ppo.feature_width": 8, "ppo.hidden_width": 8, "ppo.update_epochs": 1, "ppo.num_minibatches": 2},
    **{"lifecycle.min_training_epochs": 1, "lifecycle.min_blending_epochs": 1},  # seeds are fossilized early
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs on the null task by name, such as "shaped-1": reward and seed; "pricy" has another weight in J."""
    folder = tmp_path_factory.mktemp("rewards")

    def run(name: str) -> Path:
        reward, _, seed = name.partition("-")
        if not (folder / name).exists():
            options = PRICY if reward == "pricy" else {"reward": reward}
            trained(folder / name, seed=int(seed), **options)
        return folder / name

    return run


def trained(path: Path, **options: Any) -> None:
    """A run of one round."""
    esper.train("null", 1, 3, episode_length=12, out=path, progress=False, **SMALL, **options)


def compared(*paths: Path, hosts: int = 6) -> RewardComparison:
    configs = [config_of_run(path, {}) for path in paths]
    return compare_rewards(compare, configs, paths, [], num_envs=hosts, console=RunConsole(quiet=True))


def test_each_reward_has_a_row_on_the_same_hosts_and_the_difference_is_paired_over_them(runs, tmp_path, capfd):
    objective, shaped = runs("objective-0"), runs("shaped-0")
    assert main(["evaluate", str(objective), str(shaped), "--num-envs", "6", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = {row["name"]: row for row in found["controllers"]}
    assert list(rows) == ["objective", "shaped", "wait_only"]
    assert main(["evaluate", str(shaped), "wait_only", "--num-envs", "6", "--json"]) == 0  # by itself
    shown, _, document = capfd.readouterr().out.partition("\n{")
    alone = json.loads("{" + document)
    assert alone["controllers"][0]["hosts"]["objective"] == rows["shaped"]["hosts"]["objective"]
    returns = {row["name"]: row["shaped_return"] for row in alone["controllers"]}  # each by the reward shaped
    of_shaped = found["rewards"][1]
    assert (of_shaped["return"], of_shaped["return_of_wait_only"]) == (returns["trained"], returns["wait_only"])
    assert alone["seed"] == found["rewards"][0]["seeds"][0] == 1_000_000
    expected = np.subtract(rows["shaped"]["hosts"]["objective"], rows["objective"]["hosts"]["objective"])
    assert found["differences"]["shaped"]["100·J"]["mean"] == pytest.approx(expected.mean())
    for words in ("objective: committed accuracy minus growth", "shaped: dense; the measured contribution",
                  "minus objective", found["verdict"]):  # fmt: skip
        assert words in shown
    assert "One run of each says nothing about other training seeds" in found["verdict"]


def test_rewards_that_price_growth_differently_are_compared_by_the_j_of_each(runs):
    found = compared(runs("objective-0"), runs("pricy-0"), hosts=64)
    first, pricy, _ = found.rows
    names = ["objective, objective_growth_weight 0.03", "objective, objective_growth_weight 0.3"]
    assert [first.name, pricy.name] == names
    for row in (first, pricy):
        np.testing.assert_allclose(row.hosts["params"], np.multiply(row.hosts["growth"], 10_000))  # of a scripted host
        figures = found.figures(row)
        for name, weight in zip(names, (3.0, 30.0), strict=True):  # 100 J = val - 100 weight ln(growth)
            expected = np.subtract(row.hosts["committed"], weight * np.log(row.hosts["growth"]))
            np.testing.assert_allclose(figures[f"100·J of {name}"][0], expected, atol=1e-9)
    assert any(growth > 1.0 for growth in first.hosts["growth"]), "prices of nothing are equal"


@pytest.mark.slow
def test_with_several_seeds_a_run_is_one_unit_and_orders_do_not_matter(runs):
    paths = [runs(name) for name in ("objective-1", "objective-0", "shaped-0", "shaped-1")]
    found = compared(*paths, hosts=2)
    assert [group.seed for group in found.rewards["shaped"].groups] == [1_000_000, 1_000_001]
    assert found.units == 2
    assert found.verdict == "2 runs cannot show whether they differ; at least 6 runs are needed."
    assert "[" not in str(found).split("minus objective")[1].split("Means over")[0]  # nor are there intervals


def test_rewards_of_other_seeds_and_a_budget_are_refused(runs, capfd):
    paths = [str(runs(name)) for name in ("objective-0", "shaped-1")]
    assert main(["evaluate", *paths]) == 2
    assert "objective was trained with seed 0 and shaped with 1" in capfd.readouterr().err
    paths = [str(runs(name)) for name in ("objective-0", "shaped-0")]
    assert main(["evaluate", *paths, "--flops-per-host", "1e9"]) == 2
    assert "leave --flops-per-host out" in capfd.readouterr().err


def test_runs_that_differ_in_more_than_reward_and_learner_are_no_comparison(runs, tmp_path, capfd):
    configs = [config_of_run(runs(name), {}) for name in ("objective-0", "shaped-0", "objective-1")]
    assert differ_in_learning(configs)
    assert not differ_in_learning([configs[0], configs[2]])
    trained(tmp_path / "run", reward="shaped", **{"ppo.lr": 0.1, "lifecycle.min_prune_age": 2})
    assert not differ_in_learning([configs[0], config_of_run(tmp_path / "run", {})])
    assert main(["evaluate", str(runs("objective-0")), str(tmp_path / "run")]) == 2
    assert "lifecycle.min_prune_age is 5 in the first and 2 in the other" in capfd.readouterr().err


def test_settings_of_the_learner_are_compared_like_rewards(runs, tmp_path):
    trained(tmp_path / "fast", reward="objective", **{"ppo.lr": 0.1})
    found = esper.evaluate([runs("objective-0"), tmp_path / "fast"], num_envs=6, progress=False)
    names = ["objective, ppo.lr 0.0005", "objective, ppo.lr 0.1"]
    assert [row.name for row in found.rows] == [*names, "wait_only"]
    assert f"minus {names[0]}" in str(found)
    one, other = (np.array(row.hosts["objective"]) for row in found.rows[:2])
    assert found.differences[names[1]]["100·J"].mean == pytest.approx((other - one).mean())


def test_a_reward_that_needs_other_measurements_is_still_one_reward(runs):
    paths = [runs(name) for name in ("objective-0", "basic_plus-0")]
    configs = [config_of_run(path, {}) for path in paths]
    assert configs[0].lifecycle.fossils_as_players != configs[1].lifecycle.fossils_as_players
    assert differ_in_learning(configs)
    assert list(_by_reward(list(zip(configs, paths, strict=True)))) == ["objective", "basic_plus"]
