import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from esper.leyline.errors import DataError
from esper.tasks.datasets import Dataset
from esper.tasks.datasets.arrays import from_arrays, stored
from esper.tasks.datasets.images import CropAndFlip, Pixels
from esper.tasks.losses import Classification, MeanSquaredError, NextToken

THREE = Classification(3)


def examples(count: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Example i is two times the number first + i, its class the number modulo 3."""
    numbers = torch.arange(first, first + count)
    return numbers[:, None].expand(-1, 2).float(), numbers % 3


def load(train: object = None, val: object = None, test: object = None, **changes: object) -> Dataset:
    given = {"objective": THREE, "run_seed": 0, **changes}
    return from_arrays("mine", examples(30) if train is None else train, val, test, **given)


def test_what_is_left_out_is_split_off_by_class_and_disjoint():
    data = load(examples(300))
    # 30 for the test, 27 of the other 270 for validation
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [243, 27, 30]
    assert data.val.y.bincount().tolist() == [9, 9, 9]
    assert data.test.y.bincount().tolist() == [10, 10, 10]
    numbers = torch.cat([data.split(name).x[:, 0] for name in ("train", "val", "test")])
    assert numbers.sort().values.tolist() == list(range(300))
    assert torch.equal(data.train.y, data.train.x[:, 0].long() % 3)
    only_val = load(examples(300), test=examples(5, 900))
    assert [len(only_val.split(name)) for name in ("train", "val", "test")] == [270, 30, 5]


def test_tensors_arrays_and_map_style_data_sets_give_the_same_data():
    x, y = examples(30)
    pairs = [(x[i].numpy(), int(y[i])) for i in range(30)]
    found = [load(given) for given in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), pairs)]
    for data in found[1:]:
        assert data.identity == found[0].identity
        assert torch.equal(data.train.x, found[0].train.x)
        assert torch.equal(data.train.y, found[0].train.y)


def test_types_become_those_that_a_network_takes():
    x, y = examples(30)
    assert load((x.double(), y.to(torch.int16))).train.x.dtype == torch.float32
    assert load((x.numpy().astype(">f8"), y)).train.x.dtype == torch.float32
    assert load((x.half(), y.to(torch.uint8))).train.y.dtype == torch.int64
    assert load((x.to(torch.int32), y)).train.x.dtype == torch.int64
    regression = load((x, y), objective=MeanSquaredError(1.0))
    assert regression.train.y.dtype == torch.float32
    tokens = load((x.long(), x.to(torch.int32)), objective=NextToken(50))
    assert tokens.train.y.dtype == torch.int64


def test_images_stay_bytes_with_inputs_that_make_floats_of_them():
    images = torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8)
    pixels = Pixels((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    data = load((images, examples(30)[1]), inputs=pixels, augmentation=CropAndFlip(2))
    assert data.train.x.dtype == torch.uint8
    assert data.inputs is pixels
    with pytest.raises(DataError, match=r"mine.train.x holds bytes \(uint8\): give inputs"):
        load((images, examples(30)[1]))


def test_tensors_and_arrays_are_shared_where_their_type_is_right():
    x, y = (values.contiguous() for values in examples(30))
    for given in ((x, y), (x.numpy(), y.numpy())):
        assert load(given, given, given).train.x.data_ptr() == x.data_ptr()
    read_only = np.zeros((30, 2), np.float32)
    read_only.flags.writeable = False
    assert load((read_only, y)).train.x.shape == (25, 2)


def test_any_other_number_target_order_input_or_split_seed_is_another_data_set():
    x, y = examples(30)
    first = load().identity
    changed_x, changed_y = x.clone(), y.clone()
    changed_x[29, 1] += 1e-4
    changed_y[3] = 1
    others = [
        load((changed_x, y)), load((x, changed_y)), load((x.flip(0), y.flip(0))), load((x.view(30, 1, 2), y)),
        load(run_seed=1), load(test=(x, y)), load(inputs=Pixels((0.5,), (0.5,))), load(augmentation=CropAndFlip(3)),
    ]  # fmt: skip
    assert first == load().identity
    assert not any(first == other.identity for other in others)
    assert load(inputs=torch.nn.functional.relu).identity == load(inputs=torch.nn.functional.relu).identity


def with_value(index: int, value: float) -> tuple[Tensor, Tensor]:
    x, y = examples(30)
    x[index, 1] = value
    return x, y


def images_of(*sizes: int) -> list[tuple[Tensor, int]]:
    return [(torch.zeros(3, size, size), 0) for size in sizes]


X, Y = examples(30)
BAD = [
    ((X, Y[:29]), {}, "mine.train: x has 30 examples but y has 29"),
    ((X[:0], Y[:0]), {}, "mine.train is empty"),
    ([], {}, "mine.train is empty"),
    ((X, Y, Y), {}, r"mine.train has 3 parts, expected inputs and targets: \(x, y\)"),
    (
        with_value(4, float("nan")),
        {},
        r"mine.train.x\[4\] is NaN or infinite .as float32. \(column 1\); remove or replace such values",
    ),
    (with_value(7, float("inf")), {}, r"mine.train.x\[7\] is NaN or infinite"),
    ((X, Y + 1), {}, r"mine.train.y\[2\] is 3, expected 0..2"),
    ((X, Y - 1), {}, r"mine.train.y\[0\] is -1, expected 0..2"),
    ((X, Y.float()), {}, r"mine.train.y holds torch.float32 \[30\], expected classes \[n\] as integers"),
    ((X, Y[:, None]), {}, r"mine.train.y holds torch.int64 \[30, 1\], expected classes \[n\]"),
    (
        (X.long(), X.long()),
        {"objective": NextToken(29)},
        r"mine.train.y\[29, 0\] is 29, expected -1..28 \(-1 is padding\)",
    ),
    ((X.long(), Y), {"objective": NextToken(29)}, r"mine.train.y holds torch.int64 \[30\], expected tokens \[n, T\]"),
    ((X, torch.tensor(float("nan")).expand(30)), {"objective": MeanSquaredError(1.0)}, r"mine.train.y\[0\] is NaN"),
    (images_of(8, 8, 9), {}, r"mine.train\[2\].x has the shape \[3, 9, 9\], but the first one has \[3, 8, 8\]"),
    ([(X[0], 0), X[1]], {}, r"mine.train\[1\] is of type Tensor, expected a pair \(x, y\)"),
    ([("a picture", 0)], {}, r"mine.train\[0\].x is of type str, expected a tensor, an array or a number; convert it"),
    ((torch.tensor(1.0), Y), {}, "mine.train has a single number as x or y"),
    ((np.zeros(30, np.longdouble), Y), {}, "mine.train.x is of type ndarray of float"),
    ((np.array(["a", "b"]), Y), {}, "mine.train.x is of type ndarray of <U1, expected a tensor"),
    ((X, Y), {"val": (X[:, :1], Y)}, r"mine.val.x has examples \[1\] of torch.float32, but those of train are \[2\]"),
    ((X, Y), {"val": (X.long(), Y)}, r"mine.val.x has examples \[2\] of torch.int64, but those of train are .*float32"),
    ((X, Y), {"test": (X[:0], Y[:0])}, "mine.test is empty"),
    ((X[:2], Y[:2]), {}, "2 examples cannot be split into parts of 1, 1 with a rest"),
]


@pytest.mark.parametrize(("train", "changes", "said"), BAD, ids=range(len(BAD)))
def test_bad_data_are_refused_with_the_field_and_what_was_found(train, changes, said):
    with pytest.raises(DataError, match=said):
        load(train, **changes)


def test_a_data_set_is_read_once_in_order_and_its_first_examples_again_to_compare_them():
    @dataclasses.dataclass
    class Counting:
        read: list[int]

        def __len__(self) -> int:
            return 70

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.read.append(index)
            return torch.zeros(2), index % 3

    counting = Counting([])
    load(counting)
    assert counting.read == [*range(70), *range(64)]


LOADED = TensorDataset(*examples(40))


def padded(items: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return {"tokens": tokens, "mask": tokens != 0}, torch.tensor([y for _, y in items])


def sequences(count: int = 20) -> list[tuple[Tensor, int]]:
    return [(torch.arange(1, 2 + i % 4), i % 3) for i in range(count)]


def test_a_loader_gives_the_examples_of_its_data_set_in_their_order():
    for loader in (DataLoader(LOADED, batch_size=7, shuffle=True, drop_last=True), DataLoader(LOADED, batch_size=None)):
        assert load(loader).identity == load(LOADED).identity


def test_a_loaders_collate_function_sees_all_examples_at_once():
    found = stored("mine", DataLoader(sequences(), batch_size=3, collate_fn=padded), None)
    assert str(found.x_structure) == "{tokens: int64 [n, 4], mask: bool [n, 4]}"
    x = found.x_structure.unpack(found.x)
    assert x["tokens"][:5].tolist() == [[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert torch.equal(x["mask"], x["tokens"] != 0)
    with pytest.raises(
        DataError, match=r"mine\[1\].x has the shape \[2\], .* pad sequences \(in the collate_fn of a Dat"
    ):
        stored("mine", sequences(), None)


def test_a_loader_that_leaves_out_or_weights_examples_is_refused():
    for sampler in (WeightedRandomSampler([1.0] * 40, 40), SubsetRandomSampler([3, 0])):
        said = f"mine is a DataLoader with a {type(sampler).__name__}, which decides how often .* a Subset"
        with pytest.raises(DataError, match=said):
            stored("mine", DataLoader(LOADED, sampler=sampler), None)


def test_items_may_be_dictionaries_with_labels_or_several_inputs_and_a_target():
    x, y = examples(30)
    by_name = [{"a": x[i].tolist(), "b": np.float32(i), "labels": int(y[i])} for i in range(30)]
    columns = {"a": x, "b": torch.arange(30.0), "label": y}
    for given in (by_name, columns, DataLoader(by_name)):
        found = stored("mine", given, None)
        assert str(found.x_structure) == "{a: float32 [n, 2], b: float32 [n]}"
        assert torch.equal(found.x, torch.cat((x, torch.arange(30.0)[:, None]), dim=1))
        assert torch.equal(found.y, y)
    found = stored("mine", TensorDataset(x, x[:, :1], y), None)
    assert str(found.x_structure) == "(float32 [n, 2], float32 [n, 1])"
    with pytest.raises(DataError, match="mine is a dictionary of 'a', expected inputs by name and 'labels'"):
        stored("mine", {"a": x}, None)
    with pytest.raises(DataError, match=r"mine\[1\] has other parts than the first example"):
        stored("mine", [({"a": 1.0}, 0), ({"b": 1.0}, 0)], None)


class Noisy:
    """Forty examples, one in ten of which is turned around when it is read."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.tensor([float(index), index + 1.0])
        return x.flip(0) if self.draw() < 0.1 else x, index % 3


def test_random_transforms_are_frozen_with_a_warning_that_names_augmentation():
    with pytest.warns(UserWarning, match=r"mine.train gives other examples when it is read again.*augmentation="):
        load(Noisy(np.random.default_rng(0).random))


def test_random_transforms_are_frozen_alike_in_every_process_and_leave_the_generators_alone():
    for draw in (lambda: float(torch.rand(())), random.random, np.random.random):
        identities, following = [], []
        for seed in (1, 2):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            expected = draw()
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            with pytest.warns(UserWarning, match="augmentation="):
                identities.append(load(Noisy(draw)).identity)
            following.append(draw() == expected)
        assert identities[0] == identities[1]
        assert following == [True, True] or draw is random.random  # the checks of shapes in tests draw from that one
