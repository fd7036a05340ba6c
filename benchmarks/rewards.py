"""Time of the reward of one step in mode `shaped`: scalar reference, eager kernel and compiled kernel.

Rows are arbitrary (every stage, operation and pattern of missing values), on one thread, in float64 with breakdown.
Every repetition times each form once, in alternating order, so that a busy machine slows all of them alike; a ratio is
the median over repetitions of the ratio within each. The other forms evict the data of a form from the caches, so its
first call is timed separately, in the columns "first".

    python benchmarks/rewards.py --json rewards.json
    python benchmarks/rewards.py --min-eager 20 --min-compiled 150      # exit code 1 if it is slower
"""

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.runs.assembly.clients import compiled_reward
from esper.simic.compilation import graphs_compiled
from esper.simic.rewards import RewardConfig, compute_reward_batched
from esper.telemetry.machine import environment
from esper.tolaria.runtime import choose_device, keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the reference in plain floats lies there
from reference.rewards.golden import kernel_arguments
from reference.rewards.modes import reward_of_row
from reference.rewards.row import HostRow

STAGES = (1, 2, 3, 4, 6, 7, 8, 9, 10)
LIVE = (2, 3, 4, 6, 7)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the reward kernel of mode `shaped`, on one core of the CPU or on a GPU."""

    hosts: tuple[int, ...] = (64, 1024, 4096)
    """Numbers of hosts, ascending; the limits on ratios apply to the last, that on time to the first."""
    repetitions: int = 25
    """Times each form is measured."""
    device: str = "cpu"
    """Of the eager and the compiled kernel: cpu, cuda or cuda:N. The scalar reference is plain Python."""
    compiled: bool = True
    """Also measure the compiled kernel: needs a C++ compiler and half a minute per number of hosts."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_eager: float = 0.0
    """Least ratio of the scalar reference's time to the eager kernel's."""
    min_compiled: float = 0.0
    """Least ratio of the scalar reference's time to the compiled kernel's."""
    max_eager_ms: float = float("inf")
    """Most that the eager kernel may take at the smallest number of hosts, ms."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One form at one number of hosts; medians over the repetitions, and the shortest."""

    hosts: int
    form: str
    us_per_step: float
    us_per_step_best: float
    us_first: float
    """The first call after the other forms."""
    ns_per_host: float
    ratio: float
    """Times faster than the scalar reference."""
    ratio_of_best: float
    """The same of the shortest times, which other work on the machine disturbs least."""
    ratio_first: float
    """The same of the first calls."""


def arbitrary_rows(count: int, seed: int = 1) -> list[HostRow]:
    """Rows of one step with every stage and operation; a fifth to a third of the optional values are missing."""
    draw = torch.Generator().manual_seed(seed)

    def real(low: float, high: float, missing: float = 0.0) -> Tensor:
        values = torch.rand(count, generator=draw, dtype=torch.float64) * (high - low) + low
        return torch.where(torch.rand(count, generator=draw) < missing, torch.nan, values)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=draw)

    stage, host = torch.tensor(STAGES)[whole(0, len(STAGES))], real(50, 10_000).round()
    columns = {
        "action": whole(0, 6), "stage": stage, "has_seed": torch.isin(stage, torch.tensor(LIVE)),
        "epochs_in_stage": whole(0, 12), "seed_age": whole(1, 40), "previous_epochs": whole(0, 12),
        "previous_stage": torch.tensor(STAGES)[whole(0, len(STAGES))], "val_acc": real(5, 95), "acc_delta": real(-3, 3),
        "seed_contribution": real(-8, 15, 0.3), "total_improvement": real(-5, 15, 0.2),
        "counterfactual_improvement": real(-5, 8, 0.2), "stage_improvement": real(-3, 5, 0.2),
        "interaction_sum": real(-3, 3, 0.3), "host_params": host, "total_params": host + real(0, 3_000).round(),
        "effective_seed_params": real(0, 3_000, 0.3), "alpha_delta_sq_sum": real(0, 8, 0.3),
        "num_active": whole(0, 4), "num_fossilized": whole(0, 4), "num_contributing": whole(0, 3),
        "committed_acc": real(5, 95), "fossilized_params": real(0, 9_000).round(),
    }  # fmt: skip
    lists = [column.tolist() for column in columns.values()]
    return [
        HostRow(epoch=10, max_epochs=30, **dict(zip(columns, row, strict=True))) for row in zip(*lists, strict=True)
    ]


def forms(count: int, options: Options) -> dict[str, Callable[[], object]]:
    """The forms by name, as functions without arguments; called once, so that they are compiled."""
    rows, config = arbitrary_rows(count), RewardConfig(mode="shaped")
    given = kernel_arguments(rows) | {
        "epoch": torch.tensor(10), "max_epochs": torch.tensor(30), "config_weights": config.pack()
    }  # fmt: skip
    del given["deferred_scales"], given["deferred_contributions"]
    given = {name: x.to(choose_device(options.device)) if isinstance(x, Tensor) else x for name, x in given.items()}
    found: dict[str, Callable[[], object]] = {
        "scalar": lambda: deque((reward_of_row(row, config) for row in rows), maxlen=0),  # discards the results
        "eager": lambda: compute_reward_batched(**given),
    }
    if options.compiled:
        compiled = compiled_reward(compute_reward_batched)
        found["compiled"] = lambda: compiled(**given)
    for form in found.values():
        form()
    return found


def measure(count: int, options: Options) -> list[Row]:
    """One row per form."""
    measured = forms(count, options)
    warm = graphs_compiled()
    times: dict[str, list[float]] = {name: [] for name in measured}
    first: dict[str, list[float]] = {name: [] for name in measured}
    for repetition in range(options.repetitions):
        order = list(measured) if repetition % 2 else list(reversed(measured))
        for name in order:
            first[name].append(_seconds(measured[name], 1))
            times[name].append(_seconds(measured[name], 1 if name == "scalar" else 5))
    assert graphs_compiled() == warm, "the kernel was compiled again while it was measured"
    return [
        Row(
            hosts=count,
            form=name,
            us_per_step=1e6 * statistics.median(own),
            us_per_step_best=1e6 * min(own),
            us_first=1e6 * statistics.median(first[name]),
            ns_per_host=1e9 * statistics.median(own) / count,
            ratio=_ratio(times["scalar"], own),
            ratio_of_best=min(times["scalar"]) / min(own),
            ratio_first=_ratio(first["scalar"], first[name]),
        )
        for name, own in times.items()
    ]


def _ratio(scalar: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(scalar, own, strict=True))


def _seconds(form: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        form()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def where_and_how(options: Options) -> dict[str, str | int]:
    """Machine and settings of the numbers."""
    settings = f"mode shaped with breakdown, float64, {options.repetitions} repetitions"
    return {**environment(choose_device(options.device)), "settings": settings}


def shown(rows: Sequence[Row], where: dict[str, str | int]) -> Table:
    """The rows as a table."""
    page = Table(title="reward of one step", caption=", ".join(map(str, where.values())))
    for column in ("hosts", "form", "us/step", "best", "first", "ns/host", "ratio", "of best", "of first"):
        page.add_column(column, justify="left" if column == "form" else "right")
    for row in rows:
        cost = (row.us_per_step, row.us_per_step_best, row.us_first, row.ns_per_host)
        ratios = (row.ratio, row.ratio_of_best, row.ratio_first)
        page.add_row(str(row.hosts), row.form, *(f"{x:,.0f}" for x in cost), *(f"{x:.1f}" for x in ratios))
    return page


def complaints(rows: Sequence[Row], options: Options) -> list[str]:
    """The limits that are missed."""
    limits, found = {"eager": options.min_eager, "compiled": options.min_compiled}, []
    for form, least in limits.items():
        last = next((row for row in reversed(rows) if row.form == form), None)
        if least > 0 and last is None:
            found.append(f"{form} was not measured, but a ratio of {least:g} is required; omit --no-compiled.")
        elif last is not None and last.ratio < least:
            found.append(
                f"{form} is {last.ratio:.1f} times faster than scalar at {last.hosts} hosts; {least:g} is required."
            )
    first = next(row for row in rows if row.form == "eager")
    if first.us_per_step > 1e3 * options.max_eager_ms:
        found.append(
            f"eager takes {first.us_per_step / 1e3:.2f} ms at {first.hosts} hosts; at most {options.max_eager_ms:g} is "
            "required."
        )
    return found


def main(options: Options) -> int:
    """Measure, print, compare with the limits; returns the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does
    where = where_and_how(options)
    rows = [row for count in options.hosts for row in measure(count, options)]
    Console(width=120).print(shown(rows, where))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    found = complaints(rows, options)
    for line in found:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
