"""The networks that a run grew, from its checkpoint."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from esper.export.network import GrownNetwork
from esper.leyline.checkpoint_tree import below
from esper.leyline.errors import CheckpointError, ExportError
from esper.runs.build import baseline_of, dataset_of, device_of, engine_of
from esper.runs.checkpoint import load_newest
from esper.runs.config import RunConfig
from esper.runs.report import objective_of
from esper.telemetry.run_directory import CHECKPOINTS
from esper.tolaria.runtime import host_read


def grown_of_run(run: Path, config: RunConfig, *, host: int | None = None, live: bool = False) -> GrownNetwork:
    """A host of the newest checkpoint; without `host`, the one with the highest J.

    Its figure of merit on the validation split is measured again, that on the test split only if the run is complete.

    Raises:
        ExportError, CheckpointError: the run has no networks, or its checkpoint no hosts, or there is no such host.
        ConfigError, DataError: the hosts cannot be run here.
    """
    checkpoint, _, complaints = load_newest(run / CHECKPOINTS)
    state = below("engine", checkpoint.state) if checkpoint else {}
    if checkpoint is None or not state or complaints:
        found = " ".join(complaints) or (
            f"the newest is after {checkpoint.header.place}" if checkpoint else "there is none"
        )
        raise CheckpointError(
            f"{run} has no checkpoint with hosts ({found}): they are kept inside a round and at the end of a run, not "
            f"between rounds; complete it with esper train --resume {run}."
        )
    # every executor loads the same state; this one needs no compiler, no other process and no particular device
    config = replace(config, executor="streamed", graph="dynamic", workers=1, compile="off", capture="off", amp="off")
    device = device_of(config)
    dataset, task = dataset_of(config, device), config.task_spec()
    if dataset is None:
        raise ExportError(f"task {task.name!r} is scripted and has no networks; export a run of another task.")
    engine = engine_of(config, dataset, device)
    engine.load_state_dict(state, baseline_of("wait_only", config, engine.spec))
    stats = engine.outcome()
    chosen = int(np.argmax(objective_of(stats, config.reward))) if host is None else host
    test = None
    if checkpoint.header.step == 0 and 0 <= chosen < engine.spec.num_envs:
        test = float(host_read(engine.test())[0][chosen])
    return GrownNetwork.of(engine, task, dataset, stats, host=chosen, test=test, live=live)
