"""Microseconds of each operation of a control step and of an update, eager.

An episode runs and the arguments of every operation are stored; then each operation is repeated with the arguments of
its last call. `policy act` contains observation and sampling. Operators are the PyTorch operators dispatched in one
call: a count, which is exact on any machine.

    null task             all operations without networks; shares are of a control step of this task
    synthetic_tiny        the operations of networks: clipping, gradient statistics, validation

    python scripts/profile_hot_path_operations.py
    python scripts/profile_hot_path_operations.py --hosts 1024 --phases --operators 12 --functions 25
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.kasmina.rules import lifecycle
from esper.leyline.errors import EsperError
from esper.runs.assembly.clients import baseline_of
from esper.simic import client as learner
from esper.simic.agent import ppo, rollout_buffer
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.client import SimicClient
from esper.telemetry.machine import environment
from esper.tolaria import engine as engine_module
from esper.tolaria import governor, phases
from esper.tolaria.executors import fused
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.training import StackedOptimizer
from esper.tolaria.runtime import CUDATimer, choose_device
from measured_rounds import Setting, Subject, configured, percentile
from operator_counts import most_expensive_operators, operators_by_phase, operators_of, print_functions
from script_report import write_result

WARM_UP = 3
NETWORK_STEPS = 4
LEAST_REPETITIONS = 5
SINGLE_ADD, VALIDATION = "single-row add", "validation, per coalition"


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
    networks: bool = True
    """Also time the operations of networks."""
    phases: bool = False
    """Also print time and operators of each phase of a control step."""
    operators: int = 0
    """Lines of the table of the most expensive operators of a control step."""
    functions: int = 0
    """Lines of the table of the most expensive Python functions of a control step."""
    threads: int = 1
    """Threads within an operator on the CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    quick: bool = False
    """4 and 64 hosts, 12 steps, 20 repetitions."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True)
class Operation:
    """A function or method of a step or an update, and the attribute through which it is called."""

    name: str
    owner: Any
    attribute: str
    in_step: bool = True


OF_EVERY_TASK = (
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
OF_NETWORKS = (
    Operation("clip and step, hosts and seeds", StackedOptimizer, "step", in_step=False),
    Operation("gradient statistics", fused, "gradient_statistics", in_step=False),
    Operation(VALIDATION, NetworkExecutor, "evaluate", in_step=False),
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


Calls = dict[str, Callable[[], object]]


@contextmanager
def kept_arguments(operations: Sequence[Operation]) -> Iterator[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Arguments of the last call of each operation inside the block, by name."""
    last: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    originals = [vars(operation.owner)[operation.attribute] for operation in operations]

    def keeping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            last[name] = (args, kwargs)
            return original(*args, **kwargs)

        return call

    for operation, original in zip(operations, originals, strict=True):
        setattr(operation.owner, operation.attribute, keeping(operation.name, original))
    try:
        yield last
    finally:
        for operation, original in zip(operations, originals, strict=True):
            setattr(operation.owner, operation.attribute, original)


def calls_again(operations: Sequence[Operation], last: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> Calls:
    """Each operation as a function without arguments."""

    def again(operation: Operation) -> Callable[[], object]:
        assert operation.name in last, f"{operation.name} was never called: it has moved, or the episode is too short"
        function = getattr(operation.owner, operation.attribute)
        args, kwargs = last[operation.name]
        return lambda: function(*args, **kwargs)

    return {operation.name: again(operation) for operation in operations}


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


def row_of(
    name: str, call: Callable[[], object], hosts: int, step_us: float | None, device: torch.device, options: Options,
    parts: int = 1,
) -> Row:  # fmt: skip
    """Time one operation; times and operators are divided by `parts`, its number of equal pieces."""
    us = [x / parts for x in time_of(call, device, options)]
    middle = statistics.median(us)
    return Row(
        operation=name,
        hosts=hosts,
        us=middle,
        us_p95=percentile(us, 0.95),
        us_per_host=middle / hosts,
        share=middle / step_us if step_us else None,
        operators=round(operators_of(call) / parts),
        repetitions=len(us),
    )


def single_add(store: tuple[tuple[Any, ...], dict[str, Any]], options: Options) -> Callable[[], object]:
    """`add` of one row to a buffer that is made for it."""
    client, step = store[0]
    buffer = client.buffer
    steps = -(-(options.repetitions + WARM_UP + 1) // buffer.num_envs)
    depth = buffer.slabs.hidden0.h
    own = TamiyoRolloutBuffer(
        buffer.num_envs, steps, buffer.slabs.states.shape[-1], buffer.slabs.has_gate.shape[-1], depth.shape[-1],
        depth.shape[0], device=depth.device,
    )  # fmt: skip
    row = {name: field[0] for name, field in vars(buffer.column(step.t - 1)).items()}
    written = 0

    def add() -> None:
        nonlocal written
        own.add(written % own.num_envs, **row)
        written += 1

    return add


def told_of(options: Options, task: str, hosts: int) -> dict[str, Any]:
    """Settings of the measured runs."""
    sizes = {"num_envs": hosts, "episode_length": options.steps, "rounds": 3, "schedule_rounds": 3}
    eager = {"compile": "off"}  # compiled steps have no single operations
    machine = {"device": options.device, "threads": options.threads}
    return {"task": task, "ppo": {"update_epochs": 1}} | machine | sizes | eager


def control_plane(options: Options, hosts: int) -> tuple[list[Row], Subject]:
    """Operations of the null task, first the whole step."""
    config = configured(told_of(options, "null", hosts), Setting.parse(""))
    subject = Subject(config, telemetry=False, folder=Path())
    device = subject.engine.spec.device
    subject.round(0)
    with kept_arguments(OF_EVERY_TASK) as last:
        steps = [1e6 * seconds for seconds in subject.round(1).steps]
    whole = statistics.median(steps)
    first = Row(
        operation="control step", hosts=hosts, us=whole, us_p95=percentile(steps, 0.95), us_per_host=whole / hosts,
        share=1.0, operators=round(sum(operators_by_phase(subject).values())), repetitions=len(steps),
    )  # fmt: skip
    calls = calls_again(OF_EVERY_TASK, last)
    step_us = {operation.name: whole if operation.in_step else None for operation in OF_EVERY_TASK}
    calls[SINGLE_ADD] = single_add(last["buffer store"], options)
    rows = [row_of(name, call, hosts, step_us.get(name), device, options) for name, call in calls.items()]
    return [first, *rows], subject


def with_networks(options: Options, hosts: int) -> list[Row]:
    """Operations of networks, with a fixed schedule so that seeds train."""
    config = configured(told_of(options, "synthetic_tiny", hosts), Setting.parse("executor=fused"))
    engine = Subject(config, telemetry=False, folder=Path()).engine
    client = baseline_of("fixed_schedule", config, engine.spec)
    engine.reset(client, 0)
    with kept_arguments(OF_NETWORKS) as last:
        for _ in range(NETWORK_STEPS):
            engine.step(client)
        engine.apply_structure()
    coalitions = last[VALIDATION][0][3]
    parts = {VALIDATION: int(coalitions.valid.sum(dim=1).max())}
    calls = calls_again(OF_NETWORKS, last)
    device = engine.spec.device
    return [row_of(name, call, hosts, None, device, options, parts.get(name, 1)) for name, call in calls.items()]


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


def shown_phases(subject: Subject) -> Table:
    """Time and operators of each phase of a control step."""
    cost, counts = subject.round(2), operators_by_phase(subject)
    steps = len(cost.steps)
    page = Table(title=f"phases of a control step, {subject.config.num_envs} hosts")
    page.add_column("phase")
    for column in ("µs", "share", "operators"):
        page.add_column(column, justify="right")
    for phase, seconds in cost.phases.items():
        share = f"{100.0 * seconds / cost.rollout:.1f} %"
        page.add_row(phase, f"{1e6 * seconds / steps:,.0f}", share, f"{counts.get(phase, 0.0):.0f}")
    return page


def main(options: Options) -> int:
    """Time and print; returns the exit code."""
    if options.quick:
        options = replace(options, hosts=(4, 64), steps=12, repetitions=20, max_seconds=1.0)
    console, rows = Console(width=140), []
    try:
        torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        caption = ", ".join(map(str, environment(device).values()))
        for hosts in options.hosts:
            own, subject = control_plane(options, hosts)
            own += with_networks(options, hosts) if options.networks else []
            console.print(shown(own, hosts, caption))
            rows += own
            if options.phases:
                console.print(shown_phases(subject))
            if options.operators:
                console.print(most_expensive_operators(subject, options.operators))
            if options.functions:
                print_functions(subject, options.functions)
    except EsperError as error:
        print(f"profile_hot_path_operations: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        found = [asdict(row) for row in rows]
        write_result(options.json, "profile_hot_path_operations", device, asdict(options), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
