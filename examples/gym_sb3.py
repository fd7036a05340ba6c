"""MaskablePPO of sb3-contrib on esper's environment, by an adapter to the VecEnv of stable-baselines3. Two minutes.

pip install 'esper-growth[gym]' sb3-contrib
python examples/gym_sb3.py

MaskablePPO draws all eight heads independently, by their masks: some draws are illegal together, and the environment
waits then. gym_ppo.py draws the slot given the operation instead.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import esper.gym

try:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor
except ModuleNotFoundError:
    print("this example needs sb3-contrib: pip install sb3-contrib")
    sys.exit(0)


class HostsForSB3(VecEnv):
    """The hosts as a VecEnv, which begins the next episode in the step that ends one.

    All hosts must end together, as they do under a reward of the whole episode such as "objective".
    """

    def __init__(self, env: esper.gym.GrowingHosts) -> None:
        self.env, self._seed = env, None
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def action_masks(self) -> np.ndarray:
        """[N, V], for the next actions."""
        return self._info["action_mask"]

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Of the next `reset`."""
        self._seed = seed
        return [seed] * self.num_envs

    def reset(self) -> np.ndarray:
        """The first observations of an episode."""
        obs, self._info = self.env.reset(seed=self._seed)
        self._seed = None
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        """The actions of the next `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Observations, rewards, dones, and an info for each host."""
        obs, reward, terminated, truncated, info = self.env.step(self._actions)
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{"illegal": bool(illegal)} for illegal in info["illegal"]]
        if done.any():
            assert done.all(), "a host has ended before the others; use the reward 'objective'"
            for i, each in enumerate(infos):
                each |= {"terminal_observation": obs[i], "TimeLimit.truncated": bool(truncated[i])}
                each["objective"] = 100.0 * float(info["final_reward"][i])
            obs, _, _, _, info = self.env.step(self._actions)  # these actions are ignored
        self._info = info
        return obs, reward, done, infos

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def has_attr(self, attr_name: str) -> bool:
        """Whether the adapter has it."""
        return hasattr(self, attr_name)

    def get_attr(self, attr_name: str, indices: object = None) -> list[Any]:
        """The same for each host."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: object, indices: object = None) -> None:
        """Not for hosts."""
        raise NotImplementedError(f"{attr_name} is not an attribute of single hosts")

    def env_method(self, method_name: str, *args: object, indices: object = None, **kwargs: object) -> list[Any]:
        """The rows that a method of the adapter gives for the hosts."""
        found = getattr(self, method_name)(*args, **kwargs)
        return [found[i] for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: object = None) -> list[bool]:
        """None is."""
        return [False] * len(list(self._get_indices(indices)))


def played(env: VecEnv, model: MaskablePPO | None, seed: int) -> tuple[float, float, float]:
    """Per episode of the model, or of random actions within the masks: reward, 100·J, share of illegal actions."""
    env.seed(seed)
    obs, rng = env.reset(), np.random.default_rng(seed)
    total, done, illegal = np.zeros(env.num_envs), np.zeros(1, dtype=bool), []
    ends = np.cumsum(env.action_space.nvec)[:-1]
    while not done.all():
        masks = np.stack(env.env_method("action_masks"))
        if model is None:
            heads = [np.where(mask, rng.random(mask.shape), -1.0).argmax(1) for mask in np.split(masks, ends, axis=1)]
            actions = np.stack(heads, axis=1)
        else:
            actions, _ = model.predict(obs, action_masks=masks)
        obs, reward, done, infos = env.step(actions)
        total += reward
        illegal.append(np.mean([info["illegal"] for info in infos]))
    return float(total.mean()), float(np.mean([info["objective"] for info in infos])), float(np.mean(illegal))


def main(rollouts: int = 40, num_envs: int = 64, seed: int = 0) -> tuple[float, float]:
    """Train and compare with random actions; the rewards per episode of both."""
    hosts = esper.gym.make_vec("null", num_envs=num_envs, seed=seed, device="cpu")
    env, steps = VecMonitor(HostsForSB3(hosts)), 60
    model = MaskablePPO("MlpPolicy", env, n_steps=steps, batch_size=steps * num_envs // 4, n_epochs=10, gamma=0.995,
                        learning_rate=lambda left: 2e-3 * left, ent_coef=0.003, seed=seed, device="cpu",
                        policy_kwargs={"net_arch": [128, 128]})  # fmt: skip
    began = time.perf_counter()
    model.learn(rollouts * steps * num_envs)
    seconds = time.perf_counter() - began
    found = {}
    for name, each in (("random actions within the masks", None), ("MaskablePPO", model)):
        found[name], worth, illegal = played(env, each, seed + 1_000_000)
        print(f"{name}: reward per episode {found[name]:.3f}, 100·J {worth:.2f}, illegal {100 * illegal:.1f} %")
    print(f"{rollouts} episodes of {num_envs} hosts, {seconds:.0f} s, seed {seed}")
    env.close()
    return found["random actions within the masks"], found["MaskablePPO"]


if __name__ == "__main__":
    main()
