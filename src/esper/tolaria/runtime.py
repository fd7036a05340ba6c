"""The border between device and host: reading tensors, measuring time, choosing the device.

A *host read* makes Python wait for the contents of a tensor. Intended ones pass through `host_read` or `start_read`:

    tensors   bool [N]   int64 [N, 8]   float32 []          one cat of bytes, widest dtype first, so that all is aligned
    bytes     | int64 ................ | float32 | bool |   one copy, on CUDA into pinned memory without blocking
    arrays    views of those bytes, in the order of the tensors
"""

import ctypes
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, in_words
from esper.leyline.ranks import local_ranks

_reads = 0


def reads_so_far() -> int:
    """Intended reads of this process since it started."""
    return _reads


class _Place(NamedTuple):
    """The place of one tensor in the row of bytes."""

    begin: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    assert hasattr(np, name), f"{dtype} tensors cannot be read as numpy arrays; convert before reading"
    return np.dtype(name)


@lru_cache(maxsize=256)
def _packing(*forms: tuple[torch.dtype, torch.Size]) -> tuple[tuple[int, ...], tuple[_Place, ...]]:
    """The packing order of tensors of these dtypes and shapes, and the place of each."""
    order = tuple(sorted(range(len(forms)), key=lambda i: (-forms[i][0].itemsize, str(forms[i][0]))))
    places: dict[int, _Place] = {}
    begin = 0
    for i in order:
        dtype, shape = forms[i]
        end = begin + math.prod(shape) * dtype.itemsize
        places[i] = _Place(begin, end, _numpy_type(dtype), shape)
        begin = end
    return order, tuple(places[i] for i in range(len(forms)))


@final
class PendingRead:
    """A read in flight; the device keeps working until `wait`."""

    def __init__(self, buffer: Tensor, copied: torch.cuda.Event | None, places: tuple[_Place, ...]) -> None:
        self._buffer, self._copied, self._places = buffer, copied, places

    def wait(self) -> tuple[np.ndarray, ...]:
        """The values at the start of the read, in the order of the tensors: views of the bytes that were read."""
        if self._copied is not None:
            self._copied.synchronize()
        read = self._buffer.numpy()
        return tuple(read[p.begin : p.end].view(p.dtype).reshape(p.shape) for p in self._places)


@torch.no_grad()
def start_read(*tensors: Tensor) -> PendingRead:
    """Begin to copy tensors of one device to the host as one transfer; counts as one read.

    Later writes into the tensors do not change the result. On CUDA nothing waits until `PendingRead.wait`. On the
    device "meta", where tensors have no values, all are 0.
    """
    devices = {t.device for t in tensors}
    assert len(devices) == 1, f"one read packs tensors of one device, not of {sorted(map(str, devices))}"
    global _reads
    _reads += 1
    order, places = _packing(*((t.dtype, t.shape) for t in tensors))
    by_type = [
        torch.cat([tensor.reshape(-1) for tensor in group])
        for _, group in groupby((tensors[i] for i in order), key=lambda tensor: tensor.dtype)
    ]
    # bool needs no view: `cat` promotes it to uint8, which are the same bytes
    row = torch.cat([x if x.dtype == torch.bool else x.view(torch.uint8) for x in by_type])
    if row.is_meta:  # a dry run, in which nothing is computed
        return PendingRead(torch.zeros(row.shape, dtype=torch.uint8), None, places)
    if row.device.type != "cuda":
        return PendingRead(row.cpu(), None, places)
    pinned = torch.empty(row.shape, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(row, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(row.device))
    return PendingRead(pinned, copied, places)


def host_read(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """The values of tensors of one device as numpy arrays, by one transfer; counts as one read."""
    return start_read(*tensors).wait()


@final
class CUDATimer:
    """Measures the work inside `with CUDATimer(device) as timer:`; by events on CUDA, else by the monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # two events, or two clock readings in ns

    def __enter__(self) -> "CUDATimer":
        self._marks = [self._mark()]
        return self

    def __exit__(self, *error: object) -> None:
        self._marks.append(self._mark())

    def elapsed_ms(self) -> float:
        """Milliseconds of the last block; on CUDA this waits until the device has finished it."""
        assert len(self._marks) == 2, "nothing was measured: elapsed_ms() comes after the block"
        begin, end = self._marks
        if self._device.type == "cuda":
            end.synchronize()
            return float(begin.elapsed_time(end))
        return float(end - begin) / 1e6

    def _mark(self) -> torch.cuda.Event | int:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@final
class PhaseTimer:
    """Sums the time of named phases, if `enabled`. Spans accumulate until `read`, so call it after every rollout.

    While a profiler of PyTorch runs in this process, each span is a range of its name in the trace.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._device = device
        self._spans: dict[str, list[CUDATimer]] = {}

    def span(self, phase: str) -> AbstractContextManager[object]:
        """Measure the work inside `with timer.span("train"):`."""
        if not self.enabled:
            return _NO_SPAN
        timer = CUDATimer(self._device)
        self._spans.setdefault(phase, []).append(timer)
        if torch.autograd.profiler._is_profiler_enabled:  # a range costs 14 us even where nobody records it
            both = ExitStack()
            both.enter_context(timer)
            both.enter_context(torch.profiler.record_function(phase))
            return both
        return timer

    def read(self) -> dict[str, float]:
        """Milliseconds of each phase since the last read, in order of first use; waits for the device."""
        spans, self._spans = self._spans, {}
        return {phase: math.fsum(timer.elapsed_ms() for timer in timers) for phase, timers in spans.items()}


_NO_SPAN = nullcontext()


@contextmanager
def tried_on(device: torch.device) -> Iterator[None]:
    """Code of the user runs here for the first time on this device; it ran on the CPU when its task was made.

    Raises:
        ConfigError: it fails on another device.
    """
    try:
        yield
    except EsperError:
        raise
    except Exception as error:
        if device.type == "cpu":
            raise
        reason, other = in_words(error), "set device to 'cpu'"
        if isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(
                f"one host does not fit on {device} ({reason}); use a smaller batch, or {other}."
            ) from error
        raise ConfigError(
            f"the network, its loss, inputs or augmentation run on the CPU, but not on {device} ({reason}); make new "
            f"tensors on the device of what is given, e.g. torch.arange(n, device=x.device), or {other}."
        ) from error


def choose_device(name: str) -> torch.device:
    """The device called `name`: `auto` (CUDA if available, else the CPU), `cpu`, `cuda` or `cuda:1`.

    A CUDA device always has its number, because tensors report it and `cuda` is not equal to `cuda:0`.

    Raises:
        ConfigError: another name, or a CUDA device that this machine does not have.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    asked = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if asked is None:
        raise ConfigError(f"device is {name!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:<number>'.")
    if count == 0:
        raise ConfigError(f"device is {name!r} but PyTorch finds no CUDA device here; use device 'cpu' or 'auto'.")
    index = int(asked[1]) if asked[1] else torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"device is {name!r} but this machine has cuda:0 to cuda:{count - 1}; use one of these.")
    return torch.device("cuda", index)


def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: by its affinity, the quota of its control groups, and OMP_NUM_THREADS.

    Ranks on one machine share its cores.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    path = own.read_text(encoding="utf-8").rpartition("::/")[2].strip() if own.is_file() else ""
    for place in (groups / path, *(groups / path).parents):
        files = (place / "cpu.max", place / "cpu/cpu.cfs_quota_us", place / "cpu/cpu.cfs_period_us")  # version 2, or 1
        numbers = " ".join(file.read_text(encoding="ascii") for file in files if file.is_file()).split()
        if numbers and numbers[0].isdecimal():  # neither "max" nor -1
            cores = min(cores, int(numbers[0]) / int(numbers[1]))
    cores /= local_ranks()
    if (wished := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdecimal():
        cores = min(cores, int(wished))
    return max(1, int(cores))


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER = 2**31 - 1
_PAD = 2**26


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the rest of the process; returns False without glibc.

    It returns large freed blocks to the kernel, so each step would fault in fresh pages; a run allocates the same sizes
    again and again.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)
