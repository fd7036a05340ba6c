"""The optimizer step of a host and its seeds as instructions: each is clipped by its own norm, a seed with its gate.

space 2        mask of the host's elements that decay
from 3 on      five spaces for each row: weights, gradient, first moment, second moment, steps
rows           the host, then seed and gate of each slot
"""

from dataclasses import dataclass
from enum import IntEnum

from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.tolaria.executors.native.assembler import NUM_WORKING, Assembler, Operation, Place, Program

DECAY = NUM_WORKING


class Part(IntEnum):
    """Spaces of a row; SGD has its momentum in FIRST, and neither SECOND nor STEPS."""

    WEIGHTS = 0
    GRADIENT = 1
    FIRST = 2
    SECOND = 3
    STEPS = 4


HOST = 0
_OPERATION = {"sgd": Operation.SGD, "adamw": Operation.ADAMW}
_MOMENTS = {"sgd": (Part.FIRST,), "adamw": (Part.FIRST, Part.SECOND, Part.STEPS)}


def seed_row(s: int) -> int:
    """The number of a slot's seed among the rows; its gate is the next."""
    return 1 + 2 * s


def row_space(row: int, part: Part) -> int:
    """The number of a row's space."""
    return DECAY + 1 + row * len(Part) + part


def num_step_spaces(num_slots: int) -> int:
    """Spaces of a step of a host with so many slots."""
    return row_space(seed_row(num_slots), Part.WEIGHTS)


@dataclass(frozen=True)
class TrainedSlot:
    """A seed that learns in slot `s`: how many weights it has, and its gate (None: no gate, or it does not learn)."""

    s: int
    seed: int
    gate: int | None


def optimizer_program(spec: OptimizerSpec, host: int, slots: tuple[TrainedSlot, ...]) -> Program:
    """One step of a host of so many weights and of its seeds; gradients stay as they are."""
    a = Assembler(trainable=True)
    _step(a, spec, [(HOST, host)], spec.host_lr, decays=True)
    for slot in slots:
        rows = [(seed_row(slot.s), slot.seed)]
        if slot.gate is not None:
            rows.append((seed_row(slot.s) + 1, slot.gate))
        _step(a, spec, rows, spec.seed_lr, decays=False)
    return a.program()


def _step(a: Assembler, spec: OptimizerSpec, rows: list[tuple[int, int]], rate: float, *, decays: bool) -> None:
    """Of rows (number, weights) that are clipped together."""
    factor = a.numbers(1)
    for k, (row, count) in enumerate(rows):
        a.emit(Operation.SQUARE_NORM, _at(row, Part.GRADIENT), factor, sizes=(count,), flag=k > 0)
    a.emit(Operation.CLIP, factor, numbers=(spec.grad_clip,))
    mask = Place(DECAY, 0) if decays else None
    for row, count in rows:
        weights, gradient, *moments = (_at(row, part) for part in (Part.WEIGHTS, Part.GRADIENT, *_MOMENTS[spec.kind]))
        a.emit(
            _OPERATION[spec.kind], factor, gradient, mask, weights, *moments,
            sizes=(count,), numbers=(rate, *_rates(spec)),
        )  # fmt: skip


def _rates(spec: OptimizerSpec) -> tuple[float, ...]:
    if spec.kind == "sgd":
        return spec.sgd_weight_decay, spec.momentum
    return spec.adamw_weight_decay, *spec.betas, spec.eps


def _at(row: int, part: Part) -> Place:
    return Place(row_space(row, part), 0)
