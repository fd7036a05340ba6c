"""Runs of seconds, started through the command line of this process, that can be stopped at any step.

null    three scripted hosts, of which one is rolled back in step 5 of each round
tiny    two real hosts on random images, whose seeds grow old fast; `streamed` is the same, host by host,
        and `shared` the same in two processes
"""

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
from esper.cli import main
from esper.tasks.null import Fault, NullSpec
from esper.tasks.registry import register_task, task_by_name
from esper.telemetry.sinks import register_listener

register_task(
    replace(
        task_by_name("null"),
        name="faulty_null",
        script=NullSpec(faults=(Fault(host=1, t=5, loss=float("nan")),)),
        min_training_epochs=1,
    )
)
register_task(tiny.task(name="tiny"))

FAST = (
    *("--set", "lifecycle.min_blending_epochs=1", "lifecycle.embargo_epochs=1", "lifecycle.min_prune_age=1"),
    *(
        "ppo.feature_width=8",
        "ppo.hidden_width=8",
        "ppo.update_epochs=1",
        "ppo.num_minibatches=2",
        "governor.snapshot_every=3",
    ),
)
OPTIONS = {
    "null": ("--task", "faulty_null", "--num-envs", "3", "--episode-length", "8", *FAST),
    "tiny": ("--task", "tiny", "--num-envs", "2", "--episode-length", "6", *FAST, "lifecycle.sequential=false"),
}
OPTIONS["streamed"] = (*OPTIONS["tiny"], "--executor", "streamed")
RECORDS = ("metrics.jsonl", "events.jsonl")

_signals: dict[tuple[int, int], tuple[int, ...]] = {}


@register_listener("interrupter")
class Interrupter:
    """A user at the keyboard: sends this process a signal in the step (round, t) that a test has chosen."""

    def __init__(self, run_directory: Path) -> None:
        del run_directory

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            for number in _signals.get((fields["round"], fields["t"]), ()):
                signal.raise_signal(number)


class Notebook:
    """A sink that writes everything down, and notes that it was closed."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.taken.append((kind, dict(fields)))

    def close(self) -> None:
        self.closed += 1


@contextmanager
def interrupted_at(round: int, t: int, *numbers: int) -> Iterator[None]:
    """Runs inside are sent these signals in that step, SIGINT unless told otherwise."""
    _signals[round, t] = numbers or (signal.SIGINT,)
    try:
        yield
    finally:
        del _signals[round, t]


def train(path: Path, kind: str = "null", rounds: int = 3, *more: str) -> int:
    """`esper train` with a new run directory; returns the exit code."""
    return main(["train", "--rounds", str(rounds), "--out", str(path), *OPTIONS[kind], *more])


def resume(path: Path, *more: str) -> int:
    """`esper train --resume`; returns the exit code."""
    return main(["train", "--resume", str(path), *more])


def records(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of both record files, without what was measured with a clock."""
    return {
        name: [without_times(json.loads(line)) for line in (path / name).read_text().splitlines()] for name in RECORDS
    }


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if "second" not in key and key != "memory_bytes"}


def summary(path: Path) -> dict[str, Any]:
    """summary.json without what was measured with a clock."""
    return without_times(json.loads((path / "summary.json").read_text()))


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
