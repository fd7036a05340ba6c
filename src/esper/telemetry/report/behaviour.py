"""The section about the controller: which operations it chooses in which situation, early and late in the run."""

from esper.leyline.actions import LifecycleOp
from esper.telemetry.report.views import Payload, Record, Rounds, columns_of, rounds_of

BINS = 40
"""Most groups of steps of an episode."""


def behaviour(record: Record) -> dict[str, Payload]:
    """For each run, in the first and in the last quarter of its rounds, counts of operations by situation.

    Situations are the step of the episode, the most advanced seed that is not fossilized at the end of the step before,
    and the quarter of the accuracies of all hosts in that step. With them: blueprints by slot of the seeds germinated,
    and over all rounds the operations that took effect.
    """
    return {run: _run(record, run, found) for run, found in rounds_of(record).items()}


def _run(record: Record, run: str, found: Rounds) -> Payload:
    phases = {"first": (1, found.quarter), "last": (found.last - found.quarter + 1, found.last)}
    if phases["first"] == phases["last"]:
        del phases["first"]  # there is one round
    queries = {"step": _BY_STEP, "accuracy": _BY_ACCURACY, "blueprint": _BLUEPRINTS, "stage": _BY_STAGE}
    if not record.query("select 1 from slots where run = ? limit 1", (run,)):
        del queries["stage"]  # unknown, which is not "no seed"
    counted = {
        phase: {"rounds": rounds} | {name: record.query(sql, (run, *rounds)) for name, sql in queries.items()}
        for phase, rounds in phases.items()
        if found.last
    }
    return {"phases": counted, "operations": columns_of(record.query(_BY_ROUND, (run, found.bucket)))}


_SUMS = ", ".join(f"avg(ops_{op.name.lower()}) as ops_{op.name.lower()}" for op in LifecycleOp)
_BY_ROUND = f"""
select max(round) as round, {_SUMS} from rounds where run = $1 group by (round - 1) // $2 order by 1"""
_CHOSEN = "from decisions where run = $1 and round between $2 and $3 and op is not null"
_BY_STEP = f"""
select (t - 1) // width * width + 1 as t, any_value(width) as width, lower(op) as op, count(*) as times
from (select t, op {_CHOSEN}),
    (select (coalesce(max(episode_length), 1) + {BINS} - 1) // {BINS} as width from runs where run = $1)
group by 1, 3 order by 1, 3"""
_BY_STAGE = f"""
with seeds as (
    select round, host, t + 1 as t, max(case upper(stage) when 'GERMINATED' then 1 when 'TRAINING' then 2
        when 'BLENDING' then 3 when 'HOLDING' then 4 else 0 end) as rank
    from slots where run = $1 and round between $2 and $3 group by round, host, t
)
select coalesce(rank, -1) as rank, lower(op) as op, count(*) as times
from (select round, host, t, op {_CHOSEN}) left join seeds using (round, host, t) group by 1, 2 order by 1, 2"""
_BY_ACCURACY = f"""
with ranked as (
    select round, host, t, ntile(4) over (partition by round, t order by val_acc) as quarter
    from steps where run = $1 and round between $2 and $3 and val_acc is not null
)
select quarter, lower(op) as op, count(*) as times
from (select round, host, t, op {_CHOSEN}) join ranked using (round, host, t) group by 1, 2 order by 1, 2"""
_BLUEPRINTS = """
select slot, blueprint, count(*) as times from seeds
where run = $1 and round between $2 and $3 group by slot, blueprint order by slot, blueprint"""
