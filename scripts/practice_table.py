"""Markdown of results.py: every method on every host, with 95 % intervals over seeds (Student's t)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from scipy.stats import t as student

from practice_hosts import HOSTS
from write_benchmarks import table

TITLES = {host.name: host.title for host in HOSTS}
GROWN = "esper, "
"""What the names of methods that grow begin with."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One method on one host with one seed; accuracies in percent, cost in FLOPs, seconds of a core and of a clock."""

    host: str
    data: str
    examples: int
    """Of training."""
    epochs: float
    """Of each of three runs of the network as it is, which are the budget."""
    method: str
    seed: int
    test: float
    val: float
    params: int
    limit: int
    """Parameters of the wider network, which no method may exceed."""
    flops: float
    budget: float
    seconds: float
    chosen: str
    commit: str
    wall: float = math.nan

    @property
    def setting(self) -> tuple[int, float, str, int]:
        """What must be equal for a comparison: the host in the order of the page, epochs, data and their number."""
        return list(TITLES).index(self.host), self.epochs, self.data, self.examples

    @property
    def key(self) -> tuple[str, int, float, str, int]:
        """What is computed once."""
        return self.host, self.examples, self.epochs, self.method, self.seed


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of the 95 % interval; NaN for a single value."""
    n = len(values)
    half = student.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return float(np.mean(values)), float(half)


def page(results: Sequence[Result], reference: str) -> str:
    """All tables: what `reference` gains, and each host with all methods."""
    ordered = sorted(results, key=lambda r: r.setting)
    settings = [by_method(list(some)) for _, some in groupby(ordered, key=lambda r: r.setting)]
    parts = [summary(settings, reference), *(host_table(methods, reference) for methods in settings)]
    return "\n\n".join(part for part in parts if part)


Methods = Mapping[str, Mapping[int, Result]]
"""Results of one setting: by method and seed."""


def by_method(results: Sequence[Result]) -> Methods:
    """In the order in which methods first appear."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.method, {})[result.seed] = result
    return found


def summary(settings: Sequence[Methods], reference: str) -> str:
    """`reference` against the usual way that has the best mean test accuracy, for each host that has both."""
    lines: list[tuple[str, ...]] = [("host", reference, "the best usual way", "its test accuracy", "difference")]
    better = worse = 0
    for methods in settings:
        usual = [name for name in methods if not name.startswith(GROWN)]
        if reference not in methods or not usual:
            continue
        best = max(usual, key=lambda name: interval(tests(methods[name]))[0])
        gain, half = interval(differences(methods[reference], methods[best]))
        better, worse = better + (gain - half > 0.0), worse + (gain + half < 0.0)
        shown = (with_interval(*interval(tests(methods[name]))) for name in (reference, best))
        own, its = shown
        first = next(iter(methods[best].values()))
        lines.append((TITLES[first.host], own, best, its, with_interval(gain, half, sign="+")))
    hosts = len(lines) - 1
    words = f"{reference} is better than the best usual way on {better} of {hosts} hosts, worse on {worse}; "
    return f"{words}the others show no difference.\n\n{table(lines)}" if hosts else ""


def host_table(methods: Methods, reference: str) -> str:
    """All methods on one host."""
    first = next(iter(next(iter(methods.values())).values()))
    lines: list[tuple[str, ...]] = [
        ("method", "test", f"{reference} minus it", "validation", "parameters", "GFLOPs", "CPU seconds", "seconds")
    ]
    for name, seeds in methods.items():
        found = list(seeds.values())
        against = ""
        if name != reference and reference in methods:
            against = with_interval(*interval(differences(methods[reference], seeds)), sign="+")
        params, val, flops, seconds, wall = (
            float(np.mean([getattr(r, field) for r in found]))
            for field in ("params", "val", "flops", "seconds", "wall")
        )
        tested = with_interval(*interval(tests(seeds)))
        lines.append(
            (
                name,
                tested,
                against,
                f"{val:.2f}",
                f"{params:,.0f}",
                f"{flops / 1e9:,.0f}",
                f"{seconds:,.0f}",
                "-" if math.isnan(wall) else f"{wall:,.0f}",
            )
        )
    seeds = sorted({seed for found in methods.values() for seed in found})
    words = f"{first.examples:,} examples of {first.data}; budget {first.budget / 1e9:,.0f} GFLOPs, which are 3 x "
    words += f"{first.epochs:g} epochs of the network; at most {first.limit:,} parameters; seeds {seeds}".replace(
        "[", ""
    )
    title = TITLES[first.host]
    return f"#### {title[0].upper()}{title[1:]}\n\n{words.replace(']', '')}.\n\n{table(lines)}"


def tests(seeds: Mapping[int, Result]) -> list[float]:
    """Test accuracy of each seed."""
    return [result.test for result in seeds.values()]


def differences(ours: Mapping[int, Result], theirs: Mapping[int, Result]) -> list[float]:
    """Ours minus theirs on the seeds that both have."""
    return [ours[seed].test - theirs[seed].test for seed in ours if seed in theirs]


def with_interval(mean: float, half: float, sign: str = "") -> str:
    """`89.62 ± 0.31`, or the mean alone."""
    return f"{mean:{sign}.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
