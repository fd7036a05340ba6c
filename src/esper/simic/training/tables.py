"""What the commands print, as tables that fit into 80 columns."""

import math
from collections.abc import Sequence

from rich.table import Table

from esper.leyline.actions import LifecycleOp
from esper.simic.training.evaluate import REFERENCE, Row
from esper.tasks.registry import TaskSpec

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
            f"{row.test:.2f}",
            gain,
            f"{row.growth:.2f}x",
            f"{row.mean_return:+.3f}",
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
    if math.isnan(value):
        return ""
    return format(value, form) + ("" if math.isnan(error) else f" ± {error:.2f}")
