"""What looks wrong in a run: thresholds, and small functions that compare a run with them.

    each update  --of_update, of_flags, of_trend-->  alarms in events.jsonl, while the run goes on
    the record   --find------------------------->    the table `anomalies`, from the same rules and others that need
                                                     several rounds

All thresholds and advice are in `RULES`. A missing value (NaN, NULL) raises nothing.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from esper.leyline.settings import AtLeast0, Finite

WINDOW = 10
"""Rounds whose mean is compared with that of the rounds before."""
WARM_UP = 5
"""Rounds after which memory no longer grows for good reasons."""

Row = Mapping[str, Any]
Query = Callable[[str, Sequence[object]], list[dict[str, Any]]]
"""Rows of a SELECT with parameters, as `Record.query`."""


@dataclass(frozen=True)
class Alarm:
    """A number beyond its threshold; `name` is the kind of its rule."""

    name: str
    value: float
    threshold: float


class Rule(NamedTuple):
    """A threshold, what crossing it means, and what to do. `below`: it is crossed downwards."""

    threshold: float
    message: str
    advice: str
    below: bool = False

    def broken_by(self, value: float) -> bool:
        """Whether a number is beyond the threshold; NaN is not."""
        return value < self.threshold if self.below else value > self.threshold


_SMALLER_STEPS = "Lower ppo.lr or ppo.update_epochs."
_REPORT_BUG = "Resume from an earlier checkpoint; if it happens again, report it with this run directory."
_ABOVE = {
    "stored_log_prob_error": Rule(
        0.01, "A stored log-probability is not that of the policy that acted, before any step was taken.", _REPORT_BUG
    ),
    "approx_kl": Rule(0.1, "An update moved the policy far from the one that acted (KL).", _SMALLER_STEPS),
    "hidden_rms": Rule(10.0, "The recurrent state is too large.", "Lower ppo.lr; look at the features."),
    "cell_rms": Rule(10.0, "The recurrent cell state is too large.", "Lower ppo.lr; look at the features."),
    "nonfinite_minibatches": Rule(0.0, "Minibatches had a loss or gradient that is not finite.", _SMALLER_STEPS),
    "actions_outside_mask": Rule(0.0, "A stored action was outside its mask.", _REPORT_BUG),
    "nonfinite_logits": Rule(0.0, "The policy had logits that are not finite.", _REPORT_BUG),
}
_BELOW = {
    "explained_variance": Rule(
        -0.5, "The critic predicts returns worse than a constant.", "Lower ppo.lr, or raise ppo.vf_coef.", below=True
    ),
    "hidden_rms": Rule(1e-6, "The recurrent state is zero.", "Look for features that are all zero.", below=True),
    "cell_rms": Rule(1e-6, "The recurrent cell state is zero.", "Look for features that are all zero.", below=True),
    "grad_norm": Rule(1e-6, "The gradient of the policy vanished.", "Look for rewards that never change.", below=True),
    "entropy_op": Rule(
        0.08, "The policy is nearly certain of every operation.", "Raise ppo.ent_coef or lower ppo.lr.", below=True
    ),
    "entropy_parameters": Rule(
        0.05,
        "The policy is nearly certain of slot, blueprint and all else that an operation is done with.",
        "Raise ppo.ent_coef or lower ppo.lr.",
        below=True,
    ),
}
_OTHERS = {
    "gradient_always_clipped": Rule(
        20.0,
        "For ten updates the gradient was many times the limit that it is clipped to.",
        "Lower ppo.vf_coef or the scale of the reward, or raise ppo.max_grad_norm.",
    ),
    "value_collapse": Rule(
        0.02,
        "For ten rounds the values hardly vary, while the returns do: the critic is constant.",
        "Raise ppo.vf_coef or ppo.lr; check that the features tell the hosts apart.",
        below=True,
    ),
    "lstm_saturated": Rule(
        0.9, "The recurrent state is at its limits, where it learns nothing.", "Lower ppo.lr; normalize the features."
    ),
    "policy_waits": Rule(
        0.97,
        "The policy almost always waits where it could act.",
        "Raise ppo.ent_coef; compare the reward of a germination with its cost.",
    ),
    "rollbacks": Rule(
        0.25,
        "More than a quarter of the hosts were rolled back in a round.",
        "Lower the learning rates of hosts and seeds, or batch sizes that are too small.",
    ),
    "rollbacks_dominate_return": Rule(
        0.5,
        "Most of the variance of the return comes from rollbacks, which hides the effect of the operations.",
        "Lower the learning rates of hosts and seeds.",
    ),
    "memory_grows": Rule(
        1.5,
        "Memory keeps growing; value: last peak / peak after five rounds.",
        "Look at listeners that keep records; resume the run to begin with fresh memory.",
    ),
    "objective_rises": Rule(2.0, "100·J rose within ten rounds.", "Nothing: train on."),
    "objective_falls": Rule(
        -2.0,
        "100·J fell within ten rounds.",
        "Evaluate the best checkpoint instead of the newest; lower ppo.lr.",
        below=True,
    ),
    "objective_stands_still": Rule(
        0.5,
        "100·J changed by at most half a point within ten rounds.",
        "Stop if it is as good as the baselines; else train with more hosts or another seed.",
        below=True,
    ),
    "reward_flag_steps": Rule(
        0.0,
        "The reward marked steps of a host in which a seed may game it.",
        "Compare 100·J with the shaped return; use reward.mode = 'objective'.",
    ),
}
RULES: Mapping[str, tuple[Rule, ...]] = {
    kind: tuple(table[kind] for table in (_ABOVE, _BELOW, _OTHERS) if kind in table)
    for kind in (*_ABOVE, *_BELOW, *_OTHERS)
}
"""The rules by kind of anomaly."""


def rule_of(alarm: Alarm) -> Rule:
    """The rule that an alarm broke."""
    kind = alarm.name if alarm.name in RULES else "reward_flag_steps"
    return next(rule for rule in RULES[kind] if rule.threshold == alarm.threshold)


# While the run goes on ------------------------------------------------------------------------------------------------


def of_update(metrics: Mapping[str, float]) -> Iterator[Alarm]:
    """Every metric of an update beyond its threshold. A policy that is meant to become certain need not explore.

    A single head may be certain because it has learned what is best; all of them together are not, in a policy that
    still learns.
    """
    sharpened = metrics.get("inverse_temperature", 1.0) > 1.0
    for name, value in metrics.items():
        if sharpened and name.startswith("entropy_"):
            continue
        for table in (_ABOVE, _BELOW):
            if name in table and table[name].broken_by(value):
                yield Alarm(name, value, table[name].threshold)


def of_flags(steps: Mapping[str, int]) -> Iterator[Alarm]:
    """The reward flags that a host raised in an episode; `steps` counts the steps of each flag."""
    for name, count in steps.items():
        if _OTHERS["reward_flag_steps"].broken_by(float(count)):
            yield Alarm(f"{name}_steps", float(count), _OTHERS["reward_flag_steps"].threshold)


def of_trend(rounds: int, recent: Sequence[float]) -> Iterator[Alarm]:
    """Every ten rounds: how 100·J changed against the ten rounds before. `recent`: those of the last twenty rounds."""
    now, before = recent[-WINDOW:], recent[-2 * WINDOW : -WINDOW]
    if rounds % WINDOW or len(now) < WINDOW or len(before) < WINDOW:
        return
    change = sum(now) / WINDOW - sum(before) / WINDOW
    yield from _broken("objective_rises", change)
    yield from _broken("objective_falls", change)
    if abs(change) <= (limit := _OTHERS["objective_stands_still"].threshold):
        yield Alarm("objective_stands_still", change, limit)


def _broken(kind: str, value: float) -> Iterator[Alarm]:
    if _OTHERS[kind].broken_by(value):
        yield Alarm(kind, value, _OTHERS[kind].threshold)


# From a record --------------------------------------------------------------------------------------------------------

Measure = tuple[str, int, float]
"""Kind, round, and the number that is compared with the threshold."""


def find(query: Query, run: str) -> list[dict[str, Any]]:
    """The rows of the table `anomalies` of a run, in order of rounds."""
    updates = query("SELECT * FROM updates WHERE run = ? ORDER BY round", [run])
    rounds = query("SELECT round, objective, memory_peak FROM rounds WHERE run = ? ORDER BY round", [run])
    limits = query("SELECT config->>'$.ppo.max_grad_norm' AS most FROM runs WHERE run = ?", [run])
    most = float(limits[0]["most"] or "nan") if limits else math.nan
    # where waiting is the only legal operation its probability is exactly 1
    chosen = "SELECT round, avg(p_wait) AS p_wait FROM decisions WHERE run = ? AND p_wait < 1 GROUP BY round"
    waits = query(f"{chosen} ORDER BY round", [run])
    episodes = query("SELECT round, host, rollbacks, shaped_return FROM episodes WHERE run = ? ORDER BY round", [run])
    found: list[tuple[int, int | None, Alarm]] = [
        (row["round"], None, alarm)
        for row in updates
        for alarm in of_update({name: value for name, value in row.items() if isinstance(value, float)})
    ]
    measures = (*_of_updates(updates, most), *_of_rounds(rounds, waits), *_of_rollbacks(episodes))
    found += [(number, None, alarm) for kind, number, value in measures for alarm in _broken(kind, value)]
    objective = [_number(row["objective"]) for row in rounds]
    for end in range(2 * WINDOW, len(rounds) + 1, WINDOW):
        found += [
            (rounds[end - 1]["round"], None, alarm)
            for alarm in of_trend(end, objective[end - 2 * WINDOW : end])
            if alarm.name != "objective_rises"
        ]
    columns = (row["column_name"] for row in query("DESCRIBE steps", ()))
    for name in [column for column in columns if column.startswith("flag_")]:
        marked = query(f'SELECT round, host, count(*) AS n FROM steps WHERE run = ? AND "{name}" GROUP BY ALL', [run])
        found += [(m["round"], m["host"], a) for m in marked for a in of_flags({name.removeprefix("flag_"): m["n"]})]
    return [_row(*finding) for finding in sorted(found, key=lambda f: (f[0], -1 if f[1] is None else f[1]))]


def in_words(row: Row) -> str:
    """A line about all anomalies of one kind: `first`, `last` round, number `n`, the last `value`."""
    rounds = f"round {row['first']}" if row["first"] == row["last"] else f"rounds {row['first']} to {row['last']}"
    times = "" if row["n"] == 1 else f", {row['n']} times"
    return f"{row['kind']} ({rounds}{times}; {row['value']:.3g}): {row['message']} {row['advice']}"


def _row(round_: int, host: int | None, alarm: Alarm) -> dict[str, Any]:
    rule = rule_of(alarm)
    place = {"round": round_, "t": None, "host": host}
    texts = {"message": rule.message, "advice": rule.advice}
    return place | {"kind": alarm.name, "value": alarm.value, "threshold": alarm.threshold} | texts


def _windows(rows: Sequence[Row], *names: str) -> Iterator[tuple[int, list[Row]]]:
    """Every tenth round, and the ten rows up to it, if all have these numbers."""
    for end in range(WINDOW, len(rows) + 1, WINDOW):
        window = list(rows[end - WINDOW : end])
        if all(isinstance(row.get(name), float) for row in window for name in names):
            yield window[-1]["round"], window


def _of_updates(updates: Sequence[Row], limit: float) -> Iterator[Measure]:
    """What ten updates have in common; `limit` is the norm that gradients are clipped to."""
    for number, window in _windows(updates, "grad_norm"):
        yield "gradient_always_clipped", number, min(row["grad_norm"] for row in window) / limit
    for number, window in _windows(updates, "value_std", "return_std"):
        shares = [row["value_std"] / row["return_std"] for row in window if row["return_std"] > 0.0]
        yield "value_collapse", number, max(shares, default=math.nan)
    for row in updates:  # the root mean square of the recurrent output, which is at most 1
        yield "lstm_saturated", row["round"], _number(row.get("hidden_rms"))


def _of_rounds(rounds: Sequence[Row], waits: Sequence[Row]) -> Iterator[Measure]:
    """The mean probability of WAIT in ten rounds, and the last memory peak against that of an early round."""
    for number, window in _windows(waits, "p_wait"):
        yield "policy_waits", number, statistics.fmean(row["p_wait"] for row in window)
    peaks = [(row["round"], float(row["memory_peak"])) for row in rounds if row["memory_peak"]]
    if len(peaks) >= 2 * WARM_UP:
        yield "memory_grows", peaks[-1][0], peaks[-1][1] / peaks[WARM_UP - 1][1]


def _of_rollbacks(episodes: Sequence[Row]) -> Iterator[Measure]:
    """The share of hosts with rollbacks, and the share of the variance of the return that is between the two groups."""
    for number, group in groupby(episodes, key=itemgetter("round")):
        hosts = list(group)
        marked = [bool(row["rollbacks"]) for row in hosts]
        yield "rollbacks", number, sum(marked) / len(hosts)
        returns = [_number(row["shaped_return"]) for row in hosts]
        yield "rollbacks_dominate_return", number, share_between(marked, returns)


def share_between(marked: Sequence[bool], values: Sequence[float]) -> float:
    """The share of the variance of the values between those that are marked and the others; NaN if there is none.

    `p (1 - p) (difference of the means)² / variance`, p the share of the marked.
    """
    groups = [[v for v, m in zip(values, marked, strict=True) if m is which] for which in (True, False)]
    if not all(len(group) > 1 for group in groups) or (variance := statistics.pvariance(values)) == 0.0:
        return math.nan
    share = len(groups[0]) / len(values)
    return share * (1 - share) * (statistics.fmean(groups[0]) - statistics.fmean(groups[1])) ** 2 / variance


def _number(value: object) -> float:
    return value if isinstance(value, float) else math.nan


@dataclass(frozen=True)
class Trend:
    """The trend of J over rounds, which selects the best policy and raises alarms. Single rounds are noisy.

    round      1 ... 10 | 11 ... 20 | 21          a mean of ten rounds
    best                ^ from here on, every round: a new highest mean saves the best checkpoint
    alarm                           ^ every ten rounds: the mean against that of the ten rounds before

    `recent`: mean 100·J of the last twenty rounds, oldest first; `best`: the highest mean of ten rounds so far.
    """

    rounds: AtLeast0 = 0
    recent: Annotated[tuple[Finite, ...], Field(max_length=2 * WINDOW)] = ()
    best: Finite | None = None

    def after(self, objective: float) -> tuple["Trend", bool]:
        """The trend after another round, and whether the mean of the last ten is a new best."""
        recent = (*self.recent, objective)[-2 * WINDOW :]
        mean = sum(recent[-WINDOW:]) / WINDOW if len(recent) >= WINDOW else None
        better = mean is not None and (self.best is None or mean > self.best)
        return Trend(self.rounds + 1, recent, mean if better else self.best), better

    def alarms(self) -> Iterator[Alarm]:
        """Every ten rounds: J rose or fell by more than two points, or changed by at most half a point."""
        return of_trend(self.rounds, self.recent)
