"""What an episode leaves is measured once, after its last step: fossils of that step count, and so does every host."""

import dataclasses

import numpy as np
import pytest
import torch

import tiny
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.lifecycle import LifecycleOp
from esper.runs.report import objective_of
from esper.simic.rewards.objective import objective_value
from esper.simic.rewards.reward_config import RewardConfig
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.governor import GovernorConfig
from toys import ToyClient, WithFaults, action, script

Op = LifecycleOp
E = 6
BOTTLENECK, CONV_HEAVY = 5, 7
FAST_SEEDS = OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.5)  # they change the accuracy of their host by far


def episode(engine, blueprint):
    """A seed of host 0 is fossilized in the last step, one of host 1 is only held."""
    born = action(Op.GERMINATE, slot=2, blueprint=blueprint, style=0, tempo=0, alpha_target=2)
    plan = {1: {0: born, 1: born}, E: {0: action(Op.FOSSILIZE, slot=2)}}
    client = ToyClient(engine.spec, script(engine.spec.num_envs, E, plan))
    engine.reset(client, 0)
    return client, engine.rollout(client)


@pytest.mark.parametrize("executor", ["streamed", "fused", "native"])
def test_a_fossil_and_a_rollback_of_the_last_step_are_in_what_is_kept(executor):
    reports = []
    task, rules = tiny.task(optimizer=FAST_SEEDS), GovernorConfig(snapshot_every=4)
    inner = tiny.engine(3, E, of=task, governor=rules, executor=executor)
    faulty = WithFaults(inner.executor, {E: {2: float("nan")}})
    engine = VectorizedEngine(inner.config, faulty, inner.spec, on_step=reports.append)
    client, stats = episode(engine, CONV_HEAVY)
    live = [report.val_acc for report in reports]
    # 0: all of the seed was active when the step was measured, and committed accuracy was still that of the host alone
    assert stats.fossilized.tolist() == [1, 0, 0]
    assert stats.committed_acc[0] == live[-1][0] != reports[-1].committed_acc[0]
    # 1: its seed is held, and no part of what is kept
    assert stats.committed_acc[1] == reports[-1].committed_acc[1]
    # 2: has no live accuracy in its last step, and went back to what it was after step 4
    assert np.isnan(stats.val_acc[2])
    assert stats.committed_acc[2] == live[3][2] != live[4][2]
    # growth is of the same networks, and the client gets them too
    host, seed = inner.executor.host_params, int(reports[-1].params[0, 2])
    assert stats.growth.tolist() == [1.0 + seed / host, 1.0, 1.0]
    assert client.calls[-1] == "finish"
    assert client.kept.accuracy.tolist() == stats.committed_acc.tolist()
    assert (client.kept.fossil_params.tolist(), client.kept.host_params.tolist()) == ([seed, 0, 0], [host] * 3)


def test_the_scripted_hosts_come_to_the_accuracies_of_their_formula():
    script_with_a_fault = NullSpec(faults=(Fault(host=1, t=E, loss=float("nan")),))
    engine = tiny.engine(2, E, of=dataclasses.replace(NULL, script=script_with_a_fault))
    _, stats = episode(engine, BOTTLENECK)
    # the host alone: 50 (1 - e^-0.6) = 22.559418; five passes of the seed: 6 (1 - e^-0.5) = 2.360816
    assert stats.committed_acc.tolist() == pytest.approx([24.920234, 22.559418], abs=1e-5)
    assert stats.growth.tolist() == [1.088, 1.0]  # 880 parameters on 10 000
    assert np.isnan(stats.val_acc).tolist() == [False, True]
    # five passes of the seed, each 880 of 10 000 parameters, in six steps
    assert stats.compute.tolist() == pytest.approx([1 + 5 * 0.088 / 6] * 2)
    # 100·J = 24.920234 - 3 ln(1.088) = 24.920234 - 0.253026
    found = objective_of(stats, RewardConfig(mode="sparse"))
    assert found.tolist() == pytest.approx([24.667208, 22.559418], abs=1e-5)
    assert engine.test().tolist() == pytest.approx(stats.committed_acc.tolist())


@pytest.mark.parametrize("executor", ["scripted", "streamed", "fused", "native"])
def test_the_episode_of_a_host_ends_when_it_has_spent_its_compute(executor):
    # host 0 grows in step 1, which costs more from step 2 on; half of what six steps of a host alone cost is allowed
    reports, of_null = [], executor == "scripted"
    task = NULL if of_null else tiny.task(optimizer=FAST_SEEDS)
    how = {"on_step": reports.append} | ({} if of_null else {"executor": executor})
    engine = tiny.engine(2, E, of=task, compute_budget=0.5, **how)
    born = action(Op.GERMINATE, slot=2, blueprint=CONV_HEAVY, style=0, tempo=0, alpha_target=2)
    client = ToyClient(engine.spec, script(2, E, {1: {0: born}}))
    engine.reset(client, 0)
    stats = engine.rollout(client)
    costs = engine.executor.costs
    step = 1 + int(costs.seed_flops[2, CONV_HEAVY]) / int(costs.host_flops)
    assert 1 < step < 2
    assert stats.compute.tolist() == pytest.approx([(1 + step) / E, 0.5])  # a third step of host 0 would cost too much
    assert [report.stopped.tolist() for report in reports] == [[False] * 2, [True, False], *[[True, True]] * 4]
    assert [np.isnan(report.reward).tolist() for report in reports] == [[False] * 2] * 2 + [[True, False]] + [
        [True] * 2
    ] * 3
    assert all((report.num_coalitions > 0).tolist() == (~np.isnan(report.reward)).tolist() for report in reports)
    assert stats.ops.sum(axis=1).tolist() == [2, 3]
    assert not client.steps[2].obs.legal[0, 1:].any()
    assert stats.fossilized.tolist() == [0, 0]  # the last step is not theirs
    assert client.kept.compute.tolist() == stats.compute.tolist()
    if of_null:  # 50 (1 - e^-0.2) and 50 (1 - e^-0.3)
        assert stats.committed_acc.tolist() == pytest.approx([9.063462, 12.959089])
    else:
        alone = tiny.engine(2, 3, of=task, executor=executor)
        alone.reset(ToyClient(alone.spec), 0)
        # a seed that is hidden changes nothing: host 0 after two steps, host 1 after three
        three = alone.rollout(ToyClient(alone.spec))
        assert stats.committed_acc[1] == three.committed_acc[1]
        assert stats.committed_acc[0] == pytest.approx(reports[1].committed_acc[0])
    assert engine.test().isfinite().all()


def test_the_noise_of_the_last_step_is_in_the_validation_accuracy_and_not_in_that_of_the_test():
    engine = tiny.engine(2, E, of=dataclasses.replace(NULL, script=NullSpec(sigma=2.0)))
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    stats = engine.rollout(client)
    assert stats.committed_acc.tolist() == stats.val_acc.tolist()
    assert len(set(stats.committed_acc.tolist())) == 2
    assert engine.test().tolist() == pytest.approx([22.559418] * 2)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_j_is_accuracy_less_the_prices_of_growth_and_of_compute(kind):
    columns = [np.array(x) for x in ([80.0, 80.0, 50.0], [0, 1000, 100], [1000, 1000, 50], [1.0, 4.0, 1.5])]
    given = columns if kind == "numpy" else [torch.from_numpy(x) for x in columns]
    # 0.03 ln 2 = 0.0207944; hosts count as 200 parameters at least: 0.03 ln 1.5 = 0.0121640
    found = objective_value(*given, RewardConfig())
    assert found.tolist() == pytest.approx([0.8, 0.7792056, 0.4878360], abs=1e-7)
    dear = RewardConfig(objective_acc_weight=2.0, objective_growth_weight=0.1, rent_host_params_floor=100.0)
    # 0.1 ln 2 = 0.0693147 twice
    assert objective_value(*given, dear).tolist() == pytest.approx([1.6, 1.5306853, 0.9306853], abs=1e-7)
    # half a point for each doubling: 0, 2 and log2 1.5 = 0.5849625 of them
    found = objective_value(*given, RewardConfig(objective_flops_weight=0.5))
    assert found.tolist() == pytest.approx([0.8, 0.7692056, 0.4849112], abs=1e-7)
