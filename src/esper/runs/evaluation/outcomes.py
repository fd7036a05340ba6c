"""The outcome of one controller on one group of hosts: one episode without learning, and what it cost.

Outcomes are kept in a folder, so that an interrupted comparison can be continued:

    DIR/evaluation.json                    the comparison, once it is complete
    DIR/compute.png, compute.svg           its picture, at equal compute
    DIR/outcomes/heuristic-1000000-5d4f... npz file of the arrays, with key, structures and the rest as JSON

The last part of a name is the digest of the key: everything that decides the outcome, including the source of this
package and of the plugins. Shape legend: N = hosts, S = slots, K = coalitions, T = steps.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np
import torch

from esper.leyline.architecture import Architecture, architectures_of
from esper.leyline.errors import ConfigError, DataError, option, refusing
from esper.leyline.files import is_draft, json_of, open_to_read, replacing
from esper.leyline.ranks import group, parts_of
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.plugins import source_of
from esper.runs.assembly.run_config import RunConfig, without_paths
from esper.runs.assembly.values import plain
from esper.runs.evaluation.controllers import Controller
from esper.runs.evaluation.costs import CostMeter
from esper.runs.evaluation.results import Outcome, TrainingCost
from esper.tasks.datasets import Dataset
from esper.telemetry.record.writer import sha256_of
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutCost, RolloutStats, StepReport, stats_of_all

SEED_OFFSET = 1_000_000
"""Added to the training seed, so that evaluation hosts differ from all training hosts."""
_REPETITION = 2**32
"""Added to the seed of the hosts for each repetition: the high word of the key of all draws."""


def run_controller(
    config: RunConfig,
    dataset: Dataset | None,
    device: torch.device,
    controller: Controller,
    *,
    run_seed: int,
    num_envs: int,
    repetition: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """One episode of a controller on `num_envs` hosts of seed `run_seed`, below 2^32; test is read at its end.

    With a `repetition` above 0, the same hosts with the same data are trained again: initial weights, the order of the
    examples and the draws of the controller are others. `on_step` is called after each control step.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: the controller does not fit, or cannot be run.
    """
    share = parts_of(num_envs, group().size)[group().rank]
    if not share:
        return joined_outcomes(group().gathered(None))
    config = replace(config, compile="off")  # one episode is shorter than a compilation
    task = config.task_spec()
    if controller.host is not None:
        task = replace(task, host=controller.host)
    if repetition and task.instances is not None:
        task = replace(task, instances=replace(task.instances, run_seed=run_seed))
    meter: CostMeter | None = None
    val_TN = list[np.ndarray]()

    def listen(report: StepReport) -> None:
        if meter is not None:
            meter(report)
        val_TN.append(report.val_acc.astype(np.float32))
        on_step()

    hosts = config.engine(run_seed=run_seed + _REPETITION * repetition, num_envs=num_envs)
    hosts = replace(hosts, num_envs=len(share), host_offset=share.start)
    engine = engine_of(config, dataset, device, engine_config=hosts, on_step=listen, task=task)
    client = controller.make(engine.spec)
    architectures = controller.architectures * (num_envs if len(controller.architectures) == 1 else 1)
    engine.architectures = architectures = architectures[share.start : share.stop]
    if dataset is not None:
        measured = config.lifecycle.measured_share
        meter = CostMeter(task, dataset, engine.spec, engine.executor.costs, architectures, measured)
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    (test_acc,) = host_read(engine.test())
    if controller.host is not None:  # what a wider host has more is charged like parameters and FLOPs of seeds
        host = engine_of(config, dataset, device, engine_config=config.engine(run_seed=run_seed, num_envs=1)).executor
        wide, narrow = host_read(engine.executor.costs.host_flops, host.costs.host_flops)
        params = np.full_like(stats.host_params, host.host_params)
        fossil_params = stats.fossil_params + stats.host_params - params
        compute = stats.compute * np.float32(wide / max(narrow, 1))
        stats = replace(stats, host_params=params, fossil_params=fossil_params, compute=compute)
    own_hosts = Outcome(
        name=controller.name,
        stats=stats,
        test_acc=test_acc,
        val=np.stack(val_TN),
        grown=architectures_of(stats.stage, stats.blueprint, stats.algorithm, engine.spec),
        cost=meter.cost(stats) if meter else None,
        note=controller.note,
    )
    return joined_outcomes(group().gathered(own_hosts))


def joined_outcomes(parts: Sequence[Outcome | None]) -> Outcome:
    """The outcome on the hosts of all ranks, some of which may have none."""
    first, *others = found = [part for part in parts if part is not None]
    if not others:
        return first
    costs = [part.cost for part in found if part.cost is not None]
    return replace(
        first,
        stats=stats_of_all([part.stats for part in found]),
        test_acc=np.concatenate([part.test_acc for part in found]),
        val=np.concatenate([part.val for part in found], axis=1),
        grown=tuple(grown for part in found for grown in part.grown),
        cost=TrainingCost(
            *(np.concatenate([getattr(cost, name) for cost in costs], axis=-1) for name in vars(costs[0]))
        )
        if costs
        else None,
    )


FORMAT = 5
REPORT, PICTURE, OUTCOMES = "evaluation.json", "compute", "outcomes"
_IRRELEVANT = frozenset(
    {"rounds", "schedule_rounds", "checkpoint_every", "num_envs", "preset", "plugins"}
    | {"device", "data_dir", "threads", "blocks", "rank_timeout", "compile", "ppo"}
)
"""Settings that do not change an outcome; those of a policy network are part of the identity of its controller."""
_DECISIVE = ("cpp", "kasmina", "leyline", "simic", "tamiyo", "tasks", "tolaria")
"""Packages whose source decides outcomes."""
Key = Mapping[str, Any]


def key_of(
    config: RunConfig,
    dataset: Dataset | None,
    controller: Controller,
    *,
    run_seed: int,
    num_envs: int,
    repetition: int = 0,
) -> dict[str, Any]:
    """Everything that decides the outcome of a controller, as JSON values."""
    task = config.task_spec()
    key = {
        "format": FORMAT,
        "program": _digest_of_program(),
        "plugins": {name: sha256_of(file) for name in config.plugins if (file := source_of(name))},
        "controller": controller.name,
        "identity": controller.identity,
        "hosts": [run_seed, num_envs, repetition],
        "settings": {name: value for name, value in plain(config).items() if name not in _IRRELEVANT},
        "host": repr(task.host),
        "instances": repr(task.instances),
        "data": without_paths(dataset.identity) if dataset else {},
    }
    found: dict[str, Any] = json.loads(json.dumps(key, default=str))
    return found


@lru_cache(maxsize=1)
def _digest_of_program() -> str:
    package = Path(__file__).parents[2]
    files = sorted(file for name in _DECISIVE for file in (package / name).rglob("*.*") if file.suffix != ".pyc")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


@final
class OutcomeStore:
    """The outcomes in a folder.

    Raises ConfigError if the folder holds anything but a comparison, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outcomes = folder / OUTCOMES
        with refusing(ConfigError, f"the folder {folder} cannot be used", f"name another with {option('out')}"):
            found = folder.iterdir() if folder.exists() else ()
            own = (REPORT, OUTCOMES)
            others = [f.name for f in found if not (f.name in own or f.stem.startswith(PICTURE) or is_draft(f))]
            if others:
                raise ConfigError(
                    f"{folder} holds other files ({min(others)}), so no outcomes are written there; name a new folder, "
                    f"or one of an earlier comparison, with {option('out')}."
                )
            self._outcomes.mkdir(parents=True, exist_ok=True)

    def path(self, key: Key) -> Path:
        """The file of the outcome with this key."""
        digest = hashlib.sha256(_canonical(key)).hexdigest()
        return self._outcomes / f"{Path(key['controller']).stem}-{key['hosts'][0]}-{digest[:16]}.npz"

    def get(self, key: Key) -> Outcome | None:
        """The stored outcome, or None; raises DataError for a file that is damaged or was not written by `put`."""
        return group().of_first(lambda: self._get(key))

    def _get(self, key: Key) -> Outcome | None:
        path = self.path(key)
        if not path.exists():
            return None
        try:
            with open_to_read(path) as raw, np.load(raw, allow_pickle=False) as file:
                arrays = dict(file)  # their checksums are compared
            tree = json_of(str(arrays.pop("outcome")))
            if tree["key"] != json.loads(_canonical(key)):
                raise ValueError("it belongs to another comparison")
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise DataError(
                f"the outcome {path} is damaged or was not written by esper ({error}); delete it, and it is "
                "computed again."
            ) from error
        parts: dict[str, dict[str, Any]] = {"stats": {}, "instance": {}, "cost": {}, "": {}}
        for name, value in arrays.items():
            part, _, field = name.rpartition(".")
            parts[part][field] = value
        cost, instance = RolloutCost(**tree["cost"]), parts["instance"]
        return Outcome(
            name=tree["name"],
            stats=RolloutStats(**parts["stats"], episode=tree["episode"], cost=cost, instance=instance),
            test_acc=arrays["test_acc"],
            val=arrays["val"],
            grown=tuple(Architecture.of_lines(lines) for lines in tree["grown"]),
            cost=TrainingCost(**parts["cost"]) if parts["cost"] else None,
            note=tree["note"],
        )

    def put(self, key: Key, outcome: Outcome) -> None:
        """Write an outcome atomically, on the first rank; raises ConfigError if it cannot be written."""
        if not group().is_first:
            return
        stats, path = outcome.stats, self.path(key)
        tree = {
            "key": dict(key),
            "name": outcome.name,
            "note": outcome.note,
            "grown": [architecture.lines for architecture in outcome.grown],
            "episode": stats.episode,
            "cost": vars(stats.cost),
        }
        parts = {"stats": vars(stats), "instance": stats.instance, "cost": vars(outcome.cost) if outcome.cost else {}}
        named = ((f"{part}.{name}", x) for part, values in parts.items() for name, x in values.items())
        arrays: dict[str, Any] = {name: x for name, x in named if isinstance(x, np.ndarray)}
        way = f"name another folder with {option('out')}"
        with refusing(ConfigError, f"{path} cannot be written", way), replacing(path) as file:
            np.savez(file.buffer, outcome=json.dumps(tree), test_acc=outcome.test_acc, val=outcome.val, **arrays)


def _canonical(key: Key) -> bytes:
    return json.dumps(key, sort_keys=True).encode()
