"""The tables and sentences that the commands print, at most 80 columns wide."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from esper.leyline.actions import LifecycleOp
from esper.runs.evaluate import REFERENCE, TRAINED, Difference, Row
from esper.tasks.registry import TaskSpec

LEGEND = """Means over hosts, each with its fossilized seeds only (the committed network).
val, test: accuracy in %. 100·J: val minus the price of added parameters.
vs: paired difference in 100·J with its 95 % interval."""


def comparison(rows: Sequence[Row]) -> Table:
    """Results of the controllers."""
    reference = TRAINED if rows[0].name == TRAINED else REFERENCE
    page = _page("controller", "100·J", f"vs {reference}", "val", "test", "growth")
    for row in rows:
        page.add_row(
            row.name,
            f"{row.objective:.2f}",
            "" if row.name == reference else _with_interval(row.difference),
            f"{row.committed:.2f}",
            f"{row.test:.2f}",
            f"{row.growth:.2f}x",
        )
    return page


def operations(rows: Sequence[Row]) -> Table:
    """Effective operations per host."""
    names = [op.name for op in LifecycleOp]
    page = _page("ops per host", *(name.lower().removesuffix("_target") for name in names))
    for row in rows:
        page.add_row(row.name, *(f"{row.ops[name] / len(row.hosts['objective']):.1f}" for name in names))
    return page


def rollbacks(rows: Sequence[Row]) -> list[str]:
    """A sentence for each controller with rollbacks."""
    times = {row.name: "once" if row.rollbacks == 1 else f"{row.rollbacks} times" for row in rows if row.rollbacks}
    return [f"{name}: hosts were rolled back {number}." for name, number in times.items()]


def done(summary: Mapping[str, Any]) -> str:
    """The result of a run: its last round, in one line."""
    hosts = summary["num_envs"]
    return (
        f"done: 100·J {_with_spread(summary['final_objective_mean'], summary['final_objective_std'])}; "
        f"committed validation {summary['final_committed_accuracy_mean']:.2f}, "
        f"committed test {summary['final_test_accuracy_mean']:.2f}; "
        f"growth {summary['growth_ratio_mean']:.2f}x; {hosts} host{'s' * (hosts != 1)}; "
        f"{summary['env_steps_per_second']:.0f} env-steps/s with updates"
    )


def tasks(found: Sequence[TaskSpec]) -> Table:
    """The registered tasks."""
    page = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("task", "slots", "steps", "data", "description"):
        page.add_column(column, no_wrap=column != "description")
    for task in found:
        data = "--data-dir" if task.source else "embedded" if task.load else "none"
        page.add_row(task.name, " ".join(task.enabled), str(task.episode_length), data, task.description)
    return page


def _page(first: str, *columns: str) -> Table:
    page = Table(box=None, padding=(0, 2, 0, 0))
    page.add_column(first, no_wrap=True)
    for column in columns:
        page.add_column(column, justify="right", no_wrap=True)
    return page


def _with_interval(difference: Difference) -> str:
    interval = "" if math.isnan(difference.low) else f" [{difference.low:+z.2f}, {difference.high:+z.2f}]"
    return f"{difference.mean:+z.2f}{interval}"


def _with_spread(value: float, spread: float) -> str:
    return f"{value:.2f}" + ("" if math.isnan(spread) else f" ± {spread:.2f}")
