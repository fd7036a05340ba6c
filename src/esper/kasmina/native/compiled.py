"""The C++ part: compiled when it is first needed, kept in the user's cache folder, called through ctypes.

No headers of PyTorch are included, so it takes seconds. The file's name tells what it was made of: sources, options,
and what the compiler knows of itself and of the processor; whatever changes, it is made anew.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.native.assembler import INSTRUCTION, LANES, Operation
from esper.leyline.errors import ConfigError

_SOURCE = Path(__file__).parent / "source"
_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-shared",
    "-fPIC",
)
_LONG_VECTORS = "-mprefer-vector-width=512"
"""Where there are such vectors compilers prefer shorter ones, which is 6 % slower here."""
_WAY_OUT = (
    "install one (such as g++), name yours in the environment variable CXX, or set executor to 'fused' or 'streamed'"
)
_SECONDS = 300
L = TypeVar("L")

RUNS = {torch.float32: "esper_run_float", torch.float64: "esper_run_double"}


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of c++, g++ and clang++ that is there."""
    named = os.environ.get("CXX")
    candidates = (named,) if named else ("c++", "g++", "clang++")
    return next((path for path in map(shutil.which, candidates) if path), None)


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
            run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4 + [ctypes.c_void_p]

    def run(
        self, program: np.ndarray, first: np.ndarray, count: np.ndarray, base: np.ndarray, lanes: int, scratch: Tensor
    ) -> None:
        """Carry out instructions `first[h]` to `first[h] + count[h]` for each host h; other threads may run meanwhile.

        Args:
            program: instructions.
            first: [H] int64.
            count: [H] int64.
            base: [H, spaces] int64, the addresses of each host's spaces.
            lanes: examples of the batch.
            scratch: working memory; its dtype is that of all numbers.
        """
        assert all(array.flags.c_contiguous for array in (program, first, count, base))
        hosts, spaces = base.shape
        failed = self._runs[scratch.dtype](
            program.ctypes.data, first.ctypes.data, count.ctypes.data, base.ctypes.data,
            hosts, spaces, lanes, stride_of(lanes), scratch.data_ptr(),
        )  # fmt: skip
        assert failed == -1, f"instruction {failed} does not exist"


def stride_of(lanes: int) -> int:
    """Numbers from one row of lanes to the next."""
    return -(-lanes // LANES) * LANES


@lru_cache(maxsize=1)
def cached_library() -> Library:
    """The library, compiled unless the user's cache folder holds it; loaded once per process.

    Raises:
        ConfigError: there is no compiler, or it failed.
    """
    return load_library(cache_folder())


def cache_folder() -> Path:
    """`esper` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esper"


def load_library(folder: Path) -> Library:
    """The library from this folder; compiled into it, or where it cannot be written for this process alone."""
    return opened(_SOURCE / "program.cpp", Library, folder, what="the native executor", way_out=_WAY_OUT)


def opened(source: Path, load: Callable[[Path], L], folder: Path | None = None, *, what: str, way_out: str) -> L:
    """`load` called with the library made of a source and the files beside it.

    Args:
        source: what is compiled.
        load: how the library is loaded.
        folder: where it is kept, the user's cache folder unless given.
        what: who needs it, for messages.
        way_out: what else can be done, for messages.

    Raises:
        ConfigError: there is no compiler, or it failed.
    """
    tool, folder = compiler(), cache_folder() if folder is None else folder
    if tool is None:
        asked = os.environ.get("CXX")
        found = f"CXX names {asked!r}, which is not there" if asked else "none of c++, g++ and clang++ is there"
        raise ConfigError(f"{what} needs a C++ compiler, but {found}; {way_out}.")
    try:
        known = _told([tool, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
        options = (*_OPTIONS, _LONG_VECTORS) if b"__AVX512F__" in known else _OPTIONS
        path = folder / f"{source.stem}-{_fingerprint(known, options, source.parent)}.so"
        if path.exists():
            return load(path)
        with TemporaryDirectory() as scratch:
            draft = Path(scratch) / path.name
            _told([tool, *options, "-I", str(_SOURCE), "-o", str(draft), str(source)])
            _keep(draft, path)
            return load(draft)  # stays loaded when its file is gone
    except _CompilerError as error:
        raise ConfigError(f"{tool} could not compile {what} ({error}); {way_out}.") from error


def _keep(draft: Path, path: Path) -> None:
    """Copy under another name and rename, so that a half-written file is never loaded.

    Where the folder cannot be written nothing is lost: the next process compiles again.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}.so")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(draft, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _fingerprint(known: bytes, options: Sequence[str], sources: Path = _SOURCE) -> str:
    """Of what the compiler knows of itself and of the processor, the options, and the sources."""
    digest = hashlib.sha256(known + " ".join(options).encode())
    for source in sorted({*sources.iterdir(), *_SOURCE.iterdir()}):  # the first may include from the second
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


class _CompilerError(Exception):
    """The compiler said no."""


def _told(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _CompilerError(f"took more than {_SECONDS} s") from error
    if done.returncode != 0:
        first_error = next((line for line in done.stderr.decode().splitlines() if "error" in line), "no message")
        raise _CompilerError(first_error.strip())
    return done.stdout
