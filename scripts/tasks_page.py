"""The tables of docs/tasks.md, from the results of verify_tasks.py."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats  # scikit-learn needs it too

from write_benchmarks import Lines, table

MARKERS = "<!-- verify_tasks: begin -->", "<!-- verify_tasks: end -->"
MAX_GAP = 1e-3
"""Most that losses of two executors may differ in the first steps."""


@dataclass(frozen=True)
class Trial:
    """One episode: figure of merit of each host with its fossilized seeds, on validation and test examples.

    `fossilized` counts the hosts that kept a seed, `rollbacks` those of all hosts; `seconds` are CPU time.
    """

    val: list[float]
    test: list[float]
    fossilized: int
    rollbacks: int
    seconds: float


@dataclass(frozen=True)
class Agreement:
    """How far executors are apart, and whether runs repeat to the bit.

    `early`, `late`: largest difference of a loss to streamed, by executor, in the first three steps (six updates of a
    host) and in all six.
    """

    early: Mapping[str, float]
    late: Mapping[str, float]
    repeats: bool
    seeds_differ: bool


@dataclass(frozen=True)
class Result:
    """What was found for one task.

    `measured` says when and where; `figure` is the figure of merit; `executor` the choice of "auto"; `budget` the
    training of a host in words; `measured_on` the numbers of validation and test examples; `grown` a trial per
    blueprint in `slot`.
    """

    task: str
    measured: str
    data: str
    figure: str
    host_params: int
    slot: str
    executor: str
    budget: str
    measured_on: tuple[int, int]
    wait_only: Trial
    grown: Mapping[str, Trial]
    agreement: Agreement


def measured(environment: Mapping[str, str | int]) -> str:
    """Date, commit, machine and version of PyTorch."""
    return "{date}, commit {commit}, {cpu}, device {device}, PyTorch {torch}".format(**environment)


def result_of(row: Mapping[str, Any]) -> Result:
    """The result that JSON holds."""
    trials = {name: Trial(**trial) for name, trial in row["grown"].items()}
    parts = {"wait_only": Trial(**row["wait_only"]), "grown": trials, "agreement": Agreement(**row["agreement"])}
    return Result(**{**row, "measured_on": tuple(row["measured_on"]), **parts})


def gain(trial: Trial, waits: Trial) -> tuple[float, float]:
    """Mean difference of the test figures of paired hosts, and half its 95 % interval by Student's t (NaN for one)."""
    differences = np.subtract(trial.test, waits.test)
    n = len(differences)
    if n == 1:
        return float(differences[0]), math.nan
    half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n)
    return float(differences.mean()), float(half)


def failures(results: Iterable[Result]) -> list[str]:
    """A sentence for each check that failed."""
    found: list[str] = []
    for result in results:
        trials = {"wait_only": result.wait_only, **result.grown}
        for name, trial in trials.items():
            if not np.isfinite([*trial.val, *trial.test]).all():
                found.append(f"{result.task}, {name}: accuracies are {trial.val} and {trial.test}, expected numbers.")
            if name != "wait_only" and trial.fossilized < len(trial.test):
                found.append(f"{result.task}, {name}: {trial.fossilized} of {len(trial.test)} hosts kept the seed.")
        for name, difference in result.agreement.early.items():
            if not difference <= MAX_GAP:
                found.append(f"{result.task}: losses of {name} differ from streamed by {difference:.1e}.")
        if not result.agreement.repeats:
            found.append(f"{result.task}: two runs of one seed differ.")
        if not result.agreement.seeds_differ:
            found.append(f"{result.task}: two seeds give the same hosts.")
    return found


def hosts_table(results: Sequence[Result]) -> Lines:
    """What hosts reach without growth."""
    return [
        ("task", "data", "measured by", "parameters", "training", "examples val / test", "val", "test", "executor"),
        *(
            (r.task, r.data, r.figure, f"{r.host_params:,}", r.budget, " / ".join(f"{n:,}" for n in r.measured_on),
             f"{np.mean(r.wait_only.val):.1f}", f"{np.mean(r.wait_only.test):.1f}", r.executor)
            for r in results
        ),
    ]  # fmt: skip


def gains_table(results: Sequence[Result]) -> Lines:
    """Gain of each blueprint; the results are of one family."""
    names = tuple(results[0].grown)

    def cells(result: Result) -> Iterable[str]:
        for name in names:
            mean, half = gain(result.grown[name], result.wait_only)
            yield f"{mean:+.1f}" if math.isnan(half) else f"{mean:+.1f} ± {half:.1f}"

    return [("task", "slot", *names), *((r.task, r.slot, *cells(r)) for r in results)]


def agreement_table(results: Sequence[Result]) -> Lines:
    """Executors and repetitions."""

    def cell(result: Result, name: str) -> str:
        of = result.agreement
        return f"{of.early[name]:.0e} / {of.late[name]:.0e}" if name in of.early else "-"

    return [
        ("task", "fused - streamed", "native - streamed", "repeats to the bit"),
        *(
            (r.task, cell(r, "fused"), cell(r, "native"), "yes" if r.agreement.repeats else "NO")
            for r in results
        ),
    ]  # fmt: skip


def sections(results: Sequence[Result]) -> str:
    """The text between the markers."""
    seconds = sum(t.seconds for r in results for t in (r.wait_only, *r.grown.values()))
    families = {
        tuple(result.grown): [r for r in results if r.grown.keys() == result.grown.keys()] for result in results
    }
    gains = "\n\n".join(table(gains_table(alike)) for alike in families.values())
    return "\n\n".join(
        (
            f"Measured {'; '.join(dict.fromkeys(r.measured for r in results))}. {len(results[0].wait_only.test)} hosts "
            f"per task and blueprint; {seconds / 60:.0f} minutes of CPU time for the growth.",
            "## Hosts without growth",
            "Means over the hosts in percent (`wait_only`). Training: control steps x batches of examples.",
            table(hosts_table(results)),
            "## Gain of each blueprint",
            "Test figure in percentage points minus that of the same hosts without growth: mean and 95 % interval "
            "(Student's t over paired hosts). The seed germinates in step 1 with ADD and is fossilized when it may be.",
            gains,
            "## Executors and repetitions",
            "Hosts with every blueprint, two small batches per step: largest difference of a loss to the streamed "
            "executor in steps 1-3 / 1-6, and whether every executor repeats two seeds to the bit. Executors round "
            "differently (2e-7); where that moves a value across a ReLU or to another maximum of a pooling, the "
            "weights of that one host drift apart from then on.",
            table(agreement_table(results)),
        )
    )
