"""The tables and sentences that the commands print, at most 80 columns wide."""

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.leyline.actions import LifecycleOp
from esper.runs.controllers import REFERENCE, TRAINED
from esper.runs.drawing import drawing, words
from esper.runs.rows import Row
from esper.runs.statistics import LEAST_UNITS, Estimate
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import RunConsole, size, with_spread

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def legend(units: str) -> str:
    """What the columns mean; `units` are hosts or runs."""
    return f"""Means over hosts, each with its fossilized seeds only (the committed network).
100·J: val minus the price of added parameters ± standard deviation over {units};
IQM: interquartile mean over {units}; vs: paired difference and 95 % interval;
better: share of {units} in which it is better; val, test: points, e.g. accuracy;
J test: 100·J with test. FLOPs: of one example; to train and measure a host."""


def comparison(rows: Sequence[Row]) -> Table:
    """The objective of the controllers."""
    reference = TRAINED if rows[0].name == TRAINED else REFERENCE
    page = plain_table("controller", "100·J", "IQM", f"vs {reference}", "better")
    for row in rows:
        own = row.name == reference
        page.add_row(
            row.name,
            with_spread(row.objective, row.objective_std),
            f"{row.objective_iqm.mean:.2f}",
            "" if own else _with_interval(row.difference, len(row.units)),
            "" if own else f"{100.0 * row.improvement.mean:.0f} %",
        )
    return page


def quality_and_cost(rows: Sequence[Row]) -> Table:
    """Accuracy, size and cost of the networks."""
    page = plain_table("controller", "val", "test", "J test", "growth", "FLOPs", "train", "measure")
    for row in rows:
        page.add_row(
            row.name,
            f"{row.committed:.2f}",
            f"{row.test:.2f}",
            f"{row.test_objective:.2f}",
            f"{row.growth:.2f}x",
            *(short(value) for value in (row.flops, row.training_flops, row.measuring_flops)),
        )
    return page


def perplexities(rows: Sequence[Row]) -> Table:
    """Loss and perplexity of the networks, for texts."""
    page = plain_table("controller", "loss", "perplexity")
    for row in rows:
        page.add_row(row.name, f"{row.loss:.4f}", f"{row.perplexity:.2f}")
    return page


def short(value: float) -> str:
    """A large number in five characters at most, such as 18.3k; "-" for NaN."""
    if math.isnan(value):
        return "-"
    factor, letter = next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])
    scaled = value / factor
    return f"{scaled:.{0 if scaled >= 100.0 or not letter else 1}f}{letter}"


def operations(rows: Sequence[Row]) -> Table:
    """Effective operations per host."""
    names = [op.name for op in LifecycleOp]
    page = plain_table("ops per host", *(name.lower().removesuffix("_target") for name in names))
    for row in rows:
        page.add_row(row.name, *(f"{row.ops[name] / len(row.hosts['objective']):.1f}" for name in names))
    return page


def rollbacks(rows: Sequence[Row]) -> list[str]:
    """A sentence for each controller with rollbacks."""
    times = {row.name: "once" if row.rollbacks == 1 else f"{row.rollbacks} times" for row in rows if row.rollbacks}
    return [f"{name}: hosts were rolled back {number}." for name, number in times.items()]


def done(summary: Mapping[str, Any]) -> str:
    """The result of a run: its last round in one line, and its best host in another."""
    hosts, peak, best = summary["num_envs"], summary["memory_bytes"]["peak"], summary["best_host"]
    last = (
        f"done: 100·J {with_spread(summary['final_objective_mean'], summary['final_objective_std'])}; "
        f"committed validation {summary['final_committed_accuracy_mean']:.2f}, "
        f"committed test {summary['final_test_accuracy_mean']:.2f}{_perplexity(summary['final_perplexity'])}; "
        f"growth {summary['growth_ratio_mean']:.2f}x; {hosts} host{'s' * (hosts != 1)}; "
        f"{summary['env_steps_per_second']:.0f} env-steps/s with updates, {size(peak)} peak memory"
    )
    return last if best is None else f"{last}\n{best_host(best)}"


def best_host(best: Mapping[str, Any]) -> str:
    """The host that `esper export` takes."""
    return (
        f"best host of all rounds: host {best['host']} of round {best['round']}, 100·J {best['objective']:.2f}; "
        f"validation {best['val']:.2f}, chosen by it; test {best['test']:.2f}{_perplexity(best['perplexity'])}; "
        f"growth {best['growth']:.2f}x"
    )


def _perplexity(value: float | None) -> str:
    """Of a text, for the end of a sentence."""
    return "" if value is None else f"; validation perplexity {value:.2f}"


def tasks(found: Sequence[TaskSpec], data_dir: Path | None) -> Table:
    """The registered tasks."""
    page = plain_table("task", "host", "params", "slots", "data")
    for column in (page.columns[1], page.columns[4]):
        column.justify = "left"
    for task in found:
        host, params = ("none", "") if task.host is None else (words(task.host), _count(task.host.num_params()))
        enabled, offered = len(task.enabled), len(task.offered)
        slots = str(enabled) if enabled == offered else f"{enabled}/{offered}"
        page.add_row(task.name, host, params, slots, _data(task, data_dir))
    return page


def _count(number: int) -> str:
    """A number of parameters, short enough for eighty columns."""
    return f"{number:,}" if number < 1e6 else f"{number / 1e6:.1f} M"


def data_lines(found: Sequence[TaskSpec], data_dir: Path | None) -> list[str]:
    """Where the files of the tasks are, or where to put them: a sentence for each data set."""
    folder = data_dir or "none; name one with --data-dir or the environment variable ESPER_DATA"
    sources = {task.source.name: task.source for task in found if task.source is not None}
    lines = [f"data folder: {folder}"] if sources else []
    for name, source in sources.items():
        place = source.folder(data_dir)
        lines.append(f"{name}: {f'found in {place}' if place else f'missing; expected {source.expected}'}")
    return lines


def task(found: TaskSpec, data_dir: Path | None) -> list[str]:
    """One task: what it is, how it is trained, and its host with the slots."""
    lines = [f"{found.name}: {found.description}"]
    if found.host is not None:
        optimizer, batches = found.optimizer, found.batches_per_step
        lines += [
            f"host: {words(found.host)}, {found.host.num_params():,} parameters",
            f"training: {found.episode_length} steps of {batches or 'all'} batches of {found.batch_train}, "
            f"{optimizer.kind}, learning rate {optimizer.host_lr:g}; measured by {found.objective.unit}",
            *(data_lines([found], data_dir) or ["data: embedded"]),
        ]
    return [*lines, "", *drawing(found)]


def _data(task: TaskSpec, data_dir: Path | None) -> str:
    if task.source is None:
        return "ready" if task.load else "none"
    return "found" if task.source.folder(data_dir) else "missing"


def text(show: Callable[[RunConsole], None]) -> str:
    """What a function prints, as plain text."""
    file = StringIO()
    show(RunConsole(file=file, width=100, color_system=None, force_terminal=False, force_jupyter=False))
    return "\n".join(line.rstrip() for line in file.getvalue().strip().splitlines())


def plain_table(first: str, *columns: str) -> Table:
    """An empty table without lines, with a first column of words and others of numbers."""
    page = Table(box=None, padding=(0, 2, 0, 0))
    page.add_column(first, no_wrap=True)
    for column in columns:
        page.add_column(column, justify="right", no_wrap=True)
    return page


def _with_interval(difference: Estimate, units: int) -> str:
    """With its interval, where there are enough units for one."""
    interval = f" [{difference.low:+z.2f}, {difference.high:+z.2f}]" if units >= LEAST_UNITS else ""
    return f"{difference.mean:+z.2f}{interval}"
