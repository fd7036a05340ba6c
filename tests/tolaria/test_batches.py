import pickle
from dataclasses import replace

import pytest
import torch

from esper.leyline.errors import ConfigError, DataError
from esper.leyline.random import Stream, permutation
from esper.tasks.datasets import Dataset, Split
from esper.tasks.instances import HostExamples
from esper.tasks.losses import PADDING
from esper.tolaria.batches import SharedBatchIterator, batch_bounds
from esper.tolaria.executors.choice import training_bounds
from tiny import task

CPU = torch.device("cpu")


def numbered(n_train: int = 10, n_val: int = 7, n_test: int = 5) -> Dataset:
    """Example i of a split is an image of 1x2x2 whose pixels are all i, with the label i."""

    def split(n: int) -> Split:
        return Split(torch.arange(float(n))[:, None, None, None].expand(-1, 1, 2, 2).clone(), torch.arange(n))

    splits = {"train": split(n_train), "val": split(n_val), "test": split(n_test)}
    return Dataset(identity={"name": "numbers"}, **splits, num_classes=10)


def train_iterator(num_envs: int = 3, batch_size: int = 4, run_seed: int = 1) -> SharedBatchIterator:
    return SharedBatchIterator(numbered(), num_envs, batch_size, "train", run_seed, CPU)


def orders(batches: SharedBatchIterator, t: int, episode: int, hosts: torch.Tensor) -> torch.Tensor:
    batches.begin(t, episode, hosts)
    return torch.cat([y for _, y in batches], dim=1)


def test_a_training_pass_shows_every_example_with_its_label_once_to_every_host():
    batches = train_iterator()
    batches.begin(1, 0, torch.arange(3))
    shapes = [(tuple(x.shape), tuple(y.shape)) for x, y in batches]
    assert shapes == [((3, 4, 1, 2, 2), (3, 4)), ((3, 4, 1, 2, 2), (3, 4)), ((3, 2, 1, 2, 2), (3, 2))]
    assert all(torch.equal(x, y[:, :, None, None, None].expand_as(x).float()) for x, y in batches)
    assert len(batches) == 3
    seen = orders(batches, 1, 0, torch.arange(3))
    assert torch.equal(seen.sort(dim=1).values, torch.arange(10).expand(3, -1))


def test_the_order_of_a_pass_is_drawn_once_for_all_of_its_steps_and_is_that_of_an_iterator_that_begins_there():
    hosts, others = torch.arange(3), torch.arange(1, 4)
    new = lambda: SharedBatchIterator(numbered(), 3, 2, "train", 1, CPU, batches_per_step=2)  # noqa: E731
    batches, drawn = new(), []
    for t, episode, of in ((1, 0, hosts), (2, 0, hosts), (3, 0, hosts), (4, 0, hosts), (1, 0, others), (2, 1, others)):
        assert torch.equal(orders(batches, t, episode, of), orders(new(), t, episode, of))
        drawn.append(batches.order.untyped_storage().data_ptr())
    assert drawn[0] == drawn[1] != drawn[2]  # step 3 ends one pass of 10 examples and begins another
    kept = batches.order
    batches.begin(2, 1, others)
    assert kept.untyped_storage().data_ptr() == batches.order.untyped_storage().data_ptr()


def test_hosts_steps_episodes_and_runs_have_their_own_orders():
    hosts = torch.arange(3)
    seen = orders(train_iterator(), 1, 0, hosts)
    assert len({tuple(row) for row in seen.tolist()}) == 3
    for other in (
        orders(train_iterator(), 2, 0, hosts),
        orders(train_iterator(), 1, 1, hosts),
        orders(train_iterator(run_seed=2), 1, 0, hosts),
    ):
        assert not torch.equal(other, seen)


def test_the_order_of_a_host_depends_neither_on_the_others_nor_on_the_batch_size():
    seen = orders(train_iterator(), 5, 2, torch.tensor([8, 4, 6]))
    alone = orders(train_iterator(num_envs=1, batch_size=10), 5, 2, torch.tensor([4]))
    assert torch.equal(seen[1], alone[0])


def test_a_pass_can_be_repeated_and_restarted():
    batches = train_iterator()
    seen = orders(batches, 3, 0, torch.arange(3))
    assert torch.equal(torch.cat([y for _, y in batches], dim=1), seen)
    next(iter(batches))
    assert torch.equal(orders(batches, 3, 0, torch.arange(3)), seen)


def test_training_batches_are_memory_of_their_own():
    batches = train_iterator()
    batches.begin(1, 0, torch.arange(3))
    next(iter(batches)).x.zero_()
    assert orders(batches, 1, 0, torch.arange(3)).shape == (3, 10)
    total = sum(x.sum().item() for x, _ in batches)
    assert total == 3 * 45 * 4  # three hosts, numbers 0..9, four pixels


@pytest.mark.parametrize(("split", "n"), [("val", 7), ("test", 5)])
def test_validation_and_test_are_the_same_for_all_hosts_in_fixed_order_with_their_tail(split, n):
    batches = SharedBatchIterator(numbered(), 3, 4, split, 1, CPU)
    for t in (1, 2):
        batches.begin(t, 0, torch.arange(3))
        ys = [y for _, y in batches]
        assert len(ys) == len(batches) == 2
        assert torch.cat(ys).tolist() == list(range(n))
    assert next(iter(batches)).x.shape == (4, 1, 2, 2)


def test_a_split_without_examples_and_a_batch_without_any_are_refused():
    with pytest.raises(DataError, match="the val split of numbers is empty"):
        SharedBatchIterator(numbered(n_val=0), 1, 4, "val", 1, CPU)
    with pytest.raises(ConfigError, match="batch size of the train split is 0"):
        train_iterator(batch_size=0)


def test_the_data_are_on_the_device_once():
    data = numbered()
    a, b = (SharedBatchIterator(data, 1, 4, "val", 1, CPU) for _ in range(2))
    assert next(iter(a)).x.data_ptr() == next(iter(b)).x.data_ptr() == data.val.x.data_ptr()


# -- a step of some batches -------------------------------------------------------------------------------------------


def test_steps_of_some_batches_continue_through_the_permutations_of_each_host():
    hosts = torch.tensor([0, 5])
    batches = SharedBatchIterator(numbered(), 2, 3, "train", 1, CPU, batches_per_step=2)
    assert len(batches) == 2
    # 10 examples, 6 in a step: the permutations of passes 1, 2, 3 one after another
    stream = torch.cat([permutation(1, Stream.TRAIN_ORDER, hosts, 10, episode=4, t=t) for t in (1, 2, 3)], dim=1)
    for t in (1, 2, 3, 4):
        assert torch.equal(orders(batches, t, 4, hosts), stream[:, 6 * (t - 1) : 6 * t]), t
        assert torch.equal(batches.order, stream[:, 6 * (t - 1) : 6 * t])


def test_a_step_may_pass_the_split_more_than_once():
    hosts = torch.tensor([3])
    batches = SharedBatchIterator(numbered(n_train=4), 1, 5, "train", 1, CPU, batches_per_step=2)
    seen = orders(batches, 1, 0, hosts)[0].tolist()
    assert [sorted(seen[:4]), sorted(seen[4:8]), len(seen)] == [[0, 1, 2, 3], [0, 1, 2, 3], 10]


def test_more_passes_than_the_random_streams_can_number_are_refused():
    batches = SharedBatchIterator(numbered(n_train=2), 1, 4, "train", 1, CPU, batches_per_step=1)
    batches.begin(2047, 0, torch.arange(1))
    with pytest.raises(ConfigError, match="step 2048 reaches pass 4096 over the 2 training examples"):
        batches.begin(2048, 0, torch.arange(1))


# -- stored examples become inputs ------------------------------------------------------------------------------------


class Doubled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x.float()


class Shifted:
    """Adds a number of its own to each example."""

    def draw(self, run_seed, hosts, episode, t, count):
        place = torch.arange(count)[None, :, None]
        return 1000 * t + 100 * hosts[:, None, None] + 10 * episode + place

    def __call__(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return x + drawn


def whole_numbers(**changes) -> Dataset:
    def split(n: int) -> Split:
        return Split(torch.arange(n)[:, None], torch.arange(n)[:, None].expand(-1, 2))

    return Dataset(identity={"name": "whole"}, train=split(6), val=split(3), test=split(2), **changes)


def test_whole_numbers_and_targets_of_any_shape_pass_unchanged():
    batches = SharedBatchIterator(whole_numbers(), 2, 4, "train", 1, CPU)
    batches.begin(1, 0, torch.arange(2))
    for x, y in batches:
        assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
        assert torch.equal(y, x.expand(-1, -1, 2))


def test_training_examples_are_augmented_and_become_inputs_and_others_become_inputs_only():
    data = whole_numbers(inputs=Doubled(), augmentation=Shifted())
    batches = SharedBatchIterator(data, 2, 4, "train", 1, CPU)
    batches.begin(3, 1, torch.tensor([0, 7]))
    x = torch.cat([x for x, _ in batches], dim=1)[..., 0]
    added = 3010 + torch.tensor([[0], [700]]) + torch.arange(6)
    assert torch.equal(x, 2.0 * (batches.order + added).float())
    assert torch.equal(batches.drawn[..., 0], added)
    ((x, _),) = SharedBatchIterator(data, 2, 4, "val", 1, CPU)
    assert x[:, 0].tolist() == [0.0, 2.0, 4.0]


# -- hosts with examples of their own ----------------------------------------------------------------------------------


def chosen() -> HostExamples:
    """Host 0 has the examples 1, 3, 5, 7; host 1 has 2 and 4, labelled 9 and 4."""
    index = torch.tensor([[1, 3, 5, 7], [2, 4, -1, -1]])
    target = torch.tensor([[1, 3, 5, 7], [9, 4, PADDING, PADDING]])
    return HostExamples(index, target, torch.tensor([4, 2]))


def own_iterator() -> SharedBatchIterator:
    batches = SharedBatchIterator(numbered(), 2, 3, "train", 1, CPU, batches_per_step=2)
    batches.choose(chosen())
    return batches


def test_each_host_passes_over_its_own_examples_again_and_again():
    batches, seen = own_iterator(), []
    for t in (1, 2):
        batches.begin(t, 0, torch.arange(2))
        for x, y in batches:
            assert (tuple(x.shape), tuple(y.shape)) == ((2, 3, 1, 2, 2), (2, 3))
            seen.append(x[:, :, 0, 0, 0].long())
    stream = torch.cat(seen, dim=1)
    for start in range(0, 12, 4):
        assert sorted(stream[0, start : start + 4].tolist()) == [1, 3, 5, 7]
    for start in range(0, 12, 2):
        assert sorted(stream[1, start : start + 2].tolist()) == [2, 4]
    assert len({tuple(stream[0, start : start + 4].tolist()) for start in range(0, 12, 4)}) > 1


def test_labels_are_those_that_the_host_was_given():
    batches = own_iterator()
    batches.begin(1, 0, torch.arange(2))
    for x, y in batches:
        number = x[:, :, 0, 0, 0].long()
        assert torch.equal(y[0], number[0])
        assert torch.equal(y[1], torch.where(number[1] == 2, 9, 4))


def test_the_own_order_of_a_host_depends_neither_on_the_others_nor_on_their_number_of_examples():
    together, alone = own_iterator(), SharedBatchIterator(numbered(), 1, 3, "train", 1, CPU, batches_per_step=2)
    alone.choose(HostExamples(chosen().index[1:, :2], chosen().target[1:, :2], torch.tensor([2])))
    for t in (1, 2, 5):
        together.begin(t, 0, torch.arange(2))
        alone.begin(t, 0, torch.tensor([1]))
        assert torch.equal(together.order[1], alone.order[0])
        assert torch.equal(together.targets[1], alone.targets[0])


def test_validation_examples_of_a_host_are_followed_by_some_that_do_not_count():
    batches = SharedBatchIterator(numbered(n_val=8), 2, 3, "val", 1, CPU)
    batches.choose(chosen())
    first, last = list(batches)
    assert first.y.tolist() == [[1, 3, 5], [9, 4, PADDING]]
    assert last.y.tolist() == [[7], [PADDING]]
    assert first.x[0, :, 0, 0, 0].tolist() == [1.0, 3.0, 5.0]
    assert len(batches) == 2


def test_examples_that_are_changed_in_place_while_they_are_used_end_the_pass():
    batches = SharedBatchIterator(numbered(), 3, 4, "val", 1, CPU)
    passed = iter(batches)
    next(passed).x.add_(1.0)
    next(passed)
    with pytest.raises(DataError, match="changed in place"):
        next(passed)
    with pytest.raises(DataError, match="changed in place"):
        next(iter(batches))


def test_a_split_that_moves_to_another_process_is_still_unchanged():
    split = Split(torch.zeros(3, 2).add_(1.0), torch.zeros(3).add_(1.0))
    pickle.loads(pickle.dumps(split)).require_unchanged()


# -- a last batch that is not full -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "count", "size", "sizes"),
    [
        ("merge", 129, 128, [129]), ("merge", 257, 128, [128, 129]), ("merge", 130, 128, [128, 2]),
        ("merge", 256, 128, [128, 128]), ("merge", 1, 128, [1]), ("merge", 3, 1, [1, 1, 1]),
        ("drop", 129, 128, [128]), ("drop", 255, 128, [128]), ("drop", 256, 128, [128, 128]), ("drop", 3, 1, [1, 1, 1]),
        ("keep", 129, 128, [128, 1]), ("keep", 130, 128, [128, 2]), ("keep", 1, 128, [1]),
    ],
)  # fmt: skip
def test_a_last_training_batch_is_merged_dropped_or_kept(last, count, size, sizes):
    bounds = batch_bounds(count, size, last)
    assert [stop - start for start, stop in bounds] == sizes
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]


def test_dropping_all_examples_is_refused():
    with pytest.raises(ConfigError, match="'drop', and 3 training examples do not fill a batch of 4"):
        SharedBatchIterator(numbered(n_train=3), 1, 4, "train", 1, CPU, last_batch="drop")
    assert len(SharedBatchIterator(numbered(n_val=3), 1, 4, "val", 1, CPU, last_batch="drop")) == 1


def test_the_batches_of_a_step_are_known_before_it():
    split = numbered(n_train=47)
    assert training_bounds(task(last_batch="drop"), split) == [(0, 16), (16, 32)]
    assert training_bounds(task(), split) == [(0, 16), (16, 32), (32, 47)]
    assert training_bounds(task(batches_per_step=2, last_batch="drop"), split) == [(0, 16), (16, 32)]


def test_each_step_leaves_out_the_end_of_a_permutation_of_its_own():
    batches = SharedBatchIterator(numbered(), 2, 4, "train", 1, CPU, last_batch="drop")
    hosts = torch.arange(2)
    for t in (1, 2):
        want = permutation(1, Stream.TRAIN_ORDER, hosts, 10, episode=5, t=t)[:, :8]
        assert torch.equal(orders(batches, t, 5, hosts), want)
    assert len(batches) == 2


def test_a_function_of_the_user_gets_batches_of_examples_in_training_as_in_validation():
    shapes: list[torch.Size] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return x[:, None]

    data = replace(numbered(n_train=8), inputs=watched)
    train = SharedBatchIterator(data, 2, 4, "train", 1, CPU)
    train.begin(1, 0, torch.arange(2))
    (first, _), *_ = train
    (val, _), *_ = SharedBatchIterator(data, 2, 4, "val", 1, CPU)
    stored = numbered().train.x.shape[1:]
    assert first.shape == (2, 4, 1, *stored)
    assert val.shape[1:] == (1, *stored)
    assert {len(shape) for shape in shapes} == {1 + len(stored)}
