"""What the commands print about tasks and finished runs, at most 80 columns wide, and the form of all their tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import singledispatch
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.host import HostSpec, InjectionPoint
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import RunConsole, size, with_spread

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
Part = str | InjectionPoint
"""Layers in words, or a slot after them."""


def plain_table(first: str, *columns: str, fold: bool = False, rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table without lines, with a first column of words (`fold`: in several lines) and others of numbers."""
    page = Table(box=None, padding=(0, 2, 0, 0))
    page.add_column(first, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for column in columns:
        page.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        page.add_row(*row)
    return page


def text(show: Callable[[RunConsole], None]) -> str:
    """What a function prints, as plain text."""
    file = StringIO()
    show(RunConsole(file=file, width=100, color_system=None, force_terminal=False, force_jupyter=False))
    return "\n".join(line.rstrip() for line in file.getvalue().strip().splitlines())


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short(value: float) -> str:
    """A large number in five characters at most, such as 18.3k; "-" for NaN."""
    if math.isnan(value):
        return "-"
    factor, letter = next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])
    scaled = value / factor
    return f"{scaled:.{0 if scaled >= 100.0 or not letter else 1}f}{letter}"


def done(summary: Mapping[str, Any]) -> str:
    """The result of a run: its last round in one line, and its best host in another."""
    peak, best = summary["memory_bytes"]["peak"], summary["best_host"]
    last = (
        f"done: 100·J {with_spread(summary['final_objective_mean'], summary['final_objective_std'])}; "
        f"committed validation {summary['final_committed_accuracy_mean']:.2f}, "
        f"committed test {summary['final_test_accuracy_mean']:.2f}{_perplexity(summary['final_perplexity'])}; "
        f"growth {summary['growth_ratio_mean']:.2f}x; {counted(summary['num_envs'], 'host')}; "
        f"{summary['env_steps_per_second']:.0f} env-steps/s with updates, {size(peak)} peak memory"
    )
    if best is None:
        return last
    return (
        f"{last}\nbest host of all rounds: host {best['host']} of round {best['round']}, "
        f"100·J {best['objective']:.2f}; "
        f"validation {best['val']:.2f}, chosen by it; test {best['test']:.2f}{_perplexity(best['perplexity'])}; "
        f"growth {best['growth']:.2f}x"
    )


def _perplexity(value: float | None) -> str:
    """Of a text, for the end of a sentence."""
    return "" if value is None else f"; validation perplexity {value:.2f}"


# -- tasks -------------------------------------------------------------------------------------------------------------


def tasks(found: Sequence[TaskSpec], data_dir: Path | None) -> Table:
    """The registered tasks."""
    page = plain_table("task", "host", "params", "slots", "data")
    page.columns[1].justify = page.columns[4].justify = "left"
    for task in found:
        params = 0 if task.host is None else task.host.num_params()
        enabled, offered = len(task.enabled), len(task.offered)
        there = "found" if task.source and task.source.folder(data_dir) else "missing"
        page.add_row(
            task.name,
            "none" if task.host is None else words(task.host),
            "" if task.host is None else f"{params:,}" if params < 1e6 else f"{params / 1e6:.1f} M",
            str(enabled) if enabled == offered else f"{enabled}/{offered}",
            there if task.source else "ready" if task.load else "none",
        )
    return page


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
        falls = "" if optimizer.schedule == "constant" else f" ({optimizer.schedule})"
        lines += [
            f"host: {words(found.host)}, {found.host.num_params():,} parameters",
            f"training: {found.episode_length} steps of {batches or 'all'} batches of {found.batch_train}, "
            f"{optimizer.kind}, learning rate {optimizer.host_lr:g}{falls}; measured by {found.objective.unit}",
            *(data_lines([found], data_dir) or ["data: embedded"]),
        ]
    return [*lines, "", *drawing(found)]


@singledispatch
def words(host: HostSpec) -> str:
    """A host in a few words; others by the name of their class."""
    return type(host).__name__


@words.register
def _(host: CNNHostSpec) -> str:
    unshuffle = f", unshuffle {host.unshuffle}" if host.unshuffle > 1 else ""
    return f"CNN {'-'.join(map(str, host.channels()))}, {host.kernel}x{host.kernel}{unshuffle}"


@words.register
def _(host: TransformerHostSpec) -> str:
    return f"transformer {host.layers}x{host.width}"


@words.register
def _(host: ModuleHostSpec) -> str:
    return getattr(host.model, "__name__", type(host.model).__name__)


@singledispatch
def parts(host: HostSpec) -> list[Part]:
    """A host from the input to the output; of others than the built-in ones the slots alone are known."""
    in_order = sorted(host.points(), key=lambda point: point.position)
    return ["input", *(part for point in in_order for part in ("layers", point)), "layers", "output"]


@parts.register
def _(host: CNNHostSpec) -> list[Part]:
    points = {point.slot_id: point for point in host.points()}
    found: list[Part] = [f"images, {host.in_channels} channel{'s' * (host.in_channels > 1)}"]
    if host.unshuffle > 1:
        found.append(f"pixel unshuffle {host.unshuffle}x{host.unshuffle}: {host.input_channels()} channels")
    for block in range(host.blocks):
        found += [f"convolution {host.kernel}x{host.kernel}, batch norm, ReLU", points[f"r0c{block}"]]
        if block < host.pools:
            found += ["max pooling 2x2", points[f"r1c{block}"]]
    return [*found, "mean over space, linear", f"{host.classes} classes"]


@parts.register
def _(host: TransformerHostSpec) -> list[Part]:
    layers = host.layers // host.segments
    segment = f"{layers} layer{'s' * (layers > 1)}: attention ({host.heads} heads), MLP ({4 * host.width})"
    found: list[Part] = [f"up to {host.context} tokens", f"token and position embedding ({host.width})"]
    found += [part for point in host.points() for part in (segment, point)]
    return [*found, "layer norm, token table", f"logits of {host.vocabulary} tokens"]


def drawing(task: TaskSpec) -> list[str]:
    """The lines of a host with its slots, the enabled ones filled."""
    if task.host is None:
        return [f"no network; formulas with up to {len(task.offered)} slots"]
    first, *inner, last = parts(task.host)
    lines = [str(first)]
    for part in inner:
        if isinstance(part, str):
            lines.append(f"  │  {part}")
        else:
            mark = "●" if part.slot_id in task.enabled else "○"
            lines.append(f"  {mark} {part.slot_id}   {part.channels} channels")
    others = "" if set(task.offered) == set(task.enabled) else "   ○ others: --set 'slots=[\"SLOT\", ...]'"
    return [*lines, str(last), "", f"● slots of a run{others}"]
