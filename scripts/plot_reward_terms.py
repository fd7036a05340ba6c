"""Plot every reward term over one scripted episode.

python scripts/plot_reward_terms.py docs/reward_terms.png

+------------------------------------+
| accuracy                           |     accuracy of the host with all seeds and with fossils alone
| slots                              |     stages of the seeds, and the operations
+--------+--------+--------+---------+
| term   | term   | term   | term    |     each term, step by step, in the modes that have it
+--------+--------+--------+---------+

The episode is the same for every mode: the inputs of its rewards are recorded once and given to each mode.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea
from matplotlib.patches import Patch

from esper.leyline.lifecycle import LifecycleOp, SeedStage
from esper.leyline.messages import RewardInputs
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import ScriptedClient
from esper.simic.rewards import REWARD_TERMS, make_reward
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Schedule, canonical_action
from esper.tasks import null
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.registry import register_task, task_by_name
from esper.telemetry.report.figures import BLUE, FAINT, GREEN, INK, OPERATIONS, ORANGE, RED, SKY, VIOLET, label_axes
from esper.telemetry.report.figures import STAGES as LIVE_STAGES
from recorded_reward import RecordedReward, breakdowns

assert _presets
COLORS = {"shaped": BLUE, "escrow": ORANGE, "basic": SKY, "basic_plus": GREEN, "loss": VIOLET, "objective": RED}
"""Modes in the picture. `sparse`, `minimal` and `simplified` have no term of their own in this episode."""
FEW = 2
"""A term that is not zero in at most so many steps is drawn as stems."""
COLUMNS, WIDE = 4, ("attribution", "potential", "action", "rent")
"""Panels in a row; these terms are two panels wide."""
COOLING = "#dfe4e8"
STAGES = LIVE_STAGES | dict.fromkeys(("PRUNED", "EMBARGOED", "RESETTING"), COOLING)
_OP = LifecycleOp


def episode() -> Schedule:
    """A harmful seed, pruned; a good one, held and fossilized; a second good one, held; a third, too late to blend."""
    good, bad = null.BLUEPRINTS[null.BEST_BLUEPRINT].index, null.BLUEPRINTS["conv_small"].index
    rows = (
        (1, canonical_action(_OP.GERMINATE, slot=0, blueprint=bad)),
        (19, canonical_action(_OP.PRUNE, slot=0)),
        (26, canonical_action(_OP.GERMINATE, slot=0, blueprint=good)),
        (37, canonical_action(_OP.GERMINATE, slot=1, blueprint=good)),
        (53, canonical_action(_OP.FOSSILIZE, slot=0)),
        (54, canonical_action(_OP.GERMINATE, slot=2, blueprint=good)),
        (57, canonical_action(_OP.SET_ALPHA_TARGET, slot=1)),
    )
    return Schedule.from_rows("one of each", 1, rows)


@dataclass(frozen=True)
class Episode:
    """One host: the reward inputs of each step, and the breakdown [T, M] by mode."""

    seen: Sequence[RewardInputs]
    paid: Mapping[str, np.ndarray]

    def column(self, name: str) -> np.ndarray:
        """A column of the host inputs, step by step."""
        return np.array([getattr(inputs.hosts, name)[0].item() for inputs in self.seen])

    def term(self, mode: str, name: str) -> np.ndarray:
        """A term in a mode, step by step."""
        terms = list(make_reward(mode).terms)
        column = self.paid[mode][:, terms.index(name)] if name in terms else np.zeros(len(self.seen))
        return np.asarray(column)


def play() -> Episode:
    """The episode on the scripted task with interactions, under every mode.

    `basic_plus` plays an episode of its own, because only it measures the contributions of fossils.
    """
    paid: dict[str, np.ndarray] = {}
    seen = _play("shaped", paid)
    _play("basic_plus", paid)
    for mode in (mode for mode in COLORS if mode not in paid):
        config = resolve({"task": "null_pairs", "reward": {"mode": mode}}).reward
        paid[mode] = breakdowns(seen, config)[1][:, 0]
    return Episode(seen, paid)


def _play(mode: str, paid: dict[str, np.ndarray]) -> Sequence[RewardInputs]:
    config = resolve({"task": "null_pairs", "preset": "small", "num_envs": 1, "reward": {"mode": mode}})
    engine = engine_of(config, None, torch.device("cpu"))
    reward = RecordedReward(make_reward(mode, config.reward))
    client = ScriptedClient(scheduled(episode(), engine.spec), reward)
    engine.reset(client, episode=0)
    engine.rollout(client)
    paid[mode] = torch.stack(reward.paid)[:, 0].numpy()
    return reward.seen


def accuracy(ax: Axes, played: Episode) -> None:
    """Accuracy of the host."""
    steps = np.arange(1, len(played.seen) + 1)
    label_axes(ax, "Accuracy", "validation, %; the host alone would follow the grey line")
    ax.plot(steps, [null.host_accuracy(t) for t in steps], color="#c3ccd4", linewidth=2.2)
    ax.plot(steps, played.column("val_acc"), color=BLUE, linewidth=2.2)
    ax.plot(steps, played.column("committed_acc"), color=ORANGE, linewidth=2.2, linestyle=(0, (4, 2)))
    handles = [Line2D([], [], color=BLUE, linewidth=2.2), Line2D([], [], color=ORANGE, linewidth=2.2)]
    ax.legend(handles, ["with all live seeds", "with fossilized seeds only"], loc="lower right", frameon=False,
              fontsize=9, labelcolor=INK)  # fmt: skip
    ax.set_xlim(0.5, len(played.seen) + 0.5)
    ax.set_xticks(range(10, len(played.seen) + 1, 10))


def slots(ax: Axes, played: Episode) -> None:
    """Stages of the slots before the operation of each step, and the operations."""
    label_axes(ax, "Slots", "stages before the operation of each step; marks are operations that took effect")
    ax.grid(visible=False)
    for t, inputs in enumerate(played.seen, start=1):
        for slot, stage in enumerate(inputs.slots.stage[0].tolist()):
            color = STAGES.get(SeedStage(stage).name, "#f3f5f7")
            ax.barh(slot, 1.02, left=t - 0.5, height=0.72, color=color)
        op = _OP(int(inputs.ops[0]))
        if op != _OP.WAIT and bool(inputs.success[0]):
            ax.plot(t, int(inputs.target[0]), marker="o", markersize=9, color=OPERATIONS[op.name],
                    markeredgecolor="white", markeredgewidth=1.6)  # fmt: skip
    ax.set_yticks(range(played.seen[0].slots.stage.shape[1]))
    ax.set_yticklabels([f"slot {i}" for i in range(played.seen[0].slots.stage.shape[1])])
    ax.invert_yaxis()
    ax.set_xlim(0.5, len(played.seen) + 0.5)
    ax.set_xticks(range(10, len(played.seen) + 1, 10))
    stages = [Patch(color=c, label=n.lower()) for n, c in LIVE_STAGES.items() if n != "GERMINATED"]
    stages += [Patch(color=COOLING, label="cooling down")]
    marks = [
        Line2D([], [], color=color, marker="o", markersize=8, linestyle="", label=name.lower().replace("_", " "))
        for name, color in OPERATIONS.items()
        if name != "ADVANCE"
    ]
    ax.legend(handles=[*stages, *marks], loc="lower right", bbox_to_anchor=(1.0, 1.12), ncols=9, frameon=False,
              fontsize=9, labelcolor=INK, handlelength=1.0, columnspacing=1.2)  # fmt: skip


def groups(played: Episode, name: str) -> dict[tuple[str, ...], np.ndarray]:
    """The series of a term that are not all zero; modes with equal series share one."""
    found: dict[tuple[str, ...], np.ndarray] = {}
    for mode in COLORS:
        series = played.term(mode, name)
        if not series.any():
            continue
        same = next((modes for modes, other in found.items() if np.allclose(series, other, atol=1e-6)), ())
        found.pop(same, None)
        found[(*same, mode)] = series
    return found


def term(ax: Axes, played: Episode, name: str, modes: Mapping[tuple[str, ...], np.ndarray]) -> None:
    """One term, step by step."""
    label_axes(ax, name, "")
    ax.title.set_fontfamily("DejaVu Sans Mono")
    steps = np.arange(1, len(played.seen) + 1)
    ax.axhline(0.0, color=FAINT, linewidth=0.8)
    for paying, series in modes.items():
        color, paid = COLORS[paying[0]], np.flatnonzero(series)
        if len(paid) <= FEW:
            ax.vlines(steps[paid], 0.0, series[paid], color=color, linewidth=2.2)
            ax.plot(steps[paid], series[paid], "o", color=color, markersize=5)
        else:
            ax.step(steps, series, where="mid", color=color, linewidth=1.7)
            ax.fill_between(steps, 0.0, series, step="mid", color=color, alpha=0.12, linewidth=0)
    name_modes(ax, modes)
    ax.set_xlim(0.5, len(played.seen) + 1.5)
    ax.set_xticks(range(10, len(played.seen) + 1, 10))
    ax.margins(y=0.12)


def last_step(ax: Axes, name: str, modes: Mapping[tuple[str, ...], np.ndarray]) -> None:
    """A term that several modes have in the last step only: one bar per mode."""
    label_axes(ax, name, "in the last step")
    ax.title.set_fontfamily("DejaVu Sans Mono")
    values = [series[-1] for series in modes.values()]
    ax.barh(range(len(modes)), values, color=[COLORS[paying[0]] for paying in modes], height=0.55)
    for place, (paying, value) in enumerate(zip(modes, values, strict=True)):
        label = f"{', '.join(paying)}  {value:.3g}"
        ax.text(max(value, 0.0) + 0.06, place, label, va="center", fontsize=9, color=INK)
    ax.grid(visible=False)
    ax.set_yticks([])
    ax.set_xlim(0.0, 1.75 * max(values))
    ax.invert_yaxis()


def name_modes(ax: Axes, modes: Iterable[tuple[str, ...]]) -> None:
    """Names of the modes in their colours, below the heading."""
    names = [
        TextArea(", ".join(paying), textprops={"color": COLORS[paying[0]], "fontsize": 9, "fontweight": "bold"})
        for paying in modes
    ]
    row = HPacker(children=names, pad=0, sep=12)
    ax.add_artist(AnchoredOffsetbox(loc="lower left", child=row, frameon=False, borderpad=0, pad=0,
                                    bbox_to_anchor=(0.0, 1.035), bbox_transform=ax.transAxes))  # fmt: skip


def picture(played: Episode, target: Path) -> None:
    """Draw all panels into a PNG file."""
    plt.rcParams["font.family"] = "DejaVu Sans"
    panels = {name: found for name in REWARD_TERMS if (found := groups(played, name))}
    wide = [name for name in WIDE if name in panels]
    order = [*wide, *(name for name in panels if name not in wide)]
    cells = sum(2 if name in wide else 1 for name in order)
    rows = -(-cells // COLUMNS)
    figure = plt.figure(figsize=(16.0, 6.4 + 2.2 * rows), facecolor="white")
    height = figure.get_figheight()
    grid = figure.add_gridspec(2 + rows, COLUMNS, height_ratios=(1.5, 0.85, *[1.0] * rows), hspace=0.75, wspace=0.2,
                               left=0.05, right=0.985, top=1 - 1.4 / height, bottom=0.35 / height)  # fmt: skip
    figure.suptitle("Every reward term over one episode", x=0.05, y=1 - 0.3 / height, ha="left",
                    fontsize=17, color=INK, fontweight="bold")  # fmt: skip
    nothing = [name for name in REWARD_TERMS if name not in panels]
    figure.text(0.05, 1 - 0.78 / height, f"scripted task, one host, {len(played.seen)} steps; the same episode under "
                f"each mode. Zero here: {', '.join(nothing)}.", fontsize=11, color=FAINT)  # fmt: skip
    accuracy(figure.add_subplot(grid[0, :]), played)
    slots(figure.add_subplot(grid[1, :]), played)
    place = 0
    for name in order:
        width = 2 if name in wide else 1
        row, column = divmod(place, COLUMNS)
        ax, modes = figure.add_subplot(grid[2 + row, column : column + width]), panels[name]
        if len(modes) > 1 and all(np.flatnonzero(series).tolist() == [len(series) - 1] for series in modes.values()):
            last_step(ax, name, modes)
        else:
            term(ax, played, name, modes)
        place += width
    figure.savefig(target, dpi=100)
    plt.close(figure)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description="Plot every reward term over one scripted episode.")
    parser.add_argument("target", type=Path, help="the PNG file to write")
    target = parser.parse_args().target
    pairs = null.NullSpec(interaction=0.05)
    register_task(replace(task_by_name("null"), name="null_pairs", script=pairs))
    picture(play(), target)


if __name__ == "__main__":
    main()
