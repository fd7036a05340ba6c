"""What the environment of Gymnasium costs: the null task through `esper.gym` against `VectorizedEngine.step`.

Both play the same actions, some of them illegal, and look at observations and masks in every step: the environment
gives them, and the client of the engine makes them in `act`. The two must earn the same. Steps are measured in turn, in
CPU time; the ratio is the median over episodes.

    OMP_NUM_THREADS=1 python benchmarks/gym_step.py
    OMP_NUM_THREADS=1 python benchmarks/gym_step.py --max-ratio 1.1       exit code 1 where it is above
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor

import esper.gym
from esper.gym import action_mask, legal_actions, observation_of
from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.runs.assembly.assemble import device_of, engine_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import ScriptedClient
from esper.simic.rewards import make_reward
from esper.tamiyo.schedules import NoMemory, ScriptedPolicy
from esper.telemetry.machine import environment
from esper.tolaria.runtime import choose_device, host_read
from paired import cpu_ms


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the environment with the engine that it drives."""

    hosts: int = 256
    """Hosts of the null task."""
    episode_length: int = 60
    """Control steps of an episode."""
    repetitions: int = 9
    """Pairs of episodes; a first one is not counted."""
    json: Path | None = None
    """Also write the numbers to this file."""
    max_ratio: float = float("inf")
    """Most time of the environment over that of the engine."""


class Player:
    """A script that makes what a learner looks at, as the environment does, and plays given actions [T, N, 8]."""

    def __init__(self, spec: EngineSpec, actions: Tensor) -> None:
        self.spec, self.actions = spec, actions
        self.selectable = torch.zeros(spec.num_blueprints, dtype=torch.bool)
        self.selectable[list(spec.selectable)] = True
        self.earned = torch.zeros(spec.num_envs)

    def begin(self, episode: int, hosts: Tensor) -> NoMemory:
        """Nothing is earned."""
        self.earned = torch.zeros(self.spec.num_envs)
        return NoMemory()

    def decide(self, obs: Observation, memory: NoMemory) -> Tensor:
        """Look, and play the actions of this step."""
        seen = observation_of(obs.slots, obs.hosts, obs.t, obs.episode_length, self.spec.num_blueprints)
        host_read(seen, action_mask(obs.legal, obs.has_gate, self.selectable), obs.legal)
        return legal_actions(self.actions[obs.t - 1], obs.legal, obs.has_gate, self.selectable)[0]

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """Add what was earned."""
        if step.t < self.spec.episode_length:  # the last reward is corrected by what is kept
            self.earned += step.reward
        return memory


def main(options: Options) -> int:
    """Measure and print; returns the exit code."""
    n, length = options.hosts, options.episode_length
    config = resolve({"task": "null", "num_envs": n, "episode_length": length, "device": "cpu"})
    engine = engine_of(config, None, device_of(config))
    drawn = np.random.default_rng(0).integers(engine.spec.head_sizes, size=(length, n, 8))
    player = Player(engine.spec, torch.from_numpy(drawn))
    client = ScriptedClient(ScriptedPolicy(player, engine.spec), make_reward("objective"))
    env = esper.gym.make_vec("null", num_envs=n, episode_length=length, device="cpu")
    threads = torch.get_num_threads()
    earned = np.zeros(n, dtype=np.float32)

    def pair(i: int) -> tuple[float, float]:
        """Milliseconds per step of one episode each, a step of one after a step of the other."""
        engine.reset(client, 0)
        env.reset(seed=0)
        earned[:] = 0.0
        times = {"engine": 0.0, "environment": 0.0}
        for t, actions in enumerate(drawn):

            def by_environment(actions: np.ndarray = actions, t: int = t) -> None:
                _, reward, *_ = env.step(actions)
                if t < length - 1:
                    earned[:] += reward

            def by_engine(t: int = t) -> None:
                engine.step(client)
                if t == length - 1:
                    engine.kept_network()

            works = [("engine", by_engine), ("environment", by_environment)]
            for name, work in works if (i + t) % 2 else reversed(works):
                times[name] += cpu_ms(work) / length
        assert (player.earned.numpy() == earned).all(), "the two did not do the same"
        return times["engine"], times["environment"]

    pair(0)
    pairs = [pair(i) for i in range(options.repetitions)]
    ratios = [b / a for a, b in pairs]
    ratio = statistics.median(ratios)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"null, {n} hosts, {threads} thread{'s' * (threads != 1)}: engine {a:.2f} ms per step, environment {b:.2f} ms, "
        f"ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(pairs)} pairs)"
    )
    where = environment(choose_device("cpu"))
    print(", ".join(map(str, where.values())))
    if options.json is not None:
        row = {"hosts": n, "engine_ms": a, "environment_ms": b, "ratio": ratio, "ratios": ratios}
        options.json.write_text(json.dumps({"environment": where, "rows": [row]}, indent=2) + "\n")
    return int(ratio > options.max_ratio)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
