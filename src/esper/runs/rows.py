"""A comparison as rows: one per controller, with statistics over its hosts or runs, and the verdict in words.

G = groups of hosts (one per run or seed), N = hosts of each group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.leyline.objective import Objective
from esper.runs.controllers import COMMON, REFERENCE, TRAINED
from esper.runs.outcomes import Outcome
from esper.runs.report import objective_of, ops_by_name, standard_deviation
from esper.runs.statistics import (
    LEAST_UNITS,
    MEANINGFUL,
    Estimate,
    bootstrap,
    interquartile_mean,
    paired_difference,
    probability_of_improvement,
    units_needed,
    units_of,
)
from esper.simic.rewards.objective import objective_value
from esper.simic.rewards.reward_config import RewardConfig
from esper.tamiyo.baselines import STATIC
from esper.tasks.objectives import perplexity

_CONSTANT = ("fixed_schedule", "fixed_schedule_fill", "best_schedule")
QUICK, CLAIM = 5, 10
"""Runs of a quick look and of a claim."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: means over all hosts of their committed networks (host and fossilized seeds).

    A *unit* is a run if there are several, else a host. Values that do not exist (a spread of one, FLOPs of scripted
    hosts) are NaN.

    Attributes:
        objective: 100·J, with its standard deviation over units. objective_iqm: interquartile mean over units.
        difference: paired difference in 100·J to the trained controller, else to wait_only. difference_test: the same
            with test accuracy in J. improvement: probability that a unit is better than that of the reference.
        needed: units that would be needed to detect a difference of 2 points; None if one unit says nothing of it.
        committed, test: accuracy (pp) on the validation and the test split. loss: on the validation split; perplexity:
            exp(loss) for texts, else NaN. test_objective: 100·J with `test`.
        growth: (host + fossilized parameters) / host parameters. ops: effective operations of all hosts, by name.
        flops: of one example in the kept network. training_flops, measuring_flops: of a host, see `training_cost`.
        seconds: wall time of all its episodes.
        shaped_return: undiscounted sum of rewards; a diagnostic that does not rank controllers.
        hosts: the values of every host, group after group. structures: `GrowthManifest.tree` of every host.
        instances: properties of every host by name; empty where hosts are equal.
        units: the values of 100·J that the statistics are of.
    """

    name: str
    objective: float
    objective_std: float
    objective_iqm: Estimate
    difference: Estimate
    difference_test: Estimate
    improvement: Estimate
    needed: int | None
    committed: float
    committed_std: float
    loss: float
    perplexity: float
    test: float
    test_std: float
    test_objective: float
    growth: float
    fossilized: float
    flops: float
    training_flops: float
    measuring_flops: float
    seconds: float
    rollbacks: int
    shaped_return: float
    ops: dict[str, int]
    units: list[float]
    hosts: dict[str, list[float]]
    structures: list[dict[str, Any]]
    instances: dict[str, list[float]]


def table(
    outcomes: Mapping[str, Sequence[Outcome]], weights: RewardConfig, objective: Objective, *, by_run: bool
) -> list[Row]:
    """The comparison: the trained controller, the strongest constant schedule, then the others by J, best first.

    Args:
        outcomes: of each controller, one per group of hosts, with equal groups for all of them.
        weights: of J.
        objective: of the task.
        by_run: whether the groups belong to different training runs.
    """
    reference = _Values(outcomes[TRAINED if TRAINED in outcomes else REFERENCE], weights, by_run)
    rows = [_row(found, _Values(found, weights, by_run), reference, objective) for found in outcomes.values()]
    rows.sort(key=lambda row: -row.objective)
    constant = next((row for row in rows if row.name in _CONSTANT), None)
    return sorted(rows, key=lambda row: 0 if row.name == TRAINED else 1 if row is constant else 2)


class _Values:
    """The figures of every host [G, N] of one controller, and the units of both objectives."""

    def __init__(self, outcomes: Sequence[Outcome], weights: RewardConfig, by_run: bool) -> None:
        stats = [outcome.stats for outcome in outcomes]
        missing = np.full(stats[0].growth.shape, np.nan)
        costs = [outcome.cost for outcome in outcomes]
        test_objective = [
            100.0 * objective_value(o.test_acc.astype(np.float64), o.stats.fossil_params, o.stats.host_params, weights)
            for o in outcomes
        ]
        columns = {
            "objective": [objective_of(s, weights) for s in stats],
            "committed": [s.committed_acc for s in stats],
            "loss": [s.committed_loss for s in stats],
            "test": [o.test_acc for o in outcomes],
            "test_objective": test_objective,
            "growth": [s.growth for s in stats],
            "shaped_return": [s.returns for s in stats],
            "flops": [cost.per_example if cost else missing for cost in costs],
            "training_flops": [cost.training if cost else missing for cost in costs],
            "measuring_flops": [cost.measuring if cost else missing for cost in costs],
        }
        self.hosts = {name: np.stack(column).astype(np.float64) for name, column in columns.items()}
        self.units = units_of(self.hosts["objective"], by_run=by_run)
        self.test_units = units_of(self.hosts["test_objective"], by_run=by_run)


def _row(outcomes: Sequence[Outcome], own: _Values, reference: _Values, objective: Objective) -> Row:
    stats, hosts = [outcome.stats for outcome in outcomes], own.hosts
    means = {name: float(values.mean()) for name, values in hosts.items()}
    spread = standard_deviation(own.units - reference.units)
    of_text = perplexity(objective, means["loss"])
    return Row(
        name=outcomes[0].name,
        objective_std=standard_deviation(own.units),
        objective_iqm=bootstrap([own.units], interquartile_mean),
        difference=paired_difference([own.units], [reference.units]),
        difference_test=paired_difference([own.test_units], [reference.test_units]),
        improvement=probability_of_improvement([own.units], [reference.units]),
        needed=None if np.isnan(spread) else units_needed(spread),
        perplexity=float("nan") if of_text is None else of_text,
        committed_std=standard_deviation(hosts["committed"]),
        test_std=standard_deviation(hosts["test"]),
        **means,
        fossilized=float(np.mean([s.fossilized for s in stats])),
        seconds=float(sum(s.cost.seconds for s in stats)),
        rollbacks=int(sum(s.rollbacks.sum() for s in stats)),
        ops=ops_by_name(np.concatenate([s.ops for s in stats])),
        units=own.units.tolist(),
        hosts={name: values.reshape(-1).tolist() for name, values in hosts.items()},
        structures=[manifest.tree() for outcome in outcomes for manifest in outcome.grown],
        instances={
            name: [float(x) for s in stats for x in s.instance[name]] for name in (stats[0].instance if stats else ())
        },
    )


@dataclass(frozen=True)
class Size:
    """The size of a comparison in words."""

    groups: int
    hosts: int
    by_run: bool

    @property
    def units(self) -> str:
        """What is resampled."""
        return "runs" if self.by_run and self.groups > 1 else "hosts"

    def __str__(self) -> str:
        hosts = counted(self.hosts, "host")
        if self.groups == 1:
            return hosts
        return f"{self.groups} {'runs' if self.by_run else 'groups'} of {hosts}"


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def verdict(rows: Sequence[Row], size: Size) -> str:
    """The trained controller against the best baseline, or else that one against wait_only; a few sentences.

    Where the best baseline has a finished structure from the first step, the best of the others is named too.
    """
    has_run = rows[0].name == TRAINED
    by_value = sorted(rows[has_run:], key=lambda row: -row.objective)
    growing = [row for row in by_value if row.name not in (STATIC, COMMON)]
    best = by_value[0]
    first = _against(best, f"the best baseline, {best.name}", size, has_run) + _caution(size, has_run)
    if not has_run or best in growing or not growing:
        return first
    other = growing[0]
    of_others = _against(other, f"{other.name}, the best of the others", size, has_run)
    return f"{first} {best.name} has its structure from the first step; {of_others}"


def _against(best: Row, called: str, size: Size, has_run: bool) -> str:
    """The trained controller against `best`, or that one against wait_only."""
    subject, other = (TRAINED, called) if has_run else (best.name, REFERENCE)
    if subject == other:
        return f"No baseline is better than {REFERENCE} on {size}."
    found, test = best.difference, best.difference_test
    if has_run:
        found, test = -found, -test
    better = 1.0 - best.improvement.mean if has_run else best.improvement.mean
    one = size.units.removesuffix("s")
    units = len(best.units)
    interval = f", 95 % interval {found.low:+z.2f} to {found.high:+z.2f} over {size.units}"
    share = f", better in {100 * better:.0f} % of {size.units}" if units > 1 else ""
    numbers = (
        f"{found.mean:+z.2f} in 100·J on {size}{interval if units >= LEAST_UNITS else ''}{share}; "
        f"{test.mean:+z.2f} with test accuracy"
    )
    if units < LEAST_UNITS:
        few = f"{counted(units, one)} cannot show whether {subject} differs from {other}"
        return f"{few}: {numbers}. At least {LEAST_UNITS} {size.units} are needed."
    if found.excludes_zero:
        word = "better" if found.mean > 0.0 else "worse"
        return f"{subject} is {word} than {other}: {numbers}."
    needed = "" if best.needed is None else (
        f" To detect a difference of {MEANINGFUL:g}, {counted(best.needed, one)} would be needed."
    )  # fmt: skip
    return f"{subject} does not differ significantly from {other}: {numbers}.{needed}"


def _caution(size: Size, has_run: bool) -> str:
    """What may not be concluded."""
    if not has_run or size.groups >= CLAIM:
        return ""
    if size.groups == 1:
        return f" One run says nothing about other training seeds; a claim needs {CLAIM} runs."
    return f" {size.groups} runs are {'a quick look' if size.groups >= QUICK else 'few'}; a claim needs {CLAIM}."
