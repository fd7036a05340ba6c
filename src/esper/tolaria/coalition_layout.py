"""The constant tables of coalitions: the named sets for S slots, their order, and which hosts evaluate them.

Sets are written by *rank*, the place of a slot among the players (or members) of its host, so that one table serves
every host; rank S is a slot that is neither. A host with two players in three slots evaluates

    name    main  without 0  without 1  without 2  all-off  single 0  single 1  single 2  pair 0,1  pair 0,2  pair 1,2
    ranks   all   1, 2       0, 2       0, 1       none     0         1         2         0, 1      0, 2      1, 2
    asked   yes   yes        yes        -          yes      yes       yes       -         yes       -         -

`committed`, which depends on stages, and the subsets of the members follow.
"""

import itertools
from functools import lru_cache
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.tensor_dataclass import tensor_dataclass

_BITS_PER_WORD = 52
"""Slots that one float64 encodes exactly; larger sets take several words."""


class Rules(NamedTuple):
    """The options of the enumeration; `shapley_limit` None: no subsets."""

    interaction_limit: int
    fossils_as_players: bool
    shapley_limit: int | None


def most_coalitions(num_slots: int, rules: Rules) -> int:
    """K: the most distinct sets of any host with S slots."""

    def most(n: int) -> int:
        if rules.shapley_limit is not None and n <= rules.shapley_limit:
            return 1 << n
        asked = 1 + n + 1 + rules.fossils_as_players
        if 2 <= n <= rules.interaction_limit:
            asked += n + comb(n, 2)
        return min(asked, 1 << n)

    return max(most(n) for n in range(num_slots + 1))


_Row = tuple[frozenset[int], int, int]
"""One named set: the ranks that are on, and the least and the greatest number of players that evaluate it."""


@tensor_dataclass
class Table:
    """Named sets by rank: set m contains rank r if `on[r, m]`, and p players evaluate it if `asked[p, m]`."""

    on: Tensor
    asked: Tensor


@tensor_dataclass
class Layout:
    """The numbering of names for S slots, in evaluation order.

        main | without 0 .. S-1 | all-off | single 0 .. | pair 0,1 .. | committed | subset 0 .. J-1

    `leave_one_out[r]`, `single[r]`, `pair[r, q]` are the columns of the sets of rank r; one past the last name: none.
    """

    players: Table
    subsets: Table
    leave_one_out: Tensor
    single: Tensor
    pair: Tensor
    all_off: int
    committed: int


@lru_cache(maxsize=64)
def layout_of(num_slots: int, rules: Rules, device: torch.device) -> Layout:
    """The layout for S slots, cached."""
    few = range(min(rules.interaction_limit, num_slots) if rules.interaction_limit >= 2 else 0)
    players, subsets = _player_rows(num_slots, few, rules.interaction_limit), _subset_rows(num_slots, rules)
    none = len(players) + 1 + len(subsets)
    first_single = num_slots + 2
    pair = torch.full((num_slots + 1, num_slots + 1), none)
    for number, (r, q) in enumerate(itertools.combinations(few, 2), first_single + len(few)):
        pair[r, q] = pair[q, r] = number
    return Layout(
        players=_table(players, num_slots, device),
        subsets=_table(subsets, num_slots, device),
        leave_one_out=torch.tensor([*range(1, num_slots + 1), none], device=device),
        single=torch.tensor([first_single + r if r in few else none for r in range(num_slots + 1)], device=device),
        pair=pair.to(device),
        all_off=num_slots + 1,
        committed=len(players),
    )


def _player_rows(num_slots: int, few: range, interaction_limit: int) -> list[_Row]:
    everyone = frozenset(range(num_slots))
    return [
        (everyone, 0, num_slots),
        *((everyone - {r}, r + 1, num_slots) for r in range(num_slots)),
        (frozenset(), 1, num_slots),
        *((frozenset({r}), max(2, r + 1), interaction_limit) for r in few),
        *((frozenset(pair), max(pair) + 1, interaction_limit) for pair in itertools.combinations(few, 2)),
    ]


def _subset_rows(num_slots: int, rules: Rules) -> list[_Row]:
    if rules.shapley_limit is None:
        return []
    bits = range(min(rules.shapley_limit, num_slots))
    subsets = (frozenset(r for r in bits if j >> r & 1) for j in range(2 ** len(bits)))
    return [(on, max(on, default=-1) + 1, rules.shapley_limit) for on in subsets]


def _table(rows: list[_Row], num_slots: int, device: torch.device) -> Table:
    counts = range(num_slots + 1)  # also ranks; rank `num_slots` is in no set
    return Table(
        on=torch.tensor([[r in on for on, _, _ in rows] for r in counts], dtype=torch.bool, device=device),
        asked=torch.tensor(
            [[low <= n <= high for _, low, high in rows] for n in counts], dtype=torch.bool, device=device
        ),
    )


@lru_cache(maxsize=64)
def word_weights(num_slots: int, device: torch.device) -> Tensor:
    """`[S, W]`: what slot s adds to word w of a set's code."""
    weights = torch.zeros(num_slots, -(-num_slots // _BITS_PER_WORD), dtype=torch.float64)
    for s in range(num_slots):
        weights[s, s // _BITS_PER_WORD] = 2.0 ** (s % _BITS_PER_WORD)
    return weights.to(device)


@lru_cache(maxsize=64)
def numbers(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1."""
    return torch.arange(count, device=device)
