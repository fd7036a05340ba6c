"""Which executor runs the hosts of a task: all at once, or one after another."""

from typing import Literal

import torch

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.initialization import deterministic_build
from esper.kasmina.population import Population
from esper.leyline.errors import ConfigError
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.amp import LossScaler, amp_dtype
from esper.tolaria.capture import recorder_for
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.static import StaticExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.executors.twins import can_fuse

_FUSED_PIXELS = 256
"""Images up to this size run fused unless told otherwise: there the time goes into small operations.

A rule and no measurement, because the two differ by rounding: a choice by the clock would let a busy machine decide
which of two states a run ends in.
"""


def network_executor(
    config: EngineConfig, task: TaskSpec, dataset: Dataset, device: torch.device
) -> tuple[StreamedExecutor | FusedExecutor | StaticExecutor, Literal["fused", "streamed"]]:
    """The executor for hosts that are networks, in this process, and what it is called.

    Raises:
        ConfigError: "fused" or static topology was asked for, but the host cannot be stacked.
    """
    assert task.host is not None
    assert dataset is not None
    host_spec, (height, width) = task.host, dataset.train.x.shape[-2:]
    host = deterministic_build(lambda: CNNHost(host_spec, config.slots, image_size=(height, width)))
    assert isinstance(host, CNNHost)
    population = Population(
        host,
        task.optimizer,
        num_envs=config.num_envs,
        run_seed=config.run_seed,
        device=device,
        host_offset=config.host_offset,
    )
    streamed = StreamedExecutor(
        population,
        dataset,
        batch_train=task.batch_train,
        batch_val=task.batch_val,
        scaler=LossScaler(amp_dtype(config.amp, device), config.num_envs, device),
    )
    fits, static = can_fuse(population), config.topology == "static"
    if (config.executor == "fused" or static) and not fits:
        asked, out = ("topology is 'static'", " with topology 'grouped'") if static else ("executor is 'fused'", "")
        raise ConfigError(
            f"{asked}, but the host has layers with weights that no stacking rule knows; "
            f"use executor 'streamed'{out}, or add a rule to kasmina.lowering.STACKED."
        )
    if static:
        return StaticExecutor(streamed), "fused"
    small = height * width <= _FUSED_PIXELS
    if config.executor == "fused" or (config.executor == "auto" and fits and small):
        recorder = recorder_for(config.capture, "train_batch", device)
        return FusedExecutor(streamed, recorder=recorder), "fused"
    return streamed, "streamed"
