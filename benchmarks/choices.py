"""What some choices of docs/decisions.md gain: the way that was given up against the way that was taken.

    pooling       max pooling by PyTorch against ours, forward and backward
    pointwise     grouped convolution against matrix product, forward and backward, per number of channels
    where         missing features replaced by `torch.where` against a masked term
    recurrence    the LSTM cell step by step under autograd against the sequence with its own gradient
    clamp         masked logits unclamped against clamped, in a null step of many hosts
    threads       one thread against two, in a fused train pass of digits; wall time
    memory        freed memory returned to the system against kept, each in a process of its own, with page faults

Both ways run in turn, on one thread and in CPU time unless stated; a ratio is the median over repetitions of the ratio
within each. Above 1 the second way is faster. Only `memory` compares processes, in pairs.

    python benchmarks/choices.py
    python benchmarks/choices.py --only memory threads --json choices.json
"""

import json
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from torch import Tensor

import null_control_step
from esper.kasmina.hosts.cnn import max_pool_2x2
from esper.kasmina.parameters.stacking import StackedConv2d
from esper.tamiyo import heads
from esper.tamiyo.network import lstm_sequence
from esper.telemetry.machine import environment
from esper.tolaria.runtime import keep_freed_memory
from grown_hosts import CPU, DIGITS_SHAPE, GrownHosts
from paired import Row, compare, comparisons, cpu_ms, row_of, wall_ms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the recurrence under autograd lies there
from reference.recurrence import lstm_steps

CALLS = 20
"""Of an operator in one measurement."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the ways that were given up with those that were taken."""

    only: tuple[str, ...] = ()
    """Choices to measure instead of all, e.g. pooling clamp."""
    hosts: int = 16
    """Hosts of digits, of the pooling and of the pointwise convolutions."""
    many_hosts: int = 1024
    """Rows of the features, and hosts of the null step."""
    minibatches: tuple[int, ...] = (4, 16, 64, 256)
    """Hosts in a minibatch of the recurrence."""
    examples: int = 512
    """Train examples of digits."""
    steps: int = 60
    """Steps of a null episode."""
    passes: int = 8
    """Control steps of digits in each process of `memory`."""
    repetitions: int = 7
    """Measurements of each; a first one is not counted."""
    json: Path | None = None
    """Also write the numbers to this file."""


def builtin_pool(h: Tensor) -> Tensor:
    """`max_pool_2x2` by PyTorch's operator."""
    return F.max_pool2d(h, 2)


def often(form: Callable[[], object]) -> None:
    """Several calls; one is too short to be timed."""
    for _ in range(CALLS):
        form()


def pooling(options: Options) -> list[Row]:
    """Forward and backward on the features of the first block of digits."""
    x = torch.randn(64 * options.hosts, 8, 8, 8, requires_grad=True)

    def pool(form: Callable[[Tensor], Tensor]) -> None:
        y = form(x)
        torch.autograd.grad(y, x, y)

    pools = [partial(often, partial(pool, form)) for form in (builtin_pool, max_pool_2x2)]
    return [compare(f"pooling of {list(x.shape)}", "PyTorch's", "ours", pools, options.repetitions)]


def pointwise(options: Options) -> list[Row]:
    """A 1x1 convolution of all hosts on 32 images of 8x8."""
    rows = []
    for inputs, outputs in ((1, 8), (8, 8), (8, 16)):
        x = torch.randn(32 * options.hosts, inputs, 8, 8, requires_grad=True)
        weight = torch.randn(options.hosts, outputs, inputs, 1, 1, requires_grad=True)
        layer = StackedConv2d(inputs, outputs, 1, bias=False)
        layer._parameters["weight"] = weight

        def grouped(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            wide = x.view(32, -1, 8, 8)
            return F.conv2d(wide, weight.flatten(0, 1), groups=options.hosts).view(len(x), -1, 8, 8)

        def forward_and_backward(forward: Callable[[Tensor], Tensor], x: Tensor = x, weight: Tensor = weight) -> None:
            y = forward(x)
            torch.autograd.grad(y, (x, weight), y)

        work = [partial(often, partial(forward_and_backward, form)) for form in (grouped, layer)]
        name = f"1x1, {inputs} to {outputs} channels, N = {options.hosts}"
        rows.append(compare(name, "grouped convolution", "matrix product", work, options.repetitions))
    return rows


def where(options: Options) -> list[Row]:
    """Features with missing values: half of all numbers, or a fifth of the columns."""
    wide, value = torch.randn(options.many_hosts, 128), torch.randn(128)
    missing = {
        "half missing": wide.masked_fill(wide > 0.0, torch.nan),
        "columns missing": wide.index_fill(1, torch.arange(0, 128, 5), torch.nan),
    }

    def selected(x: Tensor) -> Tensor:
        return torch.where(x.isnan(), value, x)

    def masked_term(x: Tensor) -> Tensor:
        return torch.addcmul(x.nan_to_num(nan=0.0), x.isnan().to(x.dtype), value)

    rows = []
    for name, x in missing.items():
        assert torch.equal(selected(x), masked_term(x))
        work = [partial(often, partial(form, x)) for form in (selected, masked_term)]
        title = f"features, {name}, {options.many_hosts} x 128"
        rows.append(compare(title, "where", "masked term", work, options.repetitions))
    return rows


def recurrence(options: Options) -> list[Row]:
    """An episode per minibatch, forward and backward, at the width of the preset `small`."""

    def row(hosts: int, width: int = 128) -> Row:
        gates, weight = torch.randn(hosts, options.steps, 4 * width), torch.randn(4 * width, width) / width**0.5
        given = (gates.requires_grad_(), torch.zeros(hosts, width), torch.zeros(hosts, width))
        reset = torch.zeros(hosts, options.steps, dtype=torch.bool)

        def forward_and_backward(form: Callable[..., Tensor]) -> None:
            form(*given, reset, weight.requires_grad_()).sum().backward()

        work = [partial(forward_and_backward, form) for form in (lstm_steps, lstm_sequence)]
        name = f"recurrence, {hosts} hosts x {options.steps} steps"
        return compare(name, "autograd", "own gradient", work, options.repetitions)

    return [row(hosts) for hosts in options.minibatches]


def clamp(options: Options) -> list[Row]:
    """An episode of the null task without and with the clamp of the logits."""
    settings = null_control_step.Options(episode_length=options.steps)
    subject = null_control_step.Subject.build(options.many_hosts, settings)

    def clamped() -> None:
        subject.seconds_per_step(0)

    def unclamped() -> None:
        original, heads.MIN_RELATIVE = heads.MIN_RELATIVE, -float("inf")
        try:
            clamped()
        finally:
            heads.MIN_RELATIVE = original

    name = f"{options.steps} null steps, N = {options.many_hosts}"
    return [compare(name, "unclamped logits", "clamped", (unclamped, clamped), options.repetitions)]


def threads(options: Options) -> list[Row]:
    """A fused train pass on one thread and on two."""
    hosts = GrownHosts.build(DIGITS_SHAPE, options.hosts, options.examples, 8)

    def train(number: int) -> None:
        torch.set_num_threads(number)
        hosts.train(hosts.fused)
        torch.set_num_threads(1)

    name, work = f"train digits, N = {options.hosts}", (partial(train, 1), partial(train, 2))
    return [compare(f"{name}, wall", "1 thread", "2 threads", work, options.repetitions, wall_ms)]


def in_this_process(keep: bool, options: Options) -> tuple[float, int]:
    """CPU milliseconds and page faults of some steps of digits; a first step is not counted."""
    torch.set_num_threads(1)
    if keep and not keep_freed_memory():
        raise SystemExit("choices: freed memory can be kept only with glibc; leave `memory` out.")
    hosts = GrownHosts.build(DIGITS_SHAPE, options.hosts, options.examples, 360)

    def step() -> None:
        hosts.train(hosts.fused)
        hosts.measure(hosts.streamed)

    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ms = cpu_ms(lambda: [step() for _ in range(options.passes)])
    return ms, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def memory(options: Options) -> tuple[Row, dict[str, int]]:
    """Pairs of processes in alternating order, and the medians of their page faults."""
    pairs, faults = [], {"returned": list[int](), "kept": list[int]()}
    for repetition in range(options.repetitions):
        ms: dict[str, float] = {}
        for name in faults if repetition % 2 else reversed(faults):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                ms[name], number = pool.submit(in_this_process, name == "kept", options).result()
            faults[name].append(number)
        pairs.append((ms["returned"], ms["kept"]))
    row = row_of(f"{options.passes} steps of digits, N = {options.hosts}", "memory returned", "kept", pairs)
    return row, {name: round(statistics.median(own)) for name, own in faults.items()}


CHOICES: dict[str, Callable[[Options], list[Row]]] = {
    "pooling": pooling,
    "pointwise": pointwise,
    "where": where,
    "recurrence": recurrence,
    "clamp": clamp,
    "threads": threads,
}


def main(options: Options) -> int:
    """Measure and print; returns the exit code."""
    wanted = options.only or (*CHOICES, "memory")
    unknown = sorted(set(wanted) - {*CHOICES, "memory"})
    if unknown:
        raise SystemExit(f"choices: {', '.join(unknown)} is unknown; choose from {', '.join((*CHOICES, 'memory'))}.")
    rows, faults = list[Row](), dict[str, int]()
    if "memory" in wanted:  # before this process keeps its memory
        row, faults = memory(options)
        rows.append(row)
    torch.set_num_threads(1)
    keep_freed_memory()
    for name, measure in CHOICES.items():
        rows += measure(options) if name in wanted else []
    where_from = environment(CPU) | {"settings": f"{options.repetitions} repetitions"}
    console = Console(width=140)
    console.print(comparisons("choices", rows, where_from))
    if faults:
        counts = ", ".join(f"{number:,} {name}" for name, number in faults.items())
        console.print(f"page faults of {options.passes} steps: {counts}", highlight=False)
    if options.json is not None:
        report = {"environment": where_from, "rows": [asdict(row) for row in rows], "page_faults": faults}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
