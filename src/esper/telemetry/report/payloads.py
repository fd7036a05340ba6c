"""What the report shows, as JSON values: one function for each section of the page.

record (views over the Parquet parts) --payloads--> {"runs": ..., "curves": ..., ...} --page.py--> one HTML file

Rows are aggregated in SQL. Whatever is not in the record is None here, and an empty section of the page.
"""

import json
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from esper.leyline.errors import command
from esper.leyline.files import absolute, mode_of
from esper.telemetry.record.lines import evaluation_files
from esper.telemetry.report import behaviour, hosts, learning
from esper.telemetry.report.views import Payload, Record, columns_of, rounds_of
from esper.telemetry.run_directory import IMPORTANCE, plain_json, plugins_of

WINDOW = 10
"""Last rounds over which two runs are compared."""
CONSTANT = ("fixed_schedule", "fixed_schedule_fill", "best_schedule")
"""Controllers that do the same in every episode."""
TRAINED = "trained"


def runs(record: Record) -> list[Payload]:
    """Each run: what was trained, on what, its settings, and its last complete round."""
    found = record.query("select * exclude (config, environment, summary, started), started::varchar as started, "
                         "config::varchar as config, environment::varchar as environment, "
                         "summary::varchar as summary from runs order by run")  # fmt: skip
    return [_run(record, row) for row in found]


def _run(record: Record, row: Payload) -> Payload:
    documents = {name: json.loads(row[name]) if row[name] else {} for name in ("config", "environment", "summary")}
    last = record.query("select * from rounds where run = ? order by round desc limit 1", (row["run"],))
    cost = record.query(
        "select sum(seconds) as seconds, count(*) as rounds, sum(rollbacks) as rollbacks from rounds where run = ?",
        (row["run"],),
    )[0]
    learned = record.query(_LEARNED, (row["run"],)) if last else [None]
    place = {"path": absolute(Path(row["path"]))}
    return row | documents | place | {"last": last[0] if last else None, "cost": cost, "learned": learned[0]}


_LEARNED = """
with quarter as (select greatest(max(round) // 4, 1) as length, max(round) as last from rounds where run = $1)
select length as rounds, avg(objective) filter (round <= length) as first,
    avg(objective) filter (round > last - length) as last
from rounds, quarter where run = $1 group by length"""


def curves(record: Record) -> dict[str, Payload]:
    """Means and quartiles over the hosts for each round of each run, and what the rounds cost.

    `seconds` pass from the start to the end of a round; `memory` is the peak in GiB.
    """
    names = ("objective", "committed", "live", "shaped_return", "growth")
    columns = ", ".join(
        f"avg({name}) as {name}, quantile_cont({name}, 0.25) as {name}_low, quantile_cont({name}, 0.75) as {name}_high"
        for name in names
    )
    sql = f"select max(round) as round, {columns} from episodes where run = ? group by (round - 1) // ? order by 1"
    curves = {run: columns_of(record.query(sql, (run, found.bucket))) for run, found in rounds_of(record).items()}
    for run, curve in ((run, curve) for run, curve in curves.items() if curve):
        costs = {row["round"]: row for row in record.query(_COSTS, (run,))}
        for name in ("seconds", "env_steps_per_s", "memory"):
            curve[name] = [costs.get(number, {}).get(name) for number in curve["round"]]
    return curves


_COSTS = """
select round, sum(seconds + coalesce(update_seconds, 0)) over (order by round) as seconds, env_steps_per_s,
    memory_peak / 1073741824.0 as memory
from rounds where run = ?"""


def differences(record: Record) -> list[Payload]:
    """Each run against the first one, paired by round and host in the last rounds that both have."""
    names = list(rounds_of(record))
    rows = [record.query(_DIFFERENCE, (names[0], other, WINDOW)) for other in names[1:]]
    return [row | {"run": other, "reference": names[0]}
            for other, (row,) in zip(names[1:], rows, strict=True) if row["pairs"]]  # fmt: skip


_DIFFERENCE = """
with newest as (select max(round) as round from rounds where run in ($1, $2) group by run), pairs as (
    select round, a.objective - b.objective as objective, a.committed - b.committed as committed,
           a.growth - b.growth as growth
    from (select * from episodes where run = $2) a join (select * from episodes where run = $1) b using (round, host)
    where round + $3 > (select min(newest.round) from newest)
)
select count(*) as pairs, min(round) as first, max(round) as last,
    avg(objective) as objective, 1.96 * stddev_samp(objective) / sqrt(count(*)) as objective_half,
    avg(committed) as committed, 1.96 * stddev_samp(committed) / sqrt(count(*)) as committed_half,
    avg(growth) as growth, 1.96 * stddev_samp(growth) / sqrt(count(*)) as growth_half
from pairs"""


def evaluation(record: Record) -> list[Payload]:
    """For each task the newest evaluation of each run on it, with the intervals that `esper evaluate` found.

    The tasks of the runs come first. `rows` hold means over hosts, half widths of their 95 % intervals, and the paired
    difference to the trained controller; `sources` the file and the verdict of each run, and its older files.
    """
    runs = {row["run"]: row for row in record.query("select run, path, task from runs order by run")}
    documents = {run: _documents(Path(row["path"])) for run, row in runs.items()}
    tasks: dict[str, dict[str, dict[str, list[Payload]]]] = {}
    for row in record.query(_EVALUATION):
        task = row["task"] or runs[row["run"]]["task"]
        tasks.setdefault(task, {}).setdefault(row["run"], {}).setdefault(row["file"], []).append(row)
    own = {row["task"] for row in runs.values()}
    sections = []
    for task in sorted(tasks, key=lambda task: (task not in own, task)):
        rows, sources = [], []
        for run, files in tasks[task].items():
            known = list(documents[run])
            *older, file = sorted(files, key=lambda name: known.index(name) if name in known else -1)
            found = documents[run].get(file, [])
            document = next((one for one in found if len(found) == 1 or one.get("task") == task), {})
            sources.append({"run": run, "file": file, "older": older, "verdict": document.get("verdict")})
            rows += _with_kind(files[file], document)
        sections.append({"task": task, "rows": rows, "sources": sources})
    return sections


def _with_kind(rows: list[Payload], document: Payload) -> list[Payload]:
    kinds = {TRAINED: "trained", **dict.fromkeys(CONSTANT, "constant")}
    differences = {found["name"]: found.get("difference") for found in document.get("controllers", ())}
    return [
        row | {"kind": kinds.get(row["controller"], "other"), "difference": differences.get(row["controller"])}
        for row in rows
    ]


def _documents(run: Path) -> dict[str, list[Payload]]:
    """The evaluations in a run directory by file, oldest first; the record complains about those that are damaged.

    A file of several tasks has one for each.
    """
    found = {}
    for file in evaluation_files(run):
        with suppress(ValueError):
            if stat.S_ISREG(mode_of(file)):
                document = json.loads(file.read_text("utf-8"))
                every = document if isinstance(document, list) else [document]
                if known := [one for one in every if isinstance(one, dict) and "controllers" in one]:
                    found[file.relative_to(run).as_posix()] = known
    return found


_MEASURES = ("objective", "committed", "test", "growth", "training_flops")
_EVALUATION = (
    "select e.run, e.file, e.task, e.controller, count(e.host) as hosts, "
    + ", ".join(
        f"coalesce(avg(e.{name}) filter (e.host is not null), max(e.{name}) filter (e.host is null)) as {name}, "
        f"1.96 * stddev_samp(e.{name}) filter (e.host is not null) / sqrt(count(e.host)) as {name}_half"
        for name in _MEASURES
    )
    + " from evaluations e group by e.run, e.file, e.task, e.controller order by e.run, objective desc"
)
"""A row without host holds the means of all."""


def importance(record: Record) -> dict[str, Payload]:
    """What each controller looks at, as `esper report` measured it; `why` there is nothing otherwise."""
    return {row["run"]: _importance(Path(row["path"])) for row in record.query("select run, path from runs")}


def _importance(run: Path) -> Payload:
    file = run / IMPORTANCE
    with suppress(ValueError):
        if stat.S_ISREG(mode_of(file)) and "groups" in (found := json.loads(file.read_text("utf-8"))):
            return dict(found)
    return {"why": f"{command('report', run, plugins=plugins_of(run))} measures it."}


def anomalies(record: Record) -> Payload:
    """How often each kind was found, with its newest finding, without rising J; and the newest hundred of all."""
    kinds = record.query(
        "select run, kind, count(*) as times, max(round) as last_round, arg_max(message, (round, t)) as message, "
        "arg_max(advice, (round, t)) as advice from anomalies where kind <> 'objective_rises' "
        "group by run, kind order by run, times desc"
    )
    newest = record.query("select * from anomalies order by run, round desc, t desc limit 100")
    return {"kinds": kinds, "newest": newest, "complaints": record.complaints}


PAYLOADS: Mapping[str, Callable[[Record], object]] = {
    "runs": runs,
    "anomalies": anomalies,
    "curves": curves,
    "differences": differences,
    "evaluation": evaluation,
    "hosts": hosts.hosts,
    "seeds": hosts.seeds,
    "behaviour": behaviour.behaviour,
    "importance": importance,
    "rewards": learning.rewards,
    "ppo": learning.ppo,
}
"""The sections by name; `payload` computes one."""


def payload(record: Record, name: str) -> object:
    """The JSON values of a section, rounded to six digits.

    Args:
        record: the opened record.
        name: a key of `PAYLOADS`.
    """
    return rounded(PAYLOADS[name](record))


def rounded(value: object) -> object:
    """`value` as JSON values, with floats of six significant digits, which are shorter by half."""
    return plain_json(_rounded(value))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
