"""Coalitions: the sets of active seeds that are evaluated each step, and the contributions that follow from them.

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

N = hosts, S = slots, M = names, K = distinct coalitions, J = subsets.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.stages import BLENDED, NUM_STAGE_VALUES, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass, tree_map
from esper.tolaria.coalition_layout import Layout, Rules, layout_of, most_coalitions, numbers, word_weights


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
    return Coalitions(sets=sets_NKS.contiguous(), valid=valid_NK, names=torch.cat(names, dim=1))
