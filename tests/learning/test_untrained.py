"""The policy that acts before anything is learned."""

import torch

from esper.leyline.lifecycle import Head, LifecycleOp
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve

HOSTS = 32


def test_the_untrained_policy_lets_seeds_live_long_enough_to_be_fossilized():
    # a uniform policy prunes all but 1 in 64 seeds in TRAINING, where PRUNE is legal for six steps
    config = resolve({"task": "null", "preset": "small", "num_envs": HOSTS, "seed": 5, "device": "cpu"})
    engine = engine_of(config, None, torch.device("cpu"))
    client = learner_of(config, engine.spec)
    engine.reset(client, episode=0)
    engine.rollout(client)
    ops = client.buffer.rollout.actions[..., Head.OP]
    assert (ops == LifecycleOp.FOSSILIZE).sum() >= HOSTS // 16
    assert (engine.state.hosts.n_fossilized > 0).float().mean() > 0.05
