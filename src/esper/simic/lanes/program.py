"""Instructions on registers, and their encoding for the C++ part.

    register   one number of every host of a block            draft    instructions in the order they were recorded
    arena      the working memory of a thread                 program  the same as words, with a place for each register

A register is written once. Its place in the arena is taken when it is written and given back when it was read last, so
that the working memory of a block of hosts fits the cache.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np
import torch

LANES = 64
"""Hosts of a block."""
_ALIGNMENT = 64
_LAYERS = ("LINEAR", "AFFINE", "NORM")  # their elements are rows of a matrix, or have a mean in common

Kind = Literal["F", "D", "I", "B"]
"""Of number: float32, float64, int64, truth value."""
Value = float | int | bool

KINDS: dict[torch.dtype, Kind] = {torch.float32: "F", torch.float64: "D", torch.int64: "I", torch.bool: "B"}
_NUMPY: dict[Kind, type[np.generic]] = {"F": np.float32, "D": np.float64, "I": np.int64, "B": np.uint8}
_BYTES: dict[Kind, int] = {kind: LANES * np.dtype(dtype).itemsize for kind, dtype in _NUMPY.items()}
"""Of a register."""


def _of(kinds: str, *names: str) -> list[str]:
    return [f"{name}_{kind}" for name in names for kind in kinds]


OPERATIONS: tuple[str, ...] = (
    *_of("FDI", "ADD", "SUB", "MUL", "MIN", "MAX"),
    *_of("FD", "FMIN", "FMAX", "DIV", "POW"),
    *("REM_I", "FLOOR_DIV_I", "AND_B", "OR_B", "XOR_B"),
    *_of("FDIB", "EQ", "NE", "LT", "LE"),
    *_of("FDI", "NEG", "ABS", "SIGN"),
    *_of("FD", "SQRT", "EXP", "LOG", "LOG1P", "TANH", "SIGMOID", "COS", "ROUND", "FLOOR"),
    "NOT_B",
    *(f"TO_{to}_{kind}" for to in "FDIB" for kind in "FDIB" if to != kind),
    *_of("FDIB", "SELECT", "GATHER", "LOOK_UP", "LOAD", "SPREAD", "STORE"),
    *_of("FD", "LINEAR", "AFFINE", "NORM"),
)
"""Every operation with the kind of its operands, in the order of `control.cpp`."""
_CODE = {name: code for code, name in enumerate(OPERATIONS)}
_TENSORS = {"LOAD": (0,), "SPREAD": (0,), "STORE": (0,), "LINEAR": (0,), "AFFINE": (0, 5), "NORM": (2, 4)}
"""Where in the head of an instruction the numbers of tensors are."""


@dataclass(frozen=True)
class Instruction:
    """One operation on several elements at once.

    Attributes:
        name: one of OPERATIONS.
        head: words between the count and the elements.
        shared: registers that every element reads; they follow the head.
        rows: for each element the register it writes (none for STORE) and those it reads; for LOAD, SPREAD and STORE
            the last entry is the place of the number in its tensor.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    head: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def memory(self) -> bool:
        """Whether the last entry of a row is a place in a tensor."""
        return self.name.startswith(("LOAD", "SPREAD", "STORE"))

    @property
    def tensors(self) -> list[int]:
        """The tensors it reads or writes."""
        return [self.head[i] for i in _TENSORS.get(self.name[: self.name.rindex("_")], ())]

    @property
    def writes(self) -> list[int]:
        """The registers it writes."""
        return [] if self.name.startswith("STORE") else [row[0] for row in self.rows]

    @property
    def reads(self) -> list[int]:
        """The registers it reads, repeated as they are."""
        first, last = 0 if self.name.startswith("STORE") else 1, -1 if self.memory else None
        return [*self.shared, *(register for row in self.rows for register in row[first:last])]


@final
@dataclass(frozen=True)
class Program:
    """What the C++ part is told: `words` [W] int32, the bytes of an arena, and what lies in it from the start.

    `tensors` are the numbers of those that are read or written.
    """

    words: np.ndarray
    arena_bytes: int
    constants: np.ndarray
    tensors: frozenset[int]

    def arena(self) -> np.ndarray:
        """A fresh arena; the first byte may be moved up to the next multiple of 64."""
        raw = np.zeros(self.arena_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        arena = raw[start : start + self.arena_bytes]
        arena[: len(self.constants)] = self.constants
        return arena


@dataclass
class Draft:
    """Instructions and the kinds of their registers; negative registers are constants, -1 - i is number i of these."""

    kinds: list[Kind] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    constants: list[tuple[Kind, Value]] = field(default_factory=list)
    _numbers: dict[tuple[Kind, bytes], int] = field(default_factory=dict)

    def register(self, kind: Kind) -> int:
        """A new register."""
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def constant(self, kind: Kind, value: Value) -> int:
        """The register that always holds this number; the sign of zero and the bits of NaN count."""
        key = (kind, _NUMPY[kind](value).tobytes())
        if key not in self._numbers:
            self.constants.append((kind, value))
            self._numbers[key] = -len(self.constants)
        return self._numbers[key]

    def value_of(self, constant: int) -> Value:
        """The number of a constant."""
        return self.constants[-1 - constant][1]

    def kind_of(self, register: int) -> Kind:
        """What kind of number a register holds."""
        return self.constants[-1 - register][0] if register < 0 else self.kinds[register]

    def encoded(self) -> Program:
        """Without what nobody reads, every register at its place."""
        return _encoded(self, _needed(self.instructions))


def _needed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions and elements on which something that is stored depends."""
    wanted: set[int] = set()
    kept: list[Instruction] = []
    for instruction in reversed(instructions):
        if not instruction.name.startswith("STORE"):
            rows = tuple(row for row in instruction.rows if row[0] in wanted)
            if not rows:
                continue
            if not instruction.name.startswith(_LAYERS):
                instruction = Instruction(instruction.name, rows, instruction.head, instruction.shared)
        wanted.update(instruction.reads)
        kept.append(instruction)
    return kept[::-1]


def _encoded(draft: Draft, instructions: Sequence[Instruction]) -> Program:
    reads = [instruction.reads for instruction in instructions]
    last_read = {register: i for i, registers in enumerate(reads) for register in registers}
    size = [_BYTES[kind] for kind in draft.kinds]
    place: dict[int, int] = {}
    end = 0
    for register in sorted((r for r in last_read if r < 0), reverse=True):
        place[register] = end
        end += _BYTES[draft.kind_of(register)]
    filled = np.zeros(end, dtype=np.uint8)
    for register in (r for r in place if r < 0):
        kind, value = draft.constants[-1 - register]
        filled[place[register] : place[register] + _BYTES[kind]].view(_NUMPY[kind])[:] = value
    free: dict[int, list[int]] = {each: [] for each in _BYTES.values()}
    words: list[int] = []
    for i, instruction in enumerate(instructions):
        written = instruction.writes
        for register in written:
            if not free[size[register]]:
                free[size[register]].append(end)
                end += size[register]
            place[register] = free[size[register]].pop()
        words += _words(instruction, place)
        for register in sorted(r for r in {*reads[i], *written} if r >= 0 and last_read.get(r, i) <= i):
            free[size[register]].append(place[register])
    assert end < 2**31, "places are 32 bits"
    tensors = frozenset(number for instruction in instructions for number in instruction.tensors)
    return Program(np.array(words, dtype=np.int32), max(end, 1), filled, tensors)


def _words(instruction: Instruction, place: dict[int, int]) -> list[int]:
    words = [_CODE[instruction.name], len(instruction.rows), *instruction.head]
    words += [place[register] for register in instruction.shared]
    if instruction.memory:
        words += [word for register, number in instruction.rows for word in (place[register], number)]
    else:
        words += [place[register] for row in instruction.rows for register in row]
    return words


def double_words(value: float) -> tuple[int, int]:
    """The bits of a double as two words."""
    low, high = struct.unpack("<ii", struct.pack("<d", value))
    return low, high
