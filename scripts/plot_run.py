"""One picture of a run, from the records in its directory.

python scripts/plot_run.py runs/digits-quickstart-s0 docs/run.png

+--------------+--------------+
| 100·J        | accuracy     |     means over the hosts, round by round
+--------------+--------------+
| operations   | growth       |
+--------------+--------------+
| life of the seeds in the last round, one line per slot  |
+---------------------------------------------------------+
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

INK, FAINT, GRID = "#22303c", "#7b8794", "#e6eaee"
BLUE, ORANGE, GREEN, RED, VIOLET, SAND = "#2f6db3", "#e08a3c", "#3d9970", "#c8553d", "#7d5ba6", "#c9a227"
OPERATIONS = {
    "GERMINATE": GREEN,
    "SET_ALPHA_TARGET": BLUE,
    "FOSSILIZE": INK,
    "PRUNE": RED,
    "ADVANCE": VIOLET,
}
STAGES = {
    "GERMINATED": "#cfe8d5",
    "TRAINING": "#8fcea0",
    "BLENDING": "#5b9bd5",
    "HOLDING": "#f2c14e",
    "FOSSILIZED": INK,
    "PRUNED": "#eab1a4",
    "EMBARGOED": "#f5ddd6",
    "RESETTING": "#f9ece8",
}
COOLDOWN = ("PRUNED", "EMBARGOED", "RESETTING")
HOSTS_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """The records of a run: rounds in order, events of the last round, the configuration's title."""

    rounds: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    title: str
    steps: int
    num_envs: int
    slots: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run directory; raises SystemExit with a sentence where it has no complete round."""
        if not (path / "config.toml").is_file():
            sys.exit(f"{path} is not a run directory: it has no config.toml; give the --run-dir of a run.")
        config = tomllib.loads((path / "config.toml").read_text())
        rounds = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        if not rounds:
            sys.exit(f"{path} has no complete round yet; wait for the first one.")
        events = (json.loads(line) for line in (path / "events.jsonl").read_text().splitlines())
        last = [event for event in events if event["round"] == len(rounds) - 1]
        hosts = f"{config['num_envs']} hosts × {config['episode_length']} steps × {len(rounds)} rounds"
        title = f"{config['task']}: {hosts}, reward {config['reward']['mode']}, seed {config['seed']}"
        return cls(rounds, last, title, config["episode_length"], config["num_envs"], config["slots"])

    def column(self, name: str) -> list[float]:
        """One number per round; what was not measured is NaN."""
        return [float("nan") if line[name] is None else line[name] for line in self.rounds]


def dress(ax: Axes, title: str, note: str) -> None:
    """A heading in place of axis labels, and no more ink than needed."""
    ax.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=20)
    ax.text(0.0, 1.035, note, transform=ax.transAxes, fontsize=9, color=FAINT)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.tick_params(colors=FAINT, length=0, labelsize=9)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def line(ax: Axes, run: Run, name: str, color: str, *, lift: float = 0.0) -> None:
    """A column over the rounds, its last value written out, `lift` points above its place."""
    values = run.column(name)
    rounds = range(1, len(values) + 1)
    ax.plot(rounds, values, color=color, linewidth=2.2, marker="o", markersize=4.5 if len(values) <= 30 else 0)
    ax.annotate(
        f"{values[-1]:.4g}",
        (len(values), values[-1]),
        xytext=(7, lift),
        textcoords="offset points",
        va="center",
        color=color,
        fontsize=9,
        fontweight="bold",
    )
    ax.set_xlim(0.5, len(values) * 1.06 + 0.5)


def accuracy(ax: Axes, run: Run) -> None:
    """Accuracy of the network that is kept, and of the hosts as they stand."""
    dress(ax, "Accuracy", "validation, % at the end of each round")
    columns = {"live_accuracy_mean": BLUE, "committed_accuracy_mean": ORANGE}
    highest = max(columns, key=lambda name: run.column(name)[-1])
    for name, color in columns.items():
        line(ax, run, name, color, lift=4.0 if name == highest else -4.0)  # apart, however close the values are
    handles = [Line2D([], [], color=c, linewidth=2.2) for c in (BLUE, ORANGE)]
    labels = ["live: with all seeds", "committed: with fossilized seeds only"]
    ax.legend(handles, labels, loc="lower right", frameon=False, fontsize=9, labelcolor=INK)


def objective(ax: Axes, run: Run) -> None:
    """What is optimized, with its spread over the hosts."""
    dress(ax, "100·J", "accuracy of the network that is kept minus the price of its growth, mean ± std per round")
    line(ax, run, "objective_mean", GREEN)
    bands = list(zip(run.column("objective_mean"), run.column("objective_std"), strict=True))
    low, high = [m - s for m, s in bands], [m + s for m, s in bands]
    ax.fill_between(range(1, len(bands) + 1), low, high, color=GREEN, alpha=0.12, linewidth=0)


def operations(ax: Axes, run: Run) -> None:
    """Operations that took effect, without WAIT."""
    dress(ax, "Operations", "effective operations per host and round, waiting left out")
    rounds = range(1, len(run.rounds) + 1)
    floor = [0.0] * len(run.rounds)
    handles = []
    for name, color in OPERATIONS.items():
        counts = [line["ops"].get(name, 0) / run.num_envs for line in run.rounds]
        if any(counts):
            ax.bar(rounds, counts, bottom=floor, color=color, width=0.72)
            floor = [a + b for a, b in zip(floor, counts, strict=True)]
            handles.append(Patch(color=color, label=name.lower().replace("_", " ")))
    ax.set_xlim(0.5, len(run.rounds) * 1.06 + 0.5)
    ax.set_ylim(0, max(floor) * 1.3 or 1.0)
    ax.legend(handles=handles, loc="upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK, handlelength=1.0)


def growth(ax: Axes, run: Run) -> None:
    """How much larger hosts become."""
    dress(ax, "Growth", "(host + fossilized parameters) / host parameters, mean per round")
    line(ax, run, "growth_ratio_mean", VIOLET)
    values = run.column("growth_ratio_mean")
    ax.fill_between(range(1, len(values) + 1), 1.0, values, color=VIOLET, alpha=0.12, linewidth=0)
    ax.set_ylim(bottom=1.0)


def lives(events: Sequence[Mapping[str, Any]], host: int, slot: str, steps: int) -> Iterator[tuple[float, float, str]]:
    """(begin, end, stage) of what one slot went through; a stage that ends in its own step has no width."""
    moves = [e for e in events if e["kind"] == "stage_changed" and e["host"] == host and e["slot"] == slot]
    for move, after in zip_longest(moves, moves[1:]):
        end = float(after["t"] if after else steps)
        if move["to"] in STAGES and end > move["t"]:
            yield float(move["t"]), end, move["to"]


def seeds(ax: Axes, run: Run) -> None:
    """One line per slot of the first hosts, coloured by stage."""
    hosts = range(min(HOSTS_SHOWN, run.num_envs))
    dress(
        ax, "Life of the seeds", f"last round, slots of {len(hosts)} of the {run.num_envs} hosts, control step by step"
    )
    ax.grid(visible=False)
    ticks, labels, y = [], [], 0.0
    for host in hosts:
        for slot in run.slots:
            ax.barh(y, run.steps, left=0, height=0.78, color="#f3f5f7")
            for begin, end, stage in lives(run.events, host, slot, run.steps):
                ax.barh(y, end - begin, left=begin, height=0.78, color=STAGES[stage])
            ticks.append(y)
            labels.append(f"host {host}  {slot}" if slot == run.slots[0] else slot)
            y += 1.0
        y += 0.55
    ax.set_yticks(ticks, labels)
    ax.invert_yaxis()
    ax.set_xlim(0, run.steps)
    handles = [Patch(color=c, label=n.lower()) for n, c in STAGES.items() if n not in COOLDOWN]
    handles += [Patch(color=STAGES["PRUNED"], label="pruned, cooling down")]
    ax.legend(handles=handles, loc="upper right", bbox_to_anchor=(1.0, 1.13), ncols=6, frameon=False, fontsize=9,
              labelcolor=INK, handlelength=1.0)  # fmt: skip


def picture(run: Run, target: Path) -> None:
    """Draw all panels into a PNG file."""
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(13.0, 13.0), facecolor="white")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1.25), hspace=0.42, wspace=0.14,
                               left=0.08, right=0.965, top=0.895, bottom=0.04)  # fmt: skip
    figure.suptitle("Networks that grow while they train", x=0.08, y=0.975, ha="left", fontsize=17, color=INK,
                    fontweight="bold")  # fmt: skip
    figure.text(0.08, 0.94, run.title, fontsize=11, color=FAINT)
    for place, panel in zip(((0, 0), (0, 1), (1, 0), (1, 1)), (objective, accuracy, operations, growth), strict=True):
        panel(figure.add_subplot(grid[place]), run)
    seeds(figure.add_subplot(grid[2, :]), run)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description="Draw one picture of a run.")
    parser.add_argument("run_dir", type=Path, help="a run directory, e.g. runs/digits-quickstart-s0")
    parser.add_argument("target", type=Path, help="the PNG file to write")
    arguments = parser.parse_args()
    picture(Run.read(arguments.run_dir), arguments.target)


if __name__ == "__main__":
    main()
