"""The candidates of a growth: how far each came and what it cost, as a table and as courses for a picture."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from esper.leyline.architecture import Architecture
from esper.leyline.errors import option
from esper.runs.evaluation import tables
from esper.runs.evaluation.tables import counted, plain_table, short
from esper.telemetry.progress import duration

_SHOWN = 12
"""Candidates that a printed leaderboard has, beside the Pareto set."""
_ROUNDING = 1e-3
"""Points that are no difference."""


@dataclass(frozen=True)
class Candidate:
    """Permanent seeds, and a factor of the learning rate; written lr×3, a word that does not wrap."""

    architecture: Architecture = Architecture()  # noqa: RUF009 -- a frozen value
    rate: float = 1.0

    def __str__(self) -> str:
        slots: dict[str, list[str]] = {}
        for seed in self.architecture.slots:
            slots.setdefault(seed.blueprint, []).append(seed.slot)
        grown = "; ".join(f"{blueprint} in {', '.join(of)}" for blueprint, of in slots.items()) or "the network alone"
        return grown + (f"; lr×{self.rate:.2g}" if self.rate != 1.0 else "")


@dataclass(kw_only=True)
class Entry:
    """A line of the leaderboard: a candidate, how far it came, and what it cost.

    Attributes:
        candidate: what was trained. params: its parameters. flops: of one example in a forward pass.
        val, loss: after each step, those of the entry that it is a copy of included; on a part of the validation
            examples, and on all of them behind a stage.
        spent: FLOPs of its own steps. parent: number of the entry that it is a copy of. born: steps of that one.
        late: steps of the growth before its first one, if it began later with new weights.
    """

    candidate: Candidate
    params: int
    flops: float
    val: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    spent: float = 0.0
    parent: int | None = None
    born: int = 0
    late: int = 0

    @property
    def of_step(self) -> float:
        """FLOPs of one of its own steps."""
        return self.spent / max(1, len(self.val) - self.born)

    @property
    def score(self) -> float:
        """Figure of merit of the last step; -inf if there is none, or if its loss is not finite."""
        return self.points(len(self.val)) if self.val else -math.inf

    def points(self, step: int) -> float:
        """Figure of merit after a step, from 1 on; -inf if its loss is not finite."""
        return self.val[step - 1] if math.isfinite(self.loss[step - 1]) else -math.inf


@final
@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """All candidates of a growth, the one that is kept first, then by points; prints as a table.

    Attributes:
        entries: the one that is kept, then by their `points`.
        chosen: place of the one that is kept, as it was after `steps` of its steps. test: its figure of merit on the
            test examples. unit: of both.
        spent: FLOPs of all together. seconds: likewise.
        budget: FLOPs that were allowed, or spent where minutes were.
        guessing: figure of merit of the best constant answer on the validation examples; None where that is not known.
        is_over: whether the growth had all of its steps; one that was stopped says nothing of what later steps give.
    """

    entries: tuple[Entry, ...]
    chosen: int
    steps: int
    test: float | None
    unit: str
    spent: float
    seconds: float
    budget: float
    guessing: float | None = None
    is_over: bool = True

    @property
    def val(self) -> float:
        """Figure of merit of the network that is kept on the validation examples."""
        return self.entries[self.chosen].val[self.steps - 1]

    @property
    def pareto(self) -> tuple[int, ...]:
        """Places of the entries than which no other has fewer parameters and more points."""
        found, best = [], -math.inf
        for i in sorted(range(len(self.entries)), key=lambda i: (self.entries[i].params, -self.points(i))):
            if self.points(i) > best:
                found.append(i)
                best = self.points(i)
        return tuple(sorted(found))

    def points(self, place: int) -> float:
        """Figure of merit of an entry: of the network that is kept, or of the last step."""
        return self.val if place == self.chosen else self.entries[place].score

    @property
    def courses(self) -> list[tuple[str, list[float], list[float], tuple[float, float] | None]]:
        """For a picture: of each entry its name, the FLOPs after each of its own steps, its points, what is kept."""
        return [
            (
                str(entry.candidate),
                [entry.of_step * (i + 1 + entry.born) for i in range(len(entry.val) - entry.born)],
                entry.val[entry.born :],
                (entry.of_step * self.steps, self.val) if i == self.chosen else None,
            )
            for i, entry in enumerate(self.entries)
        ]

    def __str__(self) -> str:
        page = plain_table("candidate", "steps", "val", "test", "parameters", "FLOPs", "spent", "Pareto", fold=True)
        shown = [i for i in range(len(self.entries)) if i < _SHOWN or i == self.chosen or i in self.pareto]
        for i in shown:
            entry = self.entries[i]
            steps, test = (self.steps, self.test) if i == self.chosen else (len(entry.val), None)
            page.add_row(
                str(entry.candidate),
                str(steps),
                f"{self.points(i):.2f}",
                "" if test is None else f"{test:.2f}",
                f"{entry.params:,}",
                *(short(value) for value in (entry.flops, entry.spent)),
                "*" * (i in self.pareto),
            )
        more = f"{counted(left, 'more candidate')}.\n" if (left := len(self.entries) - len(shown)) else ""
        kept = self.entries[self.chosen]
        if self.is_over and (longest := max(len(entry.val) for entry in self.entries)) > len(kept.val):
            best = max(entry.score for entry in self.entries if len(entry.val) == longest)
            more += (
                f"What is kept did not go on after its {counted(self.steps, 'step')}: the best of those that did has "
                f"{best:.2f} after {longest}. Later steps did not help: fewer FLOPs may be enough.\n"
            )
        if self.is_over and self.steps < len(kept.val):
            more += (
                f"What is kept is the network of step {self.steps} of {len(kept.val)} (spent counts them all); that of "
                f"the last step has {kept.score:.2f}. Later steps did not help: fewer FLOPs may be enough.\n"
            )
        if lost := sum(not math.isfinite(points) for points in kept.val[: self.steps]):
            more += (
                f"In {lost} of {counted(self.steps, 'step')} what is kept had a NaN or infinite loss or gradient and "
                "went back to the step before: lower the learning rate, or look for a division by 0.\n"
            )
        if self.guessing is not None and self.val < self.guessing + _ROUNDING and self.guessing < 100.0 - _ROUNDING:
            more += (
                f"No candidate is better than one answer for all examples, which has {self.guessing:.2f}: allow more "
                "steps, or look at the learning rate, the scale of the inputs and the targets.\n"
            )
        return (
            f"{tables.text(lambda console: console.print(page))}\n{more}"
            f"val, test: {self.unit}; FLOPs of one example, and spent on the candidate after it was copied; *: none "
            "has fewer parameters and more points; lr×: factor of the learning rate.\n"
            f"In all {short(self.spent)} FLOPs and {duration(self.seconds)}."
        )

    __repr__ = __str__


def compared(boards: Mapping[str, Leaderboard]) -> str:
    """The networks that several methods keep, as a table, and whether the first is behind another on `val`."""
    page = plain_table("method", "val", "test", "parameters", "FLOPs", "spent", fold=True)
    for name, board in boards.items():
        kept = board.entries[board.chosen]
        test = "" if board.test is None else f"{board.test:.2f}"
        sizes = (short(value) for value in (kept.flops, board.spent))
        page.add_row(f"{name}: {kept.candidate}", f"{board.val:.2f}", test, f"{kept.params:,}", *sizes)
    own, *others = boards.items()
    name, best = max(others, key=lambda other: other[1].val, default=own)
    note = f"\nnote: {name} is better on val here, and not what is kept; {option('method', name)} gives it"
    return tables.text(lambda console: console.print(page)) + note * (best.val > own[1].val + _ROUNDING)
