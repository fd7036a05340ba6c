import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from esper.leyline.tensor_dataclass import (
    lift,
    named_tensors,
    replace,
    tensor_dataclass,
    tree_map,
    where,
)


@tensor_dataclass
class Inner:
    count: Int[Tensor, " N"]


@tensor_dataclass
class Outer:
    t: int
    x: Float[Tensor, "N 2"]
    inner: Inner


def outer(offset: float = 0.0) -> Outer:
    return Outer(
        t=4,
        x=torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]) + offset,
        inner=Inner(count=torch.tensor([10, 20, 30]) + int(offset)),
    )


def test_replace_gives_a_copy_and_keeps_the_original():
    a = outer()
    b = replace(a, t=9)
    assert (a.t, b.t) == (4, 9)
    assert b.x is a.x


def test_replace_goes_through_a_constructor_that_checks():
    class Checked(Inner):
        def __init__(self, *, count):
            assert count.dim() == 1, "one axis"
            super().__init__(count=count)

    with pytest.raises(AssertionError, match="one axis"):
        replace(Checked(count=torch.tensor([1])), count=torch.tensor(1))


def test_tree_map_reaches_nested_records_and_keeps_static_values():
    doubled = tree_map(lambda a: a * 2, outer())
    assert doubled.t == 4
    assert doubled.x[2].tolist() == [8.0, 10.0]
    assert doubled.inner.count.tolist() == [20, 40, 60]


def test_tree_map_pairs_tensors_of_the_same_place():
    total = tree_map(lambda a, b: a + b, outer(), outer(100.0))
    assert total.x[0].tolist() == [100.0, 102.0]
    assert total.inner.count.tolist() == [120, 140, 160]


def test_named_tensors_gives_dotted_paths_in_field_order():
    assert [name for name, _ in named_tensors(outer())] == ["x", "inner.count"]


def test_lift_adds_trailing_axes_until_the_mask_broadcasts():
    assert lift(torch.ones(3), torch.ones(3, 4, 5)).shape == (3, 1, 1)
    assert lift(torch.ones(3, 4), torch.ones(3, 4)).shape == (3, 4)


def test_where_takes_whole_rows():
    mixed = where(torch.tensor([True, False, True]), outer(), outer(100.0))
    assert mixed.x.tolist() == [[0.0, 1.0], [102.0, 103.0], [4.0, 5.0]]
    assert mixed.inner.count.tolist() == [10, 120, 30]
