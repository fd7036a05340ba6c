"""Memory that N hosts will need, predicted before it is allocated, and how long a batch of one takes.

    part         what                                                             grows with
    process      interpreter, libraries and data, as much as this process holds   -
    policy       weights of the controller, and its optimizer                     -
    host         weights, optimizer, snapshots, working copies, batches, order    N
    pass         activations of a training batch, or of a chunk of coalitions     hosts that run at once

The largest case counts: the blueprint with the most parameters, with a gate, in every slot. What a forward pass keeps
for the backward pass is found by two small passes of one host, because it is a constant plus a multiple of the batch.
"""

import os
import time
import warnings
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.leyline.tensor_dataclass import named_tensors
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.coalitions import enumerate_coalitions
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import largest_batch, network_executor
from esper.tolaria.executors.network import HostData, NetworkExecutor, examples
from esper.tolaria.executors.protocol import Structure, empty_structure
from esper.tolaria.executors.streamed import train_function
from esper.tolaria.executors.training import begin_hosts, begin_training
from esper.tolaria.runtime import host_read, tried_on, usable_cores

_DRAWN = 5
"""Most memory while random numbers of an order are drawn and sorted, in multiples of the order."""
_ALIVE = 3
"""Activations alive at a time without gradients: input and output of a layer, and what lies between."""
_PROBED = (2, 4)
"""Examples of the two small passes."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes of a run.

    Attributes:
        process: of a process without hosts, which this one holds already. host: of each host. policy: of the policy.
        at_once: of one host while it is trained or measured.
        together: whether all hosts run at once. threads: how many share the hosts.
        batch_seconds: of a training batch of one host, without seeds.
    """

    process: int
    host: int
    at_once: int
    together: bool
    threads: int
    batch_seconds: float = 0.0
    policy: int = 0

    def total(self, num_envs: int) -> int:
        """Of a process with N hosts."""
        running = num_envs if self.together else min(num_envs, self.threads)
        return self.process + self.policy + num_envs * self.host + running * self.at_once

    def most_hosts(self, available: int) -> int:
        """The largest N whose run fits, 0 if none does; `available` bytes besides what this process holds already."""
        return bisect_right(range(1, 2**32), available, key=lambda num_envs: self.total(num_envs) - self.process)

    def require(self, num_envs: int, available: int, setting: str = "num_envs") -> None:
        """Refuse what does not fit; `setting` is the name under which the user gave `num_envs`.

        Raises:
            ConfigError: names the largest N that fits.
        """
        if (most := self.most_hosts(available)) >= num_envs:
            return
        out = (
            f"at most {most} fit: set {setting} to {most}"
            if most
            else "not even one fits: use a smaller batch or policy"
        )
        raise ConfigError(
            f"{setting} is {num_envs}, which needs about {gigabytes(self.total(num_envs))} of memory; "
            f"{gigabytes(available + self.process)} are available, and {out}, or use a machine with more memory."
        )


def gigabytes(count: int) -> str:
    """Bytes in words, e.g. "1.25 GiB"."""
    return f"{count / 2**30:.2f} GiB"


def predict(
    config: EngineConfig, task: TaskSpec, dataset: Dataset, device: torch.device, *, others: int = 0
) -> MemoryPrediction:
    """The memory of a run of this configuration, before its hosts exist; `others` are further bytes of each host.

    Raises:
        ConfigError: the hosts cannot run as configured.
    """
    task = replace(task, batch_train=largest_batch(task, dataset), batches_per_step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the choice of an executor come again when the hosts are built
        single = replace(config, num_envs=1)
        one, taken = network_executor(single, task, dataset, device)
    one.reset(0)
    structure = _everywhere_largest(one.population)
    one.apply_structure(structure)
    native = taken == "native"
    threads = min(usable_cores(), config.num_envs) if native and not one.refused else 1
    working = one.working_bytes()
    host = _host_bytes(one.data, structure, batches=not native) + others
    with tried_on(device):
        at_once = working or max(_training_bytes(one.data, structure), _measuring_bytes(one.data))
    process = resident_bytes() if device.type == "cpu" else 0  # when all code is loaded, and before trials of the time
    with tried_on(device):
        batch_seconds = _pass_seconds(one)
    if further := int(_TRIAL / batch_seconds):  # much of a quick pass is work that all hosts and batches share
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            several, _ = network_executor(single, replace(task, batches_per_step=1 + further), dataset, device)
        batch_seconds = max((_pass_seconds(several) - batch_seconds) / further, 0.1 * batch_seconds / further)
    return MemoryPrediction(
        process=process,
        host=host,
        at_once=at_once,
        together=taken == "fused",
        threads=threads,
        batch_seconds=batch_seconds,
    )


_TRIAL = 0.1
"""Most seconds of a training pass whose time is measured."""


def _pass_seconds(one: NetworkExecutor) -> float:
    """Time of a training pass: the shorter of two after the first."""
    one.reset(0)
    slots = empty_slots(1, one.population.num_slots, one.population.device)
    seconds = []
    for t in (1, 2, 3):
        began = time.perf_counter()
        host_read(one.train_epoch(t, slots).loss)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _everywhere_largest(population: Population) -> Structure:
    """One host with the largest seed in every slot, trained and active."""
    sizes: dict[int, tuple[int, int]] = {}
    for (channels, index), kind in population.seed_kinds.items():
        sizes[channels] = max(sizes.get(channels, (0, 0)), (kind.start.parameters.num_params, index))
    empty = empty_structure(1, population.num_slots)
    everywhere = np.ones((1, population.num_slots), dtype=np.bool_)
    stage = np.full_like(empty.stage, SeedStage.HOLDING)
    coalitions = enumerate_coalitions(torch.from_numpy(stage), torch.from_numpy(everywhere))
    return replace(
        empty,
        stage=stage,
        blueprint=np.array([[sizes[point.channels][1] for point in population.points]]),
        algorithm=np.full_like(empty.stage, Algorithm.GATE),
        has_gate=everywhere,
        alpha=np.ones_like(empty.alpha),
        germinated=everywhere,
        sets=coalitions.sets.numpy(),
        sets_valid=coalitions.valid.numpy(),
    )


def _host_bytes(data: HostData, structure: Structure, *, batches: bool) -> int:
    """What every host holds: its rows, their working copies, the order of its examples, two batches."""
    p = data.population
    state = sum(x.nbytes for x in p.state_dict().values())
    rows = begin_training(p, structure)
    copies = [begin_hosts(p), rows.seeds, rows.gates]
    order = 8 * len(data.dataset.train)
    augmentation = data.dataset.augmentation
    if augmentation is not None:
        order += len(data.dataset.train) * augmentation.draw(0, p.host_ids, 0, 1, 1).nbytes
    x, y = examples(data.dataset, 1)
    batch = data.batch_train * (x.nbytes + y.nbytes) if batches else 0
    return state + sum(map(_copy_bytes, copies)) + _DRAWN * order + 2 * batch


def _copy_bytes(working: TrainingCopy) -> int:
    """A working copy, and two of its parameters while the optimizer steps."""
    state = sum(x.nbytes for _, x in named_tensors(working.optimizer))
    return 4 * working.params.nbytes + state


def _training_bytes(data: HostData, structure: Structure) -> int:
    """Activations of a training batch of one host, and their gradients on the way back."""
    few, more = (_kept_for_backward(data, structure, count) for count in _PROBED)
    per_example = (more - few) / (_PROBED[1] - _PROBED[0])
    constant = few - per_example * _PROBED[0]
    return round(constant + data.batch_train * per_example) + 2 * data.largest_batch_bytes


def _kept_for_backward(data: HostData, structure: Structure, count: int) -> int:
    """Bytes that the forward pass of one host over `count` examples keeps, weights not counted."""
    p = data.population
    hosts, rows = begin_hosts(p), begin_training(p, structure)
    train = train_function(data, [0], hosts, rows, torch.from_numpy(structure.alpha).to(p.device))
    weights = {x.untyped_storage().data_ptr() for working in (hosts, rows.seeds, rows.gates)
               for x in (working.params, working.grad)}  # fmt: skip
    weights |= {x.untyped_storage().data_ptr() for x in p.host_kind.template.shared.values()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    x, y = (part[None].to(p.device) for part in examples(data.dataset, count))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        train(x, y)
    return sum(kept.values())


def _measuring_bytes(data: HostData) -> int:
    """A chunk of the coalitions of one host, or of all hosts at once, which share a chunk."""
    states, largest = data.plan(data.coalition_sets()[0]).num_states, data.host.largest_activation
    return 4 * _ALIVE * min(data.examples_at_once(states), data.batch_val) * states * largest


# -- what there is ----------------------------------------------------------------------------------------------------


def available_bytes(device: torch.device) -> int:
    """Memory that a run can still take: of the GPU, or of the machine (less, where the control group allows less)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not (info := Path("/proc/meminfo")).exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":") for line in info.read_text(encoding="ascii").splitlines())
    free = 1024 * int(fields["MemAvailable"].split()[0])
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text(encoding="ascii"))))
    return free


def resident_bytes() -> int:
    """Memory that this process holds now; its peak so far where /proc is missing."""
    if (pages := Path("/proc/self/statm")).exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
