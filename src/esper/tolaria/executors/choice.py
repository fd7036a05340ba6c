"""Chooses the executor that runs the hosts of a task."""

import warnings
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from esper.cpp import compiler
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.population import Population, check_smallest_batch, outputs_of_host
from esper.leyline.errors import ConfigError, StackingError
from esper.leyline.messages import host_numbers
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.batches import batch_bounds, check_passes
from esper.tolaria.engine_config import EngineConfig, LossScaler, amp_dtype
from esper.tolaria.executors.network import HostData, NetworkExecutor, check_scores, examples
from esper.tolaria.runtime import usable_cores

_NATIVE_INTENSITY = 150.0
"""Hosts run natively on a CPU that have at most so many multiplications for each number that is read or written. It is
the range in which native was measured to be the faster one: where matrix products take all of the time, the kernels of
PyTorch catch up."""
_FUSED_BYTES_ON_CPU = 2**20
"""Otherwise hosts run fused there if the largest activation of a batch has at most so many bytes, because small
operations take most of the time then, as they always do on a GPU.

The choice is by rule and not by timing: executors differ by rounding, so the load of the machine would change results.
"""

Taken = Literal["native", "fused", "streamed"]


def network_executor(
    config: EngineConfig,
    task: TaskSpec,
    dataset: Dataset,
    device: torch.device,
    lr_factors: Float[Tensor, " N"] | None = None,
) -> tuple[NetworkExecutor, Taken]:
    """The executor for hosts that are networks, in this process, and its name; `lr_factors` as in `HostData`.

    Raises:
        ConfigError: "fused" with a host that cannot be stacked; "native" with a host or objective
            that it has no rule for, on a GPU, in less than float32, or without a C++ compiler.
    """
    data = _host_data(config, task, dataset, device, lr_factors)
    if config.executor == "native" and (problem := native_problem(data)):
        raise ConfigError(f"executor is 'native', but {problem}.")
    if config.executor != "auto":
        return _build(config.executor, data), config.executor
    preferred: list[tuple[Taken, type[ConfigError]]] = []
    if native_problem(data) is None and compiler() is not None:
        preferred.append(("native", ConfigError))
    if prefers_fused(data):
        preferred.append(("fused", StackingError))
    for name, refusal in preferred:
        try:
            executor = _build(name, data)
            if name == "native" and not pays(executor):
                continue
            return executor, name
        except refusal as error:
            if config.num_envs > 1:  # a single host is as fast without it
                warnings.warn(f"the {name} executor cannot run these hosts; a slower one will: {error}", stacklevel=2)
    return _build("streamed", data), "streamed"


def _build(name: Taken, data: HostData) -> NetworkExecutor:
    """The executor of that name, the only one that is imported."""
    if name == "native":
        from esper.tolaria.executors.native.executor import NativeExecutor

        return NativeExecutor(data, threads=usable_cores())
    if name == "fused":
        from esper.tolaria.executors.fused import FusedExecutor

        return FusedExecutor(data)
    from esper.tolaria.executors.streamed import StreamedExecutor

    return StreamedExecutor(data)


def training_bounds(task: TaskSpec, dataset: Dataset) -> list[tuple[int, int]]:
    """`batch_bounds` of a step of training; raises ConfigError as it does, and for too many passes in a step."""
    size = len(dataset.split("train"))
    count = size if task.batches_per_step is None else task.batches_per_step * task.batch_train
    check_passes(-(-count // size), 1, size)
    return batch_bounds(count, task.batch_train, task.last_batch)


def largest_batch(task: TaskSpec, dataset: Dataset) -> int:
    """Examples of a full batch of training: fewer than `batch_train` where a step has no more."""
    start, stop = training_bounds(task, dataset)[0]
    return stop - start


def _host_data(
    config: EngineConfig, task: TaskSpec, dataset: Dataset, device: torch.device, lr_factors: Tensor | None
) -> HostData:
    """N hosts of the task with their data; objective and host are tried on two examples."""
    assert task.host is not None
    (x, y), spec = examples(dataset, 2), task.host
    host = deterministic_build(lambda: spec.build(config.slots, x[:1]))
    assert isinstance(host, Host)
    smallest = min(stop - start for start, stop in training_bounds(task, dataset))
    population = Population(
        host,
        task.optimizer,
        num_envs=config.num_envs,
        run_seed=config.run_seed,
        device=device,
        host_ids=host_numbers(config.num_envs, config.host_offset, config.distinct_hosts),
        smallest_batch=smallest,
    )
    check_smallest_batch(population.host_kind.build, x[:smallest])
    check_scores(task.objective, outputs_of_host(population.host_kind, x), y)
    scaler = LossScaler(amp_dtype(config.amp, device), config.num_envs, device)
    return HostData(
        population,
        dataset,
        task.objective,
        batch_train=task.batch_train,
        batch_val=task.batch_val,
        batches_per_step=task.batches_per_step,
        last_batch=task.last_batch,
        scaler=scaler,
        schedule=(config.schedule_begin, config.episode_length),
        instances=task.instances,
        lr_factors=lr_factors,
        measured_share=config.lifecycle.measured_share,
    )


def prefers_fused(data: HostData) -> bool:
    """Whether "auto" prefers the fused executor over the streamed one, which alone seeds global generators."""
    kinds = (data.population.host_kind, *data.population.seed_kinds.values())
    if any(kind.global_rng for kind in kinds):
        return False
    return data.population.device.type != "cpu" or data.largest_batch_bytes <= _FUSED_BYTES_ON_CPU


def native_problem(data: HostData) -> str | None:
    """Why hosts cannot run natively, and the way out; None if nothing is known against it before they are traced."""
    device, dtype, out = data.population.device, data.scaler.dtype, "use executor 'fused' or 'streamed'"
    if device.type != "cpu":
        return f"the device is {device}, and compiled C++ runs on a CPU; {out}"
    if dtype is not None:
        return f"hosts are trained in {dtype}, and compiled C++ computes in float32; set amp to 'off', or {out}"
    if data.population.host_kind.global_rng:
        return f"the host draws from the global random generators, which compiled C++ has not; {out}"
    return None


def pays(executor: NetworkExecutor) -> bool:
    """Whether a native executor is faster than the others, by the work in its programs."""
    from esper.tolaria.executors.native.executor import NativeExecutor

    assert isinstance(executor, NativeExecutor)
    return executor.intensity() <= _NATIVE_INTENSITY
