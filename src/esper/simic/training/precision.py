"""Which precision trains hosts faster on this CPU: measured once per processor and kind of work, and kept on the disk.

    amp = "auto" on a CPU --> kept result, or a second of measuring --> "bf16" or "off", said and written to config.toml

Processors differ in what bfloat16 costs them, and so do hosts: wide ones on large images gain where the processor
multiplies matrices of it, narrow ones lose everywhere.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.initialization import deterministic_build
from esper.simic.training.calibration import calibrated
from esper.simic.training.config import RunConfig
from esper.tasks.datasets import Dataset
from esper.tolaria.executors.choice import prefers_native

MIN_GAIN = 1.1
"""How many times faster bf16 must be to be taken: less is not worth its rounding."""
_REPETITIONS = 7

Measure = Callable[[RunConfig, tuple[int, int]], float]
"""(run, height and width of its images) -> time of float32 / time of bf16."""


def with_fastest_precision(
    config: RunConfig, dataset: Dataset | None, device: torch.device, measure: Measure | None = None
) -> tuple[RunConfig, str]:
    """The run with the precision that is faster on this CPU, and a sentence about it.

    Only where `amp` is "auto" and networks are trained on a CPU; elsewhere the run as it is, and nothing to say. Hosts
    that run natively are in float32, which is faster there than PyTorch's bf16.
    """
    spec = config.task_spec().host
    if config.amp != "auto" or device.type != "cpu" or dataset is None or spec is None:
        return config, ""
    height, width = (int(side) for side in dataset.train.x.shape[-2:])
    native = config.executor == "native" or (
        config.executor == "auto"
        and config.topology == "grouped"
        and prefers_native(spec, (height, width), config.batch_train, "off", device)
    )
    if native:
        return replace(config, amp="off"), "amp: off (hosts are run by compiled C++, in float32)"
    work = f"time of float32 / time of bf16: {spec}, {height}x{width}, {config.batch_train} examples"
    found = calibrated(work, device, lambda: (measure or measured_gain)(config, (height, width)))
    chosen = replace(config, amp="bf16" if found.ratio >= MIN_GAIN else "off")
    return chosen, (
        f"amp: {chosen.amp} (bf16 takes {1 / found.ratio:.2f} of the time of float32 on this processor, {found.source})"
    )


def measured_gain(config: RunConfig, image_size: tuple[int, int]) -> float:
    """Time of float32 / time of bf16 of forward and backward passes of one host on one batch, in turn.

    Seeds are of the host's channels, so they gain or lose with it.
    """
    spec = config.task_spec().host
    assert spec is not None, "a scripted task trains no host"
    host = deterministic_build(lambda: CNNHost(spec, config.slots, image_size=image_size)).train()
    shape = (config.batch_train, spec.in_channels, *image_size)
    x = torch.arange(float(torch.Size(shape).numel())).remainder(17.0).div(8.0).sub(1.0).view(shape)
    y = torch.arange(config.batch_train) % spec.classes

    def seconds(dtype: torch.dtype) -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            logits = host(x, lambda _, h: h)
        F.cross_entropy(logits.float(), y).backward()
        return time.perf_counter() - began

    precisions = (torch.float32, torch.bfloat16)
    for dtype in precisions:
        seconds(dtype)  # allocates, and lets the library choose its kernels
    pairs = [[seconds(dtype) for dtype in precisions] for _ in range(_REPETITIONS)]
    return statistics.median(full / half for full, half in pairs)
