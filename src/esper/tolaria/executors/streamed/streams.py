"""CUDA streams of the streamed executor; on the CPU nothing happens."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import final

import torch

_MAX_STREAMS = 32
"""More hosts share streams; the device runs no more kernels side by side anyway."""


@final
class HostStreams:
    """One stream per host, all of which wait for the engine's stream at a fork and are waited for at a join.

    What hosts read on their streams (weights, batches) is made on the engine's stream before the fork and is not
    freed before the join, so no tensor is handed between streams without an event.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._device = device
        if device.type == "cuda":
            count = min(num_envs, _MAX_STREAMS)
            self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def fork(self) -> None:
        """Hosts may start on everything that was queued so far."""
        if self._streams:
            engine = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                stream.wait_stream(engine)

    def of(self, host: int) -> AbstractContextManager[object]:
        """The stream that host number `host` (in this process) runs on."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[host % len(self._streams)])

    def join(self) -> None:
        """The engine's stream goes on after all hosts are done."""
        if self._streams:
            engine = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                engine.wait_stream(stream)


@cache
def host_streams(num_envs: int, device: torch.device) -> HostStreams:
    """The streams of N hosts, the same ones in every pass."""
    return HostStreams(num_envs, device)
