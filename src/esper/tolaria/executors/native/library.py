"""The library of kernels: what esper/cpp/native compiles to, called through ctypes."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.cpp.build import load
from esper.tolaria.executors.native.assembler import INSTRUCTION, LANES, Operation

RUNS = {torch.float32: "esper_run_float", torch.float64: "esper_run_double"}
_DONE = -1


@final
class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.esper_operations.restype = ctypes.c_char_p
        library.esper_instruction_bytes.restype = ctypes.c_int64
        names = library.esper_operations().decode().split()
        assert names == [operation.name for operation in Operation], "program.cpp and assembler.py name the same"
        assert library.esper_instruction_bytes() == INSTRUCTION.itemsize, "an instruction is the same in both"
        self._runs = {dtype: getattr(library, name) for dtype, name in RUNS.items()}
        for run in self._runs.values():
            run.restype = ctypes.c_int64
            run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4 + [ctypes.c_void_p, ctypes.c_int64]

    def run(
        self,
        program: np.ndarray,
        first: np.ndarray,
        count: np.ndarray,
        begin: np.ndarray,
        size: np.ndarray,
        lanes: int,
        scratch: Tensor,
    ) -> None:
        """Carry out instructions `first[h]` to `first[h] + count[h]` for each host h; other threads may run meanwhile.

        Args:
            program: instructions.
            first: [H] int64.
            count: [H] int64.
            begin: [H, spaces] int64, the addresses of each host's spaces.
            size: [H, spaces] int64, their bytes.
            lanes: examples of the batch.
            scratch: working memory; its dtype is that of all numbers.

        Raises:
            IndexError: an instruction is unknown, or would reach beyond a space or a label beyond the classes; it was
                not carried out.
        """
        assert all(array.flags.c_contiguous for array in (program, first, count, begin, size))
        hosts, spaces = begin.shape
        failed = self._runs[scratch.dtype](
            program.ctypes.data, first.ctypes.data, count.ctypes.data, begin.ctypes.data, size.ctypes.data,
            hosts, spaces, lanes, stride_of(lanes), scratch.data_ptr(), scratch.nbytes,
        )  # fmt: skip
        if failed != _DONE:
            number = int(program["operation"][failed])
            name = Operation(number).name if number in list(Operation) else f"the unknown operation {number}"
            raise IndexError(f"instruction {failed}, {name}, does not fit the memory that it was given")


def stride_of(lanes: int) -> int:
    """Numbers from one row of lanes to the next."""
    return -(-lanes // LANES) * LANES


@lru_cache(maxsize=1)
def cached_library() -> Library:
    """The library, loaded once per process.

    Raises:
        ConfigError: there is no compiler, or it failed, or the library cannot be loaded (`esper.cpp.build.load`).
    """
    return load(
        "native/program.cpp",
        Library,
        what="the native executor",
        way_out="install one (such as g++), name yours in the environment variable CXX, or set executor to 'fused' or "
        "'streamed'",
    )
