"""How tensors lie in memory while a program reads and writes them, so that lanes come as vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.simic.lanes.program import Instruction
from esper.simic.lanes.recorder import Recorder, RecordingError, host_and_registers, is_shared

_ROW = 16
"""Numbers of a host that lie in a row in memory are read and written as vectors from here on."""


@dataclass(frozen=True)
class Layout:
    """How a tensor with an axis of hosts (None: without one) must lie in memory.

    As `told`; else hosts are the innermost axis, unless there is a long row of float32 for each host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None
    told: tuple[int, ...] | None = None

    def strides(self) -> tuple[int, ...]:
        """Numbers from one to the next along each axis."""
        if self.told is not None:
            return self.told
        order = list(range(len(self.shape)))
        if self.axis is not None and (self.dtype != torch.float32 or self._row() < _ROW):
            order.remove(self.axis)
            order.append(self.axis)
        strides, step = [0] * len(order), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(self.shape[axis], 1)
        return tuple(strides)

    def places(self) -> tuple[int, list[int]]:
        """Numbers from one host to the next, and where each number of host 0 lies."""
        strides, grid = self.strides(), np.zeros(1, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(self.shape, strides, strict=True)):
            if axis != self.axis:
                grid = (grid[:, None] + stride * np.arange(size)).reshape(-1)
        return 0 if self.axis is None else strides[self.axis], grid.tolist()

    def _row(self) -> int:
        assert self.axis is not None
        return int(np.prod(self.shape[self.axis + 1 :], dtype=np.int64))


@dataclass(frozen=True)
class Output:
    """A tensor of the answer; `passed` is the argument that it is, None where it is computed.

    `is_place`: the caller gives the tensor that it is written to.
    """

    layout: Layout
    passed: int | None
    is_place: bool = False


def loads(recorder: Recorder, layouts: Sequence[Layout]) -> Iterator[Instruction]:
    """What brings the numbers that are read into registers; arguments lie as in `layouts`."""
    read = np.array(sorted({r for x in recorder.draft.instructions for r in x.reads if r >= 0}), dtype=np.int64)
    for argument, layout in zip(recorder.arguments, layouts, strict=True):
        stride, places = layout.places()
        here = read[(read >= argument.first) & (read < argument.first + len(places))]
        if len(here):
            name = "SPREAD" if argument.axis is None else "LOAD"
            rows = tuple((register, places[register - argument.first]) for register in here.tolist())
            yield Instruction(f"{name}_{recorder.kind(argument.recorded)}", rows, (argument.number, stride))


def store(recorder: Recorder, number: int, x: Tensor, layout: Layout) -> Instruction:
    """What brings an answer from registers to tensor `number`."""
    if layout.axis is None:
        raise RecordingError(f"an answer of shape {tuple(x.shape)} has no axis of hosts")
    codes = np.moveaxis(recorder.codes(x), layout.axis, 0).reshape(x.shape[layout.axis], -1)
    rows = [host_and_registers(row)[1] for row in codes]
    own = [is_shared(row) | (row & 3 == host) for host, row in enumerate(codes)]
    if any(row != rows[0] for row in rows) or not all(map(np.all, own)):
        raise RecordingError("the answer of one host is made in another way than that of the next")
    stride, places = layout.places()
    return Instruction(f"STORE_{recorder.kind(x)}", tuple(zip(rows[0], places, strict=True)), (number, stride))
