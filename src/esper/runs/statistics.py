"""Statistics of comparisons: what a set of runs says about a difference, and what it cannot say.

    strata     one array of numbers per task; each number belongs to one *unit*, a training run or (with a single run)
               a host. Units are resampled within their task, and what belongs to a unit stays with it.

Sources: percentile bootstrap, Efron (1979); interquartile mean, stratified resampling and probability of improvement,
Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice" (2021); sample size with the
correction of the normal for the t distribution, Guenther (1981).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from jaxtyping import Float

from esper.leyline.random import Stream, local_generator

RESAMPLES = 10_000
LEVEL = 0.95
"""Of all intervals."""
POWER, MEANINGFUL = 0.8, 2.0
"""Of the sample size: its power, and the difference to detect in points of 100·J."""
LEAST_UNITS = 6
"""Of a significant difference. K differences have the same sign by chance in 2^(1-K) of all cases, and then the
interval of a percentile bootstrap excludes 0 whatever its level is: for less than 5 % it takes 6."""
_CHUNKS = 10

Strata = Sequence[Float[np.ndarray, " _"]]
Statistic = Callable[[Float[np.ndarray, "*R U"]], Float[np.ndarray, "*R"]]


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval; NaN bounds where a single unit allows none."""

    mean: float
    low: float
    high: float

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, -self.high, -self.low)

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval lies above or below 0."""
        return self.low > 0.0 or self.high < 0.0


def mean(values: Float[np.ndarray, "*R U"]) -> Float[np.ndarray, "*R"]:
    """The mean over units."""
    return np.asarray(values.mean(axis=-1, dtype=np.float64))


def interquartile_mean(values: Float[np.ndarray, "*R U"]) -> Float[np.ndarray, "*R"]:
    """The mean of the middle half: floor(U / 4) of the lowest and of the highest units are left out."""
    cut = values.shape[-1] // 4
    middle = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    return mean(middle)


def bootstrap(strata: Strata, statistic: Statistic = mean) -> Estimate:
    """A statistic of all units, and the 2.5 and 97.5 percentiles of it over 10,000 stratified resamples."""
    together = float(statistic(np.concatenate(strata)))
    if sum(stratum.size for stratum in strata) == 1:
        return Estimate(together, math.nan, math.nan)
    own = local_generator(0, Stream.RESAMPLING)
    found = []
    for _ in range(_CHUNKS):  # in parts, because the numbers of thousands of hosts would fill the memory
        drawn = [torch.randint(s.size, (RESAMPLES // _CHUNKS, s.size), generator=own).numpy() for s in strata]
        resampled = [stratum[units] for stratum, units in zip(strata, drawn, strict=True)]
        found.append(statistic(np.concatenate(resampled, axis=1)))
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.percentile(found, (tail, 100.0 - tail))
    return Estimate(together, float(low), float(high))


def paired_difference(values: Strata, reference: Strata) -> Estimate:
    """Mean of values minus reference, pair by pair."""
    return bootstrap([a - b for a, b in zip(values, reference, strict=True)])


def probability_of_improvement(values: Strata, reference: Strata) -> Estimate:
    """Share of the pairs in which the value is above the reference; ties count half."""
    return bootstrap([0.5 * (1.0 + np.sign(a - b)) for a, b in zip(values, reference, strict=True)])


def _z() -> float:
    """z(1 - alpha / 2) + z(power) of a two-sided test."""
    normal = NormalDist()
    return normal.inv_cdf(0.5 + LEVEL / 2.0) + normal.inv_cdf(POWER)


def units_needed(deviation: float, difference: float = MEANINGFUL) -> int:
    """Pairs that a two-sided paired t-test at 5 % needs to detect a true `difference` with a power of 80 %.

    n = ((z_0.975 + z_0.8) s / d)^2 + z_0.975^2 / 2, rounded up, and at least `LEAST_UNITS`.

    Args:
        deviation: s, standard deviation of the paired differences.
        difference: d, in the same unit, above 0.
    """
    t_correction = NormalDist().inv_cdf(0.5 + LEVEL / 2.0) ** 2 / 2.0
    return max(LEAST_UNITS, math.ceil((_z() * deviation / difference) ** 2 + t_correction))


def units_of(values: Float[np.ndarray, "G N"], *, by_run: bool) -> Float[np.ndarray, " U"]:
    """The independent numbers in the results of N hosts of each of G groups.

    With several runs (`by_run`, one group each) those are the means of the runs, otherwise all hosts.
    """
    return mean(values) if by_run and len(values) > 1 else values.reshape(-1)
