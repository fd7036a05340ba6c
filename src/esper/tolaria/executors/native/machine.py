"""Runs the programs of many hosts on their own memory, in one call for each thread.

programs     one for each different structure                       which[h]   the program of host h
spaces       [H, spaces]: the memory that each host works on        threads    hosts are shared out; they never meet
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.tolaria.executors.native.assembler import NUMBERS, ROWS, SCRATCH_ROWS, Program
from esper.tolaria.executors.native.library import Library, cached_library, stride_of


class _Memory:
    """Working memory of one thread. Lanes that a batch does not fill are zero, so another number of lanes clears it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows, self.numbers, self.scratch = (torch.zeros(0, dtype=dtype) for _ in range(3))
        self._lanes = 0

    def fit(self, programs: Sequence[Program], lanes: int) -> None:
        stride = stride_of(lanes)
        rows = max((p.rows for p in programs), default=0) * stride
        if rows and (lanes != self._lanes or len(self.rows) < rows):  # a program without rows leaves them alone
            self.rows = self.rows.zero_() if len(self.rows) >= rows else torch.zeros(rows, dtype=self.rows.dtype)
            self._lanes = lanes
        numbers = max((p.numbers for p in programs), default=0)
        scratch = max((max(p.scratch, SCRATCH_ROWS * stride) for p in programs), default=0)
        if len(self.numbers) < numbers:
            self.numbers = torch.zeros(numbers, dtype=self.rows.dtype)
        if len(self.scratch) < scratch:
            self.scratch = torch.zeros(scratch, dtype=self.rows.dtype)


@final
@dataclass(frozen=True)
class Workload:
    """Which program each host runs: `code` of all of them, and where each host's begins; made once for a pass."""

    programs: tuple[Program, ...]
    code: np.ndarray
    first: np.ndarray
    count: np.ndarray

    @classmethod
    def of_each(cls, programs: Sequence[Program]) -> "Workload":
        """A program for each host; equal ones are the same object."""
        number: dict[int, int] = {}
        which = np.array([number.setdefault(id(program), len(number)) for program in programs])
        by_id = {id(program): program for program in programs}
        return cls.of([by_id[key] for key in number], which)

    @classmethod
    def of(cls, programs: Sequence[Program], which: np.ndarray) -> "Workload":
        """`which` [H] is the program of each host."""
        sizes = np.array([len(program.code) for program in programs], dtype=np.int64)
        begins = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        code = np.concatenate([program.code for program in programs])
        return cls(tuple(programs), code, begins[which], sizes[which])

    def check_batch(self, examples: int) -> None:
        """Refuse a batch in which a normalization of a host would see a single value (`Program.check_batch`)."""
        for program in self.programs:
            program.check_batch(examples)


@final
class Spaces:
    """Where the memory of each host lies: `begin` [H, spaces] addresses, `size` [H, spaces] bytes, both int64.

    Only addresses are stored: the tensors must stay alive until the machine has run.
    """

    def __init__(self, hosts: int, spaces: int) -> None:
        self.begin, self.size = (np.zeros((hosts, spaces), dtype=np.int64) for _ in range(2))

    def __len__(self) -> int:
        """Number of hosts."""
        return len(self.begin)

    def of(self, hosts: np.ndarray | slice) -> "Spaces":
        """Those of some hosts; a copy."""
        some = Spaces(0, 0)
        some.begin, some.size = self.begin[hosts].copy(), self.size[hosts].copy()
        return some

    def share(self, space: int, tensor: Tensor) -> None:
        """The same contiguous tensor for all hosts."""
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        self.begin[:, space], self.size[:, space] = tensor.data_ptr(), tensor.nbytes

    def rows(
        self, space: int, tensor: Tensor, rows: np.ndarray | None = None, hosts: np.ndarray | slice = slice(None)
    ) -> None:
        """Rows of a contiguous tensor [R, ...], one for each of these hosts: all of them, or those in `rows`."""
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        size = tensor.nbytes // max(len(tensor), 1)
        index = np.arange(len(tensor), dtype=np.int64) if rows is None else rows.astype(np.int64)
        self.begin[hosts, space], self.size[hosts, space] = tensor.data_ptr() + index * size, size


@final
class Machine:
    """The compiled library with working memory for some threads.

    Args:
        dtype: of all numbers. threads: how many share the hosts; what a host gets does not depend on it.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32, threads: int = 1, library: Library | None = None) -> None:
        self._library = cached_library() if library is None else library
        self._memory = [_Memory(dtype) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def run(self, work: Workload, spaces: Spaces, lanes: int) -> None:
        """Carry out each host's program on its spaces; working memory is added here.

        Raises:
            IndexError: an instruction does not fit the memory that it was given.
        """
        hosts = len(spaces)
        if self._pool is None or hosts == 1:
            self._run_some(0, work, spaces, slice(0, hosts), lanes)
            return
        threads = len(self._memory)
        cuts = [hosts * k // threads for k in range(threads + 1)]
        futures = [
            self._pool.submit(self._run_some, k, work, spaces, slice(cuts[k], cuts[k + 1]), lanes)
            for k in range(threads)
        ]
        for future in futures:
            future.result()

    def _run_some(self, k: int, work: Workload, spaces: Spaces, hosts: slice, lanes: int) -> None:
        memory = self._memory[k]
        memory.fit(work.programs, lanes)
        own = spaces.of(hosts)
        own.share(ROWS, memory.rows)
        own.share(NUMBERS, memory.numbers)
        self._library.run(work.code, work.first[hosts], work.count[hosts], own.begin, own.size, lanes, memory.scratch)
