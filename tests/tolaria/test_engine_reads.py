"""How often the engine asks the device, and that an episode can be put down and taken up again at any step."""

import dataclasses

import pytest
import torch

import tiny
from dry_run import CountedReads
from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import LifecycleOp
from esper.simic.client import SimicClient
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards import make_reward
from esper.tamiyo.network import TamiyoNetwork, initialize
from esper.tasks.null import NullSpec
from esper.tasks.presets import NULL
from esper.tolaria.runtime import host_read
from tiny import CPU, bit_equal, same_tree
from toys import ToyClient, action, script

Op = LifecycleOp
NOISY = dataclasses.replace(NULL, script=NullSpec(sigma=2.0))
WIDTH = 32


def learner(spec):
    ppo = PPOConfig(feature_width=WIDTH, hidden_width=WIDTH, num_minibatches=1)
    network = TamiyoNetwork(spec.menu, feature_width=WIDTH, hidden_width=WIDTH)
    initialize(network, 3)
    reward = make_reward("shaped")
    return SimicClient(network, reward, ppo, spec, read=lambda x: host_read(x)[0].tolist(), device=CPU, total_updates=3)


def busy(num_envs, length):
    """Seeds in all slots, pruned, blended and fossilized."""
    plan = {t: action(Op.GERMINATE, slot=t % 3, style=t % 4, tempo=0, blueprint=1 + t % 7) for t in range(1, length, 2)}
    plan |= {t: action(Op.PRUNE, slot=t % 3, alpha_speed=1) for t in range(6, length, 4)}
    plan |= {t: action(Op.FOSSILIZE, slot=t % 3) for t in range(8, length, 4)}
    return script(num_envs, length, plan)


# -- reads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "num_envs", "trainable"),
    [
        *(("scripted", 2, True), ("scripted", 64, False), ("scripted", 64, True)),
        *(("streamed", 1, False), ("fused", 3, False), ("native", 3, False), ("streamed", 1, True)),
        pytest.param("streamed", 5, True, marks=pytest.mark.slow),
    ],
)
def test_a_control_step_reads_the_device_once_however_many_hosts_there_are(executor, num_envs, trainable):
    length = 9
    how = {"of": NULL} if executor == "scripted" else {"executor": executor}
    engine = tiny.engine(num_envs, length, **how)
    client = learner(engine.spec) if trainable else ToyClient(engine.spec, busy(num_envs, length))
    with CountedReads() as start:
        engine.reset(client, 0)
    assert start.number == 0
    for t in range(1, length + 1):
        with CountedReads() as reads:
            engine.step(client)
        assert (t, reads.number) == (t, 1)
    with CountedReads() as rest:
        stats = engine.rollout(client)
    assert rest.number == 1  # the statistics of the episode
    assert stats.cost.reads == 0
    with CountedReads() as learning:
        client.update()
    assert learning.number == int(trainable)


@pytest.mark.parametrize("num_slots", [1, 6])
def test_slots_coalitions_and_listeners_cost_no_read(num_slots):
    length, measured = 8, set()
    slots = tuple(f"r0c{i}" for i in range(num_slots))
    listen = {"on_step": lambda report: report.val_acc.mean()}
    engine = tiny.engine(2, length, of=NULL, slots=slots, rules={"sequential": False}, **listen)
    plan = {1 + s: action(Op.GERMINATE, slot=s, tempo=0, blueprint=5) for s in range(num_slots)}
    client = ToyClient(engine.spec, script(2, length, plan))
    engine.reset(client, 0)
    for t in range(1, length + 1):
        with CountedReads() as reads:
            engine.step(client)
        assert (t, reads.number) == (t, 1)
        measured |= set(engine._coalitions.valid.sum(dim=1).tolist())
    assert measured >= ({1, 2} if num_slots == 1 else {1, 2, 4, 8})


# -- put down and taken up ------------------------------------------------------------------------------------------


def record_of(report):
    return {name: torch.tensor(value) for name, value in vars(report).items()}


def new(task, length, reports):
    engine = tiny.engine(2, length, of=task, on_step=reports.append)
    return engine, learner(engine.spec)


@pytest.mark.parametrize(("task", "at"), [(None, 7), (NOISY, 1)])
def test_an_episode_that_is_taken_up_again_goes_on_to_the_same_bit(task, at):
    length, reports, resumed = 10, [], []
    engine, client = new(task, length, reports)
    engine.reset(client, 4)
    for _ in range(at):
        engine.step(client)
    saved, policy = engine.state_dict(), client.state_dict()
    copies = {name: x.clone() for name, x in saved.items()}
    stats = engine.rollout(client)

    other, other_client = new(task, length, resumed)
    other.load_state_dict(saved, other_client)
    other_client.load_state_dict(policy)
    assert (other.episode, other.t) == (4, at)
    assert same_tree(other.state_dict(), saved)
    assert same_tree(other_client.state_dict(), policy)
    other_stats = other.rollout(other_client)
    assert [report.t for report in resumed] == list(range(at + 1, length + 1))
    for mine, theirs in zip(resumed, reports[at:], strict=True):
        assert same_tree(record_of(mine), record_of(theirs)), mine.t
    assert same_tree(other.state_dict(), engine.state_dict())
    for name in ("returns", "val_acc", "subset_acc", "ops"):
        assert bit_equal(torch.as_tensor(getattr(other_stats, name)), torch.as_tensor(getattr(stats, name))), name
    metrics, again = client.update(), other_client.update()
    assert same_tree({k: torch.tensor(v) for k, v in metrics.items()}, {k: torch.tensor(v) for k, v in again.items()})
    assert same_tree(client.state_dict(), other_client.state_dict())
    assert same_tree(saved, copies)  # what was saved is nobody's working memory


def test_an_engine_goes_back_to_its_own_saved_state():
    length, reports = 10, []
    engine = tiny.engine(2, length, on_step=reports.append, executor="fused")
    client = ToyClient(engine.spec, busy(2, length))
    engine.reset(client, 0)
    for _ in range(6):
        engine.step(client)
    saved, counted = engine.state_dict(), client.state_dict()
    engine.rollout(client)
    first, reports[:] = reports[6:], []
    engine.load_state_dict(saved, client)
    client.load_state_dict(counted)
    engine.rollout(client)
    for mine, theirs in zip(reports, first, strict=True):
        assert same_tree(record_of(mine), record_of(theirs)), mine.t


def test_training_goes_on_in_the_round_that_was_interrupted():
    length, stop_at = 8, []
    whole, whole_client = new(NOISY, length, [])
    rounds, resumed = [], []
    whole.train(whole_client, range(3), on_round=lambda stats, metrics: rounds.append((stats, metrics)))

    engine, client = new(NOISY, length, [])
    engine.train(
        client, range(3), on_round=lambda stats, metrics: resumed.append((stats, metrics)),
        should_stop=lambda: stop_at.append(0) or len(stop_at) == length + 4,
    )  # fmt: skip
    assert (engine.episode, engine.t) == (1, 3)  # asked once more between the rounds
    other, other_client = new(NOISY, length, [])
    other.load_state_dict(engine.state_dict(), other_client)
    other_client.load_state_dict(client.state_dict())
    done = other.train(
        other_client, range(1, 3), on_round=lambda stats, metrics: resumed.append((stats, metrics))
    )  # fmt: skip
    assert done
    assert [stats.returns.tolist() for stats, _ in resumed] == [stats.returns.tolist() for stats, _ in rounds]
    assert same_tree(other_client.state_dict(), whole_client.state_dict())


def test_a_state_of_other_hosts_is_refused():
    small, large = tiny.engine(2, 4, of=NULL), tiny.engine(3, 4, of=NULL)
    clients = [ToyClient(engine.spec) for engine in (small, large)]
    small.reset(clients[0], 0)
    small.step(clients[0])
    state = small.state_dict()
    with pytest.raises(CheckpointError, match="expected"):
        large.load_state_dict(state, clients[1])
    with pytest.raises(CheckpointError, match="'place'"):
        small.load_state_dict({name: x for name, x in state.items() if name != "place"}, clients[0])


@pytest.mark.parametrize("stage", [5, -1])
def test_a_state_with_a_stage_that_cannot_be_is_refused(stage):
    engine = tiny.engine(2, 4, of=NULL)
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    engine.step(client)
    state = engine.state_dict()
    state["control.slots.stage"][1, 0] = stage
    with pytest.raises(CheckpointError, match=rf"slots have the stage \[{stage}\]"):
        engine.load_state_dict(state, client)


def test_when_the_read_of_a_step_is_waited_for_changes_no_number():
    length, outputs = 9, []
    for at_once in (False, True):
        engine = tiny.engine(3, length)
        reports = []
        engine.listeners.append(reports.append)
        client = ToyClient(engine.spec, busy(3, length))
        engine.reset(client, 0)
        for _ in range(length):
            engine.step(client)
            if at_once:
                engine.apply_structure()
        stats = engine.rollout(client)
        outputs.append((engine.state_dict(), stats.returns.tolist(), [report.actions.tolist() for report in reports]))
    assert same_tree(outputs[0][0], outputs[1][0])
    assert outputs[0][1:] == outputs[1][1:]
    assert len(outputs[0][2]) == length
