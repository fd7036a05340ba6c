"""Tensors that two processes hand to each other through memory that both of them map.

    memory    | tensor | tensor | ...           each begins at a multiple of 16 bytes
    Layout    name -> begin, dtype, shape       goes over the pipe

A tensor is copied in and copied out by operators: neither process waits for its contents in Python.
"""

import math
import mmap
import os
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import BinaryIO, final

import torch
from torch import Tensor

Layout = dict[str, tuple[int, torch.dtype, torch.Size]]
_ALIGNMENT = 16


@final
class SharedMemory:
    """Memory that grows when it is written to; `file` is open in both processes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def create(cls) -> "SharedMemory":
        """New memory, for this process and one that it starts with `file` open."""
        if not hasattr(os, "memfd_create"):  # only Linux has it
            return cls(TemporaryFile())
        return cls(os.fdopen(os.memfd_create("esper"), "r+b"))

    def write(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Copy tensors of the CPU into the memory; what was there before is lost."""
        layout: Layout = {}
        end = 0
        for name, tensor in tensors.items():
            layout[name] = (end, tensor.dtype, tensor.shape)
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        if end > self._size():
            self.file.truncate(end)
        for name, tensor in tensors.items():
            self._place(*layout[name]).copy_(tensor.detach())
        return layout

    def read(self, layout: Layout) -> dict[str, Tensor]:
        """Copies of the tensors that the other process wrote."""
        return {name: self._place(*place).clone() for name, place in layout.items()}

    def _place(self, begin: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        end = begin + math.prod(shape) * dtype.itemsize
        if end > len(self._bytes):
            mapped = mmap.mmap(self.file.fileno(), self._size())
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._bytes[begin:end].view(dtype).view(shape)

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size
