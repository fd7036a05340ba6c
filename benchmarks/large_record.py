"""Queries of a large record: ten million decisions of 16 hosts, made up.

    python benchmarks/large_record.py            # half a gigabyte in a temporary folder, minutes
    python benchmarks/large_record.py --quick    # a hundredth of it

One episode of one host must be found within a second, and each query of an overview within 20 seconds and 1 GiB.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import tyro

from esper.leyline.lifecycle import OP_NAMES
from esper.telemetry.record.reader import Record, open_record
from esper.telemetry.record.writer import part_of, sha256_of
from esper.telemetry.run_directory import ABOUT, FORMAT, RECORD

HOSTS, STEPS, SLOTS = 16, 60, 3
EPISODE_SECONDS, OVERVIEW_SECONDS, MEMORY_BYTES = 1.0, 20.0, 2**30
_OP = f"([{', '.join(repr(op) for op in OP_NAMES)}])[1 + (hash(i) % 10 // 5)::INTEGER * (hash(i) % 6)::INTEGER]"
_PLACE = (
    f"(i // {HOSTS * STEPS} + 1)::INTEGER AS round, (i % {STEPS} + 1)::INTEGER AS t, "
    f"(i // {STEPS} % {HOSTS})::INTEGER AS host"
)
_STEPS = f"""
SELECT {_PLACE}, (hash(i) % 1000 / 10)::FLOAT AS val_acc, random()::FLOAT AS val_loss,
       random()::FLOAT AS train_loss, (hash(i + 1) % 1000 / 10)::FLOAT AS committed_acc, 1.1::FLOAT AS growth,
       random()::FLOAT AS reward, {_OP} AS op, 'r0c' || (hash(i) % 3) AS slot, hash(i) % 7 > 0 AS success,
       {", ".join(f"random()::FLOAT / 6 AS p_{op.lower()}" for op in OP_NAMES)}, random()::FLOAT AS value,
       random()::FLOAT AS term_potential, random()::FLOAT AS term_terminal, false AS flag_entangled
FROM range({{first}}, {{last}}) AS numbers(i) ORDER BY round, host, t
"""
_SLOTS = f"""
SELECT {_PLACE}, 'r0c' || (i // 20 % {SLOTS}) AS slot, (i // 20 % 3)::INTEGER AS serial,
       'BLENDING' AS stage, 'conv_light' AS blueprint, random()::FLOAT AS alpha, random()::FLOAT AS contribution,
       500::BIGINT AS params
FROM range({{first}}, {{last}}) AS numbers(i)
"""
EPISODE = "SELECT t, op, slot, value, p_wait FROM decisions WHERE round = {round} AND host = 7 ORDER BY t"
OVERVIEW = {
    "operations by round": "SELECT round, op, count(*) AS n FROM decisions GROUP BY round, op",
    "probability of WAIT by round": "SELECT round, avg(p_wait) AS p FROM decisions GROUP BY round",
    "accuracy by step": "SELECT t, avg(val_acc) AS mean, quantile_cont(val_acc, 0.9) AS high FROM steps GROUP BY t",
    "reward terms by round": "SELECT round, term, avg(value) AS mean FROM rewards GROUP BY round, term",
    "seeds by blueprint": "SELECT blueprint, last_stage, count(*) AS n FROM seeds GROUP BY ALL",
    "episodes": "SELECT round, avg(objective) AS mean FROM episodes GROUP BY round",
    "anomalies": "SELECT kind, count(*) AS n FROM anomalies GROUP BY kind",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure queries of a record that is made up."""

    rows: int = 10_000_000
    """Decisions, at least 96,000."""
    quick: bool = False
    """A hundredth of the rows, and no limits."""
    folder: Path | None = None
    """Where to make the record, or a record made before. (a temporary folder)"""


def make(run: Path, rounds: int) -> None:
    """Write a run of so many rounds: parts, metrics and episodes."""
    (run / RECORD).mkdir(parents=True)
    (run / "config.toml").write_text(f"task = 'null'\nnum_envs = {HOSTS}\nepisode_length = {STEPS}\n")
    (run / ABOUT).write_text(json.dumps({"format": FORMAT}))
    with duckdb.connect(":memory:") as database, (run / "metrics.jsonl").open("w") as file:
        for n in range(rounds):
            rows = {"first": n * HOSTS * STEPS, "last": (n + 1) * HOSTS * STEPS}
            digests = {}
            for kind, select in (("steps", _STEPS), ("slots", _SLOTS)):
                part = part_of(run / RECORD, kind, n + 1)
                database.execute(f"COPY ({select.format(**rows)}) TO '{part}' (FORMAT parquet, COMPRESSION zstd)")
                digests[kind] = sha256_of(part)
            line = {"round": n + 1, "objective_mean": 50.0, "lr": 1.0, "record": digests}
            file.write(json.dumps(line) + "\n")
    with (run / "events.jsonl").open("w") as file:
        for n in range(rounds * HOSTS):
            episode = {"kind": "episode", "round": n // HOSTS + 1, "host": n % HOSTS, "objective": 50.0, "rollbacks": 0}
            file.write(json.dumps(episode) + "\n")


def seconds(record: Record, sql: str) -> float:
    """Wall time of a query."""
    began = time.perf_counter()
    record.query(sql)
    return time.perf_counter() - began


def measure(run: Path, rounds: int, *, limited: bool) -> list[str]:
    """Print the times; returns the limits that are missed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    missed: list[str] = []
    with open_record([run]) as record:
        print(f"{'open':32} {time.perf_counter() - began:8.3f} s")
        several = [seconds(record, EPISODE.format(round=1 + i * (rounds - 1) // 20)) for i in range(21)]
        found = {"one episode of one host": (statistics.median(several), EPISODE_SECONDS)}
        found |= {name: (seconds(record, sql), OVERVIEW_SECONDS) for name, sql in OVERVIEW.items()}
        for name, (taken, limit) in found.items():
            print(f"{name:32} {taken:8.3f} s")
            if taken > limit:
                missed.append(f"{name}: {taken:.3f} s, at most {limit} s")
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{'memory beyond the start':32} {memory / 2**20:8.0f} MiB")
    if memory > MEMORY_BYTES:
        missed.append(f"{memory / 2**20:.0f} MiB of memory, at most {MEMORY_BYTES / 2**20:.0f}")
    return missed if limited else []


def main(options: Options) -> int:
    """Make the record if it is not there, measure, and return 1 if a limit is missed."""
    rounds = options.rows // (100 if options.quick else 1) // (HOSTS * STEPS)
    with tempfile.TemporaryDirectory() as temporary:
        run = options.folder or Path(temporary) / "run"
        if not run.exists():
            make(run, rounds)
        size = sum(file.stat().st_size for file in (run / RECORD).iterdir())
        print(f"{rounds * HOSTS * STEPS:,} decisions, {rounds:,} rounds, {size / 2**20:.0f} MiB of parts")
        missed = measure(run, rounds, limited=not options.quick)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
