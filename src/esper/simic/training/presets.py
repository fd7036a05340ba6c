"""Presets: complete sets of values by name. What a task decides (host, episode length, slots) is not repeated here.

quickstart   digits within minutes on two CPU cores: `make train`
small        a run that learns: 100 rounds of 16 hosts, network of width 128
paper        the published size: 200 rounds of 12 hosts, network of width 512
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, nearest
from esper.simic.agent.config import PPOConfig
from esper.simic.rewards.config import RewardConfig
from esper.simic.training.config import RunConfig, merge, plain, read_toml, task_values, validated
from esper.tasks.registry import task_by_name

Values = dict[str, Any]


def quickstart() -> Values:
    """Ten rounds; the schedules are shortened to match."""
    return small() | {
        "preset": "quickstart",
        "rounds": 10,
        "schedule_rounds": 10,
        "ppo": plain(PPOConfig(value_warmup=3)),
    }


def small() -> Values:
    """Sixteen hosts, a network of width 128."""
    return {
        "task": "digits",
        "preset": "small",
        "rounds": 100,
        "schedule_rounds": 100,
        "num_envs": 16,
        "reward": plain(RewardConfig(mode="objective")),
        "ppo": plain(PPOConfig()),
    }


def paper() -> Values:
    """Twelve hosts, a network of width 512, one epoch per update over all hosts at once."""
    ppo = PPOConfig(
        feature_width=512,
        hidden_width=512,
        epochs=1,
        minibatches=1,
        gae_lambda=0.98,
        lr=3e-4,
        grad_norm=5.0,
    )
    return small() | {"preset": "paper", "rounds": 200, "schedule_rounds": 200, "num_envs": 12, "ppo": plain(ppo)}


PRESETS: Mapping[str, Callable[[], Values]] = {"quickstart": quickstart, "small": small, "paper": paper}


def resolve(overrides: Mapping[str, Any], file: Path | None = None) -> RunConfig:
    """The configuration of a run from a file and the command line, complete and checked.

    Raises:
        ConfigError, RegistryError: unknown task, preset or key, a value out of range, or a combination that cannot be.
    """
    told = merge(read_toml(file) if file else {}, overrides)
    preset = told.get("preset", "quickstart")
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; {nearest(str(preset), PRESETS)}")
    base = PRESETS[preset]()
    task = task_by_name(str(told.get("task", base["task"])))
    reward = told.get("reward", {})
    mode = reward.get("mode", base["reward"]["mode"]) if isinstance(reward, Mapping) else ""
    return validated(merge(merge(base, task_values(task, str(mode))), told))
