"""The compiled C++ part that carries out programs; made once on a machine, as that of the native executor."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np

from esper.cpp.build import load
from esper.simic.lanes.program import OPERATIONS

SOURCES = Path(__file__).parent / "source"


@final
class ControlMachine:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.esper_control_operations.restype = ctypes.c_char_p
        names = tuple(library.esper_control_operations().decode().split())
        assert names == OPERATIONS, "control.cpp and program.py name the same operations"
        self._run = library.esper_control_run
        self._run.restype = ctypes.c_int64
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def run(self, words: np.ndarray, arena: np.ndarray, memory: np.ndarray, hosts: int) -> None:
        """Carry out a program for hosts 0 to N - 1, block after block.

        Args:
            words: [W] int32.
            arena: bytes, as `Program.arena` made them.
            memory: int64 addresses of the tensors.
            hosts: N.

        Raises:
            IndexError: an index of a host lies outside of what it chooses from.
        """
        failed = self._run(words.ctypes.data, len(words), arena.ctypes.data, memory.ctypes.data, hosts)
        if failed != -1:
            raise IndexError(f"{OPERATIONS[words[failed]]} was given an index that is out of range")


@lru_cache(maxsize=1)
def control_machine() -> ControlMachine:
    """The library, loaded once per process and compiled once on a machine; raises ConfigError where it cannot be."""
    return load(
        SOURCES / "control.cpp",
        ControlMachine,
        what="the control step (compile = 'native')",
        way_out="install one (such as g++), name yours in the environment variable CXX, or set compile to 'off'",
    )
