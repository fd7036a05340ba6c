"""The learners of examples/ beat random legal actions on the null task."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import esper.gym
from esper.leyline.lifecycle import CANONICAL_ACTION

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module


@pytest.mark.slow
def test_ppo_in_one_file_beats_random_actions():
    done = subprocess.run(
        [sys.executable, "-W", "error", f"{EXAMPLES}/gym_ppo.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    by_chance, learned = map(float, re.findall(r"^(?:random.*|PPO): reward per episode (-?[\d.]+)", done.stdout, re.M))
    assert by_chance < 0.38
    assert learned > 0.42  # three seeds of 16 hosts more are all above 0.5


def test_advantages_stop_at_the_end_of_an_episode(example):
    import torch

    learner = example("gym_ppo")
    settings = learner.Settings(gamma=0.5, gae_lambda=0.5)
    rewards, values = torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([[0.0], [2.0], [4.0], [8.0]])
    ended = torch.tensor([[False], [True], [False]])
    # delta: 1 + 0.5*2 - 0 = 2; 2 + 0.5*4 - 2 = 2 (or 2 - 2 = 0 where it terminates); 0 + 0.5*8 - 4 = 0
    truncated = learner.advantages(rewards, values, torch.zeros_like(ended), ended, settings)
    assert truncated.flatten().tolist() == [2.0 + 0.25 * 2.0, 2.0, 0.0]
    terminated = learner.advantages(rewards, values, ended, ended, settings)
    assert terminated.flatten().tolist() == [2.0, 0.0, 0.0]


@pytest.mark.slow
def test_maskable_ppo_of_sb3_contrib_beats_random_actions(example):
    pytest.importorskip("sb3_contrib")
    by_chance, learned = example("gym_sb3").main()  # with half as many hosts it has not begun to learn
    assert by_chance < 0.38
    assert learned > 0.42


def test_the_adapter_for_sb3_ends_an_episode_and_begins_the_next_in_one_step(example):
    pytest.importorskip("sb3_contrib")
    hosts, same = (esper.gym.make_vec("null", num_envs=2, episode_length=3, device="cpu") for _ in range(2))
    env, waits = example("gym_sb3").HostsForSB3(hosts), np.tile(CANONICAL_ACTION, (2, 1))
    env.seed(5)
    assert (env.reset() == same.reset(seed=5)[0]).all()
    for _ in range(3):
        obs, reward, done, infos = env.step(waits)
        last, want, *_ = same.step(waits)
        assert (reward == want).all()
    assert done.all()
    assert (infos[1]["terminal_observation"] == last[1]).all()
    first, _, _, _, info = same.step(waits)
    assert (obs == first).all()
    assert (np.stack(env.env_method("action_masks")) == info["action_mask"]).all()


def test_without_sb3_contrib_its_example_says_what_to_install(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    sys.modules.pop("gym_sb3", None)
    with pytest.raises(SystemExit) as found:
        example("gym_sb3")
    assert found.value.code == 0
    assert "pip install sb3-contrib" in capsys.readouterr().out
