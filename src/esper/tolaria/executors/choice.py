"""Chooses the executor that runs the hosts of a task."""

import warnings
from typing import Literal

import torch

from esper.cpp.build import compiler
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.population import Population
from esper.leyline.errors import ConfigError, StackingError
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.amp import AmpMode, LossScaler, amp_dtype
from esper.tolaria.capture import capture_backend_for
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.fused.stacked_modules import can_fuse
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.static.executor import StaticExecutor
from esper.tolaria.executors.streamed.executor import StreamedExecutor

_NATIVE_BYTES = 2**23
"""Hosts whose largest activation of a batch has at most this many bytes run natively on a CPU: larger ones do not fit
into the caches, and wide hosts with seeds are then no faster than in PyTorch."""
_FUSED_PIXELS_ON_CPU = 256
"""Otherwise images up to this size run fused, because small operations take most of the time, as always on a GPU.

The choice is by rule and not by timing: executors differ by rounding, so the load of the machine would change results.
"""

Taken = Literal["native", "fused", "streamed"]


def network_executor(
    config: EngineConfig, task: TaskSpec, dataset: Dataset, device: torch.device
) -> tuple[NetworkExecutor | StaticExecutor, Taken]:
    """The executor for hosts that are networks, in this process, and its name.

    Raises:
        ConfigError: "fused" or a static graph with a host that cannot be stacked; "native" on a GPU, in less than
            float32, or without a C++ compiler.
    """
    assert task.host is not None
    data = _host_data(config, task, dataset, device)
    fits, static = can_fuse(data.population), config.graph == "static"
    if (config.executor == "fused" or static) and not fits:
        asked, out = ("graph is 'static'", " with graph 'dynamic'") if static else ("executor is 'fused'", "")
        raise ConfigError(
            f"{asked}, but the host has layers with weights that no stacking rule knows; "
            f"use executor 'streamed'{out}, or add a rule to kasmina.parameters.stacked_layers.STACKED."
        )
    if static:
        return StaticExecutor(data), "fused"
    if config.executor == "native" and (problem := native_problem(config.amp, device)):
        raise ConfigError(f"executor is 'native', but {problem}.")
    if config.executor != "auto":
        return _build(config.executor, config, data), config.executor
    preferred: list[tuple[Taken, type[ConfigError]]] = []
    if prefers_native(task.host, data.image_size, task.batch_train, config.amp, device):
        preferred.append(("native", ConfigError))
    if fits and prefers_fused(data.image_size, device.type):
        preferred.append(("fused", StackingError))
    for name, refusal in preferred:
        try:
            return _build(name, config, data), name
        except refusal as error:
            warnings.warn(f"the {name} executor cannot run these hosts; a slower one will: {error}", stacklevel=2)
    return StreamedExecutor(data), "streamed"


def _build(name: Taken, config: EngineConfig, data: HostData) -> NetworkExecutor:
    if name == "native":
        return NativeExecutor(data, threads=config.workers * torch.get_num_threads())
    if name == "fused":
        return FusedExecutor(data, capture_backend=capture_backend_for(config.capture, data.population.device))
    return StreamedExecutor(data)


def _host_data(config: EngineConfig, task: TaskSpec, dataset: Dataset, device: torch.device) -> HostData:
    """N hosts of the task with their data."""
    assert task.host is not None
    spec, (height, width) = task.host, dataset.train.x.shape[-2:]
    host = deterministic_build(lambda: CNNHost(spec, config.slots, image_size=(height, width)))
    assert isinstance(host, CNNHost)
    population = Population(
        host,
        task.optimizer,
        num_envs=config.num_envs,
        run_seed=config.run_seed,
        device=device,
        host_offset=config.host_offset,
    )
    scaler = LossScaler(amp_dtype(config.amp, device), config.num_envs, device)
    return HostData(population, dataset, batch_train=task.batch_train, batch_val=task.batch_val, scaler=scaler)


def prefers_fused(image_size: tuple[int, int], device_type: str) -> bool:
    """Whether "auto" prefers the fused executor over the streamed one."""
    height, width = image_size
    return device_type == "cuda" or height * width <= _FUSED_PIXELS_ON_CPU


def native_problem(amp: AmpMode, device: torch.device) -> str | None:
    """Why hosts cannot run natively, and the way out; None if they can."""
    if device.type != "cpu":
        return f"the device is {device}, and compiled C++ runs on a CPU; use executor 'fused' or 'streamed'"
    if amp_dtype(amp, device) is not None:
        return f"amp is {amp!r}, and compiled C++ computes in float32; set amp to 'off', or executor to 'streamed'"
    return None


def prefers_native(
    spec: CNNHostSpec, image_size: tuple[int, int], batch: int, amp: AmpMode, device: torch.device
) -> bool:
    """Whether "auto" prefers the native executor: it can run, and the activations of a batch are small."""
    small = 4 * batch * spec.largest_activation(*image_size) <= _NATIVE_BYTES
    return small and native_problem(amp, device) is None and compiler() is not None
