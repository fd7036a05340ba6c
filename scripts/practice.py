"""What `esper.grow` is worth beside the usual ways, at equal compute: trains, and writes a part of docs/results.md.

For each host of `practice_hosts.py` the budget is three runs of its network, in FLOPs; no method may spend more, or
keep more parameters than the wider network has. Only methods of the "same time" have the seconds of "plain, long" as
their budget: the FLOPs that "esper, auto" would spend in them, by its own seconds with this seed. The best on the
validation split is tested, once. Results are lines of OUT/results.jsonl; what is there is not computed again, so that
an interrupted run continues.

    python scripts/practice.py --data-dir DATA --page docs/results.md           # `make results`: hours on two cores
    python scripts/practice.py --data-dir DATA --small --seeds 1                # minutes
    python scripts/practice.py --hosts fashion --examples 20000 --epochs 30 --methods plain wider
"""

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro

from esper.leyline.errors import ConfigError, EsperError
from esper.runs.assembly.run_config import data_folder
from esper.telemetry.machine import commit
from practice_grown import grow
from practice_hosts import HOSTS, WIDER
from practice_plain import budget_of, num_params, plans, run
from practice_table import GROWN, Result, page
from write_benchmarks import between_markers

MARKERS = ("<!-- practice: begin -->", "<!-- practice: end -->")
GROWING = ("auto", "plain", "portfolio", "halving", "hill_climbing")
TIMED = ("plain, long", GROWN + "auto")
SAME_TIME = tuple(f"{GROWN}{name}, same time" for name in ("auto", "plain"))
METHODS = ("plain", "plain, long", "wider", "wider, long", *(GROWN + name for name in GROWING), *SAME_TIME)
FILE = "results.jsonl"


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
    """Processes, each with one thread."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One result to compute."""

    host: str
    examples: int
    epochs: float
    method: str
    seed: int
    times: float = 1.0
    """Of the budget, how much this method may spend."""

    @property
    def key(self) -> tuple[str, int, float, str, int]:
        """As `Result.key`."""
        return self.host, self.examples, self.epochs, self.method, self.seed


def jobs_of(options: Options) -> list[Job]:
    """Seed by seed, so that a table of few seeds is there early; raises ConfigError for names that are unknown."""
    known = {host.name: host for host in HOSTS}
    for given, names in ((options.hosts, known), (options.methods, METHODS)):
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
    """Do the work of one job, in one thread."""
    torch.set_num_threads(1)
    host = next(host for host in HOSTS if host.name == job.host)
    whole = host.load(data_dir, job.seed)
    data = whole.fewer(job.examples, max(1, len(whole.val[1]) * job.examples // host.examples))
    budget, limit = budget_of(host, data, job.epochs) * job.times, num_params(host.net(WIDER))
    began = cpu_seconds()
    if job.method.startswith(GROWN):
        method = job.method.removeprefix(GROWN).partition(",")[0]
        found = grow(host, data, job.epochs, method, budget, limit, job.seed)
    else:
        found = run(host, data, plans(host, data, budget)[job.method], job.seed)
    if found.flops > budget or found.params > limit:
        raise ConfigError(
            f"{job.method} on {job.host} spent {found.flops:,.0f} FLOPs and kept {found.params:,} parameters; "
            f"allowed are {budget:,.0f} and {limit:,}."
        )
    settings = {name: value for name, value in asdict(job).items() if name != "times"}
    return Result(
        **settings, **asdict(found), data=data.label, limit=limit, budget=budget, seconds=cpu_seconds() - began,
        commit=commit(),
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


def timed(job: Job, results: Sequence[Result]) -> Job:
    """The job with the budget that the seconds of "plain, long" allow; ConfigError if they are not known."""
    seconds = {r.method: r.seconds for r in results if r.key == replace(job, method=r.method).key}
    if missing := [name for name in TIMED if name not in seconds]:
        raise ConfigError(f"{job.method!r} needs the seconds of {' and '.join(map(repr, missing))}; add that method.")
    return replace(job, times=seconds[TIMED[0]] / seconds[TIMED[1]])


def in_order(jobs: Sequence[Job], results: Sequence[Result], options: Options) -> Iterator[Result]:
    """The results of the jobs; `results` grows meanwhile, and has the seconds that the last of them need."""
    folder = data_folder(options.data_dir)
    yield from computed([job for job in jobs if job.method not in SAME_TIME], options, folder)
    yield from computed([timed(job, results) for job in jobs if job.method in SAME_TIME], options, folder)


def main(options: Options) -> int:
    """Compute what is missing, and write the tables; returns the exit code."""
    try:
        if options.page is not None:
            between_markers(options.page.read_text(encoding="utf-8"), "", MARKERS)
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
                    f"test {result.test:.2f}, {result.params:,} parameters, {result.seconds:,.0f} s, {result.chosen}",
                    flush=True,
                )
        order = {job.key: place for place, job in enumerate(jobs)}
        text = page(sorted(results, key=lambda result: order[result.key]), options.reference, SAME_TIME[0])
        print(text)
        if options.page is not None:
            options.page.write_text(between_markers(options.page.read_text("utf-8"), text, MARKERS), encoding="utf-8")
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
