"""Takes the accuracy of a network apart into the parts of its seeds.

    accuracy = base + what each seed adds alone + what each pair adds beyond that + the rest

That needs the accuracy f of every subset of the seeds (Harsanyi dividends: d(S) = sum over T in S of (-1)^|S-T| f(T)).
With fewer subsets, each seed is given what is lost without it, and the rest is the interaction of all.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import factorial

from esper.telemetry.report.views import Payload

Coalition = frozenset[str]


def waterfall(scores: Mapping[Coalition, float | None]) -> Payload | None:
    """The steps from the smallest measured coalition to the largest; None if fewer than two were measured.

    Args:
        scores: accuracy (points) by members; the members of the smallest are in all others.

    Returns:
        base and total accuracy, members of the base, `parts` with members and value, the `rest`, the method
        ("subsets" or "leave one out"), and the Shapley value of each seed where all subsets were measured.
    """
    known = {members: score for members, score in scores.items() if score is not None}
    base, full = min(known, key=len, default=frozenset()), max(known, key=len, default=frozenset())
    players = sorted(full - base)
    if not players or not all(base <= members for members in known):
        return None
    values = {members - base: score for members, score in known.items()}
    complete = all(subset in values for subset in subsets(players))
    parts: dict[tuple[str, ...], float] = {}
    for p in players:
        if (gain := _single(values, frozenset(players), p, complete)) is not None:
            parts[(p,)] = gain
    if complete:
        parts |= {(p, q): _pair(values, p, q) for p, q in combinations(players, 2)}
    return {
        "base": known[base],
        "base_members": sorted(base),
        "total": known[full],
        "parts": [{"members": list(members), "value": value} for members, value in parts.items()],
        "rest": known[full] - known[base] - sum(parts.values()),
        "method": "subsets" if complete else "leave one out",
        "shapley": {p: shapley(values, players, p) for p in players} if complete else None,
    }


def subsets(players: list[str]) -> Iterator[Coalition]:
    """All subsets of the players, the empty one first."""
    return (frozenset(chosen) for size in range(len(players) + 1) for chosen in combinations(players, size))


def _single(values: Mapping[Coalition, float], players: Coalition, p: str, complete: bool) -> float | None:
    """What a seed adds alone, or what is lost without it; None if that was not measured."""
    if complete:
        return values[frozenset({p})] - values[frozenset()]
    without = players - {p}
    return values[players] - values[without] if without in values else None


def _pair(values: Mapping[Coalition, float], p: str, q: str) -> float:
    """What two seeds add together beyond what each adds alone."""
    one, other, none = frozenset({p}), frozenset({q}), frozenset[str]()
    return values[one | other] - values[one] - values[other] + values[none]


def shapley(values: Mapping[Coalition, float], players: list[str], player: str) -> float:
    """Mean of what a seed adds, over all orders in which the seeds could be added."""
    others, n = [p for p in players if p != player], len(players)
    return sum(
        factorial(len(s)) * factorial(n - len(s) - 1) / factorial(n) * (values[s | {player}] - values[s])
        for s in subsets(others)
    )
