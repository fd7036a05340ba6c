"""Which executor trains the hosts of a run faster on this machine: measured once, and kept on the disk.

    executor = "measured" --> kept results, or seconds of measuring --> the executor's name, in config.toml

Executors differ by rounding, and a run should not depend on how busy a machine was, so the presets say "auto", which is
a rule. This is for machines and hosts that the rule was not made for.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch

from esper.cpp.build import compiler
from esper.kasmina.blueprints import registry
from esper.kasmina.slot_fields import empty_slots
from esper.leyline.messages import SlotState
from esper.leyline.record import replace as changed
from esper.leyline.stages import Algorithm, SeedStage
from esper.simic.training.calibration import calibrated
from esper.simic.training.config import RunConfig
from esper.tasks.datasets import Dataset, Split
from esper.tolaria.build import build_engine
from esper.tolaria.executors.choice import native_problem
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native import NativeExecutor
from esper.tolaria.executors.protocol import Structure, empty_structure
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.executors.twins import can_fuse

_BATCHES, _REPETITIONS = 2, 5
NEVER = 0.0
"""The ratio of an executor that cannot run the hosts."""

Other = Literal["fused", "native"]
Measure = Callable[[RunConfig, Dataset, torch.device, Other], float]
"""(run, its data, where, another executor) -> time of streamed / time of the other."""


def with_fastest_executor(
    config: RunConfig, dataset: Dataset | None, device: torch.device, measure: Measure | None = None
) -> tuple[RunConfig, str]:
    """The run with the executor that is fastest here, and a sentence about it.

    Only where `executor` is "measured"; a task without networks has none, which is "auto" too.
    """
    if config.executor != "measured":
        return config, ""
    spec = config.task_spec().host
    if dataset is None or spec is None:
        return replace(config, executor="auto"), ""
    size = "x".join(str(side) for side in dataset.train.x.shape[-2:])
    hosts = (
        f"{_hosts(config)} x {spec}, slots {', '.join(config.slots)}, {size}, {config.batch_train} examples, amp "
        f"{config.amp}"
    )
    ratios, sources = {}, {}
    for other in get_args(Other):
        if other == "native" and (native_problem(config.amp, device) or compiler() is None):
            continue  # what can change between two runs is not kept
        work = f"time of streamed / time of {other}: {hosts}"
        found = calibrated(work, device, partial(measure or measured_ratio, config, dataset, device, other))
        if found.ratio != NEVER:
            ratios[other], sources[other] = found.ratio, found.source
    if not ratios:
        return replace(config, executor="streamed"), "these hosts run streamed alone, so nothing was measured"
    best = max(ratios, key=ratios.__getitem__)
    chosen = replace(config, executor=best if ratios[best] >= 1.0 else "streamed")
    told = " and ".join(f"{other} {1 / ratio:.2f}" for other, ratio in ratios.items())
    return chosen, f"training takes {told} of the time of streamed here ({sources[best]})"


def measured_ratio(config: RunConfig, dataset: Dataset, device: torch.device, other: Other) -> float:
    """Time of streamed / time of `other` of training the hosts of one process for two batches, in turn.

    Every other host has a seed in each slot, all blueprints mixed. `NEVER` where `other` cannot run the hosts.
    """
    task = config.task_spec()
    asked = replace(config.engine(num_envs=_hosts(config)), executor="streamed", workers=1, capture="off")
    streamed = build_engine(asked, task, _shortened(dataset, config.batch_train), device).executor
    assert isinstance(streamed, StreamedExecutor)
    if other == "fused" and not can_fuse(streamed.population):
        return NEVER
    rival = FusedExecutor(streamed) if other == "fused" else NativeExecutor(streamed)
    streamed.reset(0)
    structure = half_grown(asked.num_envs, registry.selectable(task.topology), len(asked.slots))
    streamed.settle(structure)
    slots = _slots_of(structure, device)

    def seconds(executor: StreamedExecutor | FusedExecutor | NativeExecutor) -> float:
        began = time.perf_counter()
        executor.train_epoch(1, slots).loss.sum().item()  # read, so that the device has done all of it
        return time.perf_counter() - began

    for executor in (streamed, rival):
        seconds(executor)
    pairs = [(seconds(streamed), seconds(rival)) for _ in range(_REPETITIONS)]
    return statistics.median(one_by_one / rivaling for one_by_one, rivaling in pairs)


def half_grown(num_hosts: int, blueprints: tuple[int, ...], num_slots: int) -> Structure:
    """Every other host with a seed in each slot that is being blended in, neighbours of different blueprints."""
    n, s = np.indices((num_hosts, num_slots))
    here = n % 2 == 0
    return replace(
        empty_structure(num_hosts, num_slots),
        stage=np.where(here, SeedStage.BLENDING, SeedStage.DORMANT).astype(np.int64),
        blueprint=np.where(here, np.array(blueprints)[(n // 2 * num_slots + s) % len(blueprints)], -1),
        algorithm=np.full(here.shape, Algorithm.ADD, dtype=np.int64),
        alpha=np.where(here, 0.5, 0.0).astype(np.float32),
        germinated=here,
    )


def _slots_of(structure: Structure, device: torch.device) -> SlotState:
    told = {
        name: torch.from_numpy(getattr(structure, name)).to(device)
        for name in ("stage", "blueprint", "algorithm", "alpha")
    }
    num_hosts, num_slots = structure.stage.shape
    return changed(empty_slots(num_hosts, num_slots, device), **told)


def _hosts(config: RunConfig) -> int:
    """Hosts of the process that has most of them."""
    return -(-config.num_envs // min(config.workers, config.num_envs))


def _shortened(dataset: Dataset, batch: int) -> Dataset:
    few = slice(0, _BATCHES * batch)
    return replace(
        dataset,
        train=Split(dataset.train.x[few], dataset.train.y[few]),
        val=Split(dataset.val.x[:batch], dataset.val.y[:batch]),
    )
