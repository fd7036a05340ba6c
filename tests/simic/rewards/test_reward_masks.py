"""Masks as numbers: they say what comparisons of bools would say, and a choice returns one of the two exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.rewards.derived import derived
from esper.simic.rewards.masks import (
    above,
    at_least,
    below,
    both,
    choose,
    either,
    equal,
    is_known,
    no,
    only,
    without_nan,
)

NAN = math.nan
numbers = st.floats(min_value=-1e150, max_value=1e150, allow_nan=False)
rows = st.lists(st.tuples(numbers, numbers, st.booleans(), st.booleans()), min_size=1, max_size=40)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def columns(drawn):
    first, second, one, other = zip(*drawn, strict=True)
    return column(*first), column(*second), torch.tensor(one), torch.tensor(other)


@pytest.mark.parametrize(
    ("compare", "want"),
    [(above, [0, 0, 1, 0]), (at_least, [0, 1, 1, 0]), (below, [1, 0, 0, 0]), (equal, [0, 1, 0, 0])],
)
def test_a_comparison_is_a_column_of_ones_and_zeros_and_never_holds_of_nan(compare, want):
    mask = compare(column(1.0, 2.0, 3.0, NAN), 2)
    assert mask.dtype == torch.float64
    assert mask.tolist() == want


def test_what_is_known_is_not_nan():
    assert is_known(column(0.0, NAN, math.inf)).tolist() == [1, 0, 1]


@pytest.mark.parametrize(("value", "limit"), [((), (3,)), ((3,), ()), ((3,), (3,)), ((), ())])
def test_scalars_and_columns_may_be_compared(value, limit):
    mask = above(torch.full(value, 2.0, dtype=torch.float64), torch.ones(limit, dtype=torch.float64))
    assert mask.shape == torch.broadcast_shapes(value, limit)
    assert bool((mask == 1).all())


@given(rows)
def test_masks_join_as_bools_do(drawn):
    _, _, one, other = columns(drawn)
    a, b = one.double(), other.double()
    assert torch.equal(both(a, b, a), (one & other).double())
    assert torch.equal(either(a, b), (one | other).double())
    assert torch.equal(no(a), (~one).double())


@given(rows)
def test_a_choice_is_exactly_one_of_the_two(drawn):
    value, other, one, also = columns(drawn)
    assert torch.equal(choose(one.double(), value, other), torch.where(one, value, other))
    assert torch.equal(only(value, one.double(), also.double()), torch.where(one & also, value, 0.0))


@pytest.mark.parametrize(("value", "other"), [(1.5, -2), (column(1.5, 1.5), -2), (1.5, column(-2.0, -2.0))])
def test_numbers_may_be_chosen_like_columns(value, other):
    assert choose(column(1.0, 0.0), value, other).tolist() == [1.5, -2.0]


def test_nan_is_replaced_and_nothing_else():
    assert without_nan(column(NAN, -1.0, 0.0)).tolist() == [0.0, -1.0, 0.0]


def test_constants_are_no_part_of_an_answer():
    first = choose(column(1.0), 0.25, 0.75)
    first.add_(1.0)
    assert choose(column(1.0), 0.25, 0.75).item() == 0.25


def test_a_derived_attribute_is_computed_once():
    asked = []

    class Facts:
        @derived
        def answer(self):
            """What is asked for."""
            asked.append(self)
            return 42

    facts = Facts()
    assert (facts.answer, facts.answer) == (42, 42)
    assert asked == [facts]
    assert Facts.answer.__doc__ == "What is asked for."
