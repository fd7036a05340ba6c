"""Runs the programs of many hosts, each on its own memory, in one call of the library per thread."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.tolaria.executors.native.assembler import NUMBERS, ROWS, SCRATCH_ROWS, Program
from esper.tolaria.executors.native.kernel_library import cached_library, stride_of

_KNOWN_WORKLOADS = 4  # are remembered as fitting their memory; each pass makes new ones


class _Memory:
    """Working memory of one thread. Lanes beyond the batch must be zero, so another number of lanes clears the rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows, self.numbers, self.scratch = (torch.zeros(0, dtype=dtype) for _ in range(3))
        self._lanes = 0

    def fit(self, programs: Sequence[Program], lanes: int) -> None:
        stride = stride_of(lanes)
        rows = max(p.rows for p in programs) * stride
        if rows and (lanes != self._lanes or len(self.rows) < rows):  # a program without rows leaves them alone
            self.rows = self.rows.zero_() if len(self.rows) >= rows else torch.zeros(rows, dtype=self.rows.dtype)
            self._lanes = lanes
        numbers = max(p.numbers for p in programs)
        scratch = max(SCRATCH_ROWS * stride, *(p.scratch for p in programs))
        if len(self.numbers) < numbers:
            self.numbers = torch.zeros(numbers, dtype=self.rows.dtype)
        if len(self.scratch) < scratch:
            self.scratch = torch.zeros(scratch, dtype=self.rows.dtype)


@final
@dataclass(frozen=True)
class Workload:
    """The program of each host, made once per pass: `code` of all programs, and first instruction and count [H]."""

    programs: tuple[Program, ...]
    code: np.ndarray
    first: np.ndarray
    count: np.ndarray

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
        return cls(tuple(distinct.values()), np.concatenate([p.code for p in distinct.values()]), first, count)

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
        self._library = cached_library()
        self._memory = [_Memory(dtype) for _ in range(threads)]
        self._fitted: list[dict[int, tuple[Workload, int, np.ndarray]]] = [{} for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def run(self, work: Workload, spaces: Spaces, lanes: int) -> None:
        """Execute each host's program on its spaces and on working memory that is added here.

        Raises:
            IndexError: an instruction does not fit the memory that it was given.
        """
        hosts, threads = len(spaces.begin), len(self._memory)
        if self._pool is None or hosts == 1:
            self._run_some(0, work, spaces, slice(0, hosts), lanes)
            return
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
        known = self._fitted[k].get(id(work))
        fitted = known is not None and known[1] == lanes and np.array_equal(known[2], own.size)
        self._library.run(
            work.code, work.first[hosts], work.count[hosts], own.begin, own.size, lanes, memory.scratch, fitted=fitted
        )
        if not fitted:
            if len(self._fitted[k]) >= _KNOWN_WORKLOADS:
                self._fitted[k].clear()
            self._fitted[k][id(work)] = work, lanes, own.size
