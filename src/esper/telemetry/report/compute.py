"""What controllers reach for what they spend on a host, as a picture; needs matplotlib, as `figures`.

+-----------------+-----------------+
| 100·J           | test accuracy   |   over the FLOPs of training and measuring a host
+-----------------+-----------------+
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from esper.telemetry.report.figures import BLUE, FAINT, FORMATS, GREEN, INK, ORANGE, RED, SAND, SKY, VIOLET, dress

COLORS = {"trained": RED, "portfolio": BLUE, "halving": GREEN, "random_search": SKY, "wait_only": FAINT}
_OTHERS = (ORANGE, VIOLET, SAND, INK)


def write_picture(report: Mapping[str, Any], path: Path) -> None:
    """Draw a comparison at equal compute as PNG and SVG.

    Args:
        report: of a comparison, with "equal_compute".
        path: of the files, without their suffix.
    """
    curves = report["equal_compute"]["curves"]
    others = [name for name in curves if name not in COLORS]
    colors = COLORS | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    figure = Figure(figsize=(13.0, 5.6), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2, wspace=0.14, left=0.05, right=0.985, top=0.8, bottom=0.21)
    hosts = report["num_envs"] * len(report["groups"])
    figure.suptitle(f"{report['task']}: equal compute, {hosts} new hosts", x=0.05, ha="left", fontsize=15, color=INK,
                    fontweight="bold")  # fmt: skip
    panels = (("objective", "100·J"), ("test", "Test accuracy"))
    for place, (value, title) in enumerate(panels):
        ax = figure.add_subplot(grid[0, place])
        dress(ax, title, "over the FLOPs of training and measuring a host; lines: the same with a larger budget")
        for name, curve in curves.items():
            _line(ax, name, [point["flops"] for point in curve], [point[value] for point in curve], colors[name])
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_minor_formatter(NullFormatter())
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.045, 0.0), ncols=6, frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
    with mpl.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "esper"}):
        for suffix in FORMATS:
            figure.savefig(path.with_name(f"{path.name}.{suffix}"), dpi=110)


def _line(ax: Axes, name: str, flops: list[float], values: list[float], color: str) -> None:
    ax.plot(flops, values, color=color, linewidth=1.8, marker="o", markersize=5.0, label=name)
