"""The kernels of esper/cpp/native as a loaded library; it runs the programs of many hosts, each on its own memory."""

import ctypes
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.cpp import load
from esper.tolaria.executors.native.program import INSTRUCTION, Operation, Program

_DONE, _NO_SUCH_EXAMPLE = -1, -2


class ExamplesStruct(ctypes.Structure):
    """`Examples` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "labels", "order", "table", "moves")),
        *((name, ctypes.c_int64) for name in ("available", "numbers", "count", "batch", "padded")),
        *((name, ctypes.c_int64) for name in ("channels", "height", "width", "border", "own_labels")),
        *((name, ctypes.c_int64) for name in ("labels_each", "first", "outputs_each", "goes_on", "keys_each")),
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
        library.esper_instruction_bytes.restype = library.esper_lanes.restype = ctypes.c_int64
        names = library.esper_operations().decode().split()
        assert names == [operation.name for operation in Operation], "program.cpp lists other operations"
        assert library.esper_instruction_bytes() == INSTRUCTION.itemsize, "an instruction has another size in C++"
        self.lanes: int = library.esper_lanes()  # of which a row has a multiple
        self._run = library.esper_run
        self._run.restype = ctypes.c_int64
        structs = (HostsStruct, ExamplesStruct, MemoryStruct)
        self._run.argtypes = [ctypes.POINTER(struct) for struct in structs]

    def run(self, program: np.ndarray, hosts: HostsStruct, examples: ExamplesStruct, memory: MemoryStruct) -> None:
        """Run hosts that no other thread has taken, without the interpreter's lock.

        The caller keeps alive what the structures point to: contiguous arrays of the library's dtype, or int64.
        `program` are all instructions.

        Raises:
            IndexError: an instruction is unknown, reaches beyond a space, or has a label beyond the classes, and was
                not executed; or the order names an example that there is not.
        """
        failed = self._run(hosts, examples, memory)
        if failed == _NO_SUCH_EXAMPLE:
            raise IndexError(f"the order of the examples names one that is not among the {examples.available}")
        if failed != _DONE:
            number = int(program["operation"][failed])
            name = Operation(number).name if number in list(Operation) else f"the unknown operation {number}"
            raise IndexError(f"instruction {failed}, {name}, does not fit the memory that it was given")


def stride_of(lanes: int) -> int:
    """Numbers from one row of lanes to the next."""
    unit = cached_library().lanes
    return -(-lanes // unit) * unit


@lru_cache(maxsize=2)
def cached_library(dtype: torch.dtype = torch.float32) -> Library:
    """The library for float32 or float64, loaded once per process.

    Raises:
        ConfigError: there is no compiler, it failed, or the library cannot be loaded (`esper.cpp.load`).
    """
    return load(
        "native/program.cpp",
        Library,
        what="the native executor",
        alternative="install one (such as g++), name yours in the environment variable CXX, or set executor to 'fused' "
        "or 'streamed'",
        options=(f"-DESPER_NUMBER={'double' if dtype is torch.float64 else 'float'}",),
    )


@dataclass(frozen=True)
class Examples:
    """The data of a pass.

    Attributes:
        images: [n, ...], of the machine's dtype, or bytes [n, C, H, W] with a `table`.
        labels: [n, ...] int64, or [H, count, ...] in the order in which each host takes its examples, if `own_labels`.
        order: [H, count] int64, the examples that each host takes in turn, -1 after its last; None: all of them, as
            they lie.
        batch: examples at a time; the last batch may be shorter.
        padded: fill the last batch with examples that are not counted, which is fastest.
        table: [C, 256], the numbers that the bytes of each channel stand for.
        moves: [H, count, 3] int64, a window of each image as drawn by `CropAndFlip`. border: its `padding`.
        keys_each: numbers of each batch in the space KEYS of a host (`sequences.pass_keys`).
        first: number of the first batch in its pass.
    """

    images: Tensor
    labels: Tensor
    order: Tensor | None
    batch: int
    padded: bool = False
    table: Tensor | None = None
    moves: Tensor | None = None
    border: int = 0
    own_labels: bool = False
    keys_each: int = 0
    first: int = 0

    @property
    def count(self) -> int:
        """Examples of each host."""
        return len(self.labels) if self.order is None else self.order.shape[1]

    def batch_sizes(self) -> set[int]:
        """The sizes of the batches."""
        return {min(self.batch, self.count - start) for start in range(0, self.count, self.batch)}

    def struct(self) -> ExamplesStruct:
        """What C++ reads."""
        tensors = self.images, self.labels, self.order, self.table, self.moves
        assert all(x is None or (x.is_contiguous() and x.device.type == "cpu") for x in tensors)
        assert (self.images.dtype == torch.uint8) == (self.table is not None)
        channels, height, width = (*self.images.shape[1:], 1, 1, 1)[:3]
        assert self.table is None or self.table.shape == (channels, 256)
        pointers = (None if x is None else x.data_ptr() for x in tensors)
        sizes = len(self.images), self.images[0].numel(), self.count, self.batch, self.padded
        per_label = self.labels.dim() - (2 if self.own_labels else 1)
        each = math.prod(self.labels.shape[self.labels.dim() - per_label :])
        image = channels, height, width, self.border
        return ExamplesStruct(*pointers, *sizes, *image, self.own_labels, each, self.first, keys_each=self.keys_each)


def working_numbers(programs: Sequence[Program], lanes: int, numbers_gathered: int) -> dict[str, int]:
    """How many numbers of working memory these programs need on batches of `lanes` examples, by purpose."""
    stride = stride_of(lanes)
    return {
        "rows": max(p.rows for p in programs) * stride,
        "local": max(p.local * min(p.chunk, stride) for p in programs),
        "numbers": max(p.numbers for p in programs),
        "scratch": max(p.scratch for p in programs),
        "images": numbers_gathered * stride,
    }


class _Memory:
    """Working memory of one thread; the largest so far."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        names = "rows", "local", "numbers", "scratch", "images"
        self._tensors = {name: torch.zeros(0, dtype=dtype) for name in names}
        self._labels = torch.zeros(0, dtype=torch.int64)

    def struct(self, programs: Sequence[Program], lanes: int, numbers_gathered: int, labels: int = 1) -> MemoryStruct:
        """What C++ reads, large enough for these programs; it clears the rows."""
        stride, needed = stride_of(lanes), working_numbers(programs, lanes, numbers_gathered)
        for name, size in needed.items():
            if len(self._tensors[name]) < size:
                self._tensors[name] = torch.empty(size, dtype=self._dtype)
        if len(self._labels) < stride * labels:
            self._labels = torch.empty(stride * labels, dtype=torch.int64)
        pointers = (x.data_ptr() for x in (*self._tensors.values(), self._labels))
        size = self._dtype.itemsize
        return MemoryStruct(*pointers, *(size * needed[name] for name in ("rows", "local", "numbers", "scratch")))


@final
@dataclass(frozen=True)
class Workload:
    """The program of each host, made once per pass.

    `programs` are the different ones, `of_hosts` [H] those of the hosts; `code` are all instructions, and `first` and
    `count` [H] those of each host.

    `chunk` [H]: examples of a batch that pass through the layers together (`Program.chunk`).
    `turn` [H]: the hosts, those with the most work first, so that threads end at nearly the same time.
    """

    programs: tuple[Program, ...]
    of_hosts: tuple[Program, ...]
    code: np.ndarray
    first: np.ndarray
    count: np.ndarray
    chunk: np.ndarray
    turn: np.ndarray

    @classmethod
    def of_each(cls, programs: Sequence[Program]) -> "Workload":
        """A program for each host; a program that several hosts share is stored once."""
        distinct = {id(program): program for program in programs}
        begins, end = {}, 0
        for key, program in distinct.items():
            begins[key] = end
            end += len(program.code)
        first = np.array([begins[id(program)] for program in programs], dtype=np.int64)
        count = np.array([len(program.code) for program in programs], dtype=np.int64)
        chunk = np.array([program.chunk for program in programs], dtype=np.int64)
        code = np.concatenate([p.code for p in distinct.values()])
        turn = np.argsort([-program.cost for program in programs], kind="stable")
        return cls(tuple(distinct.values()), tuple(programs), code, first, count, chunk, turn)

    def part(self, k: int) -> "Workload":
        """That of one host."""
        some = np.array([k])
        return replace(
            self, first=self.first[some], count=self.count[some], chunk=self.chunk[some], turn=np.zeros(1, np.int64)
        )

    def begun(self) -> "Workload":
        """The instructions up to the barrier."""
        return replace(self, count=self._barriers())

    def rest(self) -> "Workload":
        """The instructions behind the barrier."""
        barriers = self._barriers()
        return replace(self, first=self.first + barriers, count=self.count - barriers)

    def _barriers(self) -> np.ndarray:
        found = np.flatnonzero(self.code["operation"] == Operation.BARRIER)
        return np.asarray(found[np.searchsorted(found, self.first)] + 1 - self.first)

    def check_batch(self, examples: int) -> None:
        """Raise ValueError where a normalization of a host would see a single value (`Program.check_batch`)."""
        for program in self.programs:
            program.check_batch(examples)


@final
class Spaces:
    """Where the memory of each host lies: `begin` [H, spaces] addresses, `size` [H, spaces] bytes, both int64.

    Only addresses are stored: the caller keeps the tensors alive until the machine has run.
    """

    def __init__(self, hosts: int, spaces: int) -> None:
        self.begin, self.size = (np.zeros((hosts, spaces), dtype=np.int64) for _ in range(2))

    def of(self, hosts: np.ndarray | slice) -> "Spaces":
        """A copy for some of the hosts."""
        some = Spaces(0, 0)
        some.begin, some.size = self.begin[hosts].copy(), self.size[hosts].copy()
        return some

    def share(self, space: int, tensor: Tensor) -> None:
        """Give all hosts the same contiguous tensor."""
        self._set(slice(None), space, tensor, np.zeros(1, dtype=np.int64), tensor.nbytes)

    def rows(
        self, space: int, tensor: Tensor, rows: np.ndarray | None = None, hosts: np.ndarray | slice = slice(None)
    ) -> None:
        """Give each of these hosts one row of a contiguous tensor [R, ...]: in order, or those in `rows`."""
        index = np.arange(len(tensor)) if rows is None else rows
        self._set(hosts, space, tensor, index.astype(np.int64), tensor.nbytes // max(len(tensor), 1))

    def _set(self, hosts: np.ndarray | slice, space: int, tensor: Tensor, index: np.ndarray, size: int) -> None:
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        self.begin[hosts, space], self.size[hosts, space] = tensor.data_ptr() + index * size, size


@final
class Machine:
    """The compiled library with working memory for some threads.

    Args:
        dtype: of all numbers. threads: how many share the hosts; results do not depend on it.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32, threads: int = 1) -> None:
        self._library, self._dtype = cached_library(dtype), dtype
        self._memory = [_Memory(dtype) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def run(self, work: Workload, spaces: Spaces, *, batch: int, **sizes: int) -> None:
        """Execute each host's program once, on `batch` examples that lie in its spaces already.

        `sizes`: `numbers` of an input; `labels_each` and `outputs_each` of an example; `first`, the number of the batch
        in its pass; `keys_each` as of `Examples`; and whether the program `goes_on` behind its barrier.

        Raises IndexError if an instruction does not fit its memory, and ValueError as `Workload.check_batch`.
        """
        work.check_batch(batch)
        self._run(work, spaces, ExamplesStruct(batch=batch, **sizes))

    def run_batches(self, work: Workload, spaces: Spaces, examples: Examples) -> None:
        """Execute each host's program on every batch of the examples, which become its first two spaces."""
        numbers = examples.images if examples.table is None else examples.table
        assert numbers.dtype == self._dtype, "the compiled code reads numbers of this type"
        assert all(x is None or len(x) == len(spaces.begin) for x in (examples.order, examples.moves))
        for size in examples.batch_sizes():
            work.check_batch(size)
        self._run(work, spaces, examples.struct())

    def _run(self, work: Workload, spaces: Spaces, examples: ExamplesStruct) -> None:
        taken = np.zeros(1, dtype=np.int64)
        arrays = work.code, work.first, work.count, work.chunk, spaces.begin, spaces.size, work.turn, taken
        assert all(array.flags.c_contiguous for array in arrays)
        hosts = HostsStruct(*(array.ctypes.data for array in arrays), *spaces.begin.shape)
        gathered = (examples.numbers, examples.labels_each) if examples.images else (0, 0)
        memories = [m.struct(work.programs, examples.batch, *gathered) for m in self._memory]

        def run(memory: MemoryStruct) -> None:
            self._library.run(work.code, hosts, examples, memory)

        first, *others = memories[: len(spaces.begin)]
        futures = [] if self._pool is None else [self._pool.submit(run, memory) for memory in others]
        try:
            run(first)
        finally:
            wait(futures)
        for future in futures:
            future.result()
