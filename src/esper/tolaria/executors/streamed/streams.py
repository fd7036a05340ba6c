"""CUDA streams of the streamed executor; no operation on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import final

import torch

_MAX_STREAMS = 32
"""More hosts share streams: the device does not run more kernels at once."""


@final
class HostStreams:
    """One stream per host; at a fork they wait for the engine's stream, at a join it waits for them.

    Tensors that hosts read (weights, batches) are made on the engine's stream before the fork and freed after the join,
    so an event orders every use on another stream.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._device = device
        count = min(num_envs, _MAX_STREAMS) if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def fork(self) -> None:
        """The hosts' streams wait for all work queued on the engine's stream."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def of(self, host: int) -> AbstractContextManager[object]:
        """The stream that host number `host` (in this process) runs on."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[host % len(self._streams)])

    def join(self) -> None:
        """The engine's stream waits for all hosts."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


@cache
def host_streams(num_envs: int, device: torch.device) -> HostStreams:
    """The streams of N hosts, the same in every pass."""
    return HostStreams(num_envs, device)
