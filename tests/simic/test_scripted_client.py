"""A controller that does not learn, with a reward beside it."""

from pathlib import Path

import torch

from esper.leyline.protocols import ClientProtocol
from esper.simic.rewards import RewardConfig, make_reward
from esper.simic.scripted_client import ScriptedClient
from esper.simic.training.build import baseline_of, engine_of
from esper.simic.training.presets import resolve
from esper.tamiyo.baselines import BASELINES

CPU = torch.device("cpu")
CONFIG = resolve({"task": "null", "num_envs": 3, "episode_length": 12, "lifecycle": {"min_training_epochs": 2}})


def test_every_baseline_drives_an_engine_and_learns_nothing() -> None:
    for name in BASELINES:
        engine = engine_of(CONFIG, None, CPU)
        client = baseline_of(name, CONFIG, engine.spec)
        assert isinstance(client, ClientProtocol)
        engine.reset(client, episode=0)
        stats = engine.rollout(client)
        assert stats is not None
        assert stats.ops.sum() == 3 * 12
        assert client.update() == {}
        if name != "heuristic":  # which first waits for the host to settle, longer than these twelve steps
            assert (stats.germinated.sum() == 0) == (name in ("wait_only", "static_final"))


def test_both_halves_answer_for_themselves() -> None:
    engine = engine_of(CONFIG, None, CPU)
    policy = baseline_of("heuristic", CONFIG, engine.spec)
    assert isinstance(policy, ScriptedClient)
    reward = make_reward("sparse", RewardConfig(mode="sparse"))
    client = ScriptedClient(policy.policy, reward)
    assert client.terms == reward.terms
    carried = client.initial_state(3, 3, 12, CPU)
    torch.testing.assert_close(client.rollback_reward(carried), reward.rollback_reward(carried))
    assert client.initial_hidden(3).h.shape == (1, 3, 0)


def test_its_state_survives_a_restart_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    def finished(stop: int | None) -> list[float]:
        engine = engine_of(CONFIG, None, CPU)
        client = baseline_of("fixed_schedule", CONFIG, engine.spec)
        engine.reset(client, episode=0)
        if stop is not None:
            assert engine.rollout(client, should_stop=lambda: engine.t == stop) is None
            place, memory = engine.state_dict(), client.state_dict()
            engine = engine_of(CONFIG, None, CPU)
            client = baseline_of("fixed_schedule", CONFIG, engine.spec)
            engine.load_state_dict(place, client)
            client.load_state_dict(memory)
        stats = engine.rollout(client)
        assert stats is not None
        return [*stats.returns.tolist(), *stats.growth.tolist(), *stats.ops.flatten().tolist()]

    assert finished(5) == finished(None)


def test_the_heuristic_fossilizes_seeds_on_the_null_task() -> None:
    config = resolve({"task": "null", "num_envs": 4})
    engine = engine_of(config, None, CPU)
    client = baseline_of("heuristic", config, engine.spec)
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    assert (stats.fossilized >= 1).all()
    assert (stats.committed_acc > 50.0).all()  # what the host alone approaches
