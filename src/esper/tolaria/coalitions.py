"""Coalitions: the sets of active seeds that are measured each step, the contributions that follow, and shared prefixes.

    L  active seeds (alpha > 0)             P  players: seeds of L that are evaluated (fossils only as an option)
    R  background, L without P              f  accuracy of the network with a set of seeds on, in percentage points

    name             set                evaluated
    main             L                  always
    leave-one-out i  L without i        each player i
    all-off          R                  if there are players
    single i         R + i              with 2 .. interaction_limit players
    pair i, j        R + i + j          with 2 .. interaction_limit players
    committed        fossils of L       always
    subset j         j-th subset of L   for Shapley values, up to shapley_limit seeds in L

Equal sets are evaluated once. One host with players in slots 0 and 2 of 3, without fossils:

    name             main   without 0   without 2   all-off   single 0   single 2   pair 0,2   committed
    set              {0,2}  {2}         {0}         {}        {0}        {2}        {0,2}      {}
    coalition k      0      1           2           3         2          1          0          3

The tables write sets by *rank*, the place of a slot among the players (or members) of its host, so that one table
serves every host; rank S is a slot that is neither.

Coalitions that agree on the first slots share the computation up to there (`plan_prefixes`): the network runs on
distinct states. The children of a state at a slot are the state itself (slot off) and the state with the seed's output
added (slot on); the seed runs once per parent that has an `on` child.

    coalitions   {0,1}  {1}  {0}  {}          execution order 0, 1

    before slot 0      x                      1 state
    slot 0             x ───────── x+0        off (0,)    on (0,)      seed 0 runs once, not twice
    slot 1             x   x+0   x+1  x+0+1   off (0, 1)  on (0, 1)    seed 1 runs twice
    states of the coalitions                  (3, 2, 1, 0)

Where the input of a slot is used again later (a residual connection around the slot), rows may not be added or moved:
then each distinct coalition is a state from the start and keeps its place (`shared` False).

N = hosts, S = slots, M = names, K = distinct coalitions, J = subsets.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.lifecycle import BLENDED, NUM_STAGE_VALUES, SeedStage
from esper.leyline.tensor_dataclass import numbers, tensor_dataclass, tree_map

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


@tensor_dataclass
class Coalitions:
    """The distinct sets of each host, and the number k of each named set among them.

    `sets[n, k]` are the slots that are on; rows with `valid` False are padding. `names` are the numbers (-1: not
    evaluated) of main, all-off, committed, leave-one-out [S], single [S], pair [S, S] and subset [J]. Coalition 0 is
    always `main`. Bit r of subset j is the r-th seed of L in slot order.
    """

    sets: Bool[Tensor, "N K S"]
    valid: Bool[Tensor, "N K"]
    names: Int[Tensor, "N M"]

    def split(self, per_name: Tensor) -> "Named":
        """The columns of `per_name` [N, M] by named set."""
        slots = self.sets.shape[2]
        sizes = [1, 1, 1, slots, slots, slots * slots, per_name.shape[1] - 3 - 2 * slots - slots * slots]
        main, all_off, committed, without, single, pair, subset = per_name.split(sizes, dim=1)
        return Named(main, all_off, committed, without, single, pair.unflatten(1, (slots, slots)), subset)


class Named(NamedTuple):
    """One number per host and named set."""

    main: Tensor  # [N, 1]
    all_off: Tensor  # [N, 1]
    committed: Tensor  # [N, 1]
    leave_one_out: Tensor  # [N, S]
    single: Tensor  # [N, S]
    pair: Tensor  # [N, S, S]
    subset: Tensor  # [N, J]


@tensor_dataclass
class CoalitionMetrics:
    """Accuracies and their differences in percentage points; NaN where a set was not evaluated."""

    val_acc: Float[Tensor, " N"]
    committed_acc: Float[Tensor, " N"]
    cf_total: Float[Tensor, " N"]
    contribution: Float[Tensor, "N S"]
    interactions: Float[Tensor, "N S S"]
    subset_acc: Float[Tensor, "N J"]


def enumerate_coalitions(
    stage: Int[Tensor, "N S"],
    active: Bool[Tensor, "N S"],
    *,
    interaction_limit: int = 4,
    fossils_as_players: bool = False,
    shapley: bool = False,
    shapley_limit: int = 6,
) -> Coalitions:
    """The coalitions of N hosts, without a host read.

    Args:
        stage: stage of each slot.
        active: whether its alpha is above 0.
        interaction_limit: hosts with more players evaluate no singles and pairs.
        fossils_as_players: whether fossilized seeds are players too.
        shapley: whether to evaluate every subset of L.
        shapley_limit: hosts with more seeds in L evaluate no subsets.
    """
    num_slots, device = stage.shape[1], stage.device
    kind_NS = _kinds(device)[stage] * active
    rules = Rules(interaction_limit, fossils_as_players, shapley_limit if shapley else None)
    if num_slots > _MAX_TABLE_SLOTS:
        return _enumerate(kind_NS, rules)
    code_N = (kind_NS * _kind_weights(num_slots, device)).sum(dim=1)
    return tree_map(lambda table: table[code_N], _all_structures(num_slots, rules, device))


def derive(coalitions: Coalitions, accuracy: Float[Tensor, "N K"]) -> CoalitionMetrics:
    """Contributions and interactions from the accuracies [N, K] (pp) of the coalitions, computed in float64.

    contribution_i = f(main) - f(L without i),   cf_total = f(main) - f(all-off),
    I_ij = f(R + i + j) - f(R + i) - f(R + j) + f(R)
    """
    names, dtype = coalitions.names, accuracy.dtype
    read_NM = accuracy.gather(1, names.clamp(min=0)).masked_fill(names < 0, torch.nan)
    f = coalitions.split(read_NM.to(torch.float64))
    interactions = f.pair - f.single[:, :, None] - f.single[:, None, :] + f.all_off[:, :, None]
    return CoalitionMetrics(
        val_acc=read_NM[:, 0],
        committed_acc=read_NM[:, 2],
        cf_total=(f.main - f.all_off).squeeze(1).to(dtype),
        contribution=(f.main - f.leave_one_out).to(dtype),
        interactions=interactions.to(dtype),
        subset_acc=f.subset.to(dtype),
    )


_INACTIVE, _GROWING, _FOSSIL = 0, 1, 2
"""Kinds of slots: not in L, in L and growing, in L and fossilized. Coalitions depend on nothing else."""

_MAX_TABLE_SLOTS = 6
"""Up to this number of slots, the coalitions of every combination of kinds are tabulated (3**6 = 729 rows)."""


@lru_cache(maxsize=16)
def _all_structures(num_slots: int, rules: Rules, device: torch.device) -> Coalitions:
    """The table: row `code` is a host with kind `code // 3**s % 3` in slot s."""
    codes = torch.arange(3**num_slots, device=device)[:, None]
    return _enumerate(codes // _kind_weights(num_slots, device) % 3, rules)


@lru_cache(maxsize=64)
def _kind_weights(num_slots: int, device: torch.device) -> Tensor:
    return 3 ** torch.arange(num_slots, device=device)


@lru_cache(maxsize=16)
def _kinds(device: torch.device) -> Tensor:
    """Kind of an active slot by stage value."""
    kinds = [
        _FOSSIL if stage == SeedStage.FOSSILIZED else _GROWING * (stage in BLENDED) for stage in range(NUM_STAGE_VALUES)
    ]
    return torch.tensor(kinds, device=device)


def _enumerate(kind_NS: Tensor, rules: Rules) -> Coalitions:
    """The coalitions of hosts with these kinds of slots."""
    num_slots = kind_NS.shape[1]
    layout = layout_of(num_slots, rules, kind_NS.device)
    member_NS, fossil_NS = kind_NS != _INACTIVE, kind_NS == _FOSSIL
    player_NS = member_NS if rules.fossils_as_players else kind_NS == _GROWING
    player_rank_NS, num_players_N = _ranks(player_NS)
    member_rank_NS, num_members_N = _ranks(member_NS)
    asked_NM = layout.players.asked[num_players_N]
    by_player_NSM = layout.players.on[player_rank_NS] | (member_NS & ~player_NS)[:, :, None]
    sets_NSM = torch.cat((by_player_NSM, fossil_NS[:, :, None], layout.subsets.on[member_rank_NS]), dim=2)
    # `committed` is always evaluated, like `main`
    asked_NM = torch.cat((asked_NM, asked_NM[:, :1], layout.subsets.asked[num_members_N]), dim=1)
    sets_NMS = sets_NSM.transpose(1, 2)
    column_NM, count_N = _merge_equal(sets_NMS, asked_NM)
    sets_NKS, valid_NK = _distinct(sets_NMS, column_NM, count_N, most_coalitions(num_slots, rules))
    return _named(layout, sets_NKS, valid_NK, column_NM, player_rank_NS)


def _ranks(among_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each marked slot among the marked slots of its host (S if not marked), and their number."""
    count_NS = among_NS.cumsum(dim=1)
    return torch.where(among_NS, count_NS - 1, among_NS.shape[1]), count_NS[:, -1]


def _merge_equal(sets_NMS: Tensor, asked_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the coalition of each named set (-1: not evaluated), by first occurrence, and their count."""
    _, num_names, num_slots = sets_NMS.shape
    weights_SW, order_M = word_weights(num_slots, sets_NMS.device), numbers(num_names, sets_NMS.device)
    words_NMW = sets_NMS.to(torch.float64) @ weights_SW
    same_NMM = (words_NMW[:, :, None] == words_NMW[:, None]).all(dim=3) & asked_NM[:, None]
    first_NM = same_NMM.to(torch.uint8).argmax(dim=2)  # the first of equal maxima
    rank_NM = (asked_NM & (first_NM == order_M)).cumsum(dim=1)
    return torch.where(asked_NM, rank_NM.gather(1, first_NM) - 1, -1), rank_NM[:, -1]


def _distinct(sets_NMS: Tensor, column_NM: Tensor, count_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The distinct sets [N, width, S], each at its number, and which rows are valid."""
    num_hosts, _, num_slots = sets_NMS.shape
    # sets that are not evaluated go to an extra row at the end, which is cut off
    place_NM = torch.where(column_NM < 0, width, column_NM)
    spread_NMS = place_NM[:, :, None].expand(-1, -1, num_slots)
    distinct_NKS = sets_NMS.new_zeros(num_hosts, width + 1, num_slots).scatter(1, spread_NMS, sets_NMS)
    return distinct_NKS[:, :width], numbers(width, sets_NMS.device) < count_N[:, None]


def _named(layout: Layout, sets_NKS: Tensor, valid_NK: Tensor, column_NM: Tensor, player_rank_NS: Tensor) -> Coalitions:
    """Collect the number of every named set by slot."""
    column_NM = F.pad(column_NM, (0, 1), value=-1)
    pair_NSS = layout.pair[player_rank_NS[:, :, None], player_rank_NS[:, None]]
    names = (
        column_NM[:, :1],
        column_NM[:, layout.all_off : layout.all_off + 1],
        column_NM[:, layout.committed : layout.committed + 1],
        column_NM.gather(1, layout.leave_one_out[player_rank_NS]),
        column_NM.gather(1, layout.single[player_rank_NS]),
        column_NM.gather(1, pair_NSS.flatten(1)),
        column_NM[:, layout.committed + 1 : -1],
    )
    return Coalitions(sets=sets_NKS, valid=valid_NK, names=torch.cat(names, dim=1))


@dataclass(frozen=True)
class PrefixStep:
    """One slot: the new states are `cat(x[off], x[on] + seed(x[on]))`; without sharing they keep their places.

    `off` and `on` are ascending numbers of the `num_parents` states before the slot.
    """

    slot: int
    num_parents: int
    off: tuple[int, ...]
    on: tuple[int, ...]


@dataclass(frozen=True)
class PrefixPlan:
    """The steps of one host in execution order, without slots that are off in every coalition.

    `state_of_coalition[k]` is the number of the final state that is coalition k.
    """

    steps: tuple[PrefixStep, ...]
    state_of_coalition: tuple[int, ...]
    num_states: int
    shared: bool = True

    @property
    def num_first(self) -> int:
        """States before the first slot."""
        return 1 if self.shared else self.num_states


def plan_prefixes(
    sets: Bool[np.ndarray, "K S"], execution_order: tuple[int, ...], *, shared: bool = True
) -> PrefixPlan:
    """The plan with the fewest states for the coalitions of one host (valid rows only; equal rows are allowed).

    Args:
        sets: which slots are on in each coalition.
        execution_order: the slots in the order in which the network passes them; must name each slot that is on.
        shared: whether states may be added and moved at a slot.
    """
    return _plan(sets.tobytes(), sets.shape, execution_order, shared)


@lru_cache(maxsize=4096)
def _plan(packed: bytes, shape: tuple[int, int], execution_order: tuple[int, ...], shared: bool) -> PrefixPlan:
    rows = np.frombuffer(packed, dtype=np.bool_).reshape(shape).tolist()
    named = set(execution_order)
    missing = {slot for row in rows for slot, is_on in enumerate(row) if is_on} - named
    assert not missing, f"slots {sorted(missing)} are on but the execution order {execution_order} does not pass them"
    if not shared:
        return _separate(rows, execution_order)
    state_of_row = [0] * len(rows)
    num_states, steps = 1, []
    for slot in execution_order:
        parents_on = sorted({state for state, row in zip(state_of_row, rows, strict=True) if row[slot]})
        if not parents_on:
            continue
        parents_off = sorted({state for state, row in zip(state_of_row, rows, strict=True) if not row[slot]})
        steps.append(PrefixStep(slot=slot, num_parents=num_states, off=tuple(parents_off), on=tuple(parents_on)))
        child = {(parent, False): number for number, parent in enumerate(parents_off)}
        child |= {(parent, True): number for number, parent in enumerate(parents_on, len(parents_off))}
        state_of_row = [child[state, row[slot]] for state, row in zip(state_of_row, rows, strict=True)]
        num_states = len(child)
    return PrefixPlan(steps=tuple(steps), state_of_coalition=tuple(state_of_row), num_states=num_states)


def _separate(rows: list[list[bool]], execution_order: tuple[int, ...]) -> PrefixPlan:
    """The plan without sharing: one state per distinct coalition."""
    distinct = sorted({tuple(row) for row in rows})
    states = range(len(distinct))
    steps = tuple(
        PrefixStep(slot=slot, num_parents=len(distinct), off=tuple(i for i in states if not distinct[i][slot]), on=on)
        for slot in execution_order
        if (on := tuple(i for i in states if distinct[i][slot]))
    )
    of_rows = tuple(distinct.index(tuple(row)) for row in rows)
    return PrefixPlan(steps=steps, state_of_coalition=of_rows, num_states=len(distinct), shared=False)
