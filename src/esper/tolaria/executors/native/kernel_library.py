"""The kernels of esper/cpp/native as a loaded library, called through ctypes."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from esper.cpp.build import load
from esper.tolaria.executors.native.assembler import INSTRUCTION, LANES, Operation

_DONE = -1


@final
class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.esper_operations.restype = ctypes.c_char_p
        library.esper_instruction_bytes.restype = ctypes.c_int64
        names = library.esper_operations().decode().split()
        assert names == [operation.name for operation in Operation], "program.cpp lists other operations"
        assert library.esper_instruction_bytes() == INSTRUCTION.itemsize, "an instruction has another size in C++"
        self._run = library.esper_run
        self._run.restype = ctypes.c_int64
        self._run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4 + [ctypes.c_void_p] + [ctypes.c_int64] * 3

    def run(
        self,
        program: np.ndarray,
        first: np.ndarray,
        count: np.ndarray,
        begin: np.ndarray,
        size: np.ndarray,
        lanes: int,
        scratch: Tensor,
        *,
        fitted: bool = False,
    ) -> None:
        """Execute instructions `first[h]` to `first[h] + count[h]` for each host h, without the interpreter's lock.

        `begin` and `size` [H, spaces] are the addresses and bytes of each host's spaces; all arrays are int64. `lanes`
        is the number of examples. The dtype of `scratch`, float32 or float64, is that of all numbers. `fitted` skips
        all checks but that of the labels: the same program ran with the same sizes and lanes before.

        Raises:
            IndexError: an instruction is unknown, reaches beyond a space, or has a label beyond the classes; it was not
                executed.
        """
        assert all(array.flags.c_contiguous for array in (program, first, count, begin, size))
        failed = self._run(
            program.ctypes.data, first.ctypes.data, count.ctypes.data, begin.ctypes.data, size.ctypes.data,
            *begin.shape, lanes, stride_of(lanes), scratch.data_ptr(), scratch.nbytes, scratch.element_size(), fitted,
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
        ConfigError: there is no compiler, it failed, or the library cannot be loaded (`esper.cpp.build.load`).
    """
    return load(
        "native/program.cpp",
        Library,
        what="the native executor",
        way_out="install one (such as g++), name yours in the environment variable CXX, or set executor to 'fused' or "
        "'streamed'",
    )
