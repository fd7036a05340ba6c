import pytest

from esper.telemetry.report.payloads import waterfall

NONE, A, B, AB = frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")


def test_with_all_subsets_the_parts_are_seeds_alone_and_what_pairs_add():
    # host 30; a alone 40, b alone 35, together 55: the pair adds 55 - 40 - 35 + 30 = 10
    found = waterfall({NONE: 30.0, A: 40.0, B: 35.0, AB: 55.0})
    assert found["method"] == "subsets"
    assert [(p["members"], p["value"]) for p in found["parts"]] == [(["a"], 10.0), (["b"], 5.0), (["a", "b"], 10.0)]
    assert (found["base"], found["rest"], found["total"]) == (30.0, 0.0, 55.0)
    assert found["shapley"] == {"a": 15.0, "b": 10.0}  # each alone, and half of the pair


def test_without_all_subsets_each_seed_is_what_is_lost_without_it_and_the_rest_is_interaction():
    three = frozenset("abc")
    found = waterfall({NONE: 30.0, three: 60.0, three - A: 50.0, three - B: 55.0})
    assert found["method"] == "leave one out"
    assert [(p["members"], p["value"]) for p in found["parts"]] == [(["a"], 10.0), (["b"], 5.0)]
    assert (found["rest"], found["shapley"]) == (15.0, None)


def test_shapley_values_of_three_seeds_belong_to_their_names():
    # a and b are worth 6 together only, and c is worth 4 alone
    worth = {frozenset(s): 6.0 * ("a" in s and "b" in s) + 4.0 * ("c" in s) for s in
             ("", "a", "b", "c", "ab", "ac", "bc", "abc")}  # fmt: skip
    assert waterfall(worth)["shapley"] == pytest.approx({"a": 3.0, "b": 3.0, "c": 4.0})
