"""Builds an engine from a task."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.registry import menu_of
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS
from esper.leyline.messages import EngineSpec, host_numbers
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine import Properties, StepListener, VectorizedEngine
from esper.tolaria.engine_config import EngineConfig, chosen_amp
from esper.tolaria.executors.choice import network_executor
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.executors.scripted import ScriptedExecutor


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
    lr_factors: Sequence[float] | None = None,
    executor: Executor | None = None,
) -> VectorizedEngine:
    """An engine for N hosts of `task`, with its data set from `load_dataset`.

    `lr_factors` [N] multiply the learning rates of each host and its seeds, besides the schedule and the factor of a
    host's instance. They are not part of a checkpoint: whoever restores one builds the engine with the same.

    The engine's `config` names the executor and precision in use; for scripted tasks the executor stays as configured.

    An `executor` of the caller's runs the hosts instead of one that `config` names; it was built for the same
    configuration, task and data set, and `lr_factors` are then its own affair.

    Raises:
        ConfigError: the executor, the schedule or `lr_factors` do not fit the task or the hosts.
    """
    config = replace(config, amp=chosen_amp(config.amp, device))
    factors = None if lr_factors is None else _factors(lr_factors, config, task)
    if executor is None:
        executor, config = _executor(config, task, dataset, device, factors)
    rules = config.lifecycle
    # a script knows the built-in blueprints only
    num_blueprints = registry.num_blueprints() if task.script is None else NUM_BUILTIN_BLUEPRINTS
    runs = executor.costs.selectable.tolist()
    spec = EngineSpec(
        run_seed=config.run_seed,
        num_envs=config.num_envs,
        slot_ids=config.slots,
        episode_length=config.episode_length,
        family=task.family,
        selectable=tuple(i for i in registry.selectable(task.family) if i < num_blueprints and runs[i]),
        num_blueprints=num_blueprints,
        blueprint_names=registry.names(),
        min_training_epochs=rules.min_training_epochs,
        auto_gates=(rules.auto_g1, rules.auto_g2, rules.auto_g3),
        host_offset=config.host_offset,
        device=device,
        menu=menu_of(
            executor.costs,
            executor.host_params,
            episode_length=config.episode_length,
            min_training_epochs=rules.min_training_epochs,
        ),
    )
    return VectorizedEngine(config, executor, spec, on_step=on_step, properties=_properties(config, task))


def _properties(config: EngineConfig, task: TaskSpec) -> Properties | None:
    """The properties of the hosts' instances in an episode; None where all hosts are equal."""
    instances = task.instances
    if instances is None:
        return None
    hosts = host_numbers(config.num_envs, config.host_offset, config.distinct_hosts)

    def properties(episode: int) -> dict[str, np.ndarray]:
        found = instances.properties(config.run_seed, hosts, episode)
        return {name: values.numpy() for name, values in found.items()}

    return properties


def _factors(given: Sequence[float], config: EngineConfig, task: TaskSpec) -> Tensor:
    """Factors of the learning rates, float32 [N]."""
    factors = torch.tensor(given, dtype=torch.float32)
    if factors.shape != (config.num_envs,) or not bool((factors.isfinite() & (factors > 0.0)).all()):
        raise ConfigError(
            f"lr_factors are {list(given)}; expected {config.num_envs} finite numbers above 0, one for each host."
        )
    if task.script is not None:
        raise ConfigError(f"task {task.name!r} is scripted and has no learning rate; leave lr_factors out.")
    return factors


def _executor(
    config: EngineConfig, task: TaskSpec, dataset: Dataset | None, device: torch.device, lr_factors: Tensor | None
) -> tuple[Executor, EngineConfig]:
    """The executor, and the configuration that names it."""
    if task.script is not None:
        scripted = ScriptedExecutor(
            task.script,
            num_envs=config.num_envs,
            num_slots=len(config.slots),
            run_seed=config.run_seed,
            device=device,
            host_ids=host_numbers(config.num_envs, config.host_offset, config.distinct_hosts, device),
        )
        return scripted, config
    assert dataset is not None
    executor, taken = network_executor(config, task, dataset, device, lr_factors)
    for index, reason in executor.population.left_out.items():
        name = registry.blueprint_at(index, task.family).name
        warnings.warn(f"blueprint {name!r} is not grown in this run, because it does not fit {reason}", stacklevel=2)
    return executor, replace(config, executor=taken)
