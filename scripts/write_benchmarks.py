"""Run the benchmarks and write their tables into docs/benchmarks.md, between two markers.

The text outside the markers stays unchanged. If a measurement fails, nothing is written.

    python scripts/write_benchmarks.py                   # `make bench`: about eight minutes on two quiet cores
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
MARKERS = BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"

Report = Mapping[str, Any]
Lines = Sequence[Sequence[str]]
"""The lines of a table, the header first."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run the benchmarks and write their tables."""

    page: Path = ROOT / "docs" / "benchmarks.md"
    """The page with the two markers."""
    only: tuple[str, ...] = ()
    """Titles of the measurements to run instead of all; nothing is written then."""


@dataclass(frozen=True)
class Measurement:
    """A command that writes JSON, and the tables that are made of it."""

    title: str
    command: tuple[str, ...]
    tables: tuple[Callable[[Report], Lines], ...]


def table(lines: Lines) -> str:
    """Markdown; all columns but the first are aligned to the right."""
    header, *rest = lines
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rest))


def control_step(report: Report) -> Lines:
    """Rows of benchmarks/null_control_step.py."""
    return [
        ("hosts", "control steps/s", "env-steps/s", "ms/step", "relative to 16 hosts"),
        *(
            (str(r["hosts"]), f"{r['steps_per_second']:.1f}", f"{r['env_steps_per_second']:,.0f}",
             f"{r['ms_per_step']:.2f}", f"{r['ratio']:.2f}")
            for r in report["rows"]
        ),
    ]  # fmt: skip


def operations(report: Report) -> Lines:
    """Rows of scripts/profile_hot_path_operations.py."""
    return [
        ("operation", "operators", "µs", "share of a step"),
        *(
            (r["operation"], str(r["operators"]), f"{r['us']:,.0f}",
             "-" if r["share"] is None else f"{100 * r['share']:.0f} %")
            for r in report["results"]
        ),
    ]  # fmt: skip


def gae(report: Report) -> Lines:
    """Rows of benchmarks/gae.py."""
    return [
        ("type", "ms", "best ms", "speed-up over a loop over tensors", "over a loop over lists of floats"),
        *(
            (r["dtype"], f"{r['scan_ms']:.2f}", f"{r['scan_ms_best']:.2f}", f"{r['ratio_tensors']:,.0f}",
             f"{r['ratio_floats']:.0f}")
            for r in report["rows"]
        ),
    ]  # fmt: skip


def rewards(report: Report) -> Lines:
    """Rows of benchmarks/rewards.py."""
    return [
        ("hosts", "form", "µs/step", "ns/host", "speed-up over scalar"),
        *(
            (str(r["hosts"]), r["form"], f"{r['us_per_step']:,.0f}", f"{r['ns_per_host']:,.0f}", f"{r['ratio']:.1f}")
            for r in report["rows"]
        ),
    ]


def rounds(report: Report) -> Lines:
    """Rows of scripts/benchmark_hot_path.py."""
    return [
        ("setting", "env-steps/s", "p50 ms/step", "p95 ms/step", "train", "decide", "update", "speed-up"),
        *(
            (r["setting"], f"{r['eps']:,.1f}", f"{r['step_ms_p50']:.1f}", f"{r['step_ms_p95']:.1f}",
             *(f"{100 * r['share'][phase]:.0f} %" for phase in ("train", "decide", "update")), f"{r['speed_up']:.2f}")
            for r in report["results"]
        ),
    ]  # fmt: skip


def executors(report: Report) -> Lines:
    """Rows of benchmarks/executors.py that compare an executor with streamed."""
    return [
        ("work", "executor", "streamed ms", "speed-up", "range"),
        *(
            (r["name"], r["second"], f"{r['first_ms']:,.0f}", *speed_up(r))
            for r in report["rows"].values()
            if r["first"] == "streamed"
        ),
    ]


def executor_facts(report: Report) -> Lines:
    """The facts of benchmarks/executors.py, memory included."""
    facts = report["facts"]

    def each(name: str, form: str) -> str:
        return ", ".join(f"{key} {value:{form}}" for key, value in facts[name].items())

    memory = f"{facts['memory_gib']:.2f} GiB, {facts['state_mib']:.1f} MiB of it checkpointed state"
    return [
        ("quantity", "found"),
        ("training 3x3 blocks, share of the peak of a matrix product", each("share", ".1%")),
        ("all 8 coalitions, in evaluations of one", each("coalitions", ".2f")),
        ("speed of `auto` relative to the fastest executor", each("auto_speed", ".2f")),
        ("time per host and step, many hosts relative to few", each("growth", ".2f")),
        ("peak memory of a process of 64 hosts of digits", memory),
    ]


def plain_loops(report: Report) -> Lines:
    """Rows of benchmarks/plain_loops.py."""
    return [
        ("hosts", "executor", "loops ms", "speed-up of training", "range", "8 coalitions, in plain evaluations"),
        *(
            (r["name"], r["executor"], f"{r['train_loops_ms']:,.0f}", f"{r['speed_up']:.2f}",
             f"{r['lowest']:.2f} to {r['highest']:.2f}", f"{r['coalitions']:.2f}")
            for r in report["rows"]
        ),
    ]  # fmt: skip


def speed_up(row: Report) -> tuple[str, str]:
    """Median ratio and range of one comparison."""
    return f"{row['ratio']:.2f}", f"{row['lowest']:.2f} to {row['highest']:.2f}"


ROUNDS = ("scripts/benchmark_hot_path.py", "--hosts", "16", "--task")
STREAMED_AND_AUTO = ("executor=streamed", "executor=auto")
MEASUREMENTS = (
    Measurement(
        "Control step of the null task, eager",
        ("benchmarks/null_control_step.py",),
        (control_step,),
    ),
    Measurement(
        "Operators of a control step, null task, 16 hosts",
        ("scripts/profile_hot_path_operations.py", "--hosts", "16", "--max-seconds", "0.5"),
        (operations,),
    ),
    Measurement("GAE, 1,024 hosts x 150 steps", ("benchmarks/gae.py",), (gae,)),
    Measurement("Reward kernel, mode shaped, float64", ("benchmarks/rewards.py", "--hosts", "64", "4096"), (rewards,)),
    Measurement("Executors, three seeds per host", ("benchmarks/executors.py",), (executors, executor_facts)),
    Measurement("Against plain training loops", ("benchmarks/plain_loops.py", "--repetitions", "3"), (plain_loops,)),
    Measurement(
        "Rounds of digits, 16 hosts x 20 steps",
        (*ROUNDS, "digits", "--steps", "20", "--rounds", "4", "--compare", *STREAMED_AND_AUTO),
        (rounds,),
    ),
    Measurement(
        "Rounds of the null task, 16 hosts x 60 steps, without and with records",
        (*ROUNDS, "null", "--steps", "60", "--rounds", "20"),
        (rounds,),
    ),
)


def measured(measurement: Measurement, folder: Path) -> Report:
    """Run the command in a process of its own; raises ConfigError if it fails. Its tables go to the terminal."""
    path = folder / "result.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, *measurement.command, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, check=False)
    if done.returncode or not path.exists():
        raise ConfigError(
            f"{' '.join(measurement.command)} ended with exit code {done.returncode}, so nothing was written; "
            "run it alone to see why."
        )
    content: Report = json.loads(path.read_text(encoding="utf-8"))
    return content


def section(measurement: Measurement, report: Report) -> str:
    """Title, command and tables."""
    command = " ".join((".venv/bin/python", *measurement.command))
    tables = (table(lines_of(report)) for lines_of in measurement.tables)
    return "\n\n".join((f"## {measurement.title}", f"`{command}`", *tables))


def introduction(report: Report, load: float) -> str:
    """Machine, versions and load."""
    where = ", ".join(f"{name} {value}" for name, value in report["environment"].items() if name != "settings")
    return f"Written by `make bench`: {where}. Load average before: {load:.1f}."


def between_markers(page: str, text: str, markers: tuple[str, str] = MARKERS) -> str:
    """`page` with `text` between the markers; raises ConfigError unless it has each marker once, in order."""
    first, last = markers
    begin, end = page.find(first), page.find(last)
    if page.count(first) != 1 or page.count(last) != 1 or begin > end:
        raise ConfigError(f"the page must have the lines {first} and {last}, once each and in this order.")
    return f"{page[: begin + len(first)]}\n{text}\n{page[end:]}"


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
