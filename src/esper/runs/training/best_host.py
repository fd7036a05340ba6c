"""The best host of a run so far, which is kept when its round is over.

    checkpoints/best-host.safetensors    the state of one host, as in a checkpoint; in its metadata what `BestHost` says

The best host has the highest J of all hosts of the complete rounds. The test split is not read before it is chosen.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict

from esper.export.grown import Origin
from esper.export.network import ROUNDING, GrownNetwork
from esper.leyline.architecture import architectures_of
from esper.leyline.errors import CheckpointError, ExportError
from esper.leyline.settings import AtLeast1, Count, Finite
from esper.leyline.tensor_dataclass import StateTree, below
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.clients import baseline_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.report import objective_of
from esper.runs.state_file import read_checked, write_state
from esper.runs.training.checkpoint import load_newest
from esper.simic.rewards.reward_config import RewardConfig
from esper.tasks.datasets import Dataset
from esper.telemetry.run_directory import CHECKPOINTS, continuing, require_nothing_to_lose
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

FILE = "best-host.safetensors"


@dataclass(frozen=True, kw_only=True)
class BestHost:
    """A host at the end of its round.

    Attributes:
        round: from 1. host: its global number. objective: its 100·J. val, test: figures of merit (points) of its
            committed network; `test` is None until the run is complete. loss: on the validation split.
        architecture: its permanent seeds, as in config.toml. growth: (host + fossilized parameters) / host parameters.
        state: that of an engine of this host alone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    round: AtLeast1
    host: Count
    objective: Finite
    val: Finite
    loss: Finite
    growth: Finite
    architecture: tuple[str, ...]
    test: float | None = None
    state: StateTree = field(default_factory=dict, repr=False, compare=False)

    @property
    def about(self) -> dict[str, Any]:
        """All but the state, as plain values."""
        plain = asdict(replace(self, state={})) | {"architecture": list(self.architecture)}
        del plain["state"]
        return plain


def objective_of_living(stats: RolloutStats, weights: RewardConfig) -> np.ndarray:
    """100·J of each host [N]; -inf where the loss is not finite: such a host is never the best."""
    return np.where(np.isfinite(stats.committed_loss), objective_of(stats, weights), -np.inf)


def better(
    best: BestHost | None, engine: VectorizedEngine, stats: RolloutStats, weights: RewardConfig
) -> BestHost | None:
    """The best host of the round that has just ended if it has a higher J than `best`, else `best`.

    Nothing is copied unless it has. `weights` are those of J.
    """
    objective = objective_of_living(stats, weights)
    n = int(np.argmax(objective))
    if not objective[n] > (-np.inf if best is None else best.objective):
        return best
    state = {name: x.to("cpu") for name, x in engine.state_of([n]).items()}
    return BestHost(
        round=stats.episode + 1,
        host=engine.spec.host_offset + n,
        objective=float(objective[n]),
        val=float(stats.committed_acc[n]),
        loss=float(stats.committed_loss[n]),
        growth=float(stats.growth[n]),
        architecture=architectures_of(stats.stage, stats.blueprint, stats.algorithm, engine.spec)[n].lines,
        state=state,
    )


def portable(config: RunConfig) -> RunConfig:
    """The settings with which hosts of a run are measured later: no compiler, full precision.

    Every executor loads the same state.
    """
    return replace(config, executor="streamed", compile="off", amp="off")


def engine_of_host(config: RunConfig, dataset: Dataset, device: torch.device, best: BestHost) -> VectorizedEngine:
    """An engine of this host alone, at the end of its episode.

    Raises:
        CheckpointError: its state does not fit the configuration. ConfigError: it cannot be run here.
    """
    config = portable(config)
    alone = replace(config.engine(), num_envs=1, host_offset=best.host)
    engine = engine_of(config, dataset, device, engine_config=alone)
    engine.load_state_dict(best.state, baseline_of("wait_only", config, engine.spec))
    return engine


def save(folder: Path, best: BestHost) -> None:
    """Replace the file in the folder of checkpoints; raises CheckpointError if it cannot be written."""
    write_state(folder / FILE, best.about, best.state)


def read(folder: Path) -> BestHost | None:
    """The best host in a folder of checkpoints, None if no round is complete; raises CheckpointError if damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        best, state = read_checked(path, BestHost)
        return replace(best, state=state)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Move {path} away to go on without the best host of the rounds so far."
        ) from error


def grown_of_run(
    run: Path, config: RunConfig, *, host: int | None = None, live: bool = False, last: bool = False
) -> GrownNetwork:
    """The best host of all complete rounds of a run.

    With `last`, and before a round is complete, it is the one with the highest J in the newest checkpoint; with `host`
    the one of this number there. Its figure of merit on the validation split is measured again, that on the test split
    only if its round is complete. With `live`, seeds that are still being blended in belong to it.

    Raises:
        ExportError, CheckpointError: the run has no networks, or its checkpoint no hosts, or there is no such host.
        ConfigError, DataError: the hosts cannot be run here.
    """
    config = portable(config)
    device = device_of(config)
    dataset = dataset_of(config, device)
    if dataset is None:
        raise ExportError(f"task {config.task!r} is scripted and has no networks; export a run of another task.")
    best = None if last or host is not None else read(run / CHECKPOINTS)
    if best is None:
        return _of_checkpoint(run, config, dataset, device, host, live=live, last=last)
    engine, task = engine_of_host(config, dataset, device, best), config.task_spec()
    stats = engine.outcome()
    now, rounding = float(stats.committed_acc[0]), max(1.0, abs(best.val)) * ROUNDING + 200.0 / len(dataset.val)
    if task.instances is None and not abs(now - best.val) <= rounding:
        raise ExportError(
            f"the best host of {run} has {task.objective.unit} {now:.2f} on val, and had {best.val:.2f} in the run: "
            f"the network, the data or the metric of task {task.name!r} was changed since; restore it."
        )
    test = float(host_read(engine.test())[0][0]) if best.test is None else best.test
    origin = Origin(round=best.round, host=best.host, objective=best.objective)
    return GrownNetwork.of(engine, task, dataset, stats, host=0, test=test, live=live, origin=origin)


def _of_checkpoint(
    run: Path,
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    host: int | None,
    *,
    live: bool,
    last: bool,
) -> GrownNetwork:
    checkpoint, _, problems = load_newest(run / CHECKPOINTS)
    if checkpoint is None and not problems:
        require_nothing_to_lose(run)
    state = below("engine", checkpoint.state) if checkpoint else {}
    if checkpoint is None or not state or problems:
        found = " ".join(problems) or (
            f"the newest is after {checkpoint.header.place}" if checkpoint else "there is none"
        )
        raise CheckpointError(
            f"{run} has no checkpoint with hosts ({found}): they are kept inside a round and at the end of a run, not "
            f"between rounds; complete it with {continuing(run)}"
            f"{', or export the best host of its rounds, without --last and --host' * (last or host is not None)}."
        )
    engine = engine_of(config, dataset, device)
    engine.load_state_dict(state, baseline_of("wait_only", config, engine.spec))
    stats = engine.outcome()
    objective = objective_of_living(stats, config.reward)
    chosen = int(np.argmax(objective)) if host is None else host
    if not 0 <= chosen < engine.spec.num_envs:
        raise ExportError(f"there is no host {chosen}; choose one of 0 to {engine.spec.num_envs - 1}.")
    test = float(host_read(engine.test())[0][chosen]) if checkpoint.header.step == 0 else None
    origin = Origin(round=stats.episode + 1, host=chosen, objective=float(objective[chosen]))
    return GrownNetwork.of(engine, config.task_spec(), dataset, stats, host=chosen, test=test, live=live, origin=origin)
