"""What the learner is given on the scripted task: the return that was promised, and the policy that acted."""

import pytest
import torch

from esper.leyline.lifecycle import Head, LifecycleOp, SeedStage
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.simic.agent.ppo import evaluate_minibatch
from esper.simic.client import SimicClient
from esper.tolaria.engine import VectorizedEngine

HOSTS, GAMMA = 32, 0.995


@pytest.fixture(scope="module")
def played() -> tuple[VectorizedEngine, SimicClient]:
    """An episode of the null task by a policy that has not learned yet."""
    config = resolve({"task": "null", "preset": "small", "num_envs": HOSTS, "seed": 5, "device": "cpu"})
    engine = engine_of(config, None, torch.device("cpu"))
    client = learner_of(config, engine.spec)
    engine.reset(client, episode=0)
    engine.rollout(client)
    return engine, client


def test_the_discounted_return_of_an_episode_is_its_discounted_objective(played):
    # G = sum_t gamma^(t-1) r_t = gamma^(E-1) J,  J = committed / 100 - 0.03 ln(1 + fossilized parameters / host's)
    engine, client = played
    steps = engine.spec.episode_length
    slots, hosts, rewards = engine.state.slots, engine.state.hosts, client.buffer.slabs.rewards
    fossilized = (slots.params * (slots.stage == SeedStage.FOSSILIZED)).sum(1)
    in_time = client.buffer.slabs.effective_op[:, -1] != LifecycleOp.FOSSILIZE  # an op of the last step is too late
    assert (fossilized[in_time] > 0).any()
    objective = hosts.committed_acc / 100 - 0.03 * torch.log1p(fossilized / hosts.host_params)
    found = (rewards.double() * GAMMA ** torch.arange(steps)).sum(1)
    promised = GAMMA ** (steps - 1) * objective.double()
    torch.testing.assert_close(found[in_time], promised[in_time], atol=1e-6, rtol=0)


def test_before_the_first_step_every_ratio_is_one(played):
    _, client = played
    batch = client.buffer.sequences(torch.arange(HOSTS))
    evaluated, _ = evaluate_minibatch(client.agent, batch)
    torch.testing.assert_close(evaluated.log_prob, batch.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluated.values, batch.values, atol=1e-5, rtol=0)


def test_the_untrained_policy_lets_seeds_live_long_enough_to_be_fossilized(played):
    # a uniform policy prunes all but 1 in 64 seeds in TRAINING, where PRUNE is legal for six steps
    engine, client = played
    ops = client.buffer.slabs.actions[..., Head.OP]
    assert (ops == LifecycleOp.FOSSILIZE).sum() >= HOSTS // 16
    assert (engine.state.hosts.n_fossilized > 0).float().mean() > 0.05
