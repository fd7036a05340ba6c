import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.tolaria.coalitions import PrefixPlan, plan_prefixes


def execute(plan: PrefixPlan) -> tuple[list[frozenset[int]], int]:
    """A toy network whose state is the set of seeds that were added so far, and how often a seed was run."""
    states, runs = [frozenset[int]()], 0
    for step in plan.steps:
        assert len(states) == step.num_parents
        added = []
        for parent in step.on:
            runs += 1
            added.append(states[parent] | {step.slot})
        states = [states[parent] for parent in step.off] + added
    assert len(states) == plan.num_states
    return [states[i] for i in plan.state_of_coalition], runs


def table(num_slots: int, sets: list[set[int]]) -> np.ndarray:
    return np.array([[slot in on for slot in range(num_slots)] for on in sets], dtype=np.bool_).reshape(-1, num_slots)


def test_two_seeds_and_all_their_coalitions_run_three_seed_passes():
    plan = plan_prefixes(table(2, [{0, 1}, {1}, {0}, set()]), (0, 1))
    assert [(step.off, step.on) for step in plan.steps] == [((0,), (0,)), ((0, 1), (0, 1))]
    assert plan.state_of_coalition == (3, 2, 1, 0)
    assert execute(plan)[1] == 3


def test_a_slot_that_the_order_does_not_pass_is_an_error():
    with pytest.raises(AssertionError, match=r"slots \[1\] are on"):
        plan_prefixes(table(2, [{0, 1}]), (0,))


def test_equal_requests_share_one_plan():
    assert plan_prefixes(table(2, [{0}, {1}]), (0, 1)) is plan_prefixes(table(2, [{0}, {1}]), (0, 1))


@given(st.data())
def test_a_plan_reproduces_every_coalition_with_the_fewest_seed_passes(data):
    num_slots = data.draw(st.integers(1, 5))
    subsets = st.sets(st.integers(0, num_slots - 1))
    sets = data.draw(st.lists(subsets, min_size=1, max_size=12))
    order = tuple(data.draw(st.permutations(range(num_slots))))
    plan = plan_prefixes(table(num_slots, sets), order)
    reached, runs = execute(plan)
    assert reached == [frozenset(on) for on in sets]
    # a seed runs once for each distinct set of seeds that were added before it
    before = [(slot, frozenset(order[:i]) & on) for i, slot in enumerate(order) for on in sets if slot in on]
    assert runs == len(set(before))
    assert plan.num_states == len({frozenset(on) for on in sets})
    assert {step.slot for step in plan.steps} == set().union(*sets)  # none for slots that are off everywhere


def test_without_sharing_every_distinct_coalition_is_a_state_and_keeps_its_place():
    plan = plan_prefixes(table(2, [{0, 1}, {1}, {0}, {1}]), (1, 0), shared=False)
    # in the order of the rows (False, True), (True, False), (True, True)
    assert (plan.num_first, plan.num_states) == (3, 3)
    assert plan.state_of_coalition == (2, 0, 1, 0)
    assert [(step.slot, step.num_parents, step.off, step.on) for step in plan.steps] == [
        (1, 3, (1,), (0, 2)),
        (0, 3, (0,), (1, 2)),
    ]
