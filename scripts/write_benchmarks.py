"""The short form of every measurement, as one section of docs/benchmarks.md between two markers.

What people wrote outside the markers stays as it is. A measurement that fails leaves the page as it was.

    python scripts/write_benchmarks.py                   # `make bench`: about three minutes on a quiet core
    python scripts/write_benchmarks.py --page other.md
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from esper.leyline.errors import ConfigError

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure everything in short, and write it down."""

    page: Path = ROOT / "docs" / "benchmarks.md"
    """The page with the two markers."""
    only: tuple[str, ...] = ()
    """Titles of the measurements to make, instead of all; then nothing is written."""


@dataclass(frozen=True)
class Measurement:
    """A command that writes JSON, and how its numbers are shown."""

    title: str
    command: tuple[str, ...]
    rows: Callable[[Report], list[Sequence[str]]]
    """The lines of the table, the header first."""


def table(lines: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right; the first line is the header."""
    header, *rest = lines
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rest))


def control_step(report: Report) -> list[Sequence[str]]:
    """Rows of benchmarks/null_control_step.py."""
    header = ("hosts", "control steps/s", "env-steps/s", "ms/step", "beside products", "ratio")
    return [
        header,
        *(
            (str(r["hosts"]), f"{r['steps_per_second']:.1f}", f"{r['env_steps_per_second']:,.0f}",
             *(f"{r[key]:.2f}" for key in ("ms_per_step", "ms_beside", "ratio")))
            for r in report["rows"]
        ),
    ]  # fmt: skip


def gae(report: Report) -> list[Sequence[str]]:
    """Rows of benchmarks/gae.py."""
    header = ("type", "ms", "best ms", "times faster than a loop over tensors", "... over Python's floats")
    return [
        header,
        *(
            (r["dtype"], f"{r['scan_ms']:.2f}", f"{r['scan_ms_best']:.2f}", f"{r['ratio_tensors']:,.0f}",
             f"{r['ratio_floats']:.0f}")
            for r in report["rows"]
        ),
    ]  # fmt: skip


def rounds(report: Report) -> list[Sequence[str]]:
    """Rows of scripts/benchmark_hot_path.py."""
    header = ("setting", "EPS", "env+policy", "env", "p50 ms", "p95 ms", "train", "decide", "update", "speed-up")
    return [
        header,
        *(
            (r["setting"], f"{r['eps']:,.1f}", f"{r['eps_env_policy']:,.1f}", f"{r['eps_env']:,.1f}",
             f"{r['step_ms_p50']:.1f}", f"{r['step_ms_p95']:.1f}",
             *(f"{100 * r['share'][phase]:.0f} %" for phase in ("train", "decide", "update")), f"{r['speed_up']:.2f}")
            for r in report["results"]
        ),
    ]  # fmt: skip


def executors(report: Report) -> list[Sequence[str]]:
    """Rows of benchmarks/executors.py that compare an executor with the streamed one."""
    against = [r for r in report["rows"].values() if r["first"] == "streamed"]
    return [
        ("work", "executor", "streamed ms", "its ms", "times faster"),
        *(
            (r["name"], r["second"], f"{r['first_ms']:,.0f}", f"{r['second_ms']:,.0f}", f"{r['ratio']:.2f}")
            for r in against
        ),
    ]


def operations(report: Report) -> list[Sequence[str]]:
    """Rows of scripts/profile_hot_path_operations.py, one column of times for each number of hosts."""
    sizes = sorted({r["hosts"] for r in report["results"]})
    by_name: dict[str, dict[int, Any]] = {}
    for r in report["results"]:
        by_name.setdefault(r["operation"], {})[r["hosts"]] = r
    last = sizes[-1]
    lines: list[Sequence[str]] = [
        ("operation", *(f"µs, N = {n}" for n in sizes), f"µs per host, N = {last}", "share of a step", "operators")
    ]
    for name, own in by_name.items():
        share = own[last]["share"]
        part = "-" if share is None else f"{100 * share:.0f} %"
        times = (f"{own[n]['us']:,.0f}" for n in sizes)
        lines.append((name, *times, f"{own[last]['us_per_host']:.2f}", part, str(own[last]["operators"])))
    return lines


def reads(report: Report) -> list[Sequence[str]]:
    """Rows of scripts/profile_gpu_sync.py."""
    header = ("scope", "instances", "most reads", "budget")
    return [
        header,
        *((s["scope"], str(s["instances"]), str(s["most"]), str(s["budget"])) for s in report["results"]["scopes"]),
    ]


MEASUREMENTS = (
    Measurement(
        "Control step of the null task",
        ("benchmarks/null_control_step.py", "--repetitions", "3"),
        control_step,
    ),
    Measurement("GAE, 1,024 hosts x 150 steps", ("benchmarks/gae.py", "--repetitions", "3"), gae),
    Measurement(
        "Rounds of the null task, 16 hosts x 60 steps",
        ("scripts/benchmark_hot_path.py", *("--task", "null", "--hosts", "16", "--steps", "60", "--rounds", "20")),
        rounds,
    ),
    Measurement(
        "Rounds of 32x32 images, 2 hosts x 6 steps",
        (
            "scripts/benchmark_hot_path.py",
            *("--hosts", "2", "--steps", "6", "--rounds", "2", "--compare", "executor=streamed", "executor=auto"),
        ),
        rounds,
    ),
    Measurement(
        "Executors, 16 hosts with three seeds each (4 of 32x32)",
        (
            "benchmarks/executors.py",
            *(
                "--hosts",
                "16",
                "--image-hosts",
                "4",
                "--examples",
                "256",
                "--val-examples",
                "128",
                "--repetitions",
                "3",
            ),
            *("--growth", "4", "16", "--memory-hosts", "16"),
        ),
        executors,
    ),
    Measurement(
        "Operations",
        ("scripts/profile_hot_path_operations.py", *("--hosts", "4", "64", "1024", "--max-seconds", "0.5")),
        operations,
    ),
    Measurement("Host reads", ("scripts/profile_gpu_sync.py", "--quick"), reads),
)


def measured(measurement: Measurement, folder: Path) -> Report:
    """Run it in a process of its own, its tables going to the terminal; raises ConfigError where it fails."""
    path = folder / "result.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, *measurement.command, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, check=False)
    if done.returncode or not path.exists():
        raise ConfigError(
            f"{' '.join(measurement.command)} ended with exit code {done.returncode}; nothing was written, run it "
            "alone to see why."
        )
    content: Report = json.loads(path.read_text(encoding="utf-8"))
    return content


def section(measurement: Measurement, report: Report) -> str:
    """Title, command and table."""
    command = " ".join((".venv/bin/python", *measurement.command))
    return f"### {measurement.title}\n\n`{command}`\n\n{table(measurement.rows(report))}"


def introduction(report: Report, load: float) -> str:
    """Where and how busy."""
    where = ", ".join(f"{name} {value}" for name, value in report["environment"].items() if name != "settings")
    return f"Written by `make bench`: {where}. Load average before: {load:.1f}."


def between_markers(page: str, text: str) -> str:
    """`page` with `text` between the markers; raises ConfigError unless each marker is there once, in order."""
    begin, end = page.find(BEGIN), page.find(END)
    if page.count(BEGIN) != 1 or page.count(END) != 1 or begin > end:
        raise ConfigError(f"the page needs the lines {BEGIN} and {END}, once each and in this order.")
    return f"{page[: begin + len(BEGIN)]}\n{text}\n{page[end:]}"


def main(options: Options) -> int:
    """Measure and write; returns the exit code."""
    chosen = [m for m in MEASUREMENTS if not options.only or m.title in options.only]
    try:
        if not chosen:
            known = "; ".join(m.title for m in MEASUREMENTS)
            raise ConfigError(f"no measurement has the title {', '.join(options.only)}; there are: {known}.")
        between_markers(options.page.read_text(encoding="utf-8"), "")
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            reports = [measured(m, Path(folder)) for m in chosen]
        if not options.only:
            parts = [section(m, report) for m, report in zip(chosen, reports, strict=True)]
            text = "\n\n".join((introduction(reports[-1], load), *parts))
            page = between_markers(options.page.read_text(encoding="utf-8"), f"\n{text}\n")
            options.page.write_text(page, encoding="utf-8")
            print(f"written to {options.page}")
    except (ConfigError, OSError) as error:
        print(f"write_benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
