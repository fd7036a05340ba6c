"""Count the reads of the device in whole rounds, and find where they happen.

    control step   1   the packed read: the structure of the next step, and the reported numbers
    update         1   the packed metrics
    round          1   the packed statistics

The call site of every other read is printed as unlisted. Reads are counted, not stalls, so CPU and CUDA give the same
counts. On CUDA, PyTorch's own sync warnings are added; they also cover calls that bypass Python.

    python scripts/profile_gpu_sync.py                 # exit code 1: a budget is exceeded, or an unlisted site reads
    python scripts/profile_gpu_sync.py --task null --hosts 64 --micro
"""

import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.leyline.actions import NUM_HEADS
from esper.leyline.errors import EsperError
from esper.runs import events
from esper.runs.assembly.assemble import assemble, device_of
from esper.telemetry.anomalies import Trend
from esper.telemetry.machine import environment
from esper.tolaria.runtime import choose_device, host_read
from esper.tolaria.state import StepReport
from measured_rounds import Setting, configured
from script_report import write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the counter of reads lies there
from read_counter import HostReadCounter

SYNC_WARNING = "called a synchronizing CUDA operation"
LISTED = {r"^esper/runs/report\.py:": "the Shapley formula, on CPU tensors that were read before"}
"""Call sites that may read, as regular expressions, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Count the host reads of real rounds."""

    task: str = "synthetic_tiny"
    """Name of a task; null trains no networks."""
    hosts: int = 4
    """N, number of hosts."""
    steps: int = 16
    """E, number of control steps per round."""
    rounds: int = 2
    """Rounds."""
    setting: str = ""
    """Settings of the run, NAME=VALUE[,NAME=VALUE...], e.g. executor=fused."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    step_budget: int = 1
    """Most reads of a control step, a reset and a bootstrap included."""
    update_budget: int = 1
    """Most reads of an update."""
    round_budget: int = 1
    """Most reads of a round besides its steps and its update."""
    allow: tuple[str, ...] = ()
    """More call sites that may read besides `host_read`, as regular expressions, e.g. ^esper/tasks/"""
    micro: bool = False
    """Also compare one read per element with one packed read, for actions and log-probabilities."""
    quick: bool = False
    """One round of 2 hosts x 4 steps."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(kw_only=True)
class Scope:
    """Reads of one kind of work: the number of intended ones in each instance, and the sites of all others."""

    name: str
    budget: int
    intended: list[int] = field(default_factory=list)
    sites: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count the work inside as one instance of this scope."""
        with _sync_warnings(device, self.sites), HostReadCounter() as reads:
            yield
        self.intended.append(reads.intended)
        self.sites.update(f"{read.site} ({read.call})" for read in reads.unintended)

    def unlisted(self, allowed: Sequence[str]) -> Counter[str]:
        """Sites that are neither listed nor allowed."""
        patterns = (*LISTED, *allowed)
        return Counter({site: n for site, n in self.sites.items() if not any(re.search(p, site) for p in patterns)})


@contextmanager
def _sync_warnings(device: torch.device, sites: Counter[str]) -> Iterator[None]:
    """On CUDA: count PyTorch's own warnings of synchronization."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for found in caught:
        if SYNC_WARNING in str(found.message):
            sites[f"{found.filename}:{found.lineno} (sync warning)"] += 1
        else:
            warnings.warn_explicit(found.message, found.category, found.filename, found.lineno)


def count(options: Options) -> list[Scope]:
    """Run the rounds, with events as in a recorded run, and count the reads by scope."""
    given = {
        "task": options.task,
        "num_envs": options.hosts,
        "episode_length": options.steps,
        "rounds": options.rounds,
        "schedule_rounds": options.rounds,
        "device": options.device,
        "compile": "off",  # every operator must be visible
    }
    config = configured(given, Setting.parse(options.setting))
    device = device_of(config)
    parts = assemble(config, device)
    engine, client = parts.engine, parts.client

    def note_step(step: StepReport) -> None:
        for _ in events.step_events([step], engine.spec):
            pass

    engine.listeners.append(note_step)
    steps = Scope(name="control step", budget=options.step_budget)
    updates = Scope(name="update", budget=options.update_budget)
    rest = Scope(name="round, besides these", budget=options.round_budget)
    for number in range(options.rounds):
        between = Scope(name="", budget=0)
        with between.counted(device):
            engine.reset(client, number)
        for _ in range(options.steps):
            with steps.counted(device):
                engine.step(client)
        with between.counted(device):
            stats = engine.rollout(client)
        assert stats is not None
        with updates.counted(device):
            metrics = client.update()
        with between.counted(device):
            for _ in events.round_events(stats, metrics, engine.spec, Trend(), config.reward):
                pass
        rest.intended.append(sum(between.intended))
        rest.sites.update(between.sites)
    return [steps, updates, rest]


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One way of reading actions and log-probabilities [N, 8]; medians."""

    way: str
    reads: int
    microseconds: float
    ratio: float


def compare_reads(num_hosts: int, device: torch.device, repetitions: int) -> list[Micro]:
    """One read per element against one packed read, in turn."""
    actions = torch.randint(0, 4, (num_hosts, NUM_HEADS), device=device)
    log_probs = torch.rand(num_hosts, NUM_HEADS, device=device)

    def per_element() -> None:
        for table in (actions, log_probs):
            for host in range(num_hosts):
                for head in range(NUM_HEADS):
                    table[host, head].item()

    def packed() -> None:
        host_read(actions, log_probs)

    ways: dict[str, Callable[[], None]] = {"one read per element": per_element, "one packed read": packed}
    times: dict[str, list[float]] = {name: [] for name in ways}
    reads = {}
    for name, read in ways.items():
        with HostReadCounter() as seen:
            read()
        reads[name] = seen.intended + seen.by_site.total()
    for _ in range(repetitions):
        for name, read in ways.items():
            began = time.perf_counter()
            read()
            times[name].append(1e6 * (time.perf_counter() - began))
    first = statistics.median(times["one read per element"])
    middle = {name: statistics.median(own) for name, own in times.items()}
    return [Micro(way=name, reads=reads[name], microseconds=us, ratio=first / us) for name, us in middle.items()]


def complaints(scopes: Sequence[Scope], allowed: Sequence[str]) -> list[str]:
    """Budgets that are exceeded, and unlisted reads."""
    found = [
        f"{scope.name}: {max(scope.intended)} reads; the budget is {scope.budget}."
        for scope in scopes
        if max(scope.intended) > scope.budget
    ]
    for scope in scopes:
        found += [
            f"{scope.name}: {site} reads the device {n} times; read it with host_read, or name it with --allow."
            for site, n in scope.unlisted(allowed).most_common()
        ]
    return found


def shown(scopes: Sequence[Scope], options: Options, device: torch.device) -> Table:
    """Reads by scope."""
    title = f"host reads: {options.task}, {options.hosts} hosts x {options.steps} steps, {options.rounds} rounds"
    page = Table(title=title, caption=", ".join(map(str, environment(device).values())))
    page.add_column("scope")
    for column in ("instances", "reads in each", "budget", "unlisted reads"):
        page.add_column(column, justify="right")
    for scope in scopes:
        low, high = min(scope.intended), max(scope.intended)
        each = str(low) if low == high else f"{low} to {high}"
        unlisted = scope.unlisted(options.allow).total()
        page.add_row(scope.name, str(len(scope.intended)), each, str(scope.budget), str(unlisted))
    return page


def shown_sites(scopes: Sequence[Scope], allowed: Sequence[str]) -> Table:
    """Call sites of reads other than `host_read`."""
    page = Table(title="call sites besides host_read")
    for column in ("scope", "site", "reads", "listed"):
        page.add_column(column)
    for scope in scopes:
        unlisted = scope.unlisted(allowed)
        for site, n in scope.sites.most_common():
            page.add_row(scope.name, site, str(n), "no" if site in unlisted else "yes")
    return page


def shown_micro(rows: Sequence[Micro], num_hosts: int) -> Table:
    """The two ways side by side."""
    page = Table(title=f"actions and log-probabilities of {num_hosts} hosts")
    page.add_column("way")
    for column in ("reads", "µs", "times faster"):
        page.add_column(column, justify="right")
    for row in rows:
        page.add_row(row.way, str(row.reads), f"{row.microseconds:.1f}", f"{row.ratio:.1f}")
    return page


def main(options: Options) -> int:
    """Count, print, compare with the budgets; returns the exit code."""
    if options.quick:
        options = replace(options, hosts=2, steps=4, rounds=1)
    try:
        device = choose_device(options.device)
        scopes = count(options)
    except EsperError as error:
        print(f"profile_gpu_sync: {error}", file=sys.stderr)
        return 2
    console = Console(width=140)
    console.print(shown(scopes, options, device))
    if any(scope.sites for scope in scopes):
        console.print(shown_sites(scopes, options.allow))
    micro = compare_reads(options.hosts, device, 20 if options.quick else 200) if options.micro else []
    if micro:
        console.print(shown_micro(micro, options.hosts))
    if options.json is not None:
        results = {
            "scopes": [
                {"scope": s.name, "budget": s.budget, "instances": len(s.intended), "most": max(s.intended),
                 "least": min(s.intended), "sites": dict(s.sites)}
                for s in scopes
            ],
            "micro": [asdict(row) for row in micro],
        }  # fmt: skip
        write_result(options.json, "profile_gpu_sync", device, asdict(options), results)
    found = complaints(scopes, options.allow)
    for line in found:
        print(f"profile_gpu_sync: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
