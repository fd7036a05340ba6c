"""Environments by the name of a task, from a task of the user's, and through Gymnasium."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

import esper
import esper.gym
from esper.leyline.errors import ConfigError, RegistryError
from esper.leyline.lifecycle import CANONICAL_ACTION, LifecycleOp
from esper.tasks.registry import task_by_name
from toys import action


def test_every_built_in_task_is_registered():
    for name in ("null", "digits", "mixed_digits"):
        spec = gymnasium.spec(f"esper/{name}-v0")
        assert spec.kwargs == {"task": name}
    env = gymnasium.make_vec("esper/null-v0", num_envs=3, episode_length=5, reward="shaped", device="cpu")
    assert isinstance(env, esper.gym.GrowingHosts)
    assert env.num_envs == 3
    assert env.action_space.shape == (3, 8)
    env.reset(seed=0)
    ends = [env.step(np.tile(CANONICAL_ACTION, (3, 1)))[3].all() for _ in range(5)]
    assert ends == [False, False, False, False, True]  # shaped is truncated


def test_without_gymnasium_it_says_how_to_install_it():
    program = "import sys; sys.modules['gymnasium'] = None; import esper.gym"
    found = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert found.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: esper.gym needs gymnasium, which is not installed; pip install 'esper-growth[gym]'."
    )


def test_a_task_of_the_users_is_taken_with_its_threads_and_its_name_left_alone():
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()

    def net():
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    x, y = torch.randn(60, 6, generator=generator), torch.arange(60) % 3
    task = esper.Task(net, ["1"], train=(x, y), episode_length=3, name="mine")
    env = esper.gym.make_vec(task, num_envs=2, executor="streamed", device="cpu")
    obs, _ = env.reset(seed=1)
    rows = [env.step(np.tile(action(LifecycleOp.GERMINATE, slot=0, blueprint=1), (2, 1))) for _ in range(3)]
    assert rows[-1][2].all()
    assert (rows[-1][-1]["kept_points"] > 0.0).all()
    assert torch.is_grad_enabled()
    assert (env.reset(seed=1)[0] == obs).all()
    assert env.single_action_space.nvec[0] == 1
    env.reset(seed=2)  # another engine
    assert torch.get_num_threads() == threads
    with pytest.raises(RegistryError):
        task_by_name("mine")


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"task": "nul"}, RegistryError, "unknown task 'nul'; did you mean 'null'"),
        ({"reward": "obj"}, ConfigError, "unknown reward 'obj'; did you mean 'objective'"),
        ({"num_envs": "many"}, ConfigError, r"esper.gym.make_vec: num_envs is 'many'; it must be a whole number"),
        ({"num_env": 3}, ConfigError, r"esper.gym.make_vec has no argument 'num_env'; did you mean 'num_envs'"),
        ({"num_envs": 0}, ConfigError, "num_envs is 0"),
        ({"episode_length": 0}, ConfigError, "episode_length is 0"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"render_mode": "human"}, ConfigError, "render_mode is 'human', but hosts are not drawn"),
        ({"ppo.lr": 1.0}, ConfigError, "ppo.lr is a setting of a run"),
        ({"rounds": 3}, ConfigError, "rounds is a setting of a run"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(given, kind, words):
    with pytest.raises(kind, match=words):
        esper.gym.make_vec(**{"task": "null", **given})


def test_a_single_environment_is_refused_with_the_way_to_several():
    with pytest.raises(ConfigError, match=r'use gymnasium.make_vec\("esper/null-v0", num_envs=1\)'):
        gymnasium.make("esper/null-v0")
