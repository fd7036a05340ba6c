"""The outcome of one controller on one group of hosts: one episode, without learning, and the test split at its end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from esper.leyline.manifest import GrowthManifest, manifests
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.controllers import Controller
from esper.runs.training_cost import CostMeter, TrainingCost
from esper.tasks.datasets import Dataset
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats, StepReport

SEED_OFFSET = 1_000_000
"""Added to the training seed, so that evaluation hosts differ from all training hosts."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one controller on N hosts.

    Attributes:
        stats: of the episode. test_acc: test accuracy (pp) of the kept networks [N].
        grown: structure of each kept network.
        cost: in FLOPs; None for scripted hosts, which are no networks.
        note: that of the controller.
    """

    name: str
    stats: RolloutStats
    test_acc: np.ndarray
    grown: tuple[GrowthManifest, ...] = ()
    cost: TrainingCost | None = None
    note: str = ""


def run_controller(
    config: RunConfig,
    dataset: Dataset | None,
    device: torch.device,
    controller: Controller,
    *,
    run_seed: int,
    num_envs: int,
    on_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """One episode of a controller on `num_envs` hosts of seed `run_seed`; the test split is read at its end.

    Args:
        config: of the task, and of the run if its controller is compared.
        dataset: that of `dataset_of`.
        device: that of `device_of`.
        controller: nothing of it is changed.
        run_seed: key of all random draws.
        num_envs: N.
        on_step: called after each control step.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: the controller does not fit, or cannot be run.
    """
    config = replace(config, compile="off")  # one episode is shorter than a compilation
    task = config.task_spec()
    if controller.host is not None:
        task = replace(task, host=controller.host)
    meter: CostMeter | None = None

    def listen(report: StepReport) -> None:
        if meter is not None:
            meter(report)
        on_step()

    engine = engine_of(
        config,
        dataset,
        device,
        engine_config=config.engine(run_seed=run_seed, num_envs=num_envs),
        on_step=listen,
        task=task,
    )
    planted = controller.planted * (num_envs if len(controller.planted) == 1 else 1)
    client = controller.make(engine.spec)
    engine.planted = planted
    if dataset is not None:
        (seed_params,) = host_read(engine.executor.costs.seed_params)
        meter = CostMeter(task, dataset, engine.spec, seed_params, planted)
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    (test_acc,) = host_read(engine.test())
    return Outcome(
        name=controller.name,
        stats=_charged(stats, config) if controller.host is not None else stats,
        test_acc=test_acc,
        grown=manifests(stats.stage, stats.blueprint, stats.algorithm, engine.spec),
        cost=meter.cost(stats) if meter else None,
        note=controller.note,
    )


def _charged(stats: RolloutStats, config: RunConfig) -> RolloutStats:
    """Results of a wider host, whose additional parameters are charged like grown ones."""
    host = config.task_spec().host
    assert host is not None, "only networks can be widened"
    own = np.full_like(stats.host_params, host.num_params())
    return replace(stats, host_params=own, fossil_params=stats.fossil_params + stats.host_params - own)
