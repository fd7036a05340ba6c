"""Races: who is kept, what is spent, which plans are found, and their files; numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_runs_report import WEIGHTS, stats

import tiny
from esper.kasmina.blueprints import registry
from esper.leyline.architecture import Architecture
from esper.leyline.errors import ConfigError
from esper.runs.evaluation.races import (
    LEAST_GAIN,
    Curves,
    RacePlan,
    best_plans,
    in_random_order,
    is_plans,
    plan_within,
    race,
    raced,
    read_plans,
    small_structures,
    write_plans,
)
from esper.runs.evaluation.results import Outcome, TrainingCost
from esper.tasks.registry import task_by_name, task_names

NORM, CONV = (Architecture.of_lines([f"r0c0 {name} ADD"]) for name in ("norm", "conv_light"))


def candidate(*curves: list[float], price: float = 10.0, test: float = 0.0, fossils: int = 0) -> Outcome:
    """A structure on two hosts of 1000 parameters: validation by step [T] of each, and FLOPs of each step.

    Measuring costs half as much as training, and four times as much in the last step, where all subsets are measured.
    """
    val = np.array(curves, dtype=np.float32).T
    cost = np.full(val.shape, price)
    measuring = 0.5 * cost
    measuring[1:][-1:] *= 4.0
    kept = stats(
        committed_acc=val[-1], fossil_params=np.full(2, fossils), host_params=np.full(2, 1000), returns=val[-1] + 0.5,
        compute=np.full(2, price / 10.0),
    )  # fmt: skip
    architecture = NORM if fossils else Architecture()
    return Outcome(
        name="x", stats=kept, test_acc=np.full(2, test), val=val, grown=(architecture,) * 2,
        cost=TrainingCost(per_example=np.full(2, price), training=cost, measuring=measuring),
    )  # fmt: skip


def test_the_worse_half_stops_at_each_rung_and_the_best_at_the_end_is_kept() -> None:
    # five candidates on one host; at the first rung 0 and 2 are ahead, at the second 2, which falls behind in the end
    worth = np.array([[5.0, 6.0, 9.0], [1.0, 9.0, 9.5], [4.0, 7.0, 8.0], [3.0, 0.0, 0.0], [2.0, 0.0, 0.0]])[..., None]
    chosen, stopped = race(worth)
    assert chosen.tolist() == [2]
    assert stopped[:, 0].tolist() == [1, 0, 2, 0, 0]
    chosen, stopped = race(worth[:, -1:])  # no rungs: the best at the end
    assert (chosen.tolist(), stopped[:, 0].tolist()) == ([1], [0] * 5)


def test_of_equally_good_candidates_the_first_go_on() -> None:
    chosen, stopped = race(np.full((4, 2, 1), 3.0))
    assert (chosen.tolist(), stopped[:, 0].tolist()) == ([0], [1, 1, 0, 0])


def test_a_race_spends_what_its_candidates_cost_until_they_stop_and_reads_the_test_of_the_kept_one() -> None:
    one = candidate([10.0, 40.0, 50.0], [10.0, 20.0, 90.0], test=1.0)
    other = candidate([20.0, 30.0, 60.0], [0.0, 10.0, 95.0], price=100.0, test=2.0, fossils=500)
    # J of the second is 3 ln(1.5) = 1.2164 below its accuracy; after step 1 it leads on the first host alone
    found = raced("halving", [one, other], WEIGHTS, rungs=(1,))
    assert found.test_acc.tolist() == [2.0, 1.0]
    assert found.stats.committed_acc.tolist() == [60.0, 90.0]
    assert found.stats.returns.tolist() == [60.5, 90.5]
    assert found.grown == (NORM, Architecture())
    assert found.cost is not None
    assert found.cost.training.tolist() == [[110.0, 110.0], [100.0, 10.0], [100.0, 10.0]]
    # measured at step 1 and at the end, not in step 2
    assert found.cost.measuring.tolist() == [[55.0, 55.0], [0.0, 0.0], [50.0, 5.0]]
    every = raced("halving", [one, other], WEIGHTS, rungs=(1,), every_step=True)
    assert every.cost is not None
    assert every.cost.measuring.tolist() == [[55.0, 55.0], [50.0, 5.0], [200.0, 20.0]]
    assert found.cost.per_example.tolist() == [100.0, 10.0]
    assert found.val.T.tolist() == [[20.0, 30.0, 60.0], [10.0, 20.0, 90.0]]
    both = raced("portfolio", [one, other], WEIGHTS)
    assert both.stats.committed_acc.tolist() == [60.0, 95.0]
    assert both.cost is not None
    assert both.cost.training.sum(axis=0).tolist() == [330.0, 330.0]
    # J charges for the whole race; a host alone costs 10 in each of three steps
    assert both.stats.compute.tolist() == pytest.approx([11.0, 11.0])
    assert found.stats.compute.tolist() == pytest.approx([310 / 30, 130 / 30])
    dear = replace(WEIGHTS, objective_flops_weight=50.0)
    assert raced("portfolio", [one, other], dear).stats.committed_acc.tolist() == [60.0, 95.0]  # spent by then


def test_the_price_of_parameters_decides_who_is_kept() -> None:
    one, other = (candidate([50.0], [50.0], fossils=grown) for grown in (0, 500))
    better = candidate([51.2], [51.3], fossils=500)  # the price is 1.2164
    assert raced("x", [other, one], WEIGHTS).stats.fossil_params.tolist() == [0, 0]
    assert raced("x", [one, better], WEIGHTS).stats.fossil_params.tolist() == [0, 500]


def test_a_rolled_back_step_counts_as_nothing() -> None:
    curves = Curves.of([candidate([np.nan, 30.0], [10.0, 20.0])], WEIGHTS)
    assert curves.worth[0].tolist() == [[0.0, 10.0], [30.0, 20.0]]
    worth, flops = curves.at((1,))  # training costs 10 in each step, measuring 5
    assert worth[0].tolist() == curves.worth[0].tolist()
    assert flops[0].tolist() == [[15.0, 15.0], [30.0, 30.0]]
    assert curves.at(())[1][0].tolist() == [[25.0, 25.0]]


def test_a_portfolio_grows_by_what_its_other_members_lack() -> None:
    # four kinds of hosts; a is best on average, b is second and good where a is, c where a is not
    ends = np.array([[9.0, 9.0, 1.0, 1.0], [8.0, 8.0, 1.0, 1.0], [0.0, 0.0, 7.0, 7.0]])
    spent = np.broadcast_to(np.array([2.0, 1.0, 2.0])[:, None, None], (3, 1, 4))
    structures = [Architecture(), NORM, CONV]
    plans = best_plans(Curves(ends[:, None], spent, np.zeros((3, 4))), structures)
    # an episode of one step has no rung, which leaves single structures
    assert [plan.structures for plan in plans["halving"]] == [(NORM,), (Architecture(),)]
    found = [([structures.index(one) for one in plan.structures], plan.flops, plan.objective)
             for plan in plans["portfolio"]]  # fmt: skip
    assert found == [([1], 1.0, 4.5), ([0], 2.0, 5.0), ([1, 2], 3.0, 7.5), ([0, 2], 4.0, 8.0)]
    assert plan_within(plans["portfolio"], "portfolio", 3.99).objective == 7.5
    with pytest.raises(ConfigError, match=r"cheapest plan of portfolio takes 1 FLOPs per host, .* budget of 0; raise"):
        plan_within(plans["portfolio"], "portfolio", 0.5)


def test_a_halving_stops_where_the_end_can_be_told() -> None:
    # ten steps; who leads from step 3 on wins, so a rung there costs 3 + 10 steps instead of 20
    rising, late = np.linspace(0.0, 9.0, 10), np.r_[9.0, 9.0, np.full(8, 1.0)]
    worth = np.stack([np.stack([rising, late], axis=1), np.stack([late, rising], axis=1)])
    each = np.ones_like(worth)
    best = best_plans(Curves(worth, each, np.zeros((2, 2))), [Architecture(), NORM])["halving"][-1]
    assert (best.rungs, best.flops, best.objective) == ((3,), 13.0, 9.0)
    assert best.words == "2 structures, the worse half stops at step 3: none; r0c0 norm"


def test_the_plans_that_come_with_a_task_fit_it_and_rise_with_their_cost() -> None:
    tasks = [task for task in map(task_by_name, task_names()) if task.plans is not None]
    assert "mixed_digits" in {task.name for task in tasks}
    for task in tasks:
        for plans in read_plans(task.plans, task.name, task.episode_length).values():
            assert [plan.flops for plan in plans] == sorted(plan.flops for plan in plans)
            assert (np.diff([plan.objective for plan in plans]) >= LEAST_GAIN).all()
            for plan in plans:
                assert all(0 < step < task.episode_length for step in plan.rungs)
                seeds = [seed for structure in plan.structures for seed in structure.slots]
                assert {seed.slot for seed in seeds} <= set(task.enabled)
                assert {seed.blueprint for seed in seeds} <= set(registry.names())


def test_every_host_draws_structures_of_its_own() -> None:
    spec = replace(tiny.engine(1).spec, num_envs=3)
    known = small_structures(spec)
    assert len(known) == 1 + 3 * len(spec.selectable) + 3 * len(spec.selectable) ** 2
    assert known[Architecture.of_lines(["r0c0 norm ADD", "r1c0 norm ADD"])] == ((0, 3), (2, 3))
    passes = list(in_random_order(list(known), spec))
    assert len(passes) == len(known)
    for host in range(3):
        assert len({structures[host] for structures in passes}) == len(passes)
    assert len(set(passes[0])) == 3
    alone = next(in_random_order(list(known), replace(spec, num_envs=1)))
    assert alone == passes[0][:1]  # draws do not depend on the other hosts


def test_plans_come_back_from_their_file_and_are_refused_for_another_task(tmp_path: Path) -> None:
    path = tmp_path / "portfolio.json"
    one = RacePlan(structures=(Architecture(), NORM), rungs=(3, 6), flops=5e8, objective=71.5)
    two = RacePlan(structures=(CONV,), flops=1e9, objective=72.0)
    write_plans(path, {"portfolio": (two,), "halving": (one, two)}, "digits", 30, {"seed": 1})
    assert is_plans(path)
    assert read_plans(path, "digits", 30) == {"portfolio": (two,), "halving": (one, two)}
    with pytest.raises(
        ConfigError, match=r"searched for task 'digits' with 30 steps, .* not hold for 'digits' with 20"
    ):
        read_plans(path, "digits", 20)
    tree = json.loads(path.read_text())
    del tree["halving"][0]["rungs"]
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"does not hold plans of races \(rungs is missing\); use a file"):
        read_plans(path, "digits", 30)
    assert not is_plans(tmp_path / "none.json")
