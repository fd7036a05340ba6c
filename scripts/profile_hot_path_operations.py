"""Microseconds and operators of each operation of a control step of the null task and of its update, eager.

An episode runs and the arguments of every operation are stored; then each operation is repeated with the arguments of
its last call. `policy act` contains observation and sampling. Operators are the PyTorch operators dispatched in one
call: a count, which is exact on any machine.

    python scripts/profile_hot_path_operations.py --hosts 16 1024
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.rules import lifecycle
from esper.leyline.errors import EsperError
from esper.simic import client as learner
from esper.simic import ppo, rollout_buffer
from esper.simic.client import SimicClient
from esper.telemetry.machine import environment
from esper.tolaria import engine as engine_module
from esper.tolaria import governor, phases
from esper.tolaria.runtime import CUDATimer, choose_device
from measured_rounds import Setting, Subject, configured, percentile
from script_report import write_result

WARM_UP = 3
LEAST_REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the operations of the hot path."""

    hosts: tuple[int, ...] = (4, 64, 1024)
    """Numbers of hosts."""
    steps: int = 30
    """Control steps of the episode."""
    repetitions: int = 200
    """Calls of each operation after warm-up, at most."""
    max_seconds: float = 4.0
    """Most seconds of the calls of one operation; the table prints their number."""
    threads: int = 1
    """Threads within an operator on the CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write the numbers to this file."""


class Operation(NamedTuple):
    """A function or method of a step or an update, and the attribute through which it is called."""

    name: str
    owner: Any
    attribute: str
    in_step: bool = True


OPERATIONS = (
    Operation("reward step", SimicClient, "step"),
    Operation("guards and masks", phases, "legal_ops"),
    Operation("governor", governor, "check"),
    Operation("observation", learner, "features_of"),
    Operation("policy act", SimicClient, "act"),
    Operation("sampling", learner, "sample_heads"),
    Operation("execute", lifecycle, "apply_ops"),
    Operation("tick", lifecycle, "tick"),
    Operation("buffer store", SimicClient, "store"),
    Operation("coalition enumeration", engine_module, "enumerate_coalitions"),
    Operation("coalition derivation", phases, "derive"),
    Operation("GAE", rollout_buffer, "compute_gae", in_step=False),
    Operation("one PPO minibatch", ppo, "_train_minibatch", in_step=False),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation at one number of hosts; `share` of a control step, None if it is not part of one."""

    operation: str
    hosts: int
    us: float
    us_p95: float
    us_per_host: float
    share: float | None
    operators: int
    repetitions: int


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], object]) -> int:
    """Operators of one call."""
    with OperatorCounter() as counter:
        call()
    return counter.calls


Arguments = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


@contextmanager
def kept_arguments() -> Iterator[Arguments]:
    """Arguments of the last call of each operation inside the block, by name."""
    last: Arguments = {}
    originals = [vars(operation.owner)[operation.attribute] for operation in OPERATIONS]

    def keeping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            last[name] = (args, kwargs)
            return original(*args, **kwargs)

        return call

    for operation, original in zip(OPERATIONS, originals, strict=True):
        setattr(operation.owner, operation.attribute, keeping(operation.name, original))
    try:
        yield last
    finally:
        for operation, original in zip(OPERATIONS, originals, strict=True):
            setattr(operation.owner, operation.attribute, original)


def time_of(call: Callable[[], object], device: torch.device, options: Options) -> list[float]:
    """Microseconds of each repetition."""
    began = time.perf_counter()
    for _ in range(WARM_UP):
        call()
    expected = (time.perf_counter() - began) / WARM_UP
    repetitions = min(options.repetitions, max(int(options.max_seconds / max(expected, 1e-9)), LEAST_REPETITIONS))
    timers = [CUDATimer(device) for _ in range(repetitions)]
    for timer in timers:
        with timer:
            call()
    return [1e3 * timer.elapsed_ms() for timer in timers]


def measure(options: Options, hosts: int) -> list[Row]:
    """The whole control step first, then its operations and those of the update."""
    sizes = {"num_envs": hosts, "episode_length": options.steps, "rounds": 3, "schedule_rounds": 3}
    machine = {"device": options.device, "threads": options.threads}
    told = {"task": "null", "ppo": {"update_epochs": 1}, "compile": "off"} | machine | sizes
    subject = Subject(configured(told, Setting.parse("")), telemetry=False, folder=Path())
    engine, device = subject.engine, subject.engine.spec.device
    subject.round(0)
    with kept_arguments() as last:
        steps = [1e6 * seconds for seconds in subject.round(1).steps]
    engine.reset(subject.client, 0)
    operators = operators_of(lambda: engine.rollout(subject.client)) / options.steps
    whole = statistics.median(steps)

    def row(name: str, us: Sequence[float], operators: float, in_step: bool = True) -> Row:
        middle = statistics.median(us)
        return Row(
            operation=name, hosts=hosts, us=middle, us_p95=percentile(us, 0.95), us_per_host=middle / hosts,
            share=middle / whole if in_step else None, operators=round(operators), repetitions=len(us),
        )  # fmt: skip

    rows = [row("control step", steps, operators)]
    for operation in OPERATIONS:
        name = operation.name
        assert name in last, f"{name} was never called: it has moved, or the episode is too short"
        function, (args, kwargs) = getattr(operation.owner, operation.attribute), last[name]

        def call(function: Any = function, args: Any = args, kwargs: Any = kwargs) -> object:
            return function(*args, **kwargs)

        rows.append(row(name, time_of(call, device, options), operators_of(call), operation.in_step))
    return rows


def shown(rows: Sequence[Row], hosts: int, caption: str) -> Table:
    """The operations at one number of hosts."""
    page = Table(title=f"operations, {hosts} hosts", caption=caption)
    page.add_column("operation")
    for column in ("µs", "p95", "µs per host", "share of a step", "operators", "repetitions"):
        page.add_column(column, justify="right")
    for row in rows:
        share = f"{100.0 * row.share:.1f} %" if row.share is not None else "-"
        cells = (f"{row.us:,.0f}", f"{row.us_p95:,.0f}", f"{row.us_per_host:.2f}", share)
        page.add_row(row.operation, *cells, str(row.operators), str(row.repetitions))
    return page


def main(options: Options) -> int:
    """Time and print; returns the exit code."""
    console, rows = Console(width=140), list[Row]()
    try:
        torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        for hosts in options.hosts:
            rows += measure(options, hosts)
            caption = ", ".join(map(str, environment(device).values()))
            console.print(shown([row for row in rows if row.hosts == hosts], hosts, caption))
    except EsperError as error:
        print(f"profile_hot_path_operations: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        found = [asdict(row) for row in rows]
        write_result(options.json, "profile_hot_path_operations", device, asdict(options), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
