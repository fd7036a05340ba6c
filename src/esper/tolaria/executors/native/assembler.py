"""Instructions for the C++ part, and the working memory they share.

Who carries them out is esper/cpp/native/program.cpp, which knows the same operations in the same order. An operand is a
place in a space of a host; spaces have addresses only when the program is run, so hosts of equal structure share one.

    ROWS      activations and their gradients [rows][lanes]: one host's, used again for the next one
    NUMBERS   single numbers, as the statistics of a batch norm
    others    weights, gradients, buffers, a batch: see `Spaces`
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Final, NamedTuple, final

import numpy as np

LANES: Final = 16
"""Rows are filled up to a multiple of this many examples."""
_SIZES, _NUMBERS, _OPERANDS = 6, 5, 10

INSTRUCTION: Final = np.dtype(
    [
        ("operation", np.int32), ("flag", np.int32), ("size", np.int32, _SIZES), ("number", np.float64, _NUMBERS),
        ("space", np.int32, _OPERANDS), ("offset", np.int64, _OPERANDS),
    ],
    align=True,
)  # fmt: skip


class Operation(IntEnum):
    """What esper/cpp/native/program.cpp can do, in its order."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count

    TRANSPOSE = auto()
    CONVOLVE = auto()
    CONVOLVE_INPUT_GRAD = auto()
    CONVOLVE_WEIGHT_GRAD = auto()
    DEPTHWISE = auto()
    DEPTHWISE_INPUT_GRAD = auto()
    DEPTHWISE_WEIGHT_GRAD = auto()
    BATCH_NORM = auto()
    BATCH_NORM_BACKWARD = auto()
    BATCH_NORM_FIXED = auto()
    GROUP_NORM = auto()
    GROUP_NORM_BACKWARD = auto()
    MAX_POOL = auto()
    MAX_POOL_BACKWARD = auto()
    MEAN = auto()
    MEAN_BACKWARD = auto()
    ADD_BIAS = auto()
    ADD_BIAS_BACKWARD = auto()
    SCALE = auto()
    SCALE_BACKWARD = auto()
    MODULATE = auto()
    MODULATE_BACKWARD = auto()
    SHIFT = auto()
    SHIFT_BACKWARD = auto()
    ACTIVATE = auto()
    ACTIVATE_BACKWARD = auto()
    BLEND = auto()
    BLEND_BACKWARD = auto()
    CROSS_ENTROPY = auto()
    SQUARE_NORM = auto()
    CLIP = auto()
    SGD = auto()
    ADAMW = auto()


class Activation(IntEnum):
    """`flag` of ACTIVATE."""

    RELU = 0
    SILU = 1
    TANH = 2
    SIGMOID = 3


class Place(NamedTuple):
    """An operand: an offset into a space, in rows for ROWS and in elements elsewhere."""

    space: int
    offset: int


class Rows(NamedTuple):
    """Consecutive rows of lanes."""

    first: int
    size: int


ROWS, NUMBERS, NUM_WORKING = 0, 1, 2
SCRATCH_ROWS: Final = 3
"""Rows of scratch that every program may use: the loss does."""


@dataclass(frozen=True)
class Program:
    """Instructions, and how much working memory they need: rows of lanes, single numbers, and scratch numbers.

    `single` is the shape [C, H, W] of features in which an example has a single value to normalize (None: nowhere).
    """

    code: np.ndarray
    rows: int
    numbers: int
    scratch: int
    single: tuple[int, int, int] | None = None

    def check_batch(self, examples: int) -> None:
        """Refuse a batch in which a normalization would see a single value, as PyTorch does.

        Raises:
            ValueError: there is one example, and `single`.
        """
        if examples == 1 and self.single is not None:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list((1, *self.single))}; choose a batch size that leaves no batch of one example."
            )


class ShapeError(ValueError):
    """Layers that do not fit each other or their weights."""


def expect(what: str, found: object, expected: object) -> None:
    """Raise ShapeError unless two sizes are equal."""
    if found != expected:
        raise ShapeError(f"{what}: found {found}, expected {expected}")


@final
@dataclass
class Assembler:
    """Writes a program. `trainable`: a backward pass will follow, so what it needs must be kept."""

    trainable: bool
    _code: list[tuple[object, ...]] = field(default_factory=list)
    _free: list[Rows] = field(default_factory=list)
    _rows: int = 0
    _numbers: int = 0
    _scratch: int = 0
    _single: tuple[int, int, int] | None = None

    def emit(
        self,
        operation: Operation,
        *operands: Rows | Place | None,
        sizes: tuple[int, ...] = (),
        flag: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """One more instruction; an operand that is None is a null pointer there."""
        spaces, offsets = [-1] * _OPERANDS, [0] * _OPERANDS
        for k, operand in enumerate(operands):
            if isinstance(operand, Rows):
                spaces[k], offsets[k] = ROWS, operand.first
            elif operand is not None:
                spaces[k], offsets[k] = operand
        self._code.append((
            int(operation), flag, sizes + (0,) * (_SIZES - len(sizes)), numbers + (0.0,) * (_NUMBERS - len(numbers)),
            spaces, offsets,
        ))  # fmt: skip

    def rows(self, count: int) -> Rows:
        """Rows that nothing else uses until they are given to `release`."""
        for i, hole in enumerate(self._free):
            if hole.size >= count:
                rest = Rows(hole.first + count, hole.size - count)
                self._free[i : i + 1] = [rest] if rest.size else []
                return Rows(hole.first, count)
        rows = Rows(self._rows, count)
        self._rows += count
        return rows

    def release(self, *released: Rows) -> None:
        """Rows that are not read any more."""
        merged: list[Rows] = []
        for hole in sorted([*self._free, *released]):
            if merged and merged[-1].first + merged[-1].size == hole.first:
                merged[-1] = Rows(merged[-1].first, merged[-1].size + hole.size)
            else:
                assert not merged or merged[-1].first + merged[-1].size < hole.first, "released twice"
                merged.append(hole)
        self._free = merged

    def numbers(self, count: int) -> Place:
        """Single numbers for the rest of the program."""
        place = Place(NUMBERS, self._numbers)
        self._numbers += count
        return place

    def scratch(self, count: int) -> None:
        """Say that an instruction needs this many scratch numbers."""
        self._scratch = max(self._scratch, count)

    def normalizes(self, shape: tuple[int, int, int], groups: int) -> None:
        """Say that features [C, H, W] are normalized over each group of their channels."""
        if math.prod(shape) == groups:
            self._single = shape

    def program(self) -> Program:
        """What was written."""
        code = np.array(self._code, dtype=INSTRUCTION)
        return Program(code, self._rows, self._numbers, self._scratch, self._single)
