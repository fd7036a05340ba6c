"""Numbers of rounds and runs, worked out by hand."""

import numpy as np
import pytest
import torch

from esper.leyline.lifecycle import Cause, SeedStage
from esper.runs.assembly.presets import resolve
from esper.runs.report import Cost, RoundSoFar, ops_by_name, round_line, shapley_of, slots_by_stage, summary
from esper.simic.rewards.reward_config import RewardConfig
from esper.tolaria.state import RolloutCost, RolloutStats, StepReport

NAN = float("nan")
WEIGHTS = RewardConfig(mode="objective")


def stats(**changes: object) -> RolloutStats:
    """Two hosts with two slots; host 0 holds a fossil of share 4 and a blending seed of share 2."""
    fields: dict[str, object] = {
        "episode": 4,
        "returns": np.array([1.0, 2.0]),
        "val_acc": np.array([50.0, NAN], dtype=np.float32),
        "committed_acc": np.array([40.0, 60.0], dtype=np.float32),
        "committed_loss": np.array([1.0, 2.0], dtype=np.float32),
        "compute": np.array([1.5, 1.0], dtype=np.float32),
        "fossil_params": np.array([500, 0]),
        "host_params": np.array([1000, 1000]),
        "fossilized": np.array([1, 0]),
        "contributing": np.array([1, 0]),
        "germinated": np.array([2, 1]),
        "pruned": np.array([0, 1]),
        "rollbacks": np.array([0, 3]),
        "ops": np.array([[5, 2, 0, 0, 1, 0], [6, 1, 0, 1, 0, 0]]),
        "refused": np.array([1, 0]),
        "stage": np.array([[SeedStage.FOSSILIZED, SeedStage.BLENDING], [SeedStage.DORMANT, SeedStage.EMBARGOED]]),
        "blueprint": np.array([[1, 3], [-1, -1]]),
        "algorithm": np.array([[3, 1], [0, 0]]),
        "flags": np.array([[0, 0], [0, 0]]),
        "alpha": np.array([[1.0, 0.5], [0.0, 0.0]], dtype=np.float32),
        "subset_acc": np.array([[44.0, 48.0, 46.0, 50.0], [60.0, NAN, NAN, NAN]], dtype=np.float32),
        "cost": RolloutCost(seconds=2.0, steps=8, env_steps=16, reads=8),
    }
    return RolloutStats(**(fields | changes))  # type: ignore[arg-type]


def step(**changes: object) -> StepReport:
    """A step of two hosts with two slots in which nothing happened."""
    zeros, none = np.zeros((2, 2)), np.zeros((3, 2, 2), dtype=np.int64)
    fields: dict[str, object] = {
        "episode": 0,
        "t": 1,
        "stage": np.full((2, 2), int(SeedStage.DORMANT)),
        "serial": np.zeros((2, 2), dtype=np.int64),
        "blueprint": np.full((2, 2), -1),
        "alpha": zeros,
        "contribution": np.full((2, 2), NAN),
        "val_acc": np.array([50.0, 60.0]),
        "val_loss": np.array([1.0, 1.0]),
        "train_loss": np.array([1.0, 1.0]),
        "committed_acc": np.array([40.0, 60.0]),
        "compute": np.array([1.0, 1.0]),
        "params": np.array([[0, 0], [0, 200]]),
        "host_params": np.array([1000, 1000]),
        "num_coalitions": np.array([1, 4]),
        "reward": np.array([0.5, 1.5]),
        "breakdown": np.array([[0.5, 0.0], [2.0, -0.5]]),
        "flags": np.array([[False, False], [False, True]]),
        "value": np.array([0.25, -1.0]),
        "op_prob": np.array([[1.0, 0, 0, 0, 0, 0], [0.25, 0.5, 0, 0.25, 0, 0]]),
        "constrained": np.zeros((2, 8), dtype=np.bool_),
        "train_acc": np.array([45.0, 55.0]),
        "measured_sets": np.array([[[False, False], [False, False]], [[False, True], [False, False]]]),
        "measured_valid": np.array([[True, False], [True, True]]),
        "measured_acc": np.array([[50.0, 0.0], [60.0, 40.0]]),
        "row_marked": np.array([False, False]),
        "stopped": np.array([False, False]),
        "actions": np.zeros((2, 8), dtype=np.int64),
        "effective_op": np.array([0, 1]),
        "panic_reason": np.array([0, 0]),
        "panic_loss": np.array([1.0, 1.0]),
        "panic_strikes": np.array([0, 0]),
        "panic_thresholds": np.zeros((2, 3)),
        "op_moves": none,
        "tick_moves": none,
        "gate": np.zeros((2, 2), dtype=np.int64),
        "gate_passed": np.zeros((2, 2), dtype=np.bool_),
        "gate_score": np.zeros((2, 2)),
        "failed_checks": np.zeros((2, 2), dtype=np.int64),
        "rolled_back": np.zeros((2, 2), dtype=np.bool_),
    }
    given = fields | changes
    given["reward"] = np.where(given["panic_reason"] == 0, given["reward"], NAN)  # who was rolled back decides nothing
    return StepReport(**given)  # type: ignore[arg-type]


def test_shapley_values_stand_in_the_slots_of_their_seeds() -> None:
    # seed 0: ((48 - 44) + (50 - 46)) / 2 = 4; seed 1: ((46 - 44) + (50 - 48)) / 2 = 2
    np.testing.assert_allclose(shapley_of(stats()), [[4.0, 2.0], [NAN, NAN]])
    nothing = shapley_of(stats(subset_acc=np.zeros((2, 0), dtype=np.float32)))
    assert nothing.shape == (2, 2)
    assert np.isnan(nothing).all()


def test_shapley_values_skip_the_slots_without_a_live_seed() -> None:
    stage, alpha = np.full((1, 3), int(SeedStage.FOSSILIZED)), np.array([[1.0, 0.0, 1.0]], dtype=np.float32)
    subsets = np.array([[50.0, 60.0, 55.0, 75.0, NAN, NAN, NAN, NAN]], dtype=np.float32)
    np.testing.assert_allclose(shapley_of(stats(stage=stage, alpha=alpha, subset_acc=subsets)), [[15.0, NAN, 10.0]])


def test_hosts_with_more_seeds_than_subsets_or_with_a_missing_one_have_no_shapley_values() -> None:
    stage, alpha = np.full((3, 2), int(SeedStage.FOSSILIZED)), np.ones((3, 2), dtype=np.float32)
    subsets = np.array([[50.0, NAN, 55.0, 75.0], [50.0, 60.0, 55.0, 75.0], [50.0, 60.0, 55.0, 75.0]], dtype=np.float32)
    found = shapley_of(stats(stage=stage, alpha=alpha, subset_acc=subsets))
    np.testing.assert_allclose(found, [[NAN, NAN], [15.0, 10.0], [15.0, 10.0]])
    assert np.isnan(shapley_of(stats(stage=stage, alpha=alpha, subset_acc=subsets[:, :2]))).all()


def test_a_round_is_a_line_of_means_over_its_hosts() -> None:
    cost = Cost(env_steps=32, steps=16, reads=16, seconds=4.0, update_seconds=1.0)
    line = round_line(stats(), cost, {"lr": 0.1}, WEIGHTS)
    assert line["round"] == 5
    # 100·J is 40 - 3 ln(1.5) = 38.7836 and 60: the host that was rolled back counts
    assert line["objective_mean"] == pytest.approx(49.3918, abs=1e-4)
    assert line["objective_std"] == pytest.approx(21.2164 / 2**0.5, abs=1e-4)
    assert line["committed_accuracy_mean"] == 50.0
    assert line["live_accuracy_mean"] == 50.0  # the host that was rolled back has none
    assert line["shaped_return"] == 1.5
    assert line["growth_ratio_mean"] == 1.25
    assert line["shapley_mean"] == 3.0
    assert (line["fossilized_mean"], line["germinated_mean"], line["pruned_mean"]) == (0.5, 1.5, 0.5)
    assert (line["refused_mean"], line["rollbacks"]) == (0.5, 3)
    assert (line["env_steps"], line["host_reads"]) == (32, 16)  # of the whole round, not of this process's part
    assert line["lr"] == 0.1


def test_what_is_shown_of_a_round_counts_its_steps_without_those_that_were_rolled_back() -> None:
    so_far = RoundSoFar(WEIGHTS)
    (first,) = so_far.add([step()], [0.5])
    assert first["objective_mean"] == 50.0  # of 40 and 60; the seed of 200 parameters is no fossil
    assert first["objective_std"] == pytest.approx(20 / 2**0.5)
    broken = step(
        t=2, panic_reason=np.array([0, 1]), val_acc=np.array([51.0, NAN]), committed_acc=np.array([40.0, NAN])
    )
    (shown,) = so_far.add([broken], [1.0])
    assert (shown["objective_mean"], shown["committed_accuracy_mean"], shown["live_accuracy_mean"]) == (40, 40, 51)
    assert np.isnan(shown["objective_std"])  # of one host
    assert shown["ops"] == ops_by_name(np.array([2, 1, 0, 0, 0, 0]))
    assert (shown["round"], shown["t"], shown["env_steps"], shown["seconds"]) == (1, 2, 4, 1.0)
    (fresh,) = so_far.add([step(episode=1)], [0.1])
    assert (fresh["round"], fresh["ops"]["WAIT"], fresh["env_steps"]) == (2, 1, 2)


def test_a_fossil_is_charged_from_the_step_on_in_which_accuracy_is_measured_with_it() -> None:
    fossil = np.array([[SeedStage.DORMANT] * 2, [SeedStage.DORMANT, SeedStage.FOSSILIZED]])
    moves = np.zeros((3, 2, 2), dtype=np.int64)
    moves[:, 1, 1] = (SeedStage.HOLDING, SeedStage.FOSSILIZED, Cause.OP)
    new, old = step(t=3, stage=fossil, op_moves=moves), step(t=4, stage=fossil)
    assert (new.committed_params.tolist(), old.committed_params.tolist()) == ([0, 0], [0, 200])
    assert new.total_params.tolist() == [1000, 1200]
    shown = RoundSoFar(WEIGHTS).add([new, old], [0.1, 0.2])
    # 3 ln(1.2) = 0.54696, half of it in the mean of two hosts
    assert [record["objective_mean"] for record in shown] == [50.0, pytest.approx(49.72652, abs=1e-5)]


def test_steps_that_are_told_together_are_shown_as_those_that_are_told_alone() -> None:
    stages = [SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.DORMANT]
    steps = [
        step(
            t=t,
            reward=np.array([0.1 * t, -0.3]),
            effective_op=np.array([t % 6, 1]),
            panic_reason=np.array([0, t % 2]),
            val_acc=np.array([NAN, 50.0 + t]),
            committed_acc=np.array([NAN, NAN if t == 4 else 1.0]),
            stage=np.array([[stages[t % 3], SeedStage.TRAINING], [SeedStage.DORMANT, stages[(t + 1) % 3]]]),
        )
        for t in range(1, 8)
    ]
    alone = RoundSoFar(WEIGHTS)
    expected = [alone.add([one], [one.t / 4])[0] for one in steps]
    assert expected[2]["slots"] == slots_by_stage(steps[2].stage)
    together = RoundSoFar(WEIGHTS)
    found = together.add(steps[:2], [0.25, 0.5]) + together.add(steps[2:], [t / 4 for t in range(3, 8)])
    for one, other in zip(found, expected, strict=True):
        assert [one.pop(name) for name in ("ops", "slots")] == [other.pop(name) for name in ("ops", "slots")]
        assert one == pytest.approx(other, nan_ok=True)
    assert np.isnan(expected[3]["committed_accuracy_mean"])  # nobody has one


def test_a_summary_is_of_the_whole_run() -> None:
    config = resolve({"task": "null", "rounds": 5, "num_envs": 2, "episode_length": 8})
    total = Cost(env_steps=80, steps=40, reads=40, seconds=3.0, update_seconds=1.0)
    found = summary(config, torch.device("cpu"), stats(), np.array([30.0, 50.0]), total, "abc")
    assert found["env_steps"] == 5 * 2 * 8
    assert found["env_steps_per_second"] == pytest.approx(20.0)
    assert found["final_objective_mean"] == pytest.approx(49.3918, abs=1e-4)
    assert found["final_objective_std"] == pytest.approx(21.2164 / 2**0.5, abs=1e-4)
    assert found["final_committed_accuracy_mean"] == 50.0
    assert found["final_test_accuracy_mean"] == 40.0
    assert found["final_perplexity"] is None
    assert found["growth_ratio_mean"] == 1.25
    assert found["host_reads_per_step"] == 1.0
    assert (found["task"], found["preset"], found["seed"], found["device"]) == ("null", "quickstart", 0, "cpu")
    assert found["state_digest"] == "abc"
    assert found["torch"] == torch.__version__
