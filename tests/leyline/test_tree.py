"""Trees of tensors: taken apart and put together again, and what has no place in them."""

from typing import NamedTuple

import pytest
import torch

from esper.leyline.messages import Hidden
from esper.leyline.structure import flatten, unflatten
from esper.leyline.tensor_dataclass import tensor_dataclass


class Pair(NamedTuple):
    left: object
    right: object


@tensor_dataclass
class Either:
    a: object
    b: object


def hidden(value: float) -> Hidden:
    return Hidden(h=torch.full((1, 2, 3), value), c=torch.full((1, 2, 3), -value))


def test_a_tree_comes_back_as_it_was():
    x = torch.arange(3)
    tree = {"a": (x, None), "b": Pair(hidden(1.0), [x + 1, "mode"]), "c": True}
    tensors, form = flatten(tree)
    assert [t.flatten()[0].item() for t in tensors] == [0, 1.0, -1.0, 1]
    again = unflatten(form, tensors)
    assert list(again) == ["a", "b", "c"]
    assert again["a"][0] is x
    assert again["a"][1] is None
    assert type(again["b"]) is Pair
    assert again["b"].left.c is tree["b"].left.c
    assert again["b"].right[1] == "mode"
    assert again["c"] is True


def test_a_record_of_tensors_and_one_with_something_else_in_it_have_other_forms():
    whole, half = Either(a=torch.zeros(1), b=torch.ones(2)), Either(a=torch.zeros(1), b=None)
    assert flatten(whole)[1] != flatten(half)[1]
    for rec in (whole, half):
        again = unflatten(flatten(rec)[1], flatten(rec)[0])
        assert type(again) is Either
        assert again.a is rec.a
        assert again.b is rec.b


def test_the_form_knows_everything_but_the_tensors():
    x, y = torch.zeros(2), torch.ones(5)
    assert flatten((x, True))[1] == flatten((y, True))[1]
    assert hash(flatten({"a": x})[1]) == hash(flatten({"a": y})[1])
    different = [(x, True), (x, False), (x, None), (x, "on"), [x, True], (True, x), {"a": x}, {"b": x}, Pair(x, True)]
    assert len({flatten(tree)[1] for tree in different}) == len(different)


@pytest.mark.parametrize("number", [3, 0.5, 0])
def test_a_plain_number_is_refused_with_the_way_out(number):
    with pytest.raises(TypeError, match=f"plain number {number}.*pass it as a tensor"):
        flatten((torch.zeros(1), number))


def test_what_is_no_tree_is_named():
    with pytest.raises(TypeError, match="a tree of tensors cannot contain Generator"):
        flatten((torch.Generator(),))
