"""Outcomes in a folder, so that an interrupted comparison can be continued.

    DIR/evaluation.json                    the comparison, once it is complete
    DIR/outcomes/heuristic-1000000-5d4f... the outcome of one controller on the hosts of one seed: safetensors
                                           file with the arrays; the metadata hold key, structures and a digest

The last part of a name is the digest of the key: everything that decides the outcome. So an outcome is found again only
if nothing that matters has changed, including the source of this package and of the plugins.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from esper.leyline.errors import ConfigError, DataError, option
from esper.leyline.files import is_draft, replacing
from esper.leyline.manifest import GrowthManifest
from esper.runs.config import RunConfig
from esper.runs.controllers import Controller
from esper.runs.outcomes import Outcome
from esper.runs.plugins import source_of
from esper.runs.training_cost import TrainingCost
from esper.runs.values import plain
from esper.tasks.datasets import Dataset
from esper.tolaria.state import RolloutCost, RolloutStats

FORMAT = 2
REPORT, OUTCOMES = "evaluation.json", "outcomes"
_IRRELEVANT = frozenset(
    {"rounds", "schedule_rounds", "checkpoint_every", "num_envs", "preset", "plugins"}
    | {"device", "data_dir", "workers", "threads", "compile", "ppo"}
)
"""Settings that do not change an outcome; those of a policy network are part of the identity of its controller."""
_DECISIVE = ("cpp", "kasmina", "leyline", "simic", "tamiyo", "tasks", "tolaria")
"""Packages whose source decides outcomes."""
Key = Mapping[str, Any]


def key_of(
    config: RunConfig, dataset: Dataset | None, controller: Controller, *, run_seed: int, num_envs: int
) -> dict[str, Any]:
    """Everything that decides the outcome of a controller, as JSON values."""
    task = config.task_spec()
    key = {
        "format": FORMAT,
        "program": _digest_of_program(),
        "plugins": {name: _digest_of_file(file) for name in config.plugins if (file := source_of(name))},
        "controller": controller.name,
        "identity": controller.identity,
        "hosts": [run_seed, num_envs],
        "settings": {name: value for name, value in plain(config).items() if name not in _IRRELEVANT},
        "host": repr(task.host),
        "instances": repr(task.instances),
        "data": {name: x for name, x in dataset.identity.items() if not Path(str(x)).is_absolute()} if dataset else {},
    }
    found: dict[str, Any] = json.loads(json.dumps(key, default=str))
    return found


@lru_cache(maxsize=1)
def _digest_of_program() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file for name in _DECISIVE for file in (package / name).rglob("*.*") if file.suffix != ".pyc")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def _digest_of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@final
class OutcomeStore:
    """The outcomes in a folder.

    Raises ConfigError if the folder holds anything but a comparison, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outcomes = folder / OUTCOMES
        own = {REPORT, OUTCOMES}
        try:
            if folder.exists():
                others = sorted(file.name for file in folder.iterdir() if file.name not in own and not is_draft(file))
                if others:
                    raise ConfigError(
                        f"{folder} holds other files ({others[0]}), so no outcomes are written there; name a new "
                        f"folder, or one of an earlier comparison, with {option('out')}."
                    )
            self._outcomes.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} cannot be used ({error.strerror}); name another with {option('out')}."
            ) from error

    def path(self, key: Key) -> Path:
        """The file of the outcome with this key."""
        digest = hashlib.sha256(_canonical(key)).hexdigest()
        return self._outcomes / f"{Path(key['controller']).stem}-{key['hosts'][0]}-{digest[:16]}.safetensors"

    def get(self, key: Key) -> Outcome | None:
        """The stored outcome, or None; raises DataError for a file that is damaged or was not written by `put`."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
            text = metadata["outcome"]
            if metadata["sha256"] != _digest(text, arrays):
                raise ValueError("its content does not match its checksum")
            tree = json.loads(text)
            if tree["key"] != json.loads(_canonical(key)):
                raise ValueError("it belongs to another comparison")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DataError(
                f"the outcome {path} is damaged or was not written by esper ({error}); delete it, and it is "
                "computed again."
            ) from error
        return _outcome(tree, arrays)

    def put(self, key: Key, outcome: Outcome) -> None:
        """Write an outcome atomically; raises ConfigError if it cannot be written."""
        arrays, cost = dict(_arrays(outcome)), outcome.stats.cost
        tree = {
            "key": dict(key),
            "name": outcome.name,
            "note": outcome.note,
            "grown": [manifest.lines for manifest in outcome.grown],
            "episode": outcome.stats.episode,
            "cost": {f.name: getattr(cost, f.name) for f in fields(RolloutCost)},
        }
        text = json.dumps(tree)
        path = self.path(key)
        try:
            with replacing(path) as file:
                file.buffer.write(save(arrays, metadata={"outcome": text, "sha256": _digest(text, arrays)}))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); name another folder with {option('out')}."
            ) from error


def _canonical(key: Key) -> bytes:
    return json.dumps(key, sort_keys=True).encode()


def _arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    stats = {f"stats.{f.name}": getattr(outcome.stats, f.name) for f in fields(RolloutStats)}
    found = {name: value for name, value in stats.items() if isinstance(value, np.ndarray)}
    found |= {f"instance.{name}": value for name, value in outcome.stats.instance.items()}
    found["test_acc"] = outcome.test_acc
    if outcome.cost is not None:
        found |= {f"cost.{f.name}": getattr(outcome.cost, f.name) for f in fields(TrainingCost)}
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name}|{arrays[name].dtype}|{arrays[name].shape}|".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _outcome(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Outcome:
    parts: dict[str, dict[str, Any]] = {"stats": {}, "instance": {}, "cost": {}}
    for name, value in arrays.items():
        part, _, field = name.partition(".")
        if field:
            parts[part][field] = value
    stats = RolloutStats(
        **parts["stats"], episode=tree["episode"], cost=RolloutCost(**tree["cost"]), instance=parts["instance"]
    )
    return Outcome(
        name=tree["name"],
        stats=stats,
        test_acc=arrays["test_acc"],
        grown=tuple(GrowthManifest.of_lines(lines) for lines in tree["grown"]),
        cost=TrainingCost(**parts["cost"]) if parts["cost"] else None,
        note=tree["note"],
    )
