"""Speed of whole rounds under one or several settings.

    env                  steps without the phase `decide`: hosts, measuring, governor, lifecycle, reward, buffer
    env+policy           steps
    env+policy+learn     rounds: reset, steps, update, records; their rate is called EPS

All settings run in turn in one process, round by round, so that a busy machine slows them alike; a speed-up is the
median over rounds of the ratio within each. The first round of each is not counted.

    python scripts/benchmark_hot_path.py                                          # telemetry off and on; amp on a GPU
    python scripts/benchmark_hot_path.py --compare executor=streamed executor=fused
    python scripts/benchmark_hot_path.py --task null --hosts 64 --min-eps 2000    # exit code 1 if it is slower
    python scripts/benchmark_hot_path.py --json now.json --baseline before.json   # ... or 10 % slower than before
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.leyline.errors import ConfigError, EsperError
from esper.runs.assembly.assemble import dataset_of
from esper.telemetry.machine import environment
from esper.tolaria.runtime import choose_device
from measured_rounds import RoundCost, Setting, Subject, alternating, configured, percentile
from script_report import write_result

TOLERANCE = 0.10
"""Share by which a setting may be slower than its baseline."""
SIZE = ("task", "hosts", "steps", "threads")
"""Options that must be equal in two measurements that are compared."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure whole rounds."""

    task: str = "synthetic_cifar"
    """Name of a task; synthetic_cifar and synthetic_tiny need no files, null trains no networks."""
    hosts: int = 4
    """N, number of hosts."""
    steps: int = 16
    """E, number of control steps per round."""
    rounds: int = 5
    """Rounds of each setting; a first one is not counted."""
    settings: tuple[str, ...] = ()
    """Settings to measure, each NAME=VALUE[,NAME=VALUE...], e.g. executor=fused,telemetry=on."""
    compare: tuple[str, str] | None = None
    """Two settings, like --settings A B."""
    threads: int = 1
    """Threads within an operator on the CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    quick: bool = False
    """Two rounds of 2 hosts x 4 steps."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_eps: float = 0.0
    """Least EPS of the best setting."""
    baseline: Path | None = None
    """JSON of an earlier run; each setting may be at most 10 % slower than there."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of one setting. Rates are per second; `share` of a round by phase."""

    setting: str
    eps: float
    eps_env_policy: float
    eps_env: float
    step_ms_p50: float
    step_ms_p95: float
    train_samples: float
    val_samples: float
    speed_up: float
    share: Mapping[str, float]


def chosen_settings(options: Options, device: torch.device) -> list[str]:
    """The settings of the user, else telemetry off and on, and on CUDA amp and compile."""
    if options.compare is not None:
        return list(options.compare)
    if options.settings:
        return list(options.settings)
    amp = ["amp=auto"] if device.type == "cuda" else []
    compiled = ["compile=on"] if device.type == "cuda" else []
    return ["telemetry=off", "telemetry=on", *amp, *compiled]


def notes(device: torch.device) -> list[str]:
    """What the default comparison omits, and why."""
    if device.type == "cuda":
        return []
    return [
        "amp=auto: float32 on a CPU; use --settings amp=off amp=bf16 to compare bf16",
        "compile=on: takes half a minute on a CPU; use --settings compile=off compile=on",
    ]


def measure(options: Options, names: Sequence[str]) -> list[Row]:
    """One row per setting."""
    given = {
        "task": options.task,
        "num_envs": options.hosts,
        "episode_length": options.steps,
        "rounds": options.rounds + 1,
        "schedule_rounds": options.rounds + 1,
        "device": options.device,
        "threads": options.threads,
    }
    settings = [Setting.parse(name) for name in names]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_runs:
        subjects = []
        for number, setting in enumerate(settings):
            config = configured(given, setting)
            subject = Subject(config, telemetry=setting.telemetry, folder=Path(folder) / str(number))
            subjects.append(open_runs.enter_context(subject))
        costs = alternating(subjects, options.rounds)
        examples = [examples_of(subject) for subject in subjects]
    return [
        row_of(setting.name, own, costs[0], options.hosts * options.steps, *sizes)
        for setting, own, sizes in zip(settings, costs, examples, strict=True)
    ]


def examples_of(subject: Subject) -> tuple[int, int]:
    """Train and validation examples that one host sees in one step."""
    dataset = dataset_of(subject.config, subject.engine.spec.device)
    return (len(dataset.train), len(dataset.val)) if dataset else (0, 0)


def row_of(
    name: str, own: Sequence[RoundCost], first: Sequence[RoundCost], env_steps: int, num_train: int, num_val: int
) -> Row:
    """The results of one setting; medians over rounds. `env_steps` is hosts x steps of a round."""

    def rate(number: int, seconds: Sequence[float]) -> float:
        middle = statistics.median(seconds)
        return number / middle if number and middle else 0.0

    steps = [seconds for cost in own for seconds in cost.steps]
    whole = sum(cost.whole for cost in own)
    share = {phase: sum(cost.phases[phase] for cost in own) / whole for phase in own[0].phases}
    outer = ("update", "records", "reset")
    return Row(
        setting=name,
        eps=rate(env_steps, [cost.whole for cost in own]),
        eps_env_policy=rate(env_steps, [cost.rollout for cost in own]),
        eps_env=rate(env_steps, [cost.rollout - cost.phases["decide"] for cost in own]),
        step_ms_p50=1e3 * percentile(steps, 0.50),
        step_ms_p95=1e3 * percentile(steps, 0.95),
        train_samples=rate(env_steps * num_train, [cost.phases["train"] for cost in own]),
        val_samples=rate(env_steps * num_val, [cost.phases["measure"] for cost in own]),
        speed_up=statistics.median(a.whole / b.whole for a, b in zip(first, own, strict=True)),
        share=share | {name: sum(getattr(cost, name) for cost in own) / whole for name in outer},
    )


def speeds(rows: Sequence[Row], title: str, caption: str) -> Table:
    """Rates and step times."""
    page = Table(title=title, caption=caption)
    page.add_column("setting")
    for column in ("EPS", "env+policy", "env", "p50 ms", "p95 ms", "train ex./s", "val. ex./s", "speed-up"):
        page.add_column(column, justify="right")
    for row in rows:
        rates = (f"{x:,.1f}" for x in (row.eps, row.eps_env_policy, row.eps_env, row.step_ms_p50, row.step_ms_p95))
        samples = (f"{x:,.0f}" if x else "-" for x in (row.train_samples, row.val_samples))
        page.add_row(row.setting, *rates, *samples, f"{row.speed_up:.3f}")
    return page


def shares(rows: Sequence[Row]) -> Table:
    """Share of a round by phase."""
    page = Table(title="share of a round by phase (%)")
    page.add_column("phase")
    for row in rows:
        page.add_column(row.setting, justify="right")
    for phase in rows[0].share:
        page.add_row(phase, *(f"{100.0 * row.share.get(phase, 0.0):.1f}" for row in rows))
    return page


def complaints(rows: Sequence[Row], options: Options) -> list[str]:
    """The limits that are missed."""
    best, found = max(rows, key=lambda row: row.eps), []
    if best.eps < options.min_eps:
        found.append(f"{best.eps:.1f} EPS with {best.setting}; at least {options.min_eps:g} is required.")
    if options.baseline is not None:
        before = baseline_of(options.baseline, options)
        known = [row for row in rows if row.setting in before]
        if not known:
            found.append(f"{options.baseline} has none of the settings {', '.join(row.setting for row in rows)}.")
        found += [
            f"{row.eps:.1f} EPS with {row.setting}; the baseline has {before[row.setting]:.1f}, and at most "
            f"{TOLERANCE:.0%} less is accepted."
            for row in known
            if row.eps < (1.0 - TOLERANCE) * before[row.setting]
        ]
    return found


def baseline_of(path: Path, options: Options) -> dict[str, float]:
    """EPS by setting of an earlier run; raises ConfigError if the file is not a result or has another size."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        size = {name: content["config"][name] for name in SIZE}
        speed = {row["setting"]: float(row["eps"]) for row in content["results"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a result of this script ({error}); write one with --json FILE.") from error
    own = {name: getattr(options, name) for name in SIZE}
    if size != own:
        raise ConfigError(f"{path} was measured with {size}, this run with {own}; use the same options.")
    return speed


def main(options: Options) -> int:
    """Measure, print, compare with the limits; returns the exit code."""
    if options.quick:
        options = replace(options, hosts=2, steps=4, rounds=2)
    try:
        torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        rows = measure(options, chosen_settings(options, device))
        found = complaints(rows, options)
    except EsperError as error:
        print(f"benchmark_hot_path: {error}", file=sys.stderr)
        return 2
    console = Console(width=140)
    size = f"{options.task}, {options.hosts} hosts x {options.steps} steps, {options.rounds} rounds"
    console.print(speeds(rows, size, ", ".join(map(str, environment(device).values()))))
    console.print(shares(rows))
    best = max(rows, key=lambda row: row.speed_up)
    console.print(f"best setting: {best.setting} ({best.speed_up:.2f} times {rows[0].setting})", highlight=False)
    for line in notes(device):
        console.print(f"not measured: {line}", highlight=False)
    if options.json is not None:
        write_result(options.json, "benchmark_hot_path", device, asdict(options), [asdict(row) for row in rows])
    for line in found:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
