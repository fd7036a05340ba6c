"""The best host of a run so far, which is kept when its round is over.

    checkpoints/best-host.safetensors    the state of one host, as in a checkpoint; in its metadata what `BestHost` says

The best host has the highest J of all hosts of the complete rounds. The test split is not read before it is chosen.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized

from esper.leyline.errors import CheckpointError
from esper.leyline.files import replace_file
from esper.leyline.manifest import manifests
from esper.leyline.messages import StateTree
from esper.runs.build import baseline_of, engine_of
from esper.runs.checkpoint import state_digest
from esper.runs.config import RunConfig
from esper.runs.report import objective_of
from esper.simic.rewards.config import RewardConfig
from esper.tasks.datasets import Dataset
from esper.telemetry.run_directory import continuing
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

FILE = "best-host.safetensors"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class BestHost:
    """A host at the end of its round.

    Attributes:
        round: from 1. host: its global number. objective: its 100·J. val, test: figures of merit (points) of its
            committed network; `test` is None until the run is complete. loss: on the validation split.
        topology: its permanent seeds, as in config.toml. growth: (host + fossilized parameters) / host parameters.
        state: that of an engine of this host alone.
    """

    round: int
    host: int
    objective: float
    val: float
    loss: float
    growth: float
    topology: tuple[str, ...]
    test: float | None = None
    state: StateTree = field(default_factory=dict, repr=False, compare=False)

    @property
    def about(self) -> dict[str, Any]:
        """All but the state, as plain values."""
        plain = asdict(replace(self, state={})) | {"topology": list(self.topology)}
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
    state = {name: x.to("cpu") for name, x in engine.host_state(n).items()}
    return BestHost(
        round=stats.episode + 1,
        host=engine.spec.host_offset + n,
        objective=float(objective[n]),
        val=float(stats.committed_acc[n]),
        loss=float(stats.committed_loss[n]),
        growth=float(stats.growth[n]),
        topology=manifests(stats.stage, stats.blueprint, stats.algorithm, engine.spec)[n].lines,
        state=state,
    )


def portable(config: RunConfig) -> RunConfig:
    """The settings with which hosts of a run are measured later: no compiler, no other process, full precision.

    Every executor loads the same state.
    """
    return replace(config, executor="streamed", workers=1, compile="off", amp="off")


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


def with_test(config: RunConfig, dataset: Dataset, device: torch.device, best: BestHost) -> BestHost:
    """The same with its figure of merit on the test split, which is measured if it is not known."""
    if best.test is not None:
        return best
    (test,) = host_read(engine_of_host(config, dataset, device, best).test())
    return replace(best, test=float(test[0]))


def save(folder: Path, best: BestHost) -> None:
    """Replace the file in the folder of checkpoints; raises CheckpointError if it cannot be written."""
    path, state = folder / FILE, {name: x.contiguous() for name, x in best.state.items()}
    about = json.dumps(best.about | {"format": FORMAT}, allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, serialized(state, metadata={"about": about, "sha256": state_digest(state)}))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the best host {path} cannot be written ({getattr(error, 'strerror', None) or error}); fix that, then "
            f"continue with {continuing(folder.parent)}."
        ) from error


def read(folder: Path) -> BestHost | None:
    """The best host in a folder of checkpoints, None if no round is complete; raises CheckpointError if damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    out = "move the file away to go on without the best host of the rounds so far"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
        fields = json.loads(metadata["about"])
        if (found := fields.pop("format")) != FORMAT:
            raise CheckpointError(f"{path} has format {found!r}, but this version reads format {FORMAT}; {out}.")
        if state_digest(state) != metadata["sha256"]:
            raise CheckpointError(f"{path} does not match its checksum: the file was damaged or edited; {out}.")
        return BestHost(**fields | {"topology": tuple(fields["topology"])}, state=state)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {out}.") from error
