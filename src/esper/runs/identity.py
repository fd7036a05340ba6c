"""Which settings must not change when a run is resumed, and the shape that its checkpoints share."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError
from esper.leyline.messages import EngineSpec
from esper.runs.config import RunConfig
from esper.runs.values import flat, plain
from esper.tasks.datasets import data_label

CHANGEABLE = ("rounds", "device", "data_dir", "compile", "checkpoint_every", "sinks")
"""Settings that a resumed run may change."""


def run_shape(config: RunConfig, spec: EngineSpec, identity: Mapping[str, object]) -> dict[str, object]:
    """Properties that a checkpoint and the run that loads it must share; `identity` is that of the data set."""
    shape = {
        "task": config.task,
        "data": {name: value for name, value in identity.items() if not _is_path(value)},
        "seed": config.seed,
        "slots": config.slots,
        "num_envs": config.num_envs,
        "episode_length": config.episode_length,
        "reward": config.reward_name,
        "blueprints": spec.blueprint_names,
        "head_sizes": spec.head_sizes,
        "feature_width": config.ppo.feature_width,
        "hidden_width": config.ppo.hidden_width,
        "num_layers": config.ppo.num_layers,
    }
    plain: dict[str, object] = json.loads(json.dumps(shape, default=dict))  # tuples become lists, as in the header
    return plain


def data_of(shape: Mapping[str, object]) -> str:
    """The data set of a `run_shape` in words (`data_label`); "none" for scripted hosts."""
    identity = shape["data"]
    assert isinstance(identity, dict)
    return data_label(identity) if identity else "none"


def _is_path(value: object) -> bool:
    """Paths are ignored: the data folder may move between two parts of a run."""
    return isinstance(value, str) and Path(value).is_absolute()


def fingerprint(config: RunConfig) -> str:
    """SHA-256 of all settings that affect the results of a run."""
    decisive = {name: value for name, value in plain(config).items() if name not in CHANGEABLE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def require_same_config(found: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if the configuration differs from the one in a checkpoint (`found`)."""
    was, now = flat(found), flat(json.loads(json.dumps(plain(config))))
    for name in sorted(was.keys() | now.keys()):
        if name not in CHANGEABLE and was.get(name) != now.get(name):
            raise ConfigError(
                f"{name} is {now.get(name)} in config.toml, but the run was made with {was.get(name)}; restore it, or "
                "start a new run for other settings."
            )
