"""What the commands print, as tables that fit into 80 columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from esper.leyline.actions import LifecycleOp
from esper.simic.training.evaluate import REFERENCE, Row
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import figure

LEGEND = """Accuracies in %, means over the hosts: committed on validation data (± standard
deviation), test on the test split; host and fossilized seeds count.
vs wait_only: paired difference in committed accuracy ± its standard error."""


def comparison(rows: Sequence[Row]) -> Table:
    """What the controllers came to."""
    page = _page("controller", "committed", "test", "vs wait_only", "growth", "return", "fossils")
    for row in rows:
        gain = "" if row.name == REFERENCE else _with_error(row.gain, row.gain_standard_error, "+.2f")
        page.add_row(
            row.name,
            _with_error(row.committed, row.committed_std, ".2f"),
            figure(row.test, ".2f"),
            gain,
            f"{row.growth:.2f}x",
            figure(row.mean_return, "+.3f"),
            f"{row.fossilized:.2f}",
        )
    return page


def operations(rows: Sequence[Row]) -> Table:
    """What the controllers did: effective operations per host."""
    names = [op.name for op in LifecycleOp]
    page = _page("ops per host", *(name.lower() for name in names))
    for row in rows:
        page.add_row(row.name, *(f"{row.ops[name] / len(row.hosts['return']):.1f}" for name in names))
    return page


def rollbacks(rows: Sequence[Row]) -> list[str]:
    """A sentence for each controller whose hosts were rolled back."""
    return [_rollbacks(row) for row in rows if row.rollbacks]


def _rollbacks(row: Row) -> str:
    hosts, times = len(row.hosts["committed"]), "once" if row.rollbacks == 1 else f"{row.rollbacks} times"
    missing = sum(map(math.isnan, row.hosts["committed"]))
    unknown = f"; {missing} of {hosts} without an accuracy are left out of its means" if missing else ""
    return f"{row.name}: hosts were rolled back {times}{unknown}."


def done(summary: Mapping[str, Any]) -> str:
    """The last line of a run but one: what its summary says."""
    return (
        f"done: accuracy {figure(summary['final_val_accuracy_mean'], '.2f')} (validation), "
        f"{figure(summary['final_test_accuracy_mean'], '.2f')} (test, committed); "
        f"growth {summary['growth_ratio_mean']:.2f}x; "
        f"{summary['env_steps_per_second']:.0f} env-steps/s with updates"
    )


def tasks(found: Sequence[TaskSpec]) -> Table:
    """What can be trained."""
    page = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("task", "slots", "steps", "data", "description"):
        page.add_column(column, no_wrap=column != "description")
    for task in found:
        data = "--data-dir" if task.needs_data_dir else "embedded" if task.load else "none"
        page.add_row(task.name, " ".join(task.enabled), str(task.episode_length), data, task.description)
    return page


def _page(first: str, *columns: str) -> Table:
    page = Table(box=None, padding=(0, 2, 0, 0))
    page.add_column(first, no_wrap=True)
    for column in columns:
        page.add_column(column, justify="right", no_wrap=True)
    return page


def _with_error(value: float, error: float, form: str) -> str:
    return figure(value, form) + ("" if math.isnan(error) else f" ± {error:.2f}")
