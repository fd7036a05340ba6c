"""Several tensors as one."""

import dataclasses
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.structure import Structure, described, selection

TOKENS, MASK = torch.tensor([[1, -2, 3], [4, 5, 2**40]]), torch.tensor([[True, True, False], [True, False, False]])


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    state: Tensor


class Pair(NamedTuple):
    mean: Tensor
    ids: Tensor


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
        (Pair(ids=TOKENS, mean=logits), "a Pair with [0] and [1]", "out[0]"),
        ({"ids": TOKENS}, "a dict with ['ids']", "..."),
        (torch.distributions.Normal(0.0, 1.0), "a Normal", "..."),
    ):
        assert (described(value), selection(value)) == (words, place)
