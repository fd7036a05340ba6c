"""Trees of tensors: taken apart and put together again, and packed into one tensor."""

import dataclasses
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.messages import Hidden
from esper.leyline.structure import Structure, described, flatten, selection, unflatten
from esper.leyline.tensor_dataclass import tensor_dataclass

TOKENS, MASK = torch.tensor([[1, -2, 3], [4, 5, 2**40]]), torch.tensor([[True, True, False], [True, False, False]])


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    state: Tensor


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


def test_floats_lie_side_by_side_as_numbers_through_which_gradients_pass():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[5.0]], [[6.0]]]).requires_grad_()
    structure = Structure.of((a, b))
    packed = structure.pack((a, b))
    assert packed.tolist() == [[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]]
    first, second = structure.unpack(packed)
    assert first.tolist() == a.tolist()
    assert second.shape == (2, 1, 1)
    (second * torch.tensor([10.0, 20.0]).view(2, 1, 1)).sum().backward()
    assert b.grad.flatten().tolist() == [10.0, 20.0]


def test_other_types_lie_side_by_side_as_bytes_in_words_of_eight():
    of = {"tokens": TOKENS, "mask": MASK, "level": torch.tensor([0.5, -0.0]), "image": torch.ones(2, 3, 3).byte()}
    structure = Structure.of(of)
    packed = structure.pack(of)
    assert packed.dtype == torch.int64
    assert packed.shape == (2, 3 + 1 + 1 + 2)  # 24, 3, 4 and 9 bytes
    found = structure.unpack(packed)
    assert list(found) == list(of)
    for name, values in of.items():
        assert (found[name].dtype, found[name].tolist()) == (values.dtype, values.tolist())
        assert found[name].is_contiguous()


def test_any_number_of_axes_may_lie_in_front():
    structure = Structure.of((TOKENS, MASK))
    packed = structure.pack((TOKENS, MASK))
    hosts = torch.stack((packed, packed.flip(0), packed))
    tokens, mask = structure.unpack(hosts)
    assert tokens.shape == mask.shape == (3, 2, 3)
    assert torch.equal(tokens[1], TOKENS.flip(0))
    assert torch.equal(structure.pack((tokens, mask)), hosts)


def test_a_structure_survives_pickling_into_another_process():
    structure = Structure.of({"a": (TOKENS, None), "b": MASK})
    found = pickle.loads(pickle.dumps(structure))
    assert found == structure
    assert found.unpack(structure.pack({"a": (TOKENS, None), "b": MASK}))["a"][1] is None


def test_other_parts_shapes_or_types_are_refused():
    structure = Structure.of((TOKENS, MASK))
    for tree in ((TOKENS, MASK, MASK), (TOKENS[:, :2], MASK), (TOKENS.int(), MASK), [TOKENS, MASK]):
        with pytest.raises(ConfigError, match=r"but the first examples were \(int64 \[n, 3\], bool \[n, 3\]\)"):
            structure.pack(tree)
    for tree in ((), (TOKENS, MASK[:1]), (torch.tensor(1.0), MASK)):
        with pytest.raises(ConfigError, match="the same number of examples"):
            Structure.of(tree)


def test_values_are_described_with_the_expression_for_what_is_mostly_meant():
    hidden, logits = torch.zeros(2, 5, 4), torch.zeros(2, 3)
    for value, words, place in (
        (Output(None, logits, hidden), "a Output with .logits and .state", "out.logits"),
        (
            {"hidden": hidden, "class_logits": logits},
            "a dict with ['hidden'] and ['class_logits']",
            "out['class_logits']",
        ),
        ((logits, None), "a tuple with [0]", "out[0]"),
        (Pair(left=logits, right=TOKENS), "a Pair with [0] and [1]", "out[0]"),
        ({"ids": TOKENS}, "a dict with ['ids']", "..."),
        (torch.distributions.Normal(0.0, 1.0), "a Normal", "..."),
    ):
        assert (described(value), selection(value)) == (words, place)
