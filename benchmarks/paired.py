"""Paired timing: two ways of doing the same work, measured in turn.

A busy machine slows both alike, so a ratio is taken within each repetition; the result is the median of the ratios.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """Two ways of doing the same work: medians of milliseconds, and how many times faster the second was."""

    name: str
    first: str
    second: str
    first_ms: float
    second_ms: float
    ratio: float
    lowest: float
    highest: float


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of this process."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def wall_ms(work: Callable[[], object]) -> float:
    """Wall milliseconds, for work on several threads or in several processes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def compare(
    name: str,
    first: str,
    second: str,
    work: Sequence[Callable[[], object]],
    repetitions: int,
    clock: Callable[[Callable[[], object]], float] = cpu_ms,
) -> Row:
    """Time both in alternating order; a first repetition is not counted."""
    for one in work:
        one()
    pairs = []
    for i in range(repetitions):
        ms = {j: clock(work[j]) for j in ((0, 1) if i % 2 else (1, 0))}
        pairs.append((ms[0], ms[1]))
    return row_of(name, first, second, pairs)


def row_of(name: str, first: str, second: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """The row of the pairs of milliseconds."""
    ratios = [a / b for a, b in pairs]
    return Row(
        name=name,
        first=first,
        second=second,
        first_ms=statistics.median(a for a, _ in pairs),
        second_ms=statistics.median(b for _, b in pairs),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def comparisons(title: str, rows: Iterable[Row], where: Mapping[str, str | int]) -> Table:
    """The rows as a table."""
    page = Table(title=title, caption=", ".join(map(str, where.values())))
    page.add_column("work")
    for column in ("before", "after", "ms before", "ms after", "times faster", "range"):
        page.add_column(column, justify="right")
    for r in rows:
        times = (f"{r.first_ms:.1f}", f"{r.second_ms:.1f}", f"{r.ratio:.2f}", f"{r.lowest:.2f} to {r.highest:.2f}")
        page.add_row(r.name, r.first, r.second, *times)
    return page
