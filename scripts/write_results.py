r"""Draws the pictures and writes the tables of docs/results.md from runs and their comparison.

    esper train --preset learn --seed 1 --out runs/learn-1      (and 2, 3)
    esper search mixed_digits --preset learn --seed 1 --out runs/search-1
    esper evaluate runs/learn-1 runs/learn-2 runs/learn-3 ... --num-envs 128 --out runs/evaluation
    python scripts/write_results.py runs/evaluation/evaluation.json runs/learn-1 runs/learn-2 runs/learn-3 \
        --by-seed seed-1.json seed-2.json seed-3.json

The page has tables between two markers; what stands around them is written by hand.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from esper.telemetry.record.reader import open_record
from esper.telemetry.report.figures import BLUE, FAINT, GREEN, INK, ORANGE, label_axes, seed_lanes
from esper.telemetry.report.page import round_of, rounds_of
from write_benchmarks import between_markers

MARKERS = ("<!-- write_results: begin -->", "<!-- write_results: end -->")
SMOOTHED = 10
"""Rounds of which a learning curve shows the mean."""
MOST = 3
"""Structures named for each kind of host."""
Controller = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write docs/results.md."""

    evaluation: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="JSON")]
    """What `esper evaluate` wrote."""
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...")]
    """The run directories of the trained controller."""
    by_seed: tuple[Path, ...] = ()
    """The same comparison for each run alone."""
    page: Path = Path("docs/results.md")
    """The page with the markers; its folder gets the pictures."""


def main(options: Options) -> int:
    """Write the page and the pictures."""
    report = json.loads(options.evaluation.read_text(encoding="utf-8"))
    controllers: list[Controller] = report["controllers"]
    folder = options.page.parent
    references = {row["name"]: row["objective"] for row in controllers if row["name"] != "trained"}
    draw(curves(options.runs, references), folder / "results_learning.png")
    draw(frontier(controllers), folder / "results_frontier.png")
    draw(timelines(options.runs[0]), folder / "results_timelines.png")
    alone = [json.loads(path.read_text(encoding="utf-8")) for path in options.by_seed]
    parts = (comparison(report), each_seed(alone), by_kind(controllers), grown(controllers))
    text = "\n\n".join(part for part in parts if part)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(between_markers(page, text, MARKERS), encoding="utf-8")
    return 0


def comparison(report: Mapping[str, Any]) -> str:
    """All controllers: J, differences, accuracies and costs."""
    lines = [
        f"{report['verdict']}",
        "",
        "| controller | 100·J | IQM | difference of trained | validation | test | growth | FLOPs to train a host |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["controllers"]:
        difference = row["difference"]
        against = "" if row["name"] == report["reference"] else _interval(difference, sign=-1.0)
        lines.append(
            f"| {row['name']} | {row['objective']:.2f} | {row['objective_iqm']['mean']:.2f} | {against} | "
            f"{row['committed']:.1f} | {row['test']:.1f} | {row['growth']:.2f}x | "
            f"{row['training_flops'] / 1e6:,.0f} M |"
        )
    return "\n".join(lines)


def each_seed(reports: Sequence[Mapping[str, Any]]) -> str:
    """The controller of each training seed against every baseline, on its own new hosts."""
    if not reports:
        return ""
    others = [row["name"] for row in reports[0]["controllers"] if row["name"] != reports[0]["reference"]]
    lines = [
        "### Each training seed by itself",
        "",
        f"Trained controller minus each baseline, on {reports[0]['num_envs']} new hosts of the seed above the column.",
        "",
        "| against | " + " | ".join(str(report["seed"]) for report in reports) + " |",
        "| --- |" + " ---: |" * len(reports),
    ]
    rows = [{row["name"]: row for row in report["controllers"]} for report in reports]
    own = [f"{row[reports[0]['reference']]['objective']:.2f}" for row in rows]
    cells = {name: [_interval(row[name]["difference"], sign=-1.0) for row in rows] for name in others}
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in {"(100·J)": own, **cells}.items()]
    return "\n".join(lines)


def by_kind(controllers: Sequence[Controller]) -> str:
    """Mean J of the hosts of each kind: number of classes and view."""
    kinds = kinds_of(controllers[0])
    names = sorted(set(kinds))
    lines = [
        "### By kind of host",
        "",
        "| controller | " + " | ".join(f"{name} ({kinds.count(name)})" for name in names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    for row in controllers:
        values = np.array(row["hosts"]["objective"])
        means = [values[[kind == name for kind in kinds]].mean() for name in names]
        lines.append(f"| {row['name']} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return "\n".join(lines)


def grown(controllers: Sequence[Controller]) -> str:
    """What the first controller keeps on the hosts of each kind."""
    kinds, structures = kinds_of(controllers[0]), controllers[0]["architectures"]
    lines = [
        "### What the controller keeps",
        "",
        "| kind of host | seeds that it kept, and on how many hosts |",
        "| --- | --- |",
    ]
    for name in sorted(set(kinds)):
        counts = Counter(
            " and ".join(f"{seed['blueprint']} in {seed['slot']}" for seed in structure["slots"]) or "none"
            for structure, kind in zip(structures, kinds, strict=True)
            if kind == name
        )
        common = "; ".join(f"{what}: {count}" for what, count in counts.most_common(MOST))
        rest = counts.total() - sum(count for _, count in counts.most_common(MOST))
        lines.append(f"| {name} | {common}{f'; others: {rest}' * bool(rest)} |")
    return "\n".join(lines)


def kinds_of(controller: Controller) -> list[str]:
    """The kind of each host in words."""
    instances = controller["instances"]
    pairs = zip(instances["classes"], instances["view"], strict=True)
    return [_kind(classes, view) for classes, view in pairs]


def _kind(classes: float, view: float) -> str:
    return f"{int(classes):2d} classes, view {int(view)}"


def curves(runs: Sequence[Path], references: Mapping[str, float]) -> Figure:
    """100·J of the training rounds: each run, and the mean of all, beside the values of the baselines."""
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.subplots()
    smoothed = []
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        values = np.convolve([row["objective_mean"] for row in rows], np.ones(SMOOTHED) / SMOOTHED, mode="valid")
        smoothed.append(values)
        axes.plot(np.arange(SMOOTHED, SMOOTHED + len(values)), values, color=BLUE, alpha=0.3, linewidth=0.8)
    shortest = min(map(len, smoothed))
    every, rounds = np.array([values[:shortest] for values in smoothed]), np.arange(SMOOTHED, SMOOTHED + shortest)
    axes.fill_between(rounds, every.min(axis=0), every.max(axis=0), color=BLUE, alpha=0.12, linewidth=0)
    label = f"trained, mean and range of {len(runs)} seeds"
    axes.plot(rounds, every.mean(axis=0), color=BLUE, linewidth=2.2, label=label)
    shown = {"best_schedule.json": ORANGE, "best_rule.json": GREEN, "wait_only": FAINT}
    for name, color in shown.items():
        if name in references:
            axes.axhline(references[name], color=color, linestyle="--", linewidth=1.4, label=f"{name} (new hosts)")
    axes.set_xlabel("round")
    axes.set_ylabel(f"100·J, mean of {SMOOTHED} rounds")
    _finish(axes)
    return figure


def timelines(run: Path) -> Figure:
    """The seeds of one host of each kind in the newest round of a run: that with the median of 100·J."""
    with closing(open_record([run])) as record:
        (name, found), *_ = rounds_of(record).items()
        newest = round_of(record, name, found.last, "newest")
        (about,) = record.query("select slots, episode_length from runs")
    kinds = dict[str, list[Mapping[str, Any]]]()
    for host in newest["hosts"]:
        instance = json.loads(host["instance"])
        kinds.setdefault(_kind(instance["classes"], instance["view"]), []).append(host)
    typical = {kind: sorted(hosts, key=itemgetter("objective"))[len(hosts) // 2] for kind, hosts in kinds.items()}
    figure = Figure(figsize=(9.0, 1.0 + 0.9 * len(typical)), layout="constrained")
    axes = figure.subplots()
    label_axes(axes, f"Round {found.last}", "one host of each kind, with its 100·J; colour: stage, height: alpha")
    lanes = {f"{kind}, {host['objective']:.0f}": host["segments"] for kind, host in sorted(typical.items())}
    seed_lanes(axes, lanes, about["slots"], about["episode_length"])
    axes.set_xlabel("control step")
    return figure


def _name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """A label beside each point, at the first place around it that is inside and free."""
    renderer = FigureCanvasAgg(axes.get_figure(root=True)).get_renderer()
    places = axes.transData.transform([(x, y) for _, x, y in points])
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for name, x, y in points:
        for right, dy in product((True, False), (4, -4, 12, -12, 20, -20)):
            label = axes.annotate(
                name, (x, y), xytext=(7 if right else -7, dy), textcoords="offset points", fontsize=8, color=INK,
                ha="left" if right else "right", va="center",
            )  # fmt: skip
            box = label.get_window_extent(renderer)
            if axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and not any(box.overlaps(other) for other in taken):
                break
            label.remove()
        else:
            axes.add_artist(label)
        taken.append(box)


def frontier(controllers: Sequence[Controller]) -> Figure:
    """Test accuracy against growth, and against the FLOPs that training a host takes."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    sizes = (("growth", "parameters / host"), ("training_flops", "FLOPs to train a host, 10^9"))
    both = list(zip(figure.subplots(1, 2), sizes, strict=True))
    for axes, (what, label) in both:
        for row in controllers:
            trained = row["name"] == "trained"
            axes.plot(
                _size(row, what), row["test"], "o", color=BLUE if trained else FAINT, markersize=9 if trained else 6
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.set_ylabel("test accuracy, %")
        axes.margins(0.18, 0.1)
        _finish(axes, legend=False)
    figure.draw_without_rendering()  # labels need the final place of the axes
    for axes, (what, _) in both:
        _name_points(axes, [(row["name"], _size(row, what), row["test"]) for row in controllers])
    return figure


def _size(row: Controller, what: str) -> float:
    """Growth, or FLOPs in 10^9."""
    return float(row[what]) / (1e9 if what == "training_flops" else 1.0)


def draw(figure: Figure, path: Path) -> None:
    """Write a picture."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def _finish(axes: Any, *, legend: bool = True) -> None:
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _interval(estimate: Mapping[str, Any], *, sign: float) -> str:
    """A difference with its interval, as trained minus the other."""
    mean, ends = sign * estimate["mean"], sorted(sign * estimate[end] for end in ("low", "high"))
    return f"{mean:+.2f} [{ends[0]:+.2f}, {ends[1]:+.2f}]"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
