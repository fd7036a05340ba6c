"""What the report shows, as JSON values: one function for each section of the page.

record (views over the Parquet parts) --payloads--> {"runs": ..., "curves": ..., ...} --document--> one HTML file

Rows are aggregated in SQL. Whatever is not in the record is None here, and an empty section of the page.

The page needs no network: scripts, styles and payloads are inside.

    header, nav, main       empty; app.js fills them
    script type JSON        one for each payload, `payload-NAME`
    d3, plot                the libraries (assets/NOTICE.md)
    dom, charts, app        elements, charts, sections; a page that fetches its payloads uses the same files
    embedded                starts app.js with the payloads of this file

The content security policy allows these scripts alone, by their digests.
"""

import base64
import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from html import escape
from importlib import resources
from itertools import combinations, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from esper.leyline.errors import command
from esper.leyline.files import absolute, mode_of, read_json
from esper.leyline.lifecycle import HEAD_NAMES, LifecycleOp
from esper.telemetry.anomalies import RULES
from esper.telemetry.record.reader import Record, evaluations_of
from esper.telemetry.record.schema import CONSTANT, TRAINED, shapley_values
from esper.telemetry.run_directory import IMPORTANCE, plain_json, plugins_of

POINTS = 2000
"""Most points of a curve; longer runs are averaged over neighbouring rounds."""
LONGEST_PHASE = 100
"""Most rounds at either end of a run over which decisions are counted, for the memory of the query."""
Payload = dict[str, Any]
T = TypeVar("T")


class Rounds(NamedTuple):
    """The complete rounds of a run.

    Attributes:
        last: number of the newest one, 0 if there is none. best: the one with the highest mean of 100·J.
        bucket: how many rounds share a point of a curve. hosts: hosts in a round.
    """

    last: int
    best: int
    bucket: int
    hosts: int

    @property
    def quarter(self) -> int:
        """How many rounds are "the first" or "the last" of the run: a quarter of them, at most `LONGEST_PHASE`."""
        return min(max(self.last // 4, 1), LONGEST_PHASE)

    @property
    def phases(self) -> dict[str, tuple[int, int]]:
        """The first and the last rounds of "the first" and "the last" of the run."""
        return {"first": (1, self.quarter), "last": (self.last - self.quarter + 1, self.last)}


def rounds_of(record: Record) -> dict[str, Rounds]:
    """The complete rounds of each run, by its name."""
    rows = record.query(
        "select run, coalesce(max(r.round), 0) as last, coalesce(arg_max(r.round, r.objective), 0) as best, "
        "any_value(runs.num_envs) as hosts from runs left join rounds r using (run) group by run order by run"
    )
    return {
        row["run"]: Rounds(row["last"], row["best"], max(-(-row["last"] // POINTS), 1), row["hosts"]) for row in rows
    }


def of_each_run(section: Callable[[Record, str, Rounds], T]) -> Callable[[Record], dict[str, T]]:
    """The section of all runs, by name, from that of one run with these rounds."""

    @wraps(section)
    def of_all(record: Record) -> dict[str, T]:
        return {run: section(record, run, found) for run, found in rounds_of(record).items()}

    return of_all


def columns_of(rows: list[dict[str, Any]]) -> Payload:
    """Rows as columns; {} without rows."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


WINDOW = 10
"""Last rounds over which two runs are compared."""


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


@of_each_run
def curves(record: Record, run: str, found: Rounds) -> Payload:
    """Means and quartiles over the hosts for each round, and what the rounds cost.

    `seconds` pass from the start to the end of a round; `memory` is the peak in GiB.
    """
    names = ("objective", "committed", "live", "shaped_return", "growth")
    columns = ", ".join(
        f"avg({name}) as {name}, quantile_cont({name}, 0.25) as {name}_low, quantile_cont({name}, 0.75) as {name}_high"
        for name in names
    )
    sql = f"select max(round) as round, {columns} from episodes where run = ? group by (round - 1) // ? order by 1"
    curve = columns_of(record.query(sql, (run, found.bucket)))
    if curve:
        sql = ("select round, sum(seconds + coalesce(update_seconds, 0)) over (order by round) as seconds, "
               "env_steps_per_s, memory_peak / 1073741824.0 as memory from rounds where run = ?")  # fmt: skip
        costs = {row["round"]: row for row in record.query(sql, (run,))}
        for name in ("seconds", "env_steps_per_s", "memory"):
            curve[name] = [costs.get(number, {}).get(name) for number in curve["round"]]
    return curve


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
    documents = {run: evaluations_of(Path(row["path"]), []) for run, row in runs.items()}  # the record has warned
    tasks: dict[str, dict[str, dict[str, list[Payload]]]] = {}
    for row in record.query(_EVALUATION):
        task = row["task"] or runs[row["run"]]["task"]
        tasks.setdefault(task, {}).setdefault(row["run"], {}).setdefault(row["file"], []).append(row)
    own = {row["task"] for row in runs.values()}
    kinds, sections = {TRAINED: "trained", **dict.fromkeys(CONSTANT, "constant")}, []
    for task in sorted(tasks, key=lambda task: (task not in own, task)):
        rows, sources = [], []
        for run, files in tasks[task].items():
            known = list(documents[run])
            *older, file = sorted(files, key=lambda name: known.index(name) if name in known else -1)
            found = documents[run].get(file, [])
            document = next((one for one in found if len(found) == 1 or one.get("task") == task), {})
            sources.append({"run": run, "file": file, "older": older, "verdict": document.get("verdict")})
            differences = {one["name"]: one.get("difference") for one in document.get("controllers", ())}
            for row in files[file]:
                name = row["controller"]
                rows.append(row | {"kind": kinds.get(name, "other"), "difference": differences.get(name)})
        sections.append({"task": task, "rows": rows, "sources": sources})
    return sections


_MEASURES = ("objective", "committed", "test", "growth", "training_flops")
_EVALUATION = (
    "select e.run, e.file, e.task, e.controller, count(e.host) as hosts, "
    + ", ".join(
        f"coalesce(avg(e.{name}) filter (e.host is not null), max(e.{name}) filter (e.host is null)) as {name}, "
        f"1.96 * stddev_samp(e.{name}) filter (e.host is not null) / sqrt(count(e.host)) as {name}_half"
        for name in _MEASURES
    )
    + " from evaluations e group by e.run, e.file, e.task, e.controller"
    " order by e.run, objective desc, e.file, e.controller"
)
"""A row without host holds the means of all."""


def importance(record: Record) -> dict[str, Payload]:
    """What each controller looks at, as `esper report` measured it; `why` there is nothing otherwise."""
    found = {}
    for row in record.query("select run, path from runs order by run"):
        run, measured = Path(row["path"]), None
        with suppress(ValueError):
            measured = read_json(run / IMPORTANCE) if stat.S_ISREG(mode_of(run / IMPORTANCE)) else None
        why = {"why": f"{command('report', run, plugins=plugins_of(run))} measures it."}
        found[row["run"]] = measured if isinstance(measured, dict) and "groups" in measured else why
    return found


def anomalies(record: Record) -> Payload:
    """How often each kind was found, with its newest finding, without rising J; and the newest hundred of all."""
    kinds = record.query(
        "select run, kind, count(*) as times, max(round) as last_round, arg_max(message, (round, t)) as message, "
        "arg_max(advice, (round, t)) as advice from anomalies where kind <> 'objective_rises' "
        "group by run, kind order by run, times desc, kind"
    )
    newest = record.query("select * from anomalies order by run, round desc, t desc, host, kind limit 100")
    return {"kinds": kinds, "newest": newest, "warnings": record.warnings}


# Hosts and seeds ------------------------------------------------------------------------------------------------------


HOSTS = 64
"""Most hosts of a round whose growth is in the page."""


@of_each_run
def hosts(record: Record, run: str, found: Rounds) -> list[Payload]:
    """The newest and the best round, host by host and step by step."""
    labels = {found.last: "newest", found.best: "best 100·J"}
    if found.last == found.best:
        labels = {found.last: "newest and best"} if found.last else {}
    return [round_of(record, run, number, label) for number, label in labels.items()]


def round_of(record: Record, run: str, number: int, label: str) -> Payload:
    """The hosts of a round, at most `HOSTS`; `total` is the number of all."""
    place = (run, number)
    results = record.query("select * exclude (run, round, instance), instance::varchar as instance from episodes "
                           "where run = ? and round = ? order by host", place)  # fmt: skip
    shown = results[:HOSTS]
    steps = _by_host(record, "select host, t, val_acc, committed_acc, reward from steps", place, "t")
    slots = _by_host(record, "select host, t, slot, stage, blueprint, alpha, contribution from slots", place, "slot, t")
    seeds = _by_host(record, "select host, slot, blueprint, germinated_t, fossilized_t, pruned_t, params, contribution "
                     "from seeds", place, "germinated_t")  # fmt: skip
    scores = _by_host(record, "select host, members, accuracy from coalitions", place, "t", where=_LAST_STEP)
    return {
        "round": number,
        "label": label,
        "total": len(results),
        "hosts": [
            row
            | {
                "steps": {name: [step[name] for step in steps.get(row["host"], [])]
                          for name in ("t", "val_acc", "committed_acc", "reward")},
                "segments": segments(slots.get(row["host"], [])),
                "seeds": seeds.get(row["host"], []),
                "waterfall": waterfall({frozenset(s["members"]): s["accuracy"] for s in scores.get(row["host"], [])}),
            }
            for row in shown
        ],
    }  # fmt: skip


_LAST_STEP = " and t = (select max(t) from coalitions where run = $1 and round = $2)"


def _by_host(
    record: Record, select: str, place: tuple[str, int], order: str, where: str = ""
) -> dict[int, list[dict[str, Any]]]:
    """The rows of a round by host, in this order within a host."""
    rows = record.query(f"{select} where run = $1 and round = $2{where} order by host, {order}", place)
    return {host: list(group) for host, group in groupby(rows, key=itemgetter("host"))}


def segments(rows: list[dict[str, Any]]) -> list[Payload]:
    """Rows of `slots`, by slot and step, as stretches in which stage and blueprint stay the same.

    Returns:
        Dictionaries with slot, stage, blueprint, first step `t`, and `alpha` of each of its steps.
    """
    found: list[Payload] = []
    for before, row in pairwise([None, *rows]):
        assert row is not None
        same = before and all(before[name] == row[name] for name in ("slot", "stage", "blueprint"))
        if not (same and before and before["t"] + 1 == row["t"]):
            found.append({name: row[name] for name in ("slot", "stage", "blueprint", "t")} | {"alpha": []})
        found[-1]["alpha"].append(None if row["alpha"] is None else round(row["alpha"], 3))
    return found


@of_each_run
def seeds(record: Record, run: str, found: Rounds) -> Payload:
    """What each blueprint brought, in the first and the last quarter of the rounds.

    `contribution` (points) and `params` are means over the fossilized seeds.
    """
    return {phase: record.query(_SEEDS, (run, *rounds)) for phase, rounds in found.phases.items()}


_SEEDS = """
select blueprint, count(*) as germinated, count(fossilized_t) as fossilized, count(pruned_t) as pruned,
    avg(contribution) filter (fossilized_t is not null) as contribution,
    avg(params) filter (fossilized_t is not null) as params,
    avg(coalesce(fossilized_t, pruned_t) - germinated_t) as age
from seeds where run = ? and round between ? and ? group by blueprint
order by fossilized desc, germinated desc, blueprint"""


Coalition = frozenset[str]


def waterfall(scores: Mapping[Coalition, float | None]) -> Payload | None:
    """The steps from the smallest measured coalition to the largest; None if fewer than two were measured.

    Args:
        scores: accuracy (points) by members; the members of the smallest are in all others.

    Returns:
        base and total accuracy, members of the base, `parts` with members and value (what a seed adds alone, or what
        is lost without it, where that was measured), the `rest`, the method ("subsets" or "leave one out"), and the
        Shapley value of each seed where all subsets were measured.
    """
    known = {members: score for members, score in scores.items() if score is not None}
    base, full = min(known, key=len, default=frozenset()), max(known, key=len, default=frozenset())
    players = sorted(full - base)
    if not players or not all(base <= members for members in known):
        return None
    values = {members - base: score for members, score in known.items()}
    complete = sum(subset <= full for subset in values) == 2 ** len(players)
    none, whole = frozenset[str](), frozenset(players)
    alone = {p: frozenset({p}) for p in players}
    of_one = {p: (one, none) if complete else (whole, whole - one) for p, one in alone.items()}
    parts: dict[tuple[str, ...], float] = {
        (p,): values[more] - values[less] for p, (more, less) in of_one.items() if less in values
    }
    if complete:  # what two add together beyond what each adds alone
        for p, q in combinations(players, 2):
            parts[p, q] = values[alone[p] | alone[q]] - values[alone[p]] - values[alone[q]] + values[none]
    subsets = (frozenset(p for i, p in enumerate(players) if bits >> i & 1) for bits in range(2 ** len(players)))
    shapley = shapley_values([values[subset] for subset in subsets]) if complete else []
    return {
        "base": known[base],
        "base_members": sorted(base),
        "total": known[full],
        "parts": [{"members": list(members), "value": value} for members, value in parts.items()],
        "rest": known[full] - known[base] - sum(parts.values()),
        "method": "subsets" if complete else "leave one out",
        "shapley": dict(zip(players, shapley, strict=True)) if complete else None,
    }


# Behaviour and learning -----------------------------------------------------------------------------------------------


BINS = 40
"""Most groups of steps of an episode."""


@of_each_run
def behaviour(record: Record, run: str, found: Rounds) -> Payload:
    """In the first and in the last quarter of the rounds, counts of operations by situation.

    Situations are the step of the episode, the most advanced seed that is not fossilized at the end of the step before,
    and the quarter of the accuracies of all hosts in that step. With them: blueprints by slot of the seeds germinated,
    and over all rounds the operations that took effect.
    """
    phases = found.phases
    if phases["first"] == phases["last"]:
        del phases["first"]  # there is one round
    queries = {"step": _OPS_BY_STEP, "accuracy": _OPS_BY_ACCURACY, "blueprint": _BLUEPRINTS, "stage": _OPS_BY_STAGE}
    if not record.query("select 1 from slots where run = ? limit 1", (run,)):
        del queries["stage"]  # unknown, which is not "no seed"
    counted = {
        phase: {"rounds": rounds} | {name: record.query(sql, (run, *rounds)) for name, sql in queries.items()}
        for phase, rounds in phases.items()
        if found.last
    }
    return {"phases": counted, "operations": columns_of(record.query(_OPS_BY_ROUND, (run, found.bucket)))}


_OPS_SUMS = ", ".join(f"avg(ops_{op.name.lower()}) as ops_{op.name.lower()}" for op in LifecycleOp)
_OPS_BY_ROUND = f"""
select max(round) as round, {_OPS_SUMS} from rounds where run = $1 group by (round - 1) // $2 order by 1"""
_CHOSEN = "from decisions where run = $1 and round between $2 and $3 and op is not null"
_OPS_BY_STEP = f"""
select (t - 1) // width * width + 1 as t, any_value(width) as width, lower(op) as op, count(*) as times
from (select t, op {_CHOSEN}),
    (select (coalesce(max(episode_length), 1) + {BINS} - 1) // {BINS} as width from runs where run = $1)
group by 1, 3 order by 1, 3"""
_OPS_BY_STAGE = f"""
with seeds as (
    select round, host, t + 1 as t, max(case upper(stage) when 'GERMINATED' then 1 when 'TRAINING' then 2
        when 'BLENDING' then 3 when 'HOLDING' then 4 else 0 end) as rank
    from slots where run = $1 and round between $2 and $3 group by round, host, t
)
select coalesce(rank, -1) as rank, lower(op) as op, count(*) as times
from (select round, host, t, op {_CHOSEN}) left join seeds using (round, host, t) group by 1, 2 order by 1, 2"""
_OPS_BY_ACCURACY = f"""
with ranked as (
    select round, host, t, ntile(4) over (partition by round, t order by val_acc) as quarter
    from steps where run = $1 and round between $2 and $3 and val_acc is not null
)
select quarter, lower(op) as op, count(*) as times
from (select round, host, t, op {_CHOSEN}) join ranked using (round, host, t) group by 1, 2 order by 1, 2"""
_BLUEPRINTS = """
select slot, blueprint, count(*) as times from seeds
where run = $1 and round between $2 and $3 group by slot, blueprint order by slot, blueprint"""


@of_each_run
def rewards(record: Record, run: str, found: Rounds) -> Payload:
    """Each reward term, per host: its sum over an episode by round, and its mean by step in the last quarter."""
    return {
        "rounds": record.query(_TERMS_BY_ROUND, (run, found.bucket, found.hosts, found.last)),
        "steps": record.query(_TERMS_BY_STEP, (run, *found.phases["last"], found.hosts)),
        "since": found.phases["last"][0],
    }


_TERMS_BY_ROUND = """
select max(round) as round, term, sum(value) / ($3 * count(distinct round)) as value
from rewards where run = $1 and round <= $4 group by (round - 1) // $2, term having sum(abs(value)) > 0 order by 1, 2"""
_TERMS_BY_STEP = """
select t, term, sum(value) / ($4 * ($3 - $2 + 1)) as value
from rewards where run = $1 and round between $2 and $3 group by t, term having sum(abs(value)) > 0 order by 1, 2"""

CHARTS = {
    "KL divergence": ("approx_kl",),
    "Clipped share of ratios": ("clip_fraction",),
    "Explained variance of the critic": ("explained_variance",),
    "Entropy of the operation and of all it is done with, 1 = uniform": ("entropy_op", "entropy_parameters"),
    "Entropy of each other head, 1 = uniform": tuple(f"entropy_{name}" for name in HEAD_NAMES if name != "op"),
    "Gradient norm before clipping": ("grad_norm",),
    "Policy loss": ("policy_loss",),
    "Value loss": ("value_loss",),
}
"""Charts of PPO by title, with their columns of `updates`."""


def ppo(record: Record) -> Payload:
    """The charts of PPO: columns by round for each run, and the thresholds of alarms that fit on them."""
    known = {row["column_name"] for row in record.query("describe updates")}
    names = [name for columns in CHARTS.values() for name in columns if name in known]
    means = ", ".join(["max(round) as round", *(f"avg({name}) as {name}" for name in names)])
    sql = f"select {means} from updates where run = ? group by (round - 1) // ? order by 1"
    return {
        "charts": CHARTS,
        "runs": {run: columns_of(record.query(sql, (run, found.bucket))) for run, found in rounds_of(record).items()},
        "thresholds": _thresholds(record),
    }


def _thresholds(record: Record) -> list[Payload]:
    """Lines to draw, with what they say."""
    limits = [
        {
            "column": name,
            "value": rule.threshold,
            "label": f"alarm {'below' if rule.below else 'above'} {rule.threshold:g}",
        }
        for columns in CHARTS.values()
        for name in columns
        for rule in RULES.get(name, ())
    ]
    targets = record.query("select distinct (config->>'$.ppo.target_kl')::double as kl, "
                           "(config->>'$.ppo.max_grad_norm')::double as norm from runs")  # fmt: skip
    for row in targets:
        limits.append({"column": "approx_kl", "value": row["kl"], "label": f"target {row['kl']}"})
        limits.append({"column": "grad_norm", "value": row["norm"], "label": f"clipped at {row['norm']}"})
    return [limit for limit in limits if limit["value"] is not None]


PAYLOADS: Mapping[str, Callable[[Record], object]] = {
    "runs": runs,
    "anomalies": anomalies,
    "curves": curves,
    "differences": differences,
    "evaluation": evaluation,
    "hosts": hosts,
    "seeds": seeds,
    "behaviour": behaviour,
    "importance": importance,
    "rewards": rewards,
    "ppo": ppo,
}
"""The sections by name; `payload` computes one."""


def payload(record: Record, name: str) -> object:
    """The JSON values of a section, a key of `PAYLOADS`, rounded to six digits."""
    return rounded(PAYLOADS[name](record))


def rounded(value: object) -> object:
    """`value` as JSON values, with floats of six significant digits, which are shorter by half.

    Digits before the point stay: times and sums have more of them.
    """
    return plain_json(value, lambda number: float(f"{number:.6g}") if abs(number) < 1e6 else number)


SCRIPTS = ("d3.min.js", "plot.min.js", "dom.js", "charts.js", "app.js", "embedded.js")


def asset(name: str) -> str:
    """The text of a file that is part of the page."""
    return resources.files("esper.telemetry.report").joinpath("assets", name).read_text(encoding="utf-8")


def colors(scheme: str) -> dict[str, str]:
    """The colours of a page, #rrggbb by name; `scheme` is "light" or "dark"."""
    blocks = re.findall(r":root \{(.*?)\}", asset("style.css"), re.DOTALL)[: 2 if scheme == "dark" else 1]
    return {name: color for block in blocks for name, color in re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)}


def payloads_of(record: Record, on_section: Callable[[int, int, str], None]) -> dict[str, object]:
    """All payloads, by name; `on_section` is called with the sections done, those in all, and the name of the next."""
    found: dict[str, object] = {}
    for number, name in enumerate(PAYLOADS):
        on_section(number, len(PAYLOADS), name)
        found[name] = payload(record, name)
    return found


def document(payloads: Mapping[str, object], title: str) -> str:
    """The page with these payloads; `title` is shown until it is drawn."""
    scripts = [asset(name) for name in SCRIPTS]
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    data = "\n".join(
        f'<script type="application/json" id="payload-{name}">{embedded(value)}</script>'
        for name, value in payloads.items()
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{asset('style.css')}</style>\n</head>\n<body>",
            '<header></header>\n<nav aria-label="Sections"></nav>\n<main>',
            "<noscript>This report is drawn by the scripts in it; allow them to run.</noscript></main>",
            data,
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def digest(script: str) -> str:
    """The name of a script in a content security policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def embedded(value: object) -> str:
    """JSON that cannot end the script element that it stands in, whatever its strings are."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
