"""Runs and comparisons as pictures; needs matplotlib (`pip install esper-growth[report]`).

A run, from the same payloads as the page:

+--------------+--------------+
| 100·J        | accuracy     |     means over the hosts, round by round
+--------------+--------------+
| operations   | growth       |
+--------------+--------------+
| seeds of the newest round, one line per slot: colour is the stage, height is alpha |
+-------------------------------------------------------------------------------------+

A comparison at equal compute: 100·J and test accuracy of each controller over the FLOPs of a host. A growth: the points
of each candidate over its FLOPs.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from esper.telemetry.report.page import Payload, colors

INK, FAINT, GRID, BLUE, ORANGE, GREEN, RED, VIOLET, SAND, SKY = (
    colors("light")[name]
    for name in ("ink", "faint", "line", "blue", "orange", "green", "vermillion", "purple", "yellow", "sky")
)
"""Those of the page."""
OPERATIONS = {"GERMINATE": GREEN, "SET_ALPHA_TARGET": SKY, "FOSSILIZE": BLUE, "PRUNE": RED, "ADVANCE": VIOLET}
STAGES = {"GERMINATED": SAND, "TRAINING": ORANGE, "BLENDING": SKY, "HOLDING": VIOLET, "FOSSILIZED": BLUE}
BAND = "line: mean, band: quartiles"
HOSTS_SHOWN = 4
CONTROLLERS = {"trained": RED, "portfolio": BLUE, "halving": GREEN, "random_search": SKY, "wait_only": FAINT}
_OTHERS = (ORANGE, VIOLET, SAND, INK)
"""Colours of other controllers, in turn."""
FORMATS = ("png", "svg")


def write_figures(payloads: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the picture of each run that has a complete round, from the payloads runs, curves, behaviour and hosts.

    Returns:
        The files in `folder`, which is created if missing: run.png and run.svg, or NAME.png and NAME.svg of each run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = [run for run in payloads["runs"] if payloads["curves"].get(run["run"])]
    written = []
    with _same_everywhere():
        for run in shown:
            figure = picture(run, *(payloads[name][run["run"]] for name in ("curves", "behaviour", "hosts")))
            written += _written(figure, folder / ("run" if len(payloads["runs"]) == 1 else run["run"]))
    return written


def _same_everywhere() -> AbstractContextManager[None]:
    """A font that comes with matplotlib, and names in SVG that are not drawn at random."""
    return mpl.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "esper"})


def _written(figure: Figure, path: Path) -> list[Path]:
    """The files of a figure; `path` lacks their suffix."""
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in FORMATS]
    for file in files:
        figure.savefig(file, dpi=110)
    return files


def _empty(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def picture(run: Payload, curves: Payload, behaviour: Payload, hosts: Sequence[Payload]) -> Figure:
    """The figure of one run."""
    figure = _empty(13.0, 13.0)
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1.25), hspace=0.42, wspace=0.14,
                               left=0.08, right=0.965, top=0.875, bottom=0.04)  # fmt: skip
    sizes = f"{run['num_envs']} hosts × {run['episode_length']} steps × {run['cost']['rounds']} rounds"
    figure.suptitle("Networks that grow while they train", x=0.08, y=0.975, ha="left", fontsize=17, color=INK,
                    fontweight="bold")  # fmt: skip
    figure.text(0.08, 0.94, f"{run['task']}: {sizes}, reward {run['reward']}, seed {run['seed']}", fontsize=11,
                color=FAINT)  # fmt: skip
    objective = figure.add_subplot(grid[0, 0])
    label_axes(objective, "100·J", f"accuracy that is kept minus the price of the growth; {BAND}")
    _line(objective, curves, "objective", BLUE)
    _accuracy(figure.add_subplot(grid[0, 1]), curves)
    _operations(figure.add_subplot(grid[1, 0]), behaviour["operations"], run["num_envs"])
    _growth(figure.add_subplot(grid[1, 1]), curves)
    if hosts:
        _seeds(figure.add_subplot(grid[2, :]), run, hosts[0])
    return figure


Course = tuple[str, Sequence[float], Sequence[float], tuple[float, float] | None]
"""A candidate of a growth: its name, FLOPs spent on it after each step, its points then, and both of what is kept."""


def growth_picture(methods: Mapping[str, Sequence[Course]], unit: str) -> Figure:
    """The candidates of one or more methods of growth, points against FLOPs, the kept one of each in colour.

    The last point of each is no part of its line: it is measured on all validation examples, those before on a part.
    """
    figure = _empty(9.0, 5.5)
    ax = figure.add_axes((0.08, 0.1 + 0.04 * len(methods), 0.88, 0.74 - 0.04 * len(methods)))
    label_axes(
        ax,
        f"Validation {unit} by FLOPs",
        "FLOPs spent on each candidate, a line each on a part of the validation examples; circles: on all of them; "
        "dot: what is kept",
    )
    for (method, courses), color in zip(methods.items(), (GREEN, ORANGE, BLUE, VIOLET, RED), strict=False):
        for name, spent, points, kept in courses:
            label = None if kept is None else f"{method}: {name}, {kept[1]:.2f}"
            look: dict[str, Any] = {"color": color, "alpha": 1.0 if label else 0.3}
            ax.plot(spent[:-1], points[:-1], **look, label=label, linewidth=2.2 if label else 1.2)
            ax.plot(spent[-1:], points[-1:], **look, marker="o", markersize=5.0, markerfacecolor="white")
            if kept is not None:
                ax.plot(*kept, color=color, marker="o", markersize=7.0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="lower left", bbox_to_anchor=(0.07, 0.0), frameon=False, fontsize=9, labelcolor=INK)
    return figure


def write_equal_compute(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of a comparison, which has "equal_compute", as PNG and SVG; `path` lacks their suffix."""
    curves, figure = report["equal_compute"]["curves"], _empty(13.0, 5.6)
    others = [name for name in curves if name not in CONTROLLERS]
    colored = CONTROLLERS | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    grid = figure.add_gridspec(1, 2, wspace=0.14, left=0.05, right=0.985, top=0.8, bottom=0.21)
    hosts = report["num_envs"] * len(report["groups"])
    figure.suptitle(f"{report['task']}: equal compute, {hosts} new hosts", x=0.05, ha="left", fontsize=15, color=INK,
                    fontweight="bold")  # fmt: skip
    for place, (value, title) in enumerate((("objective", "100·J"), ("test", "Test accuracy"))):
        ax = figure.add_subplot(grid[0, place])
        label_axes(ax, title, "over the FLOPs of training and measuring a host; lines: the same with a larger budget")
        for name, curve in curves.items():
            flops, values = ([point[of] for point in curve] for of in ("flops", value))
            ax.plot(flops, values, color=colored[name], linewidth=1.8, marker="o", markersize=5.0, label=name)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_minor_formatter(NullFormatter())
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.045, 0.0), ncols=6, frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip
    with _same_everywhere():
        _written(figure, path)


def label_axes(ax: Axes, title: str, note: str) -> None:
    """A heading instead of axis labels, and few lines."""
    ax.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=24)
    ax.text(0.0, 1.035, note, transform=ax.transAxes, fontsize=9, color=FAINT)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.tick_params(colors=FAINT, length=0, labelsize=9)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _line(
    ax: Axes, curves: Payload, name: str, color: str, *, style: str = "-", band: bool = True, lift: float = 0.0
) -> None:
    """A column over the rounds with its quartiles, and its last value as a label, `lift` points above."""
    rounds, values = curves["round"], _numbers(curves[name])
    ax.plot(
        rounds,
        values,
        color=color,
        linestyle=style,
        linewidth=2.2,
        marker="o",
        markersize=4.5 if len(rounds) <= 30 else 0,
    )
    if band:
        low, high = _numbers(curves[f"{name}_low"]), _numbers(curves[f"{name}_high"])
        ax.fill_between(rounds, low, high, color=color, alpha=0.15, linewidth=0)
    ax.annotate(f"{values[-1]:.4g}", (rounds[-1], values[-1]), xytext=(7, lift), textcoords="offset points",
                va="center", color=INK, fontsize=9, fontweight="bold")  # fmt: skip
    ax.set_xlim(0.5, rounds[-1] * 1.06 + 0.5)


def _accuracy(ax: Axes, curves: Payload) -> None:
    label_axes(ax, "Accuracy", "validation, % at the end of each round")
    lines = {"committed": (BLUE, "-", "kept network"), "live": (RED, ":", "with all seeds")}
    highest = max(lines, key=lambda name: curves[name][-1] or 0.0)
    for name, (color, style, _) in lines.items():
        _line(ax, curves, name, color, style=style, band=False, lift=6.0 if name == highest else -6.0)
    ax.legend(ax.get_lines(), [label for *_, label in lines.values()], loc="lower right", frameon=False, fontsize=9,
              labelcolor=INK)  # fmt: skip


def _growth(ax: Axes, curves: Payload) -> None:
    rows = zip(curves["growth"], curves["growth_low"], curves["growth_high"], strict=True)
    outside = any(not low <= mean <= high for mean, low, high in rows if None not in (mean, low, high))
    note = "; few hosts move the mean out" * outside
    label_axes(ax, "Growth", f"parameters, host = 1; {BAND}{note}")
    _line(ax, curves, "growth", BLUE)
    ax.set_ylim(bottom=1.0)


def _operations(ax: Axes, counts: Payload, num_envs: int) -> None:
    label_axes(ax, "Operations", "effective operations per host and round, waiting left out")
    if not counts:
        return
    rounds, floor = counts["round"], [0.0] * len(counts["round"])
    width = 0.72 * (rounds[1] - rounds[0] if len(rounds) > 1 else 1)
    for name, color in OPERATIONS.items():
        values = [(count or 0.0) / num_envs for count in counts[f"ops_{name.lower()}"]]
        if any(values):
            ax.bar(
                rounds,
                values,
                bottom=floor,
                color=color,
                width=width,
                edgecolor="white",
                linewidth=0.7,
                label=name.lower().replace("_", " "),
            )
            floor = [a + b for a, b in zip(floor, values, strict=True)]
    ax.set_xlim(0.5, rounds[-1] * 1.06 + 0.5)
    ax.set_ylim(0, max(floor) * 1.3 or 1.0)
    if any(floor):
        ax.legend(loc="upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK, handlelength=1.0)


def _seeds(ax: Axes, run: Payload, newest: Payload) -> None:
    hosts = sorted(newest["hosts"], key=lambda host: not host["fossilized"])[:HOSTS_SHOWN]  # first those that grew
    note = (
        f"round {newest['round']}, slots of {len(hosts)} of the {newest['total']} hosts; colour: stage, height: alpha"
    )
    label_axes(ax, "Life of the seeds", note)
    seed_lanes(ax, {f"host {host['host']}": host["segments"] for host in hosts}, run["slots"], run["episode_length"])


def seed_lanes(ax: Axes, hosts: Mapping[str, Sequence[Payload]], slots: Sequence[str], steps: int) -> None:
    """The `segments` (`report.hosts`) of some hosts, a lane for each slot, with the blueprint where a seed begins."""
    ax.grid(visible=False)
    rows = {(host, slot): i * (len(slots) + 0.55) + j for i, host in enumerate(hosts) for j, slot in enumerate(slots)}
    ax.barh(list(rows.values()), steps, left=0.5, height=0.78, color="#f3f5f7")
    seen = dict[float, tuple[int, str]]()  # by row, the step after the last stretch, and its blueprint
    for host, segments in hosts.items():
        for stretch in segments:
            y, color = rows[host, stretch["slot"]], STAGES[stretch["stage"]]
            times = range(stretch["t"], stretch["t"] + len(stretch["alpha"]))
            ax.barh(y, len(times), left=times[0] - 0.5, height=0.78, color=color, alpha=0.35)
            ax.barh(y, len(times), left=times[0] - 0.5, height=0.78, fill=False, edgecolor=color, linewidth=1.2)
            ax.vlines(times[0] - 0.5, y - 0.39, y + 0.39, color="white", linewidth=1.5, zorder=3)
            heights = [0.78 * (alpha or 0.0) for alpha in stretch["alpha"]]
            ax.bar(times, [-height for height in heights], bottom=y + 0.39, width=1.0, color=color)
            if seen.get(y) != (times.start, stretch["blueprint"]):
                ax.text(times[0] - 0.4, y, stretch["blueprint"], va="center", fontsize=7.5, color=INK, clip_on=True)
            seen[y] = (times.stop, stretch["blueprint"])
    labels = [f"{host}  {slot}" if slot == slots[0] else slot for host, slot in rows]
    ax.set_yticks(list(rows.values()), labels)
    ax.invert_yaxis()
    ax.set_xlim(0.5, steps + 0.5)
    handles = [Patch(color=color, label=name.lower()) for name, color in STAGES.items()]
    ax.legend(handles=handles, loc="upper right", bbox_to_anchor=(1.0, 1.13), ncols=6, frameon=False, fontsize=9,
              labelcolor=INK, handlelength=1.0)  # fmt: skip
