"""The kernels of esper/cpp/native as a loaded library, called through ctypes."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np

from esper.cpp.build import load
from esper.tolaria.executors.native.assembler import INSTRUCTION, LANES, Operation

_DONE, _NO_SUCH_EXAMPLE = -1, -2


class ExamplesStruct(ctypes.Structure):
    """`Examples` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "labels", "order", "table", "moves")),
        *((name, ctypes.c_int64) for name in ("available", "numbers", "count", "batch", "padded")),
        *((name, ctypes.c_int64) for name in ("channels", "height", "width", "border", "own_labels")),
    )


class MemoryStruct(ctypes.Structure):
    """`Memory` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "local", "numbers", "scratch", "images", "labels")),
        *((name, ctypes.c_int64) for name in ("rows_size", "local_size", "numbers_size", "scratch_size")),
    )


class HostsStruct(ctypes.Structure):
    """`Hosts` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("program", "first", "count", "chunk", "base", "size", "turn", "next")),
        *((name, ctypes.c_int64) for name in ("hosts", "spaces")),
    )


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
        structs = (HostsStruct, ExamplesStruct, MemoryStruct)
        self._run.argtypes = [*(ctypes.POINTER(struct) for struct in structs), ctypes.c_int64]

    def run(
        self,
        program: np.ndarray,
        hosts: HostsStruct,
        examples: ExamplesStruct,
        memory: MemoryStruct,
        number_size: int,
    ) -> None:
        """Run hosts that no other thread has taken, without the interpreter's lock.

        The caller keeps alive what the structures point to: contiguous arrays, int64 where they are no numbers of
        `number_size` bytes (float32 or float64). `program` are all instructions.

        Raises:
            IndexError: an instruction is unknown, reaches beyond a space, or has a label beyond the classes, and was
                not executed; or the order names an example that there is not.
        """
        failed = self._run(hosts, examples, memory, number_size)
        if failed == _NO_SUCH_EXAMPLE:
            raise IndexError(f"the order of the examples names one that is not among the {examples.available}")
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
