"""The sections about single hosts and seeds: the growth of each host in two rounds, and what each blueprint brought."""

from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from esper.telemetry.report.coalitions import waterfall
from esper.telemetry.report.views import Payload, Record, rounds_of

HOSTS = 64
"""Most hosts of a round whose growth is in the page."""


def hosts(record: Record) -> dict[str, list[Payload]]:
    """For each run the newest and the best round, host by host and step by step."""
    return {
        run: [round_of(record, run, number, names) for number, names in _chosen(found.last, found.best).items()]
        for run, found in rounds_of(record).items()
    }


def _chosen(last: int, best: int) -> dict[int, str]:
    """The rounds to show, by number, with what they are."""
    if not last:
        return {}
    return {last: "newest and best"} if last == best else {last: "newest", best: "best 100·J"}


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


def seeds(record: Record) -> dict[str, Payload]:
    """What each blueprint brought, in the first and the last quarter of the rounds of each run.

    `contribution` (points) and `params` are means over the fossilized seeds.
    """
    return {
        run: {
            "first": record.query(_SEEDS, (run, 1, found.quarter)),
            "last": record.query(_SEEDS, (run, found.last - found.quarter + 1, found.last)),
        }
        for run, found in rounds_of(record).items()
    }


_SEEDS = """
select blueprint, count(*) as germinated, count(fossilized_t) as fossilized, count(pruned_t) as pruned,
    avg(contribution) filter (fossilized_t is not null) as contribution,
    avg(params) filter (fossilized_t is not null) as params,
    avg(coalesce(fossilized_t, pruned_t) - germinated_t) as age
from seeds where run = ? and round between ? and ? group by blueprint order by fossilized desc, germinated desc"""
