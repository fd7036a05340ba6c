"""An engine from a task: the only place where an executor is chosen."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.initialization import deterministic_build
from esper.kasmina.population import Population
from esper.leyline.actions import NUM_BUILTIN_BLUEPRINTS
from esper.leyline.errors import ConfigError
from esper.leyline.protocols import EngineSpec
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.amp import LossScaler, amp_dtype
from esper.tolaria.config import EngineConfig
from esper.tolaria.engine import StepListener, VectorizedEngine
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.executors.static import StaticExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.executors.twins import can_fuse

_FUSED_PIXELS = 256
"""Images up to this size run fused unless told otherwise: there the time goes into small operations.

A rule and no measurement, because the two differ by rounding: a choice by the clock would let a busy machine decide
which of two states a run ends in.
"""


def load_dataset(task: TaskSpec, run_seed: int, device: torch.device, data_dir: Path | None) -> Dataset | None:
    """The task's data on the device; None for a scripted task. Raises DataError where files are missing or broken."""
    return None if task.load is None else task.load(data_dir, run_seed).to(device)


def build_engine(
    config: EngineConfig,
    task: TaskSpec,
    dataset: Dataset | None,
    device: torch.device,
    *,
    on_step: StepListener | None = None,
) -> VectorizedEngine:
    """N hosts of `task`, ready for `train`. `dataset` is what `load_dataset` gave for it.

    The engine's `config.executor` is the one that was taken; where no network is run, it stays as it was asked for.
    """
    executor, taken = _executor(config, task, dataset, device)
    config = replace(config, executor=taken)
    rules = config.lifecycle
    # the script knows the built-in blueprints only
    num_blueprints = registry.num_blueprints() if task.script is None else NUM_BUILTIN_BLUEPRINTS
    spec = EngineSpec(
        run_seed=config.run_seed,
        num_envs=config.num_envs,
        slot_ids=config.slots,
        episode_length=config.episode_length,
        topology=task.topology,
        selectable=tuple(i for i in registry.selectable(task.topology) if i < num_blueprints),
        num_blueprints=num_blueprints,
        blueprint_names=registry.names(),
        min_training_epochs=rules.min_training_epochs,
        auto_gates=(rules.auto_g1, rules.auto_g2, rules.auto_g3),
        host_offset=config.host_offset,
        device=device,
    )
    return VectorizedEngine(config, executor, spec, on_step=on_step)


def _executor(
    config: EngineConfig, task: TaskSpec, dataset: Dataset | None, device: torch.device
) -> tuple[Executor, Literal["auto", "fused", "streamed"]]:
    """The executor, and what it is called."""
    if task.script is not None:
        if config.topology == "static":
            raise ConfigError(
                f"topology is 'static', but task {task.name!r} runs no networks that could be selected by masks; set "
                "topology to 'grouped'."
            )
        scripted = ScriptedExecutor(
            task.script,
            num_envs=config.num_envs,
            num_slots=len(config.slots),
            run_seed=config.run_seed,
            device=device,
            host_offset=config.host_offset,
        )
        return scripted, config.executor
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
        return FusedExecutor(streamed), "fused"
    return streamed, "streamed"
