"""How J goes from round to round: which policy is the best, and whether learning stands still.

    round      1 ... 10 | 11 ... 20 | 21          a mean of ten rounds
    best                ^ from here on, in every round: the highest mean so far is a checkpoint of its own
    alarm                           ^ every ten rounds: the mean against that of the ten before

One round says little, for its hosts are others than those of the round before: hence ten.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from esper.runs.alarms import Alarm

WINDOW = 10
_RISE, _FALL, _STANDSTILL = 2.0, -2.0, 0.5


@dataclass(frozen=True)
class Trend:
    """Mean 100·J of each of the last twenty rounds, oldest first.

    `rounds` are all rounds so far and `best` is the highest mean of ten of them.
    """

    rounds: int = 0
    recent: tuple[float, ...] = ()
    best: float | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Trend":
        """The trend that was written as JSON; raises TypeError where keys are missing or unknown."""
        return cls(**(fields | {"recent": tuple(fields["recent"])}))

    def after(self, objective: float) -> tuple["Trend", bool]:
        """The trend after one more round, and whether the mean of the last ten is the best so far."""
        recent = (*self.recent, objective)[-2 * WINDOW :]
        mean = _mean(recent[-WINDOW:])
        better = mean is not None and (self.best is None or mean > self.best)
        return Trend(self.rounds + 1, recent, mean if better else self.best), better

    def alarms(self) -> Iterator[Alarm]:
        """Every ten rounds: whether the mean rose or fell by more than two points, or hardly changed."""
        now, before = _mean(self.recent[-WINDOW:]), _mean(self.recent[: len(self.recent) - WINDOW])
        if self.rounds % WINDOW or now is None or before is None:
            return
        change = now - before
        if change > _RISE:
            yield Alarm("objective_rises", change, _RISE)
        elif change < _FALL:
            yield Alarm("objective_falls", change, _FALL)
        elif abs(change) <= _STANDSTILL:
            yield Alarm("objective_stands_still", change, _STANDSTILL)


def _mean(rounds: tuple[float, ...]) -> float | None:
    """Mean of ten rounds; None where there are fewer."""
    return sum(rounds) / WINDOW if len(rounds) == WINDOW else None
