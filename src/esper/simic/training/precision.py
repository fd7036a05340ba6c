"""Which precision trains hosts faster on this CPU: measured once per processor and kind of work, and kept on the disk.

    amp = "auto" on a CPU --> kept result, or a second of measuring --> "bf16" or "off", said and written to config.toml

Processors differ in what bfloat16 costs them, and so do hosts: wide ones on large images gain where the processor
multiplies matrices of it, narrow ones lose everywhere. What is kept is the ratio of times; a run whose result is kept
takes the same precision as the one before, however busy the machine is.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.initialization import deterministic_build
from esper.simic.training.config import RunConfig
from esper.tasks.datasets import Dataset
from esper.telemetry.machine import cpu_name

MIN_GAIN = 1.1
"""How many times faster bf16 must be to be taken: less is not worth its rounding."""
_REPETITIONS = 7

Measure = Callable[[RunConfig, tuple[int, int]], float]
"""(run, height and width of its images) -> time of float32 / time of bf16."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What was found: `gain` is time of float32 / time of bf16, `told` one sentence for the user."""

    amp: Literal["bf16", "off"]
    gain: float
    told: str


def with_fastest_precision(config: RunConfig, dataset: Dataset | None, device: torch.device) -> tuple[RunConfig, str]:
    """The run with the precision that is faster on this CPU, and a sentence about it.

    Only where `amp` is "auto" and networks are trained on a CPU; elsewhere the run as it is, and nothing to say.
    """
    if config.amp != "auto" or device.type != "cpu" or dataset is None or config.task_spec().host is None:
        return config, ""
    height, width = dataset.train.x.shape[-2:]
    found = fastest_precision(config, (int(height), int(width)))
    return replace(config, amp=found.amp), found.told


def fastest_precision(config: RunConfig, image_size: tuple[int, int], measure: Measure | None = None) -> Precision:
    """The kept result for this processor, these versions and this kind of host, or a measured one that is then kept.

    A file that cannot be read or written costs another measurement in the next run, and is said.
    """
    path, key = calibration_file(), _key(config, image_size)
    kept, problem = _kept(path)
    gain, source = kept.get(key), f"as {path} says"
    if gain is None:
        gain, source = (measure or measured_gain)(config, image_size), f"kept in {path}"
        problem = problem or _keep(path, kept | {key: gain})
        if problem:
            source = f"not kept: {problem}"
    amp: Literal["bf16", "off"] = "bf16" if gain >= MIN_GAIN else "off"
    verdict = f"bf16 takes {1 / gain:.2f} of the time of float32 on this processor ({source})"
    return Precision(amp=amp, gain=gain, told=f"amp: {amp}, {verdict}")


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


def calibration_file() -> Path:
    """Where results are kept: `calibration.json` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "esper" / "calibration.json"


def _key(config: RunConfig, image_size: tuple[int, int]) -> str:
    threads, spec = torch.get_num_threads(), config.task_spec().host
    return f"{cpu_name()}; torch {torch.__version__}; {threads} threads; {spec}, {image_size}, {config.batch_train}"


def _kept(path: Path) -> tuple[dict[str, float], str]:
    """Kept results, and what is wrong with the file; one that cannot be read is left as it is."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read ({error}); delete it"
    if not isinstance(found, dict) or not all(isinstance(gain, float) and gain > 0 for gain in found.values()):
        return {}, f"{path} does not hold ratios by name; delete it"
    return found, ""


def _keep(path: Path, results: dict[str, float]) -> str:
    """Write the results, whole or not at all; returns what went wrong."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})"
    return ""
