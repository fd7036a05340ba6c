"""Generalized advantage estimation: the batched scan against scalar loops.

    scan      `esper.simic.advantages.compute_gae`, all hosts at once
    tensors   a loop over hosts and steps that reads elements of tensors; on some hosts, scaled up to all
    floats    the same loop over lists of Python floats, which exist only after a read of the device

All are timed in turn in one process, so that a busy machine slows them alike; a ratio is the median over repetitions
of the ratio within each. In float64 the results are compared bit for bit.

    python benchmarks/gae.py --json gae.json
    python benchmarks/gae.py --min-ratio 300 --max-ms 5      # exit code 1 if it is slower
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.simic.advantages import compute_gae
from esper.telemetry.machine import environment
from esper.tolaria.runtime import choose_device

GAMMA, LAMBDA = 0.995, 0.95
TYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure generalized advantage estimation."""

    hosts: int = 1024
    """Rows."""
    steps: int = 150
    """Steps per row."""
    repetitions: int = 7
    """Measurements of each; a first one is not counted."""
    calls: int = 20
    """Calls of the scan in one measurement."""
    tensor_hosts: int = 16
    """Hosts on which the loop over elements of tensors runs; its time is scaled up to all hosts."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_ratio: float = 0.0
    """Least speed-up of the scan over the loop over tensors, in float32."""
    max_ms: float = float("inf")
    """Most milliseconds of the scan, in float32."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times for one dtype; medians over the repetitions, in milliseconds for all hosts."""

    dtype: str
    scan_ms: float
    scan_ms_best: float
    tensors_ms: float
    floats_ms: float
    ratio_tensors: float
    ratio_floats: float
    equal: bool
    """Whether the scan equals the loop over floats (float64) bit for bit."""


def scalar_gae(r: Any, v: Any, b: Any, terminal: Any, truncated: Any, valid: Any) -> list[list[Any]]:
    """The recursion in scalars; the tables are lists of lists or tensors."""
    rows = []
    for n in range(len(r)):
        row, value, trace = [0.0] * len(r[n]), 0.0, 0.0  # value and advantage of the next step
        for t in reversed(range(len(r[n]))):
            if not valid[n][t]:
                value, trace = GAMMA * value, GAMMA * trace
                continue
            ends = terminal[n][t] or truncated[n][t]
            value_after = 0.0 if terminal[n][t] else b[n][t] if truncated[n][t] else value
            decay = 0.0 if ends else GAMMA * LAMBDA
            trace = (r[n][t] + GAMMA * value_after - v[n][t]) + decay * trace
            row[t], value = trace, v[n][t]
        rows.append(row)
    return rows


def rollout(options: Options, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random rewards, values and bootstrap values; one step in fifty ends a segment, one in twenty is not valid."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.hosts, options.steps)
    numbers = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]
    flags = [torch.rand(shape, generator=generator) < share for share in (0.02, 0.02, 0.95)]
    return [x.to(choose_device(options.device)) for x in (*numbers, *flags)]


def seconds_of(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Wall time of one call, the device's work included."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / calls


def measure(options: Options, dtype: str) -> Row:
    """All three ways on the same rollout."""
    tensors = rollout(options, TYPES[dtype])
    lists = [x.tolist() for x in tensors]
    some = [x[: options.tensor_hosts].cpu() for x in tensors]
    device, scale = tensors[0].device, options.hosts / len(some[0])
    costs: dict[str, list[float]] = {"scan": [], "tensors": [], "floats": []}
    for repetition in range(options.repetitions + 1):
        taken = {
            "scan": seconds_of(lambda: compute_gae(*tensors, GAMMA, LAMBDA), device, options.calls),
            "tensors": scale * seconds_of(lambda: scalar_gae(*some), torch.device("cpu"), 1),
            "floats": seconds_of(lambda: scalar_gae(*lists), torch.device("cpu"), 1),
        }
        for name in taken if repetition else ():
            costs[name].append(1e3 * taken[name])
    found = compute_gae(*tensors, GAMMA, LAMBDA).tolist()
    return Row(
        dtype=dtype,
        scan_ms=statistics.median(costs["scan"]),
        scan_ms_best=min(costs["scan"]),
        tensors_ms=statistics.median(costs["tensors"]),
        floats_ms=statistics.median(costs["floats"]),
        ratio_tensors=statistics.median(a / b for a, b in zip(costs["tensors"], costs["scan"], strict=True)),
        ratio_floats=statistics.median(a / b for a, b in zip(costs["floats"], costs["scan"], strict=True)),
        equal=found == scalar_gae(*lists),
    )


def shown(rows: Sequence[Row], options: Options) -> Table:
    """The rows as a table."""
    where = environment(choose_device(options.device))
    page = Table(
        title=f"GAE of {options.hosts} hosts x {options.steps} steps", caption=", ".join(map(str, where.values()))
    )
    for column in ("type", "scan ms", "best", "tensors ms", "floats ms", "x tensors", "x floats", "equal bits"):
        page.add_column(column, justify="right")
    for row in rows:
        times = (f"{ms:.2f}" for ms in (row.scan_ms, row.scan_ms_best, row.tensors_ms, row.floats_ms))
        page.add_row(row.dtype, *times, f"{row.ratio_tensors:.0f}", f"{row.ratio_floats:.0f}", str(row.equal))
    return page


def complaints(rows: Sequence[Row], options: Options) -> list[str]:
    """The limits that are missed, and a float64 result that differs from the scalar one."""
    found = [
        f"{row.dtype}: the scan and the scalar loop differ; they must agree bit for bit."
        for row in rows
        if row.dtype == "float64" and not row.equal
    ]
    own = next(row for row in rows if row.dtype == "float32")
    if own.ratio_tensors < options.min_ratio:
        found.append(f"{own.ratio_tensors:.0f} times the scalar loop; at least {options.min_ratio:g} is required.")
    if own.scan_ms > options.max_ms:
        found.append(f"{own.scan_ms:.2f} ms for {options.hosts} hosts; at most {options.max_ms:g} is required.")
    return found


def main(options: Options) -> int:
    """Measure, print, compare with the limits; returns the exit code."""
    torch.set_num_threads(1)
    rows = [measure(options, dtype) for dtype in TYPES]
    Console(width=120).print(shown(rows, options))
    if options.json is not None:
        where = environment(choose_device(options.device))
        report = {"script": "gae", "version": 1, "environment": where, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    found = complaints(rows, options)
    for line in found:
        print(f"gae: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
