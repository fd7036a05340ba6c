"""Hosts whose blueprints differ in what they are worth: in the engine, and what a controller can see of it."""

import pytest
import torch

import hindsight
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.presets import resolve
from esper.tamiyo.features import observe
from esper.tasks import null
from esper.tasks.null import NullSpec
from esper.tolaria.executors.scripted import ScriptedExecutor
from tiny import CPU
from toys import ToyClient

HOSTS, E, M, SLOTS, EPISODE, SEED = 12, 30, 3, 3, 2, 4
PERMUTED = NullSpec(permuted=True)


def executor(first: int = 0, num_envs: int = HOSTS, script: NullSpec = PERMUTED) -> ScriptedExecutor:
    ids = torch.arange(first, first + num_envs)
    made = ScriptedExecutor(script, num_envs=num_envs, num_slots=SLOTS, run_seed=SEED, device=CPU, host_ids=ids)
    made.reset(EPISODE)
    return made


@pytest.fixture(scope="module")
def played():
    """An episode in which each host grows its best blueprint by the best schedule."""
    config = resolve({"task": "null_permuted", "num_envs": HOSTS, "seed": SEED, "episode_length": E})
    engine = engine_of(config, None, CPU)
    best = hindsight.best_of_host(PERMUTED, SEED, torch.arange(HOSTS), EPISODE, min_health=0.7)
    client = ToyClient(engine.spec)
    for row in null.best_schedule(E, M, SLOTS):
        client.actions[row.earliest - 1] = torch.tensor(row.action)
        if row.action[Head.OP] == LifecycleOp.GERMINATE:
            client.actions[row.earliest - 1, :, Head.BLUEPRINT] = best.blueprint
    engine.reset(client, EPISODE)
    return engine, client, engine.rollout(client), best


def test_the_best_schedule_of_each_host_reaches_the_value_that_was_worked_out(played):
    _, _, stats, best = played
    want = [hindsight.best_schedule_value(E, M, SLOTS, quality) for quality in best.quality.tolist()]
    assert len(set(want)) > 1
    assert stats.committed_acc.tolist() == pytest.approx(want, abs=1e-4)
    assert stats.fossilized.tolist() == [SLOTS] * HOSTS


def test_nothing_shows_the_qualities_before_a_seed_is_measured(played):
    # germination in step 1, trained in 2, 3 and 4, first step of the ramp in the tick of 5
    _, client, _, best = played
    assert len(set(best.blueprint.tolist())) > 1
    for step in client.steps[:5]:
        features = observe(step.obs)[0]
        assert torch.equal(features, features[:1].expand_as(features))
    assert len(observe(client.steps[5].obs)[0].unique(dim=0)) > 1


def test_a_host_alone_has_the_qualities_that_it_has_among_others(played):
    engine = played[0]
    assert torch.equal(executor().quality, engine.executor.quality)
    for host in (0, 7):
        assert torch.equal(executor(first=host, num_envs=1).quality[0], executor().quality[host])


def test_hosts_that_are_not_permuted_have_the_qualities_of_the_task():
    assert executor(script=NullSpec()).quality.tolist() == [list(NullSpec().quality)] * HOSTS


def test_a_restored_executor_has_the_qualities_of_its_episode():
    original, copy = executor(), executor()
    copy.reset(EPISODE + 1)
    assert not torch.equal(copy.quality, original.quality)
    copy.load_state_dict(original.state_dict())
    assert torch.equal(copy.quality, original.quality)
