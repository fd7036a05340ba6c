import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dry_run import CountedReads
from esper.leyline.lifecycle import SeedStage
from esper.tolaria.coalitions import Coalitions, derive, enumerate_coalitions

STAGES = [int(stage) for stage in SeedStage if stage is not SeedStage.UNKNOWN]
ACTIVE = {4, 6, 7}


def sets_by_name(stages, audible, *, interaction_limit=4, fossils_as_players=False, shapley=False, shapley_limit=6):
    """Every named set of one host in evaluation order, with Python sets: {name: set}."""
    members = {s for s, (stage, active) in enumerate(zip(stages, audible, strict=True)) if stage in ACTIVE and active}
    fossils = {s for s in members if stages[s] == SeedStage.FOSSILIZED}
    players = members if fossils_as_players else members - fossils
    rest = members - players
    named = {"main": members}
    named |= {("without", i): members - {i} for i in sorted(players)}
    if players:
        named["all_off"] = rest
    if 2 <= len(players) <= interaction_limit:
        named |= {("single", i): rest | {i} for i in sorted(players)}
        named |= {("pair", i, j): rest | {i, j} for i, j in itertools.combinations(sorted(players), 2)}
    named["committed"] = fossils
    if shapley and len(members) <= shapley_limit:
        order = sorted(members)
        for number in range(2 ** len(order)):
            named["subset", number] = {slot for rank, slot in enumerate(order) if number >> rank & 1}
    return named


def expected(named):
    """Distinct sets by first occurrence, and the number of each name."""
    distinct = list(dict.fromkeys(frozenset(on) for on in named.values()))
    return distinct, {name: distinct.index(frozenset(on)) for name, on in named.items()}


def read_names(c: Coalitions, host: int):
    """The name -> number maps of one host, without what was not asked for."""
    slots, c = range(c.sets.shape[2]), c.split(c.names)
    named = {"main": c.main[host], "all_off": c.all_off[host], "committed": c.committed[host]}
    named |= {("without", i): c.leave_one_out[host, i] for i in slots}
    named |= {("single", i): c.single[host, i] for i in slots}
    named |= {("pair", i, j): c.pair[host, i, j] for i, j in itertools.combinations(slots, 2)}
    named |= {("subset", j): c.subset[host, j] for j in range(c.subset.shape[1])}
    return {name: int(number) for name, number in named.items() if number >= 0}


def hosts(*stages):
    """Hosts with these stages per slot; every blended seed is active."""
    return torch.tensor(stages), torch.ones(len(stages), len(stages[0]), dtype=torch.bool)


@st.composite
def populations(draw):
    num_slots = draw(st.integers(1, 7))
    slot = st.tuples(st.sampled_from([1, 3, 4, 6, 7, 7, 4]), st.booleans())
    hosts = draw(st.lists(st.lists(slot, min_size=num_slots, max_size=num_slots), min_size=1, max_size=4))
    rows, active = ([[of[k] for of in host] for host in hosts] for k in (0, 1))
    options = {
        "interaction_limit": draw(st.integers(0, 4)),
        "fossils_as_players": draw(st.booleans()),
        "shapley": draw(st.booleans()),
        "shapley_limit": draw(st.integers(0, 6)),
    }
    return rows, active, options


@settings(deadline=None, max_examples=150)
@given(populations())
def test_every_named_set_agrees_with_python_sets(population):
    stages, active, options = population
    found = enumerate_coalitions(torch.tensor(stages), torch.tensor(active), **options)
    for host, (stage, audible) in enumerate(zip(stages, active, strict=True)):
        distinct, numbers = expected(sets_by_name(stage, audible, **options))
        assert read_names(found, host) == numbers
        valid = found.valid[host].tolist()
        assert valid == [k < len(distinct) for k in range(len(valid))]
        sets = [frozenset(s for s, on in enumerate(ons) if on) for ons in found.sets[host].tolist()]
        assert sets[: len(distinct)] == distinct
        assert not found.sets[host, len(distinct) :].any()
        pair = found.split(found.names).pair[host]
        assert torch.equal(pair, pair.T)
        assert (pair.diagonal() == -1).all()


@pytest.mark.parametrize(("players", "count"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (5, 7), (6, 8), (9, 11)])
@pytest.mark.parametrize("fossils", [0, 2])
def test_number_of_coalitions_by_number_of_players(players, count, fossils):
    found = enumerate_coalitions(*hosts([6] * players + [7] * fossils + [1]))
    assert found.valid.sum().item() == count


@pytest.mark.parametrize("fossils_as_players", [False, True])
@pytest.mark.parametrize("shapley", [False, True])
@pytest.mark.parametrize("interaction_limit", [0, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5, 6, 7])
def test_the_width_is_that_of_the_host_with_most_coalitions(num_slots, interaction_limit, shapley, fossils_as_players):
    every = torch.cartesian_prod(*[torch.tensor([1, 6, 7])] * num_slots).reshape(-1, num_slots)
    active = torch.ones_like(every, dtype=torch.bool)
    options = {"interaction_limit": interaction_limit, "shapley": shapley, "fossils_as_players": fossils_as_players}
    found = enumerate_coalitions(every, active, **options)
    assert found.valid.shape[1] == found.valid.sum(dim=1).max()


def test_the_drawn_example_holds():
    found = enumerate_coalitions(*hosts([4, 1, 6]))
    assert found.sets[0, :4].tolist() == [[True, False, True], [False, False, True], [True, False, False], [False] * 3]
    named = found.split(found.names)
    assert (named.main.item(), named.all_off.item(), named.committed.item()) == (0, 3, 3)
    assert named.leave_one_out.tolist() == [[1, -1, 2]]
    assert named.single.tolist() == [[2, -1, 1]]
    assert named.pair.tolist() == [[[-1, -1, 0], [-1, -1, -1], [0, -1, -1]]]


def test_two_players_alone_already_have_their_interaction():
    # f: none 50, first 60, second 55, both 75: I = 75 - 60 - 55 + 50 = 10
    found = enumerate_coalitions(*hosts([6, 6]))
    metrics = derive(found, torch.tensor([[75.0, 55.0, 60.0, 50.0]]))
    assert metrics.interactions.nan_to_num(-1).tolist() == [[[-1.0, 10.0], [10.0, -1.0]]]
    assert metrics.contribution.tolist() == [[20.0, 15.0]]
    assert metrics.cf_total.tolist() == [25.0]
    assert metrics.val_acc.tolist() == [75.0]
    assert metrics.committed_acc.tolist() == [50.0]


def test_a_host_of_many_slots_is_encoded_without_collisions():
    stage, active = torch.ones(1, 120, dtype=torch.int64), torch.ones(1, 120, dtype=torch.bool)
    for slot in (0, 51, 52, 53, 104, 119):
        stage[0, slot] = 6
    found = enumerate_coalitions(stage, active)
    sets = {tuple(on) for on in found.sets[0][found.valid[0]].tolist()}
    assert len(sets) == found.valid.sum().item() == 6 + 2


def accuracy_of(found: Coalitions, strength, pair_weight: float, base: float = 40.0):
    """Scripted accuracy: base + sum of v_i + w * sum over pairs of v_i v_j; padding is NaN and must not be read."""
    on = found.sets.to(torch.float64) * strength
    total = on.sum(-1)
    pairs = (total.square() - on.square().sum(-1)) / 2
    acc = base + total + pair_weight * pairs
    return torch.where(found.valid, acc, math.nan).to(torch.float32)


@pytest.mark.parametrize("pair_weight", [0.0, 0.5])
@pytest.mark.parametrize("stages", [[6, 6], [4, 1, 6, 7], [6, 4, 6, 6, 7]])
def test_interactions_of_scripted_models_are_exactly_those_that_were_written(pair_weight, stages):
    strength = torch.tensor([1.5, 2.25, 3.0, 0.75, 4.0], dtype=torch.float64)[: len(stages)]
    found = enumerate_coalitions(*hosts(stages), shapley=True)
    metrics = derive(found, accuracy_of(found, strength, pair_weight))
    players = [s for s, stage in enumerate(stages) if stage in (4, 6)]
    for i, j in itertools.product(range(len(stages)), repeat=2):
        got = metrics.interactions[0, i, j].item()
        if i != j and i in players and j in players:
            assert got == pytest.approx(pair_weight * float(strength[i] * strength[j]), abs=1e-5)
        else:
            assert math.isnan(got)


def test_what_was_not_evaluated_is_missing_and_never_a_number():
    found = enumerate_coalitions(*hosts([6, 6, 6, 6, 6, 1], [1, 7, 1, 1, 1, 1]))
    metrics = derive(found, accuracy_of(found, torch.ones(6, dtype=torch.float64), 0.0))
    assert metrics.interactions.isnan().all()
    assert metrics.contribution.isnan().tolist() == [[False] * 5 + [True], [True] * 6]
    assert metrics.cf_total.nan_to_num(-1).tolist() == [5.0, -1.0]
    assert metrics.committed_acc.tolist() == [40.0, 41.0]
    assert metrics.subset_acc.shape == (2, 0)


def test_every_subset_is_measured_for_shapley_reports():
    found = enumerate_coalitions(*hosts([6, 1, 7]), shapley=True)
    metrics = derive(found, accuracy_of(found, torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64), 0.0))
    assert metrics.subset_acc[0, :4].tolist() == [40.0, 41.0, 44.0, 45.0]
    assert metrics.subset_acc[0, 4:].isnan().all()


def test_nothing_is_read_back_from_the_device():
    stage, active = hosts([6, 4, 7], [1, 6, 6])
    with CountedReads() as reads:
        found = enumerate_coalitions(stage, active, shapley=True)
        derive(found, torch.zeros(found.valid.shape))
    assert reads.number == 0
