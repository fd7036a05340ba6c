"""Instructions for the C++ kernels, and the working memory that they share.

esper/cpp/native/program.cpp executes them; it lists the same operations in the same order. An operand is a place in one
of a host's spaces. Spaces get their addresses when a program runs, so hosts of equal structure share a program.

    ROWS      activations and their gradients [rows][lanes] of each chunk of a batch; the next host reuses them
    LOCAL     those that no other chunk's turn separates, so that all chunks use the same memory
    NUMBERS   single numbers, such as the statistics of a batch norm
    SCRATCH   numbers that one instruction alone uses
    others    weights, gradients, buffers, a batch: see `Space`
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from heapq import heappop, heappush
from typing import Final, NamedTuple, final

import numpy as np

WIDEST: Final = 16
"""Most lanes that a kernel treats at once (LANES of lanes.h is 8 or 16). Chunks of examples are multiples of it, so
that no row is padded."""
_SIZES, _NUMBERS, _OPERANDS = 26, 6, 12

INSTRUCTION: Final = np.dtype(
    [
        ("operation", np.int32), ("flag", np.int32), ("size", np.int32, _SIZES), ("number", np.float64, _NUMBERS),
        ("space", np.int32, _OPERANDS), ("offset", np.int64, _OPERANDS), ("extent", np.int64, _OPERANDS),
    ],
    align=True,
)  # fmt: skip

Operation = IntEnum(
    "Operation",
    # of convolution.h, normalizations.h, functions.h, pooling.h, sequences.h, tensors.h and optimizers.h
    "CONVOLVE CONVOLVE_INPUT_GRAD CONVOLVE_WEIGHT_GRAD "
    "BATCH_NORM BATCH_NORM_BACKWARD BATCH_NORM_FIXED BATCH_NORM_FIXED_BACKWARD GROUP_NORM GROUP_NORM_BACKWARD "
    "ACTIVATE ACTIVATE_BACKWARD PRELU PRELU_BACKWARD SOFTMAX SOFTMAX_BACKWARD REDUCE REDUCE_BACKWARD "
    "MAX_POOL MAX_POOL_BACKWARD AVERAGE_POOL AVERAGE_POOL_BACKWARD RESIZE RESIZE_BACKWARD "
    "EMBED EMBED_WEIGHT_GRAD ATTEND ATTEND_BACKWARD PRODUCT RUNNING_SUM SELECT COMPARE DROP "
    "CLEAR LOAD LOAD_TARGETS STORE BARRIER COPY FILL COMBINE AFFINE SUM SPREAD SPREAD_BACKWARD BLEND BLEND_BACKWARD "
    "CROSS_ENTROPY ADD_SCORES "
    "SQUARE_NORM CLIP SGD ADAMW",
    start=0,
)


class Place(NamedTuple):
    """An operand: `size` elements from an offset into a space on."""

    space: int
    offset: int
    size: int


class Rows(NamedTuple):
    """Consecutive rows of lanes, counted as if none were used twice; `Assembler.program` gives them their places."""

    first: int
    size: int

    def after(self, count: int) -> "Rows":
        """All but the first `count`."""
        return Rows(self.first + count, self.size - count)


ROWS, LOCAL, NUMBERS, SCRATCH, NUM_WORKING = range(5)
Space = IntEnum(
    "Space",
    "INPUTS LABELS OUTPUTS OUT_GRADS IN_GRADS KEYS TOTALS CONSTANTS HOST HOST_GRADS HOST_FIRST HOST_SECOND HOST_STEPS "
    "HOST_BUFFERS DECAY RATE",
    start=NUM_WORKING,
)
"""Spaces of a host besides the working memory. LABELS: those of each example, or its targets. TOTALS: for each state of
the network three float64, the sums of the losses, of the scores such as correct answers, and of what counts. DECAY:
mask of the host's weights that decay. RATE: factor of the learning rates. OUTPUTS and OUT_GRADS: of a batch, for a loss
that PyTorch computes. KEYS: of masks of dropout."""
_HALVED = (Operation.BATCH_NORM, Operation.BATCH_NORM_BACKWARD, Operation.BARRIER)
"""Operations that a chunk begins, and ends only when all chunks have begun it."""
_PRODUCTS_OF_MOVE = 8
"""Multiplications that take as long as to read or write a number."""
_CACHED_NUMBERS = 2**20
"""Numbers of the features of a chunk."""


@dataclass(frozen=True)
class Program:
    """Instructions, and the working memory they need: rows of lanes (of all chunks, of one), numbers, scratch numbers.

    `single` is the shape of features of which one example gives a normalization a single value; else None.
    `masks`: the slots whose random numbers make the masks of dropout of a batch, in order.
    """

    code: np.ndarray
    rows: int
    local: int
    numbers: int
    scratch: int
    single: tuple[int, ...] | None = None
    masks: tuple[int, ...] = ()

    @cached_property
    def products(self) -> int:
        """Multiplications of numbers of one example in convolutions and linear layers."""
        n, operation = self.code["size"].astype(np.int64), self.code["operation"]
        products = n[:, 0] * n[:, 1] // np.maximum(n[:, 2], 1) * n[:, 5:9].prod(axis=1)
        return int(products[operation <= Operation.CONVOLVE_WEIGHT_GRAD].sum())

    @cached_property
    def moved(self) -> int:
        """Numbers of one example that instructions read and write."""
        return int(self.code["extent"][np.isin(self.code["space"], (ROWS, LOCAL))].sum())

    @property
    def cost(self) -> int:
        """Roughly in proportion to its time."""
        return self.products + _PRODUCTS_OF_MOVE * self.moved

    @property
    def chunk(self) -> int:
        """Examples of a batch that pass through the layers together, so that their features stay in a core's cache."""
        return max(_CACHED_NUMBERS // max(self.rows + self.local, 1) // WIDEST, 1) * WIDEST

    def check_batch(self, examples: int) -> None:
        """Raise ValueError, as PyTorch does, where a normalization would see a single value."""
        if examples == 1 and self.single is not None:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list((1, *self.single))}; choose a batch size that leaves no batch of one example."
            )


@dataclass
class Assembler:
    """Writes a program. `masks`: the slot of each mask of dropout so far."""

    masks: list[int] = field(default_factory=list)
    _code: list[tuple[object, ...]] = field(default_factory=list)
    _begins: list[int] = field(default_factory=lambda: [0])
    _numbers: int = 0
    _scratch: int = 0
    _single: tuple[int, ...] | None = None

    def emit(
        self,
        operation: Operation,
        *operands: Rows | Place | None,
        sizes: tuple[int, ...] = (),
        flag: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Append an instruction; an operand that is None becomes a null pointer."""
        spaces, offsets, extents = [-1] * _OPERANDS, [0] * _OPERANDS, [0] * _OPERANDS
        for k, operand in enumerate(operands):
            if isinstance(operand, Rows):
                spaces[k], offsets[k], extents[k] = ROWS, operand.first, operand.size
            elif operand is not None:
                spaces[k], offsets[k], extents[k] = operand
        self._code.append((
            int(operation), flag, sizes + (0,) * (_SIZES - len(sizes)), numbers + (0.0,) * (_NUMBERS - len(numbers)),
            spaces, offsets, extents,
        ))  # fmt: skip

    def rows(self, count: int) -> Rows:
        """Rows that keep what is written to them until the last instruction that names them."""
        self._begins.append(self._begins[-1] + count)
        return Rows(self._begins[-2], count)

    def numbers(self, count: int) -> Place:
        """Single numbers, reserved for the whole program."""
        self._numbers += count
        return Place(NUMBERS, self._numbers - count, count)

    def scratch(self, count: int) -> Place:
        """Numbers for one instruction alone."""
        self._scratch = max(self._scratch, count)
        return Place(SCRATCH, 0, count)

    def normalizes(self, shape: tuple[int, ...], groups: int) -> None:
        """Note that features of this shape are normalized over each of so many groups of them."""
        if math.prod(shape) == groups:
            self._single = shape

    def program(self) -> Program:
        """The program written so far."""
        code = np.array(self._code, dtype=INSTRUCTION)
        rows, local = place_rows(code, np.array(self._begins))
        return Program(code, rows, local, self._numbers, self._scratch, self._single, tuple(self.masks))


@final
class Pool:
    """Rows that are taken and given back; `size` are enough for all."""

    def __init__(self) -> None:
        self.size, self._free = 0, list[Rows]()

    def take(self, count: int) -> Rows:
        """Rows that nobody has taken."""
        for i, hole in enumerate(self._free):
            if hole.size >= count:
                rest = Rows(hole.first + count, hole.size - count)
                self._free[i : i + 1] = [rest] if rest.size else []
                return Rows(hole.first, count)
        self.size += count
        return Rows(self.size - count, count)

    def give_back(self, rows: Rows) -> None:
        """Allow these rows to be taken again; adjacent holes are merged."""
        merged: list[Rows] = []
        for hole in sorted([*self._free, rows]):
            if merged and merged[-1].first + merged[-1].size == hole.first:
                merged[-1] = Rows(merged[-1].first, merged[-1].size + hole.size)
            else:
                assert not merged or merged[-1].first + merged[-1].size < hole.first, "given back twice"
                merged.append(hole)
        self._free = merged


def place_rows(code: np.ndarray, begins: np.ndarray) -> tuple[int, int]:
    """Give all operands in ROWS their places there or in LOCAL; how many rows there are in both.

    Rows from each of `begins` to the next are in use from the first to the last instruction that names some of them.
    They lie in LOCAL if other chunks do not take their turn in between.
    """
    in_rows = code["space"] == ROWS
    which = np.searchsorted(begins, code["offset"][in_rows], side="right") - 1
    turns, starts = np.cumsum(np.isin(code["operation"], _HALVED)).tolist(), begins.tolist()
    spans: dict[int, tuple[int, int]] = {}
    for i, k in zip(np.nonzero(in_rows)[0].tolist(), which.tolist(), strict=True):
        spans[k] = spans[k][0] if k in spans else i, i
    pools, taken = {ROWS: Pool(), LOCAL: Pool()}, list[tuple[int, int, Rows]]()
    spaces, shifts = np.zeros(len(starts), dtype=np.int32), np.zeros(len(starts), dtype=np.int64)
    for k, (first, last) in spans.items():
        while taken and taken[0][0] < first:
            _, space, rows = heappop(taken)
            pools[space].give_back(rows)
        space = ROWS if turns[last] > turns[first] else LOCAL
        rows = pools[space].take(starts[k + 1] - starts[k])
        heappush(taken, (last, space, rows))
        spaces[k], shifts[k] = space, rows.first - starts[k]
    code["space"][in_rows] = spaces[which]
    code["offset"][in_rows] += shifts[which]
    return pools[ROWS].size, pools[LOCAL].size
