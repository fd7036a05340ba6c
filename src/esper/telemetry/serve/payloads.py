"""What the live page shows beyond the report, as JSON values: any round and host, and the policy."""

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import QueryError
from esper.telemetry.report.payloads import PAYLOADS, Payload, Record, round_of, rounds_of, segments, waterfall

Place = Mapping[str, int]
"""Numbers of `round` and `host`, where the request gave them."""


def host_round(record: Record, place: Place) -> Payload:
    """All hosts of a round of the first run, step by step; the newest round whose steps are there, if none is given.

    `first` and `newest` are the rounds to choose from; without any, `round` is None and `hosts` empty.
    """
    run, first, newest = _rounds(record)
    number = place.get("round", newest)
    known: Payload = {"run": run["run"], "length": run["episode_length"], "slots": run["slots"] or []}
    known |= {"first": first, "newest": newest}
    if number is None:
        return known | {"round": None, "hosts": [], "total": 0}
    found = known | round_of(record, run["run"], number, "newest" if number == newest else "")
    if not found["hosts"]:
        raise QueryError(f"round {number} of {run['run']} is not there; rounds {first} to {newest} are.")
    return found


def _rounds(record: Record) -> tuple[Payload, int | None, int | None]:
    """The first run, and the rounds whose hosts can be shown: those with steps, or else all that are complete."""
    run = record.query("select run, episode_length, slots from runs order by run limit 1")[0]
    name = (run["run"],)
    (found,) = record.query(_WITH_STEPS, name)
    if found["newest"] is None:
        (found,) = record.query("select min(round) as first, max(round) as newest from episodes where run = ?", name)
    return run, found["first"], found["newest"]


_WITH_STEPS = """
select min(round) as first, max(round) as newest
from (select distinct round from steps where run = $1) join (select distinct round from episodes where run = $1)
using (round)"""


def host(record: Record, place: Place) -> Payload:
    """What happened to a host in a round: everything that the record has about it, by step.

    Without a host, the one with the highest J of the round.
    """
    run, first, newest = _rounds(record)
    number = place.get("round", newest)
    known: Payload = {"run": run["run"], "length": run["episode_length"], "slots": run["slots"] or []}
    known |= {"first": first, "newest": newest, "round": number}
    if number is None:
        return known | {"hosts": [], "host": None}
    of_round = record.query(_RESULTS, (run["run"], number))
    if not of_round:
        raise QueryError(f"round {number} of {run['run']} is not there; rounds {first} to {newest} are.")
    known["hosts"] = [row["host"] for row in of_round]
    best = max(of_round, key=lambda row: -1e9 if row["objective"] is None else row["objective"])
    chosen = place.get("host", best["host"])
    result = next((row for row in of_round if row["host"] == chosen), None)
    if result is None:
        raise QueryError(
            f"round {number} has no host {chosen}; it has {of_round[0]['host']} to {of_round[-1]['host']}."
        )
    return known | {"host": chosen, "result": result} | _episode(record, (run["run"], number, chosen))


_RESULTS = """
select * exclude (run, instance), instance::varchar as instance from episodes where run = ? and round = ?
order by host"""


def _episode(record: Record, where: tuple[str, int, int]) -> Payload:
    """Rows of each table about one host in one round, in the order of the steps."""

    def rows(table: str, order: str = "t") -> list[Payload]:
        select = f"select * exclude (run, round, host) from {table} where run = ? and round = ? and host = ?"
        return record.query(f"{select} order by {order}", where)

    slots = rows("slots", "slot, t")
    scores = {
        t: {frozenset(row["members"]): row["accuracy"] for row in group}
        for t, group in groupby(rows("coalitions"), key=itemgetter("t"))
    }
    return {
        "steps": rows("steps"),
        "decisions": rows("decisions"),
        "slot_rows": slots,
        "segments": segments(slots),
        "seeds": rows("seeds", "germinated_t"),
        "rewards": [row for row in rows("rewards", "t, term") if row["value"]],
        "waterfalls": {t: parts for t, known in scores.items() if (parts := waterfall(known)) is not None},
    }


def policy(record: Record, place: Place) -> dict[str, Payload]:
    """For each run, the mean probability of each operation by step, in the first and the last quarter of its rounds."""
    del place
    return {
        run: {
            phase: {"rounds": rounds, "steps": record.query(_PROBABILITIES, (run, *rounds))}
            for phase, rounds in (("first", (1, found.quarter)), ("last", (found.last - found.quarter + 1, found.last)))
            if found.last
        }
        for run, found in rounds_of(record).items()
    }


_PROBABILITIES = f"""
select t, {", ".join(f"avg(p_{op.name.lower()}) as {op.name.lower()}" for op in LifecycleOp)}, avg(value) as value
from decisions where run = $1 and round between $2 and $3 and p_wait is not null group by t order by t"""


def _of_report(name: str) -> Callable[[Record, Place], object]:
    return lambda record, place: PAYLOADS[name](record)


LIVE: Mapping[str, Callable[[Record, Place], object]] = {
    **{name: _of_report(name) for name in PAYLOADS},
    "round": host_round,
    "host": host,
    "policy": policy,
}
"""The payloads by name: those of the report, and those of this page."""
