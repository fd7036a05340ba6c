"""The networks that a run grew: the best host of all its rounds, or the hosts of its newest checkpoint."""

from pathlib import Path

import numpy as np
import torch

from esper.export.description import Origin
from esper.export.network import GrownNetwork
from esper.leyline.errors import CheckpointError, ExportError
from esper.leyline.tensor_dataclass import below
from esper.runs import best_host
from esper.runs.best_host import BestHost, engine_of_host, objective_of_living, portable
from esper.runs.build import baseline_of, dataset_of, device_of, engine_of
from esper.runs.checkpoint import load_newest
from esper.runs.config import RunConfig
from esper.tasks.datasets import Dataset
from esper.telemetry.run_directory import CHECKPOINTS, continuing
from esper.tolaria.runtime import host_read


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
    best = None if last or host is not None else best_host.read(run / CHECKPOINTS)
    if best is not None:
        return _best(config, dataset, device, best, live)
    return _of_checkpoint(run, config, dataset, device, host, live)


def _best(config: RunConfig, dataset: Dataset, device: torch.device, best: BestHost, live: bool) -> GrownNetwork:
    engine, task = engine_of_host(config, dataset, device, best), config.task_spec()
    test = float(host_read(engine.test())[0][0]) if best.test is None else best.test
    origin = Origin(round=best.round, host=best.host, objective=best.objective)
    return GrownNetwork.of(engine, task, dataset, engine.outcome(), host=0, test=test, live=live, origin=origin)


def _of_checkpoint(
    run: Path, config: RunConfig, dataset: Dataset, device: torch.device, host: int | None, live: bool
) -> GrownNetwork:
    checkpoint, _, complaints = load_newest(run / CHECKPOINTS)
    state = below("engine", checkpoint.state) if checkpoint else {}
    if checkpoint is None or not state or complaints:
        found = " ".join(complaints) or (
            f"the newest is after {checkpoint.header.place}" if checkpoint else "there is none"
        )
        raise CheckpointError(
            f"{run} has no checkpoint with hosts ({found}): they are kept inside a round and at the end of a run, not "
            f"between rounds; complete it with {continuing(run)}, or export the best host of its rounds, "
            "without --last and --host."
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
