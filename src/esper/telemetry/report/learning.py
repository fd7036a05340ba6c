"""The sections about the learner: reward terms, and the health of PPO with its thresholds."""

from esper.leyline.actions import HEADS
from esper.telemetry.anomalies import RULES
from esper.telemetry.report.views import Payload, Record, columns_of, rounds_of


def rewards(record: Record) -> dict[str, Payload]:
    """Each reward term, per host: its sum over an episode by round, and its mean by step in the last quarter."""
    return {
        run: {
            "rounds": record.query(_BY_ROUND, (run, found.bucket, found.hosts, found.last)),
            "steps": record.query(_BY_STEP, (run, found.last - found.quarter + 1, found.last, found.hosts)),
            "since": found.last - found.quarter + 1,
        }
        for run, found in rounds_of(record).items()
    }


_BY_ROUND = """
select max(round) as round, term, sum(value) / ($3 * count(distinct round)) as value
from rewards where run = $1 and round <= $4 group by (round - 1) // $2, term having sum(abs(value)) > 0 order by 1, 2"""
_BY_STEP = """
select t, term, sum(value) / ($4 * ($3 - $2 + 1)) as value
from rewards where run = $1 and round between $2 and $3 group by t, term having sum(abs(value)) > 0 order by 1, 2"""

CHARTS = {
    "KL divergence": ("approx_kl",),
    "Clipped share of ratios": ("clip_fraction",),
    "Explained variance of the critic": ("explained_variance",),
    "Entropy of each head, 1 = uniform": tuple(f"entropy_{head.name}" for head in HEADS),
    "Gradient norm before clipping": ("grad_norm",),
    "Policy loss": ("policy_loss",),
    "Value loss": ("value_loss",),
    "Largest probability ratio": ("ratio_max",),
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
