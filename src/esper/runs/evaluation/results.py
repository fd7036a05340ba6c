"""The results of a comparison: statistics over hosts or runs, one result for each controller, and the verdict in words.

Sources: BCa bootstrap, Efron (1987); interquartile mean and probability of improvement, Agarwal et al., "Deep
reinforcement learning at the edge of the statistical precipice" (2021); sample size with the correction of the normal
for the t distribution, Guenther (1981).

G = groups of hosts (one per run or seed), N = hosts of each group, U = units: the runs if there are several, else all
hosts.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

from esper.leyline.architecture import Architecture
from esper.leyline.messages import Objective
from esper.runs.evaluation.tables import counted, short
from esper.runs.report import objective_of, ops_by_name, standard_deviation
from esper.simic.rewards.reward_config import RewardConfig
from esper.tamiyo.baselines import STATIC
from esper.tasks.losses import perplexity
from esper.telemetry.record.schema import CONSTANT
from esper.telemetry.record.schema import TRAINED as TRAINED
from esper.tolaria.state import RolloutStats

REFERENCE, COMMON = "wait_only", "static_common"
"""Controllers with a part of their own in the results, besides the trained one."""
PORTFOLIO, HALVING, RANDOM_SEARCH, HILL_CLIMBING = "portfolio", "halving", "random_search", "hill_climbing"
SEARCHED = (PORTFOLIO, HALVING)
RACES = (*SEARCHED, RANDOM_SEARCH, HILL_CLIMBING)
"""Baselines that train several structures on each host (`races`), and those whose structures a search
found."""

RESAMPLES = 9_999
LEVEL = 0.95
"""Of all intervals."""
POWER, MEANINGFUL = 0.8, 2.0
"""Of the sample size: its power, and the difference to detect in points of 100·J."""
LEAST_UNITS = 6
"""Of a significant difference. K differences have the same sign by chance in 2^(1-K) of all cases, and then the
interval of a bootstrap excludes 0 whatever its level is: for less than 5 % it takes 6."""
QUICK, CLAIM = 5, 10
"""Runs of a quick look and of a claim."""

Units = Float[np.ndarray, " U"]


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs, float64: of one example in the kept network of each host [N]; of training and of measuring it [T, N]."""

    per_example: np.ndarray
    training: np.ndarray
    measuring: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one controller on N hosts.

    Attributes:
        stats: of the episode. test_acc: test accuracy (pp) of the kept networks [N].
        val: validation accuracy (pp) with all seeds as they stand in each step [T, N], float32; NaN where a host was
            rolled back.
        grown: architecture of each kept network.
        cost: in FLOPs; None for scripted hosts, which are not networks.
        note: that of the controller.
    """

    name: str
    stats: RolloutStats
    test_acc: np.ndarray
    val: np.ndarray
    grown: tuple[Architecture, ...] = ()
    cost: TrainingCost | None = None
    note: str = ""


def spent(outcome: Outcome) -> float:
    """FLOPs of training and measuring a host, in the mean."""
    cost = outcome.cost
    assert cost is not None, f"{outcome.name} was not run on networks"
    return float((cost.training + cost.measuring).sum(axis=0).mean())


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval; NaN bounds where a single unit allows none."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval lies above or below 0."""
        return self.low > 0.0 or self.high < 0.0


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half: floor(U / 4) of the lowest and of the highest units are left out."""
    from scipy.stats import trim_mean  # takes a second, which every command would pay

    return np.asarray(trim_mean(values, 0.25, axis=axis))


def estimate(values: Units, statistic: Callable[..., np.ndarray] = np.mean) -> Estimate:
    """A statistic of all units with its interval by the BCa bootstrap, with the same resamples each time.

    Where BCa is not defined, because the units are all equal for instance, it is the percentile interval.
    """
    from scipy.stats import bootstrap

    together = float(statistic(values))
    if values.size == 1:
        return Estimate(together, math.nan, math.nan)
    size = {"confidence_level": LEVEL, "vectorized": True, "axis": -1, "batch": 1_000}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of degenerate distributions; their intervals are NaN
        found = bootstrap((values,), statistic, n_resamples=RESAMPLES, method="BCa", rng=0, **size)
    low, high = found.confidence_interval
    if not (math.isfinite(low) and math.isfinite(high)):
        found = bootstrap((values,), statistic, n_resamples=0, method="percentile", bootstrap_result=found, **size)
        low, high = found.confidence_interval
    return Estimate(together, float(low), float(high))


def probability_of_improvement(values: Units, reference: Units) -> Estimate:
    """Share of the pairs in which the value is above the reference; ties count half."""
    return estimate(0.5 * (1.0 + np.sign(values - reference)))


def units_needed(deviation: float, difference: float = MEANINGFUL) -> int:
    """Pairs that a two-sided paired t-test at 5 % needs to detect a true `difference` with a power of 80 %.

    n = ((z_0.975 + z_0.8) s / d)^2 + z_0.975^2 / 2, rounded up, and at least `LEAST_UNITS`; s is the standard deviation
    of the paired differences, d the difference.
    """
    z, z_power = NormalDist().inv_cdf(0.5 + LEVEL / 2.0), NormalDist().inv_cdf(POWER)
    return max(LEAST_UNITS, math.ceil(((z + z_power) * deviation / difference) ** 2 + z**2 / 2.0))


def units_of(values: Float[np.ndarray, "G N"], *, by_run: bool) -> Units:
    """The independent numbers in the results of N hosts of each of G groups.

    With several runs (`by_run`, one group each) those are the means of the runs, otherwise all hosts.
    """
    return values.mean(axis=1) if by_run and len(values) > 1 else values.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class ControllerResult:
    """One controller: means over all hosts of their committed networks (host and fossilized seeds).

    Values that do not exist (a spread of one, FLOPs of scripted hosts) are NaN.

    Attributes:
        objective: 100·J, with its standard deviation over units. objective_iqm: interquartile mean over units.
        difference: paired difference in 100·J to the trained controller, else to wait_only. difference_test: the same
            with test accuracy in J. improvement: probability that a unit is better than that of the reference.
        needed: units that would be needed to detect a difference of 2 points; None if one unit says nothing of it.
        committed, test: accuracy (pp) on the validation and the test split. loss: on the validation split; perplexity:
            exp(loss) for texts, else NaN. test_objective: 100·J with `test`.
        growth: (host + fossilized parameters) / host parameters. params: of the kept network.
        compute: FLOPs of training over those of training the host alone, which J may price. ops: effective operations
            of all hosts, by name.
        flops: of one example in the kept network. training_flops, measuring_flops: of a host, see `CostMeter`.
        seconds: wall time of all its episodes.
        shaped_return: undiscounted sum of rewards; a diagnostic that does not rank controllers.
        hosts: the values of every host, group after group. architectures: `Architecture.tree` of every host.
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
    params: float
    compute: float
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
    architectures: list[dict[str, Any]]
    instances: dict[str, list[float]]

    @property
    def spent(self) -> float:
        """FLOPs of training and measuring a host."""
        return self.training_flops + self.measuring_flops

    @property
    def points_and_growth(self) -> tuple[str, ...]:
        """Val, test, J test and growth."""
        points = (self.committed, self.test, self.test_objective)
        return *(f"{value:.2f}" for value in points), f"{self.growth:.2f}x"

    def cells(self, reference: str) -> tuple[str, str]:
        """The difference, with its interval where there are enough units, and how often it is above 0."""
        if self.name == reference:
            return "", ""
        low, high = self.difference.low, self.difference.high
        interval = f" [{low:+z.2f}, {high:+z.2f}]" if len(self.units) >= LEAST_UNITS else ""
        return f"{self.difference.mean:+z.2f}{interval}", f"{100.0 * self.improvement.mean:.0f} %"


def results(
    outcomes: Mapping[str, Sequence[Outcome]], weights: RewardConfig, objective: Objective, *, by_run: bool
) -> list[ControllerResult]:
    """The trained controller first, then the strongest constant schedule, then the others by J, best first.

    There is an outcome of each controller per group of hosts; `by_run`: the groups belong to different training runs.
    """
    hosts = {name: host_figures(found, weights) for name, found in outcomes.items()}
    reference = hosts[TRAINED if TRAINED in outcomes else REFERENCE]
    found = [_result(outcomes[name], own, reference, objective, by_run) for name, own in hosts.items()]
    found.sort(key=lambda result: -result.objective)
    constant = next((result for result in found if result.name in CONSTANT), None)
    return sorted(found, key=lambda result: 0 if result.name == TRAINED else 1 if result is constant else 2)


def host_figures(outcomes: Sequence[Outcome], weights: RewardConfig) -> dict[str, Float[np.ndarray, "G N"]]:
    """The figures of every host of one controller, float64."""

    def columns(outcome: Outcome) -> dict[str, np.ndarray]:
        stats = outcome.stats
        missing = np.full(stats.growth.shape, np.nan)
        cost = outcome.cost or TrainingCost(missing, missing[None], missing[None])
        return {
            "objective": objective_of(stats, weights),
            "committed": stats.committed_acc,
            "loss": stats.committed_loss,
            "test": outcome.test_acc,
            "test_objective": objective_of(replace(stats, committed_acc=outcome.test_acc.astype(np.float64)), weights),
            "growth": stats.growth,
            "params": stats.host_params + stats.fossil_params,
            "compute": stats.compute,
            "shaped_return": stats.returns,
            "flops": cost.per_example,
            "training_flops": cost.training.sum(axis=0),
            "measuring_flops": cost.measuring.sum(axis=0),
        }

    groups = [columns(outcome) for outcome in outcomes]
    return {name: np.stack([group[name] for group in groups]).astype(np.float64) for name in groups[0]}


def _result(
    outcomes: Sequence[Outcome],
    hosts: Mapping[str, Float[np.ndarray, "G N"]],
    reference: Mapping[str, Float[np.ndarray, "G N"]],
    objective: Objective,
    by_run: bool,
) -> ControllerResult:
    units, test_units = (units_of(hosts[name], by_run=by_run) for name in ("objective", "test_objective"))
    other, other_test = (units_of(reference[name], by_run=by_run) for name in ("objective", "test_objective"))
    stats = [outcome.stats for outcome in outcomes]
    means = {name: float(values.mean()) for name, values in hosts.items()}
    spread = standard_deviation(units - other)
    of_text = perplexity(objective, means["loss"])
    return ControllerResult(
        name=outcomes[0].name,
        objective_std=standard_deviation(units),
        objective_iqm=estimate(units, interquartile_mean),
        difference=estimate(units - other),
        difference_test=estimate(test_units - other_test),
        improvement=probability_of_improvement(units, other),
        needed=None if np.isnan(spread) else units_needed(spread),
        perplexity=float("nan") if of_text is None else of_text,
        committed_std=standard_deviation(hosts["committed"]),
        test_std=standard_deviation(hosts["test"]),
        **means,
        fossilized=float(np.mean([s.fossilized for s in stats])),
        seconds=float(sum(s.cost.seconds for s in stats)),
        rollbacks=int(sum(s.rollbacks.sum() for s in stats)),
        ops=ops_by_name(np.concatenate([s.ops for s in stats])),
        units=units.tolist(),
        hosts={name: values.reshape(-1).tolist() for name, values in hosts.items()},
        architectures=[architecture.tree() for outcome in outcomes for architecture in outcome.grown],
        instances={name: [float(x) for s in stats for x in s.instance[name]] for name in stats[0].instance},
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


def verdict(rows: Sequence[ControllerResult], size: Size) -> str:
    """The best baseline against the trained controller, or else against wait_only; a few sentences.

    Differences have the direction of the tables. Where the best baseline has a finished structure from the first step,
    the best of the others is named too.
    """
    has_run = rows[0].name == TRAINED
    by_value = sorted(rows[has_run:], key=lambda row: -row.objective)
    growing = [row for row in by_value if row.name not in (STATIC, COMMON)]
    best = by_value[0]
    other = rows[0] if has_run else next(row for row in rows if row.name == REFERENCE)
    if len(rows) == 1:
        return f"{REFERENCE} alone, on {size}; name other baselines, or a run, to compare it with."
    if best is other:
        return f"No baseline is better than {REFERENCE} on {size}."
    first = _against(best, f"the best baseline, {best.name}," if has_run else best.name, other, size)
    if has_run and size.groups == 1:
        first += f" One run says nothing about other training seeds; a claim needs {CLAIM} runs."
    elif has_run and size.groups < CLAIM:
        first += f" {size.groups} runs are {'a quick look' if size.groups >= QUICK else 'few'}; a claim needs {CLAIM}."
    if not has_run or best in growing or not growing:
        return first
    next_best = growing[0]
    of_others = _against(next_best, f"{next_best.name}, the best of the others,", other, size)
    return f"{first} {best.name} has its structure from the first step; {of_others}"


def _against(row: ControllerResult, subject: str, reference: ControllerResult, size: Size) -> str:
    """A row, which is called `subject`, against the reference."""
    other, found, test = reference.name, row.difference, row.difference_test
    one = size.units.removesuffix("s")
    units = len(row.units)
    interval = f", 95 % interval {found.low:+z.2f} to {found.high:+z.2f} over {size.units}"
    share = f", better in {100 * row.improvement.mean:.0f} % of {size.units}" if units > 1 else ""
    costs = "" if math.isnan(row.spent) else f"; {short(row.spent)} and {short(reference.spent)} FLOPs per host"
    numbers = (
        f"{found.mean:+z.2f} in 100·J on {size}{interval if units >= LEAST_UNITS else ''}{share}; "
        f"{test.mean:+z.2f} with test accuracy{costs}"
    )
    if units < LEAST_UNITS:
        few = f"{counted(units, one)} cannot show whether {subject} differs from {other}"
        return f"{few}: {numbers}. At least {LEAST_UNITS} {size.units} are needed."
    if found.excludes_zero:
        word = "better" if found.mean > 0.0 else "worse"
        return f"{subject} is {word} than {other}: {numbers}."
    needed = "" if row.needed is None else (
        f" To detect a difference of {MEANINGFUL:g}, {counted(row.needed, one)} would be needed."
    )  # fmt: skip
    return f"{subject} does not differ significantly from {other}: {numbers}.{needed}"
