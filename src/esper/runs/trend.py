"""The trend of J over rounds: selects the best policy and raises alarms.

    round      1 ... 10 | 11 ... 20 | 21          a mean of ten rounds
    best                ^ from here on, every round: a new highest mean saves the best checkpoint
    alarm                           ^ every ten rounds: the mean against that of the ten rounds before

Single rounds are noisy, because each has new hosts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from esper.telemetry.anomalies import WINDOW, Alarm, of_trend


@dataclass(frozen=True)
class Trend:
    """`recent`: mean 100·J of the last twenty rounds, oldest first; `best`: the highest mean of ten rounds so far."""

    rounds: int = 0
    recent: tuple[float, ...] = ()
    best: float | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Trend":
        """A trend from JSON; raises TypeError if keys are missing or unknown."""
        return cls(**(fields | {"recent": tuple(fields["recent"])}))

    def after(self, objective: float) -> tuple["Trend", bool]:
        """The trend after another round, and whether the mean of the last ten is a new best."""
        recent = (*self.recent, objective)[-2 * WINDOW :]
        mean = _mean(recent[-WINDOW:])
        better = mean is not None and (self.best is None or mean > self.best)
        return Trend(self.rounds + 1, recent, mean if better else self.best), better

    def alarms(self) -> Iterator[Alarm]:
        """Every ten rounds: J rose or fell by more than two points, or changed by at most half a point."""
        return of_trend(self.rounds, self.recent)


def _mean(rounds: tuple[float, ...]) -> float | None:
    """Mean of ten rounds; None if there are fewer."""
    return sum(rounds) / WINDOW if len(rounds) == WINDOW else None
