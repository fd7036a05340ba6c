"""The engine: the order of a step, what it shows and pays, what it reports, and how it ends."""

import pytest

import tiny
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily, LifecycleOp, SeedStage
from esper.leyline.messages import EngineSpec
from esper.tasks.registry import task_by_name
from esper.telemetry.record.schema import shapley_values
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.engine_config import EngineConfig
from toys import ToyClient, ToyExecutor, action, ops_of, script

import esper.tasks.presets  # noqa: F401  isort: skip

Op, S = LifecycleOp, SeedStage
QUICK = LifecycleConfig(min_training_epochs=1, min_prune_age=1)
NULL = task_by_name("null")
LINEAR_FULL = {"style": 0, "alpha_target": 2}


def toy_engine(num_envs=2, num_slots=3, episode_length=4, *, losses=None, calls=None, on_step=None, **config):
    slots = tuple(f"r0c{i}" for i in range(num_slots))
    settings = {"num_envs": num_envs, "episode_length": episode_length, "slots": slots, "lifecycle": QUICK}
    config = EngineConfig(**{**settings, **config})
    spec = EngineSpec(
        run_seed=0, num_envs=num_envs, slot_ids=slots, episode_length=episode_length, family=HostFamily.CNN,
        selectable=tuple(range(1, 13)), min_training_epochs=1,
    )  # fmt: skip
    executor = ToyExecutor(num_envs, num_slots, losses=losses, calls=calls)
    return VectorizedEngine(config, executor, spec, on_step=on_step)


def null_engine(num_envs=1, episode_length=30, **settings):
    return tiny.engine(num_envs, episode_length, of=NULL, **settings)


def run(engine, actions=None, *, episode=0, **client_settings):
    client = ToyClient(engine.spec, actions, **client_settings)
    engine.reset(client, episode)
    return client, engine.rollout(client)


def observed(client, field, slot=0, host=0):
    """The field of one slot as seen in each step."""
    return [getattr(step.obs.slots, field)[host, slot].item() for step in client.steps]


# -- the order of things --------------------------------------------------------------------------------------------


def test_the_phases_of_a_step_come_in_their_order():
    calls = []
    engine = toy_engine(episode_length=2, calls=calls, on_step=lambda report: calls.append(f"report {report.t}"))
    client = ToyClient(engine.spec, calls=calls)
    calls.clear()
    engine.reset(client, 0)
    assert calls == ["reset", "begin_rollout"]
    first = ["train_epoch", "evaluate", "rollback_reward", "rollback", "act", "step", "reset_hosts", "store"]
    last = [*first[:-1], "bootstrap", "store"]
    calls.clear()
    engine.rollout(client)
    assert calls == [
        *first,
        "apply_structure",
        "report 1",
        *last,
        "apply_structure",
        "report 2",
        "committed val",
        "finish",
    ]


def test_a_round_is_an_episode_and_one_update():
    engine, rounds = toy_engine(episode_length=3), []
    client = ToyClient(engine.spec)
    client.calls.clear()
    done = engine.train(client, range(2), on_round=lambda stats, metrics: rounds.append((stats.episode, dict(metrics))))
    assert done
    assert rounds == [(0, {"steps": 3.0}), (1, {"steps": 3.0})]
    assert [call for call in client.calls if call in ("begin_rollout", "update")] == ["begin_rollout", "update"] * 2
    assert client.episode == 1


def test_training_stops_after_a_step_or_a_round_and_goes_on_where_it_stopped():
    engine = toy_engine(episode_length=3)
    client, asked = ToyClient(engine.spec), []

    def after(n):
        return lambda: asked.append(0) or len(asked) >= n

    ignore = lambda stats, metrics: None  # noqa: E731
    assert not engine.train(client, range(2), on_round=ignore, should_stop=after(2))
    assert (engine.episode, engine.t) == (0, 2)
    asked.clear()
    assert not engine.train(client, range(2), on_round=ignore, should_stop=after(1))
    assert (engine.episode, engine.t, len(client.steps)) == (0, 3, 3)
    assert engine.train(client, range(1, 2), on_round=ignore)
    assert (engine.episode, engine.t) == (1, 3)


def test_a_step_after_the_last_one_is_refused():
    engine = toy_engine(episode_length=2)
    client, _ = run(engine)
    with pytest.raises(AssertionError, match="the episode is over"):
        engine.step(client)


# -- what is shown, rewarded and reported ---------------------------------------------------------------------------


def test_the_reward_sees_the_state_before_the_op_and_what_became_of_it():
    grow = action(Op.GERMINATE, slot=1)
    client, _ = run(toy_engine(2, 3, 3), script(2, 3, {2: {1: grow}}))
    paid, stored = client.inputs[1], client.steps[1]
    assert (paid.epoch, paid.max_epochs) == (2, 3)
    assert paid.slots.stage[1].tolist() == [S.DORMANT] * 3
    assert paid.slots is stored.obs.slots
    assert paid.hosts is stored.obs.hosts
    assert paid.hosts.val_acc.tolist() == [10.0, 10.0]
    assert (paid.ops.tolist(), paid.target.tolist(), paid.success.tolist()) == ([0, 1], [0, 1], [True, True])
    assert stored.reward.tolist() == pytest.approx([0.1, 0.35])
    assert client.steps[2].obs.slots.stage[1, 1] == S.TRAINING
    assert client.steps[2].obs.hosts.last_op.tolist() == [0, 1]


def test_an_illegal_op_changes_nothing_and_is_counted():
    client, stats = run(toy_engine(1, 2, 3), script(1, 3, {1: action(Op.FOSSILIZE), 2: action(Op.PRUNE, slot=1)}))
    assert ops_of(client) == [[0], [0], [0]]
    assert observed(client, "stage") == [S.DORMANT] * 3
    assert [step.obs.hosts.last_success.tolist() for step in client.steps] == [[True], [False], [False]]
    assert stats.refused.tolist() == [2]
    assert stats.ops.tolist() == [[3, 0, 0, 0, 0, 0]]


def test_a_restart_forgets_the_last_episode():
    engine = toy_engine(1, 2, 6)
    grow = script(1, 6, {1: action(Op.GERMINATE)})
    first, stats = run(engine, grow)
    again, stats_again = run(engine, grow, episode=1)
    assert observed(again, "stage") == observed(first, "stage")
    assert stats_again.returns.tolist() == stats.returns.tolist()
    assert (stats.episode, stats_again.episode) == (0, 1)


def test_the_statistics_of_an_episode_are_those_of_its_end():
    # born in 1, active from 4 on (FAST), held in 6, fossilized there; slot 1 is born in 3, pruned in 4
    plan = {
        1: action(Op.GERMINATE, slot=0, tempo=0, **LINEAR_FULL),
        3: action(Op.GERMINATE, slot=1, tempo=0, **LINEAR_FULL),
        4: action(Op.PRUNE, slot=1, alpha_speed=0),
        6: action(Op.FOSSILIZE, slot=0),
    }
    client, stats = run(toy_engine(1, 2, 7), script(1, 7, plan))
    assert ops_of(client) == [[1], [0], [1], [3], [0], [4], [0]]
    assert observed(client, "stage") == [1, 3, 4, 4, 4, 6, 7]
    assert (stats.germinated.tolist(), stats.pruned.tolist(), stats.fossilized.tolist()) == ([2], [1], [1])
    assert stats.contributing.tolist() == [1]
    assert stats.growth.tolist() == pytest.approx([105 / 100])  # a seed of 5 parameters on a host of 100
    assert stats.val_acc.tolist() == [11.0]
    assert stats.committed_acc.tolist() == [11.0]
    assert stats.returns.tolist() == pytest.approx([sum(step.reward.item() for step in client.steps)])
    assert stats.stage.tolist() == [[S.FOSSILIZED, S.EMBARGOED]]
    assert (stats.cost.steps, stats.cost.env_steps, stats.cost.reads) == (7, 7, 7)


def test_a_listener_hears_of_every_step_what_the_device_held():
    reports = []
    engine = toy_engine(2, 2, 4, on_step=reports.append)
    client, _ = run(engine, script(2, 4, {1: {0: action(Op.GERMINATE, slot=1, blueprint=4)}}))
    assert [report.t for report in reports] == [1, 2, 3, 4]
    first = reports[0]
    assert first.actions.tolist() == client.steps[0].act.actions.tolist()
    assert first.effective_op.tolist() == [1, 0]
    assert first.stage.tolist() == [[1, S.TRAINING], [1, 1]]
    assert first.blueprint.tolist() == [[-1, 4], [-1, -1]]
    assert first.op_moves[:, 0, 1].tolist() == [1, 2, 1]  # DORMANT, GERMINATED, by op
    assert first.tick_moves[:, 0, 1].tolist() == [2, 3, 2]  # GERMINATED, TRAINING, by itself
    assert (first.gate[0, 1], first.gate_passed[0, 1], first.gate_score[0, 1]) == (1, True, 1.0)
    for report, step in zip(reports, client.steps, strict=True):
        assert report.reward.tolist() == step.reward.tolist()
        assert report.val_acc.tolist() == step.obs.hosts.val_acc.tolist()


def test_a_listener_changes_no_number_and_its_error_surfaces_after_the_step():
    plan = script(2, 6, {1: action(Op.GERMINATE), 4: action(Op.PRUNE)})
    silent, silent_stats = run(toy_engine(2, 2, 6), plan)

    def broken(report):
        for value in vars(report).values():
            if hasattr(value, "fill"):
                with pytest.raises(ValueError, match="read-only"):
                    value.fill(0)
        raise RuntimeError(f"step {report.t}")

    engine = toy_engine(2, 2, 6, on_step=broken)
    engine.timer.enabled = True
    client, active = ToyClient(engine.spec, plan), []
    engine.reset(client, 0)
    for _ in range(20):
        try:
            stats = engine.rollout(client)
            break
        except RuntimeError as error:
            active.append(str(error))
    assert active == [f"step {t}" for t in range(1, 7)]
    assert [s.reward.tolist() for s in client.steps] == [s.reward.tolist() for s in silent.steps]
    assert observed(client, "stage") == observed(silent, "stage")
    assert stats.returns.tolist() == silent_stats.returns.tolist()


# -- the end of an episode ------------------------------------------------------------------------------------------


def test_the_last_step_is_truncated_and_bootstraps_from_the_state_after_its_tick():
    client, _ = run(toy_engine(2, 2, 3), script(2, 3, {3: {0: action(Op.GERMINATE)}}))
    last = client.steps[-1]
    assert [step.truncated.tolist() for step in client.steps] == [[False] * 2] * 2 + [[True] * 2]
    assert not any(step.terminal.any() for step in client.steps)
    (seen,) = client.bootstraps
    assert (seen.t, seen.episode_length) == (3, 3)
    assert seen.slots.stage[:, 0].tolist() == [S.TRAINING, S.DORMANT]  # the op of the last step has worked
    assert seen.hosts.last_op.tolist() == [1, 0]
    assert seen.hosts.val_acc.tolist() == last.obs.hosts.val_acc.tolist()  # nothing is measured again
    assert last.bootstrap_value.tolist() == [3.5, 3.5]  # the recurrent state has counted three steps
    assert client.steps[0].bootstrap_value.tolist() == [0.0, 0.0]


def test_a_time_limit_can_be_a_true_end():
    client, _ = run(toy_engine(2, 2, 3, time_limit="terminate"))
    assert [step.terminal.tolist() for step in client.steps] == [[False] * 2] * 2 + [[True] * 2]
    assert not any(step.truncated.any() for step in client.steps)
    assert client.bootstraps == []
    assert client.steps[-1].bootstrap_value.tolist() == [0.0, 0.0]


def test_every_subset_of_the_live_seeds_is_measured_in_the_last_step_alone():
    # three seeds in slots 0, 2, 3 of four; worth 1, 9, 27 on top of 10
    plan = {t: action(Op.GERMINATE, slot=slot, tempo=0) for t, slot in ((1, 0), (3, 2), (5, 3))}
    engine, widths = toy_engine(1, 4, 12), []
    client = ToyClient(engine.spec, script(1, 12, plan))
    engine.reset(client, 0)
    for _ in range(12):
        engine.step(client)
        widths.append(engine._subset_acc.shape[1])
    stats = engine.rollout(client)
    assert widths == [0] * 11 + [16]  # room for every subset of four
    want = [10.0 + sum(w for r, w in enumerate((1.0, 9.0, 27.0)) if j >> r & 1) for j in range(8)]
    assert stats.subset_acc[0, :8].tolist() == pytest.approx(want)
    assert all(x != x for x in stats.subset_acc[0, 8:].tolist())


# -- timelines of the scripted task ---------------------------------------------------------------------------------


def test_shapley_values_add_up_to_what_all_seeds_together_are_worth():
    plan = {1: action(Op.GERMINATE, slot=0, tempo=0), 3: action(Op.GERMINATE, slot=1, tempo=0, blueprint=5)}
    _, stats = run(null_engine(1, 14), script(1, 14, plan))
    accuracy = stats.subset_acc[0, :4].tolist()
    assert (stats.alpha > 0.0).tolist() == [[True, True, False]]
    assert sum(shapley_values(accuracy)) == pytest.approx(accuracy[3] - accuracy[0])
    assert stats.val_acc.item() == pytest.approx(accuracy[3])


def test_the_test_split_is_closed_until_the_last_step():
    engine = null_engine(episode_length=3)
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    for step in range(3):
        with pytest.raises(ConfigError, match=f"after step {step} of 3; .* Use the validation split before"):
            engine.test()
        engine.step(client)
    assert engine.test().shape == (1,)
    engine.reset(client, 1)
    with pytest.raises(ConfigError, match="after step 0 of 3"):
        engine.test()


def test_an_episode_that_was_ended_early_has_a_test_result_and_no_further_step():
    engine = null_engine(episode_length=3)
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    engine.step(client)
    engine.end_episode()
    assert engine.test().shape == (1,)
    with pytest.raises(AssertionError, match="the episode is over"):
        engine.step(client)
    engine.reset(client, 1)
    assert not engine.is_over
