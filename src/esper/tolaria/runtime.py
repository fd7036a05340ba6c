"""The border between device and host: reading values, measuring time, choosing the device.

A *host read* makes Python wait for the contents of a tensor. `host_read` is the only function that is meant to do so:

    tensors   bool [N]   int64 [N, 8]   float32 []          one cat of bytes, widest type first, so that all is aligned
    bytes     | int64 ................ | float32 | bool |   one copy, on CUDA into pinned memory without blocking
    arrays    views of those bytes, in the order that was asked for

`HostReadCounter` finds whoever else does it, and where.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.tolaria.read_counter import HostRead as HostRead
from esper.tolaria.read_counter import HostReadCounter as HostReadCounter
from esper.tolaria.read_counter import note_intended_read, silence
from esper.tolaria.read_counter import reads_so_far as reads_so_far

_NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


Arrays = tuple[np.ndarray, ...]


class _Piece(NamedTuple):
    """Where one of the tensors lies in the row of bytes."""

    begin: int
    end: int
    dtype: type[np.generic]
    shape: tuple[int, ...]


@lru_cache(maxsize=256)
def _packing(*forms: tuple[torch.dtype, torch.Size]) -> tuple[tuple[int, ...], tuple[_Piece, ...]]:
    """The order in which tensors of these types and shapes are packed, and the piece of each of them."""
    order = tuple(sorted(range(len(forms)), key=lambda i: (-forms[i][0].itemsize, str(forms[i][0]))))
    pieces: dict[int, _Piece] = {}
    begin = 0
    for i in order:
        dtype, shape = forms[i]
        end = begin + math.prod(shape) * dtype.itemsize
        pieces[i] = _Piece(begin, end, _NUMPY_TYPES[dtype], shape)
        begin = end
    return order, tuple(pieces[i] for i in range(len(forms)))


@final
class Packed:
    """Tensors of one device as one row of bytes that stays there until it is read; later writes do not change it."""

    @torch.no_grad()
    def __init__(self, *tensors: Tensor) -> None:
        devices = {t.device for t in tensors}
        assert len(devices) == 1, f"one read packs tensors of one device, not of {sorted(map(str, devices))}"
        unknown = {t.dtype for t in tensors} - _NUMPY_TYPES.keys()
        assert not unknown, f"{unknown} cannot be read as numpy arrays; convert before reading"
        order, self._pieces = _packing(*((t.dtype, t.shape) for t in tensors))
        with silence():
            by_type = groupby((tensors[i] for i in order), key=lambda tensor: tensor.dtype)
            self.bytes = torch.cat([torch.cat([x.reshape(-1) for x in some]).view(torch.uint8) for _, some in by_type])

    def unpack(self, packed: np.ndarray) -> Arrays:
        """The tensors as views of their bytes on the host, in the order they were given."""
        return tuple(packed[p.begin : p.end].view(p.dtype).reshape(p.shape) for p in self._pieces)


@final
class PendingRead:
    """A read that was started; the device goes on working until somebody waits for the arrays."""

    def __init__(self, buffer: Tensor, copied: torch.cuda.Event | None, packed: Packed) -> None:
        self._buffer, self._copied, self._packed = buffer, copied, packed

    def wait(self) -> Arrays:
        """The values of the tensors as they were when the read was started, in the order they were given."""
        with silence():
            if self._copied is not None:
                self._copied.synchronize()
            return self._packed.unpack(self._buffer.numpy())


def start_read(*tensors: Tensor) -> PendingRead:
    """Begin to copy tensors of one device to the host as one transfer; counts as one read.

    Writing into the tensors afterwards does not change what is read. On CUDA nothing waits until `PendingRead.wait`.
    """
    packed = Packed(*tensors)
    note_intended_read()
    with silence():
        if packed.bytes.device.type != "cuda":
            return PendingRead(packed.bytes.cpu(), None, packed)
        pinned = torch.empty(packed.bytes.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(packed.bytes, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(packed.bytes.device))
    return PendingRead(pinned, copied, packed)


def read_packed(packs: Sequence[Packed]) -> list[Arrays]:
    """The values of several packs, each as it was when it was packed, by one transfer; counts as one read."""
    (read,) = host_read(torch.cat([pack.bytes for pack in packs]))
    # a copy of each begins where numpy can read numbers of any size
    lengths = [len(pack.bytes) for pack in packs]
    pieces = np.split(read, np.cumsum(lengths)[:-1])
    return [pack.unpack(piece.copy()) for pack, piece in zip(packs, pieces, strict=True)]


def host_read(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """The values of tensors of one device as numpy arrays, by one transfer; counts as one read."""
    return start_read(*tensors).wait()


@final
class CUDATimer:
    """Measures one span of work on a device: events on CUDA, the monotonic clock elsewhere.

    with CUDATimer(device) as timer:
        work()
    milliseconds = timer.elapsed_ms()      # waits for the end of the work: only outside of a step
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # two events, or two clock readings in ns

    def start(self) -> None:
        """Begin to measure; what was measured before is forgotten."""
        self._marks = [self._mark()]

    def stop(self) -> None:
        """End the span that `start` began."""
        assert len(self._marks) == 1, "start() comes before stop(), and stop() once"
        self._marks.append(self._mark())

    def elapsed_ms(self) -> float:
        """Milliseconds between start and stop; on CUDA this waits until the device has come to the end."""
        assert len(self._marks) == 2, "nothing was measured: start() and stop() come before elapsed_ms()"
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

    def __enter__(self) -> "CUDATimer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@final
class PhaseTimer:
    """Sums the time of named phases. While `enabled` is False a span costs nothing and nothing is kept.

    Each span keeps its marks until `read`, which belongs after every rollout.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._device = device
        self._spans: dict[str, list[CUDATimer]] = {}

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Measure what happens inside `with timer.span("train"):`."""
        return self._measured(phase) if self.enabled else _NO_SPAN

    def read(self) -> dict[str, float]:
        """Milliseconds of each phase since the last read, in order of first use; waits for the device."""
        spans, self._spans = self._spans, {}
        return {phase: math.fsum(timer.elapsed_ms() for timer in timers) for phase, timers in spans.items()}

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        timer = CUDATimer(self._device)
        self._spans.setdefault(phase, []).append(timer)
        with timer:
            yield


_NO_SPAN = nullcontext()


def choose_device(name: str) -> torch.device:
    """The device that a run asks for: `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:1`.

    A CUDA device always comes with its number, because tensors report it so and `cuda` is not equal to `cuda:0`.

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
