"""What `esper.grow` is worth beside the usual ways, at equal compute: trains, and writes a part of docs/results.md.

For each host of `practice_hosts.py` the budget is three runs of its network, in FLOPs; no method may spend more, or
keep more parameters than the wider network has. With `--same-time` methods of esper have minutes instead: those that
"plain, long" took with this seed on the same cores, by as many threads as are fastest for it. The best on the
validation split is tested, once. Results are lines of OUT/results.jsonl; what is there is not computed again, so that
an interrupted run continues.

    python scripts/practice.py --data-dir DATA --page docs/results.md           # `make results`: hours on two cores
    python scripts/practice.py --data-dir DATA --small --seeds 1                # minutes
    python scripts/practice.py --data-dir DATA --small --same-time --out runs/same-time
    python scripts/practice.py --hosts fashion --examples 20000 --epochs 30 --methods plain wider
"""

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro

import esper
from esper.leyline.errors import ConfigError, EsperError
from esper.runs.assembly.run_config import data_folder
from esper.telemetry.machine import commit
from esper.tolaria.runtime import usable_cores
from practice_grown import grow
from practice_hosts import HOSTS, WIDER
from practice_plain import budget_of, fastest_threads, num_params, plans, run
from practice_table import GROWN, Result, page
from write_benchmarks import between_markers

MARKERS = ("<!-- practice: begin -->", "<!-- practice: end -->")
MARKERS_OF_TIME = ("<!-- practice, same time: begin -->", "<!-- practice, same time: end -->")
LONG = "plain, long"
GROWING = ("auto", "plain", "portfolio", "halving", "hill_climbing")
METHODS = (
    "plain",
    "plain, long",
    "plain, long, small batches",
    "wider",
    "wider, long",
    "wider, long, small batches",
    *(GROWN + name for name in GROWING),
)
OTHERS = (GROWN + "auto, last step",)
"""Methods that are in the table if they are named: `keep="last"` of `esper.grow`."""
FILE = "results.jsonl"
START = 5.0
"""Seconds of a growth beside its minutes: for the start and the test."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare `esper.grow` with the usual ways."""

    hosts: tuple[str, ...] = tuple(host.name for host in HOSTS)
    """Names of the hosts."""
    methods: tuple[str, ...] = METHODS
    """Names of the methods, as in the tables."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of the split, the initial weights and the order of the examples."""
    small: bool = False
    """Take the examples and epochs of the small table."""
    examples: int | None = None
    """Examples of training instead, of every host."""
    epochs: float | None = None
    """Epochs of each of the three runs instead."""
    data_dir: Path | None = None
    """Folder of the data files. ($ESPER_DATA)"""
    out: Path = Path("runs/practice")
    """Folder of the results."""
    page: Path | None = None
    """The page with the markers; the tables go to the terminal alone without one."""
    reference: str = "esper, auto"
    """The method that the others are compared with."""
    jobs: int = 1
    """Processes at the same time, each with OMP_NUM_THREADS cores."""
    same_time: bool = False
    """Give methods of esper the time of "plain, long" instead of its FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One result to compute."""

    host: str
    examples: int
    epochs: float
    method: str
    seed: int
    seconds: float = 0.0
    """Those that a method of esper may take; 0 for a budget of FLOPs."""

    @property
    def key(self) -> tuple[str, int, float, str, int]:
        """As `Result.key`."""
        return self.host, self.examples, self.epochs, self.method, self.seed


def jobs_of(options: Options) -> list[Job]:
    """Seed by seed, so that a table of few seeds is there early; raises ConfigError for names that are unknown."""
    known = {host.name: host for host in HOSTS}
    for given, names in ((options.hosts, known), (options.methods, METHODS + OTHERS)):
        if wrong := [name for name in given if name not in names]:
            raise ConfigError(f"{wrong[0]!r} is unknown; there are: {'; '.join(names)}.")
    found = []
    for seed, name, method in product(options.seeds, options.hosts, options.methods):
        host = known[name]
        usual = host.small if options.small else (host.examples, host.epochs)
        examples = usual[0] if options.examples is None else options.examples
        if not host.batch <= examples <= host.examples:
            raise ConfigError(f"{name} has {host.examples} examples in batches of {host.batch}, not {examples}.")
        epochs = usual[1] if options.epochs is None else options.epochs
        found.append(Job(host=name, examples=examples, epochs=epochs, method=method, seed=seed))
    return found


def measured(job: Job, data_dir: Path | None) -> Result:
    """Do the work of one job."""
    torch.set_num_threads(1)
    host = next(host for host in HOSTS if host.name == job.host)
    whole = host.load(data_dir, job.seed)
    data = whole.fewer(job.examples, max(1, len(whole.val[1]) * job.examples // host.examples))
    budget, limit = budget_of(host, data, job.epochs), num_params(host.net(WIDER))
    if (cores := usable_cores()) > 1 and not job.method.startswith(GROWN):
        torch.set_num_threads(fastest_threads(host, data, plans(host, data, budget)[job.method], cores))
    used, began = cpu_seconds(), time.perf_counter()
    if job.method.startswith(GROWN):
        allowed = (
            esper.Budget(minutes=job.seconds / 60, params=limit)
            if job.seconds
            else esper.Budget(flops=budget, params=limit)
        )
        found = grow(host, data, job.epochs, job.method.removeprefix(GROWN), allowed, job.seed)
    else:
        found = run(host, data, plans(host, data, budget)[job.method], job.seed)
    wall = time.perf_counter() - began
    if (found.flops > budget and not job.seconds) or found.params > limit:
        raise ConfigError(
            f"{job.method} on {job.host} spent {found.flops:,.0f} FLOPs and kept {found.params:,} parameters; "
            f"allowed are {budget:,.0f} and {limit:,}."
        )
    setting = {name: value for name, value in asdict(job).items() if name != "seconds"}
    return Result(
        **setting, **asdict(found), data=data.label, limit=limit, budget=budget, seconds=cpu_seconds() - used,
        wall=wall, commit=commit(),
    )  # fmt: skip


def cpu_seconds() -> float:
    """Of this process and of processes that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def stored(file: Path) -> list[Result]:
    """The results of a file; a last line that an interruption cut is removed."""
    if not file.exists():
        return []
    whole, _, cut = file.read_text(encoding="utf-8").rpartition("\n")
    if cut:
        file.write_text(whole + "\n" * bool(whole), encoding="utf-8")
    return [Result(**json.loads(line)) for line in whole.splitlines()]


def computed(jobs: Sequence[Job], options: Options, data_dir: Path | None) -> Iterator[Result]:
    """The results of the jobs, as they come."""
    if options.jobs == 1:
        yield from (measured(job, data_dir) for job in jobs)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(measured, job, data_dir) for job in jobs]
        try:
            yield from (done.result() for done in as_completed(waiting))
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(jobs: Sequence[Job], results: Sequence[Result], options: Options) -> Iterator[Result]:
    """The results of the jobs; `results` grows meanwhile, and has the seconds that methods of esper may take."""
    folder, by_time = data_folder(options.data_dir), [options.same_time and j.method.startswith(GROWN) for j in jobs]
    yield from computed([job for job, later in zip(jobs, by_time, strict=True) if not later], options, folder)
    yield from computed(
        [timed(job, results) for job, later in zip(jobs, by_time, strict=True) if later], options, folder
    )


def timed(job: Job, results: Sequence[Result]) -> Job:
    """The job with the seconds that "plain, long" took, less those of the start; ConfigError if they are not known."""
    seconds = [result.wall for result in results if result.key == replace(job, method=LONG).key]
    if not seconds:
        raise ConfigError(f"{job.method!r} in the same time needs the method {LONG!r}; add it.")
    return replace(job, seconds=max(seconds[0] - START, 0.5 * seconds[0]))


def main(options: Options) -> int:
    """Compute what is missing, and write the tables; returns the exit code."""
    markers = MARKERS_OF_TIME if options.same_time else MARKERS
    try:
        if options.page is not None:
            between_markers(options.page.read_text(encoding="utf-8"), "", markers)
        options.out.mkdir(parents=True, exist_ok=True)
        jobs, file = jobs_of(options), options.out / FILE
        wanted = {job.key for job in jobs}
        results = [result for result in stored(file) if result.key in wanted]
        missing = [job for job in jobs if job.key not in {result.key for result in results}]
        print(f"practice: {len(results)} of {len(jobs)} results are in {file}")
        with file.open("a", encoding="utf-8") as lines:
            for result in in_order(missing, results, options):
                results.append(result)
                lines.write(json.dumps(asdict(result)) + "\n")
                lines.flush()
                print(
                    f"practice: {len(results)}/{len(jobs)} {result.host}, {result.method}, seed {result.seed}: "
                    f"test {result.test:.2f}, {result.params:,} parameters, {result.wall:,.0f} s, {result.chosen}",
                    flush=True,
                )
        order = {job.key: place for place, job in enumerate(jobs)}
        text = page(sorted(results, key=lambda result: order[result.key]), options.reference)
        print(text)
        if options.page is not None:
            options.page.write_text(between_markers(options.page.read_text("utf-8"), text, markers), encoding="utf-8")
    except (EsperError, OSError) as error:
        print(f"practice: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"practice: stopped; the same command continues, what is done is in {options.out / FILE}", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
