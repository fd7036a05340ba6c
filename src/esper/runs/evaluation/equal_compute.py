"""Controllers at equal compute: what each of them reaches if it may spend so many FLOPs on a host.

    controller      run as often as fits, with other weights and draws each time; validation keeps the best run
    portfolio       the searched plan that fits; halving likewise
    random_search   as many random structures as fit

Everything cheaper is read off the same runs, which gives 100·J and test accuracy as curves over the FLOPs of a host.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
from rich.table import Table

from esper.leyline.architecture import Architecture
from esper.runs.evaluation.races import RacePlan, raced
from esper.runs.evaluation.results import ControllerResult, Outcome, Size, host_figures, verdict
from esper.runs.evaluation.tables import plain_table, short
from esper.simic.rewards.reward_config import RewardConfig
from esper.telemetry.progress import with_spread

Structures = Callable[[Architecture], Sequence[Outcome]]
"""The outcomes of a structure, one per group of hosts."""


@final
@dataclass(frozen=True)
class Entry:
    """A controller or a race with what it spends.

    Attributes:
        label: in words. tried: candidates on each host.
        outcomes: one per group of hosts, of the candidate that each host keeps.
    """

    label: str
    tried: int
    outcomes: Sequence[Outcome]

    @property
    def flops(self) -> float:
        """Spent on a host, in the mean."""
        return float(np.mean([spent(outcome) for outcome in self.outcomes]))


def spent(outcome: Outcome) -> float:
    """FLOPs of training and measuring a host, in the mean."""
    cost = outcome.cost
    assert cost is not None, f"{outcome.name} was not run on networks"
    return float((cost.training + cost.measuring).sum(axis=0).mean())


def best_of(
    name: str,
    noun: str,
    passes: Iterable[Sequence[Outcome]],
    weights: RewardConfig,
    budget: float,
    *,
    every_step: bool,
) -> Iterator[Entry]:
    """Races of the first pass, of the first two, and so on within the budget; a pass has one outcome per group.

    `every_step`: see `raced`.
    """
    runs = list[Sequence[Outcome]]()
    for outcomes in passes:
        runs.append(outcomes)
        number = len(runs)
        label = f"one {noun}" if number == 1 else f"best of {number} {noun}s"
        by_group = zip(*runs, strict=True)
        entry = Entry(label, number, [raced(name, found, weights, every_step=every_step) for found in by_group])
        if entry.flops > budget:
            return
        yield entry


def of_plan(name: str, plan: RacePlan, structures: Structures, weights: RewardConfig) -> Entry:
    """The race of a plan."""
    found = [structures(structure) for structure in plan.structures]
    outcomes = [raced(name, of_group, weights, plan.rungs) for of_group in zip(*found, strict=True)]
    return Entry(plan.words, len(plan.structures), outcomes)


@dataclass(frozen=True, kw_only=True)
class EqualCompute:
    """The results at equal compute.

    Attributes:
        budget: FLOPs per host. rows: of the most expensive entry of each name that fits; labels, tried: of these.
        curves: of every entry that fits, by name: means over hosts of `POINT`.
        excluded: a sentence for each controller that spends more in a single run.
    """

    budget: float
    rows: Sequence[ControllerResult]
    labels: Mapping[str, str]
    tried: Mapping[str, int]
    curves: Mapping[str, Sequence[Mapping[str, float]]]
    excluded: Sequence[str]

    def verdict(self, size: Size) -> str:
        """The best of the others against the trained controller, or against wait_only."""
        return f"At equal compute, at most {short(self.budget)} FLOPs per host: {verdict(self.rows, size)}"

    def report(self, size: Size) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "flops_per_host": self.budget,
            "verdict": self.verdict(size),
            "labels": dict(self.labels),
            "excluded": list(self.excluded),
            "curves": {name: list(curve) for name, curve in self.curves.items()},
            "controllers": [asdict(row) for row in self.rows],
        }

    def pages(self, reference: str) -> Iterator[Table]:
        """The tables."""
        first = f"at {short(self.budget)} FLOPs"
        page = plain_table(first, "tried", "100·J", f"vs {reference}", "better")
        for row in self.rows:
            differs = ("", "") if row.name == reference else row.cells
            page.add_row(row.name, str(self.tried[row.name]), with_spread(row.objective, row.objective_std), *differs)
        yield page
        page = plain_table(first, "val", "test", "J test", "growth", "train", "measure")
        for row in self.rows:
            page.add_row(row.name, *row.points_and_growth, short(row.training_flops), short(row.measuring_flops))
        yield page

    @property
    def notes(self) -> list[str]:
        """What each of them is, in words, and who is missing."""
        return [*(f"{name}: {label}." for name, label in self.labels.items()), *self.excluded]


POINT = ("flops", "objective", "test_objective", "test")
"""Values of a point of a curve: FLOPs spent on a host, 100·J with validation and with test, test accuracy (pp)."""


def point(entry: Entry, weights: RewardConfig) -> dict[str, float]:
    """Means over all hosts."""
    hosts = host_figures(entry.outcomes, weights)
    means = {name: float(hosts[name].mean()) for name in POINT[1:]}
    return {POINT[0]: entry.flops, **means}
