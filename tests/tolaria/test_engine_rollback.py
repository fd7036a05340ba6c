"""A host in panic inside a running engine: its transition, its seeds, its weights, and the hosts beside it."""

import dataclasses

import pytest
import torch

import tiny
from esper.leyline.lifecycle import LifecycleOp, SeedStage
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.governor import PanicReason
from tiny import same_tree
from toys import PENALTY, ToyClient, WithFaults, action, script

Op, S = LifecycleOp, SeedStage
NAN = float("nan")
E, WIDTH = 6, 64


def null_engine(*faults, num_envs=2, episode_length=E, **settings):
    task = dataclasses.replace(NULL, script=NullSpec(faults=tuple(Fault(*fault) for fault in faults)))
    return tiny.engine(num_envs, episode_length, of=task, **settings)


def run(engine, actions=None):
    client = ToyClient(engine.spec, actions)
    engine.reset(client, 0)
    return client, engine.rollout(client)


# -- the transition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 3, E])
def test_the_step_of_a_panic_is_no_transition_and_the_one_before_it_is_told(t):
    engine = null_engine((1, t, NAN))
    client, _ = run(engine, script(2, E, {t: action(Op.GERMINATE)}))
    for step in client.steps:
        assert step.valid.tolist() == [True, step.t != t]
        assert step.truncated.tolist() == [step.t == E, step.t == E and t != E]
    masks = [mask.tolist() for mask, _ in client.rollbacks]
    assert masks == [[False, step == t] for step in range(1, E + 1)]
    assert client.rollbacks[t - 1][1][1].item() == PENALTY - (t - 1)  # as many steps as this segment had
    step = client.steps[t - 1]
    assert step.effective_op.tolist() == [Op.GERMINATE, Op.WAIT]
    assert step.bootstrap_value[1] == 0.0
    assert engine.state.slots.stage[1].tolist() == [S.DORMANT] * 3
    # the recurrent state starts anew in the step after
    assert [s.act.value[1].item() for s in client.steps] == [*range(1, t + 1), *range(1, E - t + 1)]


@pytest.mark.parametrize("t", [1, 3, E])
def test_where_time_truly_ends_a_panic_in_the_last_step_is_no_end(t):
    client, _ = run(null_engine((1, t, NAN), time_limit="terminate"))
    for step in client.steps:
        assert step.terminal.tolist() == [step.t == E, step.t == E and t != E]
        assert step.valid.tolist() == [True, step.t != t]
        assert not step.truncated.any()
        assert not step.bootstrap_value.any()
    assert client.bootstraps == []


def test_the_carry_of_the_reward_begins_anew_with_the_segment():
    client, stats = run(null_engine((1, 3, NAN), (1, 4, NAN), (1, 6, NAN)))
    assert [reward[1].item() for mask, reward in client.rollbacks if mask[1]] == [-7.0 - 2, -7.0, -7.0 - 1]
    assert stats.rollbacks.tolist() == [0, 3]


def test_the_return_counts_the_penalty_once_in_place_of_the_last_valid_reward():
    client, stats = run(null_engine((1, 1, NAN), (1, 3, NAN), (1, 4, NAN)))
    paid = [step.reward[1].item() for step in client.steps]
    # 1 has no row before it; 3 replaces the reward of 2; 4 has no row in its segment
    assert stats.returns[1] == pytest.approx(-7.0 - 1 + paid[4] + paid[5])
    assert stats.returns[0] == pytest.approx(sum(step.reward[0].item() for step in client.steps))


def test_a_host_in_panic_has_no_past_in_the_next_step():
    client, _ = run(null_engine((1, 3, NAN)))
    for t, missing in ((3, True), (4, False)):
        hosts = client.steps[t - 1].obs.hosts
        assert bool(hosts.val_acc[1].isnan()) is missing
        assert bool(hosts.prev_val_acc[1].isnan())
        assert not bool(hosts.val_acc[0].isnan() | hosts.prev_val_acc[0].isnan())
    after = client.steps[3].obs.hosts
    assert (after.segment.tolist(), after.last_op.tolist()) == ([0, 1], [0, 0])
    assert after.last_success.tolist() == [True, False]
    assert after.acc_hist[1].isnan().tolist() == [True] * 4 + [False]


def test_the_report_tells_why_and_at_which_strike():
    reports = []
    losses = [(1, t, 12.0) for t in (12, 13, 14)]  # above 5 ln 10, above mean + 6 std, above 3 means
    run(null_engine(*losses, episode_length=15, on_step=reports.append))
    assert [report.panic_reason.tolist() for report in reports[10:]] == [
        [0, 0], [0, 0], [0, 0], [0, PanicReason.DIVERGENCE], [0, 0],
    ]  # fmt: skip
    assert [report.panic_strikes[1] for report in reports[10:]] == [0, 1, 2, 3, 0]
    report = reports[13]
    assert report.panic_loss[1] == 12.0
    assert report.panic_thresholds[1, 0] == pytest.approx(11.512925)
    assert (report.panic_thresholds[1] < 12.0).all()


# -- seeds and weights ----------------------------------------------------------------------------------------------


def slow_life(t):
    """Born in 1, held in 6, fossilized in `t`; a second seed is born in 7."""
    return {
        1: action(Op.GERMINATE, slot=0, tempo=0, style=0, alpha_target=2),
        t: action(Op.FOSSILIZE, slot=0),
        7: action(Op.GERMINATE, slot=1, tempo=0, style=3, alpha_target=2),
    }


def trained_run(faults, plan, length, watch=(), executor="streamed"):
    """An engine of the tiny task; copies of the population's state after the steps in `watch`."""
    inner = tiny.engine(2, length, executor=executor)
    engine = VectorizedEngine(inner.config, WithFaults(inner.executor, faults), inner.spec)
    client, seen = ToyClient(engine.spec, script(2, length, plan)), {}
    engine.reset(client, 0)
    for t in range(1, length + 1):
        engine.step(client)
        if t in watch:
            engine.apply_structure()
            seen[t] = {name: x.clone() for name, x in inner.executor.population.state_dict().items()}
    return engine, client, seen


def rows_of(tree, host, *, kept=False):
    """The part of a population's state that belongs to one host."""
    found = {}
    for name, x in tree.items():
        if name.startswith("kept") == kept:
            size = 1 if "host" in name else 3
            found[name.removeprefix("kept_")] = x[host * size : (host + 1) * size]
    return found


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_rollback_restores_host_and_fossil_to_the_bit_and_destroys_the_growing_seed(executor):
    # host 1 breaks in step 9; both were kept in step 6, when the fossil came
    engine, client, seen = trained_run({9: {1: NAN}}, slow_life(6), 10, watch=(6, 8, 9), executor=executor)
    assert client.steps[8].obs.slots.stage.tolist() == [[7, 4, 1], [7, 8, 1]]
    assert engine.state.slots.stage.tolist()[1] == [S.FOSSILIZED, S.EMBARGOED, S.DORMANT]
    before, broken, after = (rows_of(seen[t], 1) for t in (6, 8, 9))
    for name in ("host.params", "host.buffers"):
        assert torch.equal(after[name], before[name]), name
        assert not torch.equal(broken[name], before[name]), name
    for name in ("seeds.params", "seeds.buffers", "gates.params"):
        assert torch.equal(after[name][0], before[name][0]), name
        assert not after[name][1:].any(), name
    assert bool(broken["seeds.params"][1].any() & broken["gates.params"][1].any())
    for name in ("host.momentum", "seeds.momentum", "gates.momentum"):
        assert not after[name].any(), name
    assert bool(broken["host.momentum"].any() & broken["seeds.momentum"][0].any())
    # the next pass trains host and fossil again
    engine.apply_structure()
    now = rows_of(engine.executor.executor.population.state_dict(), 1)
    assert not torch.equal(now["host.params"], after["host.params"])
    assert not torch.equal(now["seeds.params"][0], after["seeds.params"][0])


def test_a_host_in_panic_changes_no_bit_of_its_neighbour():
    broken, _, seen = trained_run({4: {1: NAN}, 9: {1: NAN}}, slow_life(6), 10, watch=(9, 10))
    whole, _, wanted = trained_run({}, slow_life(6), 10, watch=(9, 10))
    for t in (9, 10):
        assert same_tree(rows_of(seen[t], 0), rows_of(wanted[t], 0))
        assert same_tree(rows_of(seen[t], 0, kept=True), rows_of(wanted[t], 0, kept=True))
    for a, b in ((broken.state.slots, whole.state.slots), (broken.state.hosts, whole.state.hosts)):
        for name in vars(a):
            assert tiny.bit_equal(getattr(a, name)[0], getattr(b, name)[0]), name


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_fossil_that_came_under_suspicion_joins_the_older_snapshot_alone(executor):
    # ten healthy steps are the past; a strike in 12, when the seed is fossilized, and the end in 14
    plan = {1: action(Op.GERMINATE, tempo=0, style=0, alpha_target=2), 12: action(Op.FOSSILIZE)}
    faults = {12: {1: 100.0}, 13: {1: 100.0}, 14: {1: NAN}}
    engine, client, seen = trained_run(faults, plan, 14, watch=(10, 12, 14), executor=executor)
    assert client.steps[11].valid.tolist() == [True, True]
    assert engine.state.slots.stage[1].tolist() == [S.FOSSILIZED, S.DORMANT, S.DORMANT]
    kept, fossil, after = rows_of(seen[10], 1), rows_of(seen[12], 1), rows_of(seen[14], 1)
    assert torch.equal(after["host.params"], kept["host.params"])
    assert not torch.equal(fossil["host.params"], kept["host.params"])
    assert torch.equal(after["seeds.params"][0], fossil["seeds.params"][0])
    assert not torch.equal(fossil["seeds.params"][0], kept["seeds.params"][0])
