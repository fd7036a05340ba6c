import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from esper.tasks.datasets import largest_remainder, stratified_split


def test_largest_remainder_gives_the_left_over_seats_to_the_largest_fractions():
    # 10 seats by 47 : 16 : 16 : 21 are 4.7, 1.6, 1.6, 2.1; floors add up to 8, the two seats go to .7 and the first .6
    assert largest_remainder(10, (47, 16, 16, 21)) == (5, 2, 1, 2)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_shares_add_up_and_differ_by_less_than_one_from_the_exact_share(weights, data):
    total = data.draw(st.integers(0, sum(weights)))
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * w / sum(weights)) < 1 for share, w in zip(shares, weights, strict=True))


def labels_of(*counts: int) -> torch.Tensor:
    return torch.cat([torch.full((count,), c) for c, count in enumerate(counts)])


def test_parts_are_disjoint_complete_and_stratified():
    labels = labels_of(40, 20, 20)
    a, b, rest = stratified_split(labels, (8, 16), 3, run_seed=1)
    assert torch.cat((a, b, rest)).sort().values.tolist() == list(range(80))
    assert labels[a].bincount().tolist() == [4, 2, 2]
    assert labels[b].bincount().tolist() == [8, 4, 4]
    assert labels[rest].bincount().tolist() == [28, 14, 14]
    assert torch.equal(a, a.sort().values)


def test_the_split_is_a_function_of_the_run_seed():
    labels = labels_of(30, 30)
    first, again, other = (stratified_split(labels, (10,), 2, run_seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
