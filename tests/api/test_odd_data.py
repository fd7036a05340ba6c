"""Data as users have them: each kind works as PyTorch does with it, or is refused in one paragraph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.leyline.errors import EsperError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(-100, 100, (64, 6), generator=GENERATOR).float()  # the same in every dtype
Y = torch.randint(0, 3, (64,), generator=GENERATOR)
VAL = torch.randint(-100, 100, (20, 6), generator=GENERATOR).float(), torch.arange(20) % 3
NAN = float("nan")


class Net(nn.Module):
    """[B, 6] of any dtype -> logits [B, 3], with two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.two(torch.relu(self.norm(self.one(x.float() / 100))))))


def task(**given: Any) -> esper.Task:
    data = {"train": (X, Y), "val": VAL, "test": VAL, "batch": 16, "episode_length": 3, "lr": 1e-2}
    return esper.Task(Net, ["one", "two"], **(data | given))


def result(method: str = "plain", executor: str = "auto", **given: Any) -> tuple[float | None, float | None]:
    """Points on the validation and the test split of the network that is grown."""
    grown = esper.grow(task(**given), method, budget=esper.Budget(flops=8e5), executor=executor, progress=False)
    return grown.points, grown.test_points


def of(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The inputs of all splits, changed."""
    return {"train": (change(X), Y), "val": (change(VAL[0]), VAL[1]), "test": (change(VAL[0]), VAL[1])}


def read_only(x: Tensor) -> np.ndarray:
    array = x.numpy().copy()
    array.setflags(write=False)
    return array


COARSE = "note: measurements are coarse, because "


@pytest.mark.parametrize(
    ("val", "said"),
    [
        ((VAL[0][:1], torch.tensor([1])), ["val has 1 example;", "2 of the classes of train (0, 2) are not in val;"]),
        ((X[:49], torch.arange(49) % 3), ["val has 49 examples;"]),
        ((X, torch.arange(64) % 2), ["1 of the classes of train (2) are not in val;"]),
        ((X, torch.arange(64) % 3), []),
    ],
)
def test_a_split_that_measures_coarsely_is_noted_once(val, said, capsys):
    notes = []
    for method in ("plain", "wait_only"):
        esper.grow(task(val=val), method, steps=3, executor="streamed")
        lines = [line.removeprefix(COARSE) for line in capsys.readouterr().out.splitlines() if COARSE in line]
        notes.append([line.partition(";")[0] + ";" for line in lines])
    assert notes == [said, said]


@pytest.mark.parametrize("part", ["val", "test"])
def test_a_class_that_nothing_can_teach_is_noted(part, capsys):
    two = X[Y < 2], Y[Y < 2]
    esper.grow(task(**{"train": two, "val": two, "test": two, part: VAL}), "plain", steps=3, executor="streamed")
    said = f"note: class 2 of {part} is not in train, so it cannot be learned; give examples of it\n"
    assert capsys.readouterr().out.count(said) == 1


def test_notes_about_data_are_seen_without_progress(capsys):
    two = X[Y < 2], Y[Y < 2]
    esper.grow(task(train=two, val=two, test=VAL), "plain", steps=3, executor="streamed", progress=False)
    said = capsys.readouterr()
    assert (said.out, said.err.count("note: class 2 of test is not in train")) == ("", 1)


def test_a_column_of_targets_may_stand_beside_single_ones():
    def points(train: Tensor, val: Tensor) -> float | None:
        class Numbers(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)[:, 0]

        given = {"train": (X, train), "val": (X, val), "test": (X, val), "batch": 16, "episode_length": 3}
        return esper.grow(esper.Task(Numbers, ["one"], **given), "plain", steps=3, progress=False).points

    assert points(Y.float()[:, None], Y.float()) == points(Y.float(), Y.float())


def test_columns_of_a_table_that_are_not_numbers_are_named_and_the_advice_works():
    table = pandas.DataFrame(X.numpy()[:, :5]).assign(colour=["red", "blue"] * 32)
    with pytest.raises(EsperError, match=r"train\.x has columns that are not numbers: 'colour'; .*pandas\.get_dummies"):
        task(train=(table, Y))
    table.columns = table.columns.map(str)
    numbers = pandas.get_dummies(table, dtype=float).iloc[:, :6]
    assert result(train=(numbers, Y))[0] is not None


IN_TRAIN = (
    "note: {} are in train as well, so figures on them may show what was learned by heart; give others if you can"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"val": (X, Y)}, [IN_TRAIN.format("64 of the 64 examples of val")]),
        ({"test": (torch.cat([VAL[0], X[:1]]), torch.zeros(21).long())}, []),  # 1 of 21 is less than 5 %
        (
            {"test": (torch.cat([VAL[0], X[:2]]), torch.zeros(22).long())},
            [IN_TRAIN.format("2 of the 22 examples of test")],
        ),
        ({"val": (X + torch.tensor([0, 0, 0, 0, 0, 0.5]), Y)}, []),
    ],
    ids=["others", "the same", "few", "some", "the last number differs"],
)
def test_examples_that_are_in_train_as_well_are_noted(change, said, capsys):
    esper.grow(task(**change), "plain", steps=3, executor="streamed")
    assert [line for line in capsys.readouterr().out.splitlines() if " are in train " in line] == said


AS_THEY_ARE = {
    "a column of labels": {
        "train": (X, Y[:, None]),
        "val": (VAL[0], VAL[1][:, None]),
        "test": (VAL[0], VAL[1][:, None]),
    },
    "int8": of(lambda x: x.to(torch.int8)),
    "int64": of(lambda x: x.long()),
    "float64": of(lambda x: x.double()),
    "float16": of(lambda x: x.half()),
    "bfloat16": of(lambda x: x.bfloat16()),
    "big-endian": of(lambda x: x.numpy().astype(">f4")),
    "transposed in memory": of(lambda x: x.t().contiguous().t()),
    "every second row": of(lambda x: x.repeat_interleave(2, 0)[::2]),
    "backwards": of(lambda x: x.flip(0).numpy()[::-1]),
    "read-only": of(read_only),
    "lists": of(lambda x: x.tolist()),
    "a mask that masks nothing": of(lambda x: np.ma.masked_greater(x.numpy(), 1e9)),
    "with a gradient": of(lambda x: x.clone().requires_grad_()),
    "labels of uint8": {"train": (X, Y.to(torch.uint8))},
    "tables of pandas": of(lambda x: pandas.DataFrame(x.numpy())),
    "a column of pandas": {"train": (X, pandas.Series(Y.numpy()))},
    "labels of int32": {"train": (X, Y.int().numpy())},
}


@pytest.mark.parametrize("given", AS_THEY_ARE.values(), ids=AS_THEY_ARE.keys())
def test_numbers_are_the_same_in_every_form(given):
    found, expected = (one.spec.load(None, 0) for one in (task(**given), task()))
    for name in ("train", "val", "test"):
        own, other = found.split(name), expected.split(name)
        assert torch.equal(own.x.float(), other.x)  # whole numbers stay whole
        assert torch.equal(own.y, other.y)
        assert not own.x.requires_grad


def test_whole_numbers_are_trained_on_as_floats_are():
    assert result(executor="native", **of(lambda x: x.long())) == result(executor="native")


def test_weights_of_other_floats_are_refused_with_the_way_out():
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8).double(), nn.Linear(8, 3))

    said = r"floats are given as torch\.float32, but it has weights of torch\.float64: give model"
    with pytest.raises(EsperError, match=said):
        esper.Task(model, train=(X, Y), val=VAL, test=VAL)


def test_keys_of_inputs_are_names():
    with pytest.raises(EsperError, match=r"train\.x has the key 1; a key must be a name"):
        result(train=({1: X}, Y))


def nan_once_trained(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that is NaN as soon as an output is large."""
    loss = nn.functional.cross_entropy(outputs, y, reduction="none")
    return loss * torch.where(outputs.detach().abs().max() > 1.2, NAN, 1.0)


WORKS = {
    "a loss that becomes NaN": {"loss": nan_once_trained, "blind_loss": 1.1},
    "one class in training": {"train": (X, torch.zeros(64, dtype=torch.int64))},
    "inputs of zeros": of(torch.zeros_like),
    "one example to validate and test": {"val": (X[:1], Y[:1]), "test": (X[:1], Y[:1])},
    "a batch larger than the data": {"batch": 1000},
    "huge inputs": {"train": (1e30 * X, Y)},
    "a huge learning rate": {"lr": 1e6},
    "one step": {"episode_length": 1},
    "two steps and halving": {"episode_length": 2, "method": "halving"},
}


@pytest.mark.filterwarnings("ignore:the outputs of a new", "ignore:all training targets")
@pytest.mark.parametrize("executor", ["streamed", "native"])
@pytest.mark.parametrize("given", WORKS.values(), ids=WORKS.keys())
def test_a_network_is_kept_and_measured_whatever_the_data(given, executor):
    for points in result(executor=executor, **given):
        assert points is not None
        assert 0.0 <= points <= 100.0


class Rooted(nn.Module):
    """Divides features by their length, whose gradient is NaN for inputs of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(X.shape[1], 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h / (h.square().sum(dim=1, keepdim=True).sqrt() + 1e-6))


@pytest.mark.parametrize("method", ["plain", "auto", "wait_only"])
def test_a_growth_in_which_nothing_is_learned_ends_after_three_steps_with_a_sentence(method):
    x = torch.cat((torch.zeros(1, X.shape[1]), X[1:].float()))
    broken = esper.Task(Rooted, ["stem"], (x, Y), val=(x[1:], Y[1:]), batch=16, episode_length=5)
    budget = None if method == "wait_only" else esper.Budget(flops=2e6)
    with pytest.raises(
        EsperError, match="nothing has been learned in the first 3 steps: the loss or a gradient of each"
    ):
        esper.grow(broken, method, budget=budget, progress=False)


@pytest.mark.parametrize("executor", ["streamed", "native"])
def test_splits_that_share_their_inputs_have_their_own_labels(executor):
    relabelled, copied = ({"val": (x, (Y + 1) % 3), "test": (x, (Y + 2) % 3)} for x in (X, X.clone()))
    assert result(executor=executor, **relabelled) == result(executor=executor, **copied)


class Words(nn.Module):
    """Tokens [B, 6] below 5 -> logits [B, 6, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.mix(self.table(x))))


TOKENS = torch.arange(600 * 6).view(600, 6) % 5
LATE = torch.cat((TOKENS[:-1], TOKENS[-1:] + 95))  # beyond the examples that are tried whole
CONSTANT = torch.cat((VAL[0], torch.ones(1, 6)))


def normalized(x: Tensor) -> Tensor:
    return (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": (LATE, TOKENS)}, "the network cannot process some examples of train: IndexError: index out of"),
        ({"val": (TOKENS - 1, TOKENS)}, "the network cannot process some examples of val: IndexError"),
        ({"train": (TOKENS, torch.full_like(TOKENS, -1))}, "train.y is -1 .padding. everywhere, expected tokens"),
        ({"train": (TOKENS.numpy().astype(np.uint64) + np.uint64(2**63), TOKENS)}, r"holds numbers of 2\*\*63 or more"),
        ({"batches_per_step": 10**9}, "step 1 reaches pass .*; an episode can make 4095"),
    ],
)
def test_tokens_that_a_network_does_not_know_are_refused_in_a_sentence(given, message):
    split = {"train": (TOKENS, TOKENS), "val": (TOKENS, TOKENS), "test": (TOKENS, TOKENS)}
    with pytest.raises(EsperError, match=message) as caught:
        esper.Task(Words, ["mix"], batch=16, **(split | given))
    assert "\n" not in str(caught.value)


REFUSED = {
    "inputs of one value, normalized": (
        {"train": (CONSTANT, torch.arange(21) % 3), "inputs": normalized},
        r"what inputs= gives of train.x\[20\] is NaN or infinite",
    ),
    "an augmentation that divides by 0": (
        {"augmentation": lambda x: x / 0},
        "what augmentation= gives of train.x.0. is",
    ),
    "one target": ({"train": (X, torch.ones(64, 3) * 2)}, "the variance of the training targets is 0.0, expected"),
    "huge targets": ({"train": (X, X[:, :3] * 1e30)}, "the variance of the training targets is .*; give .*scale them"),
    "a huge loss": (
        {"loss": lambda outputs, y: 1e30 * nn.functional.cross_entropy(outputs, y, reduction="none")},
        "the blind loss is .*e.30; it must be finite and above 0.* above 1e.25, multiply the loss by a constant",
    ),
    "lists of arrays": ({"train": (list(X), list(Y))}, "join one array per example with np.stack or torch.stack"),
    "long doubles": ({"train": (X.numpy().astype(np.longdouble), Y)}, r"ndarray of float128, .*\.astype\(np.float32\)"),
    "validation labels above": ({"val": (VAL[0], VAL[1] + 5)}, r"val.y\[0\] is 5, expected 0..2"),
    "complex arrays": ({"train": (X.numpy() + 1j, Y)}, r"convert it with np.stack\(\(z.real, z.imag\)"),
    "masked values": ({"train": (np.ma.masked_greater(X.numpy(), 0), Y)}, "masked values.*; fill them"),
    "objects": ({"train": (X.numpy().astype(object), Y)}, "ndarray of object, expected"),
    "ragged": ({"train": ([[1], [1, 2]], [0, 1])}, "make its rows equally long"),
    "nothing to validate": ({"val": (X[:0], Y[:0])}, "val is empty, expected examples; leave it out"),
    "None": ({"train": (None, Y)}, "NoneType, expected a tensor, an array or a number"),
    "no step": ({"episode_length": 0}, "episode_length is 0"),
    "a learning rate of NaN": ({"lr": NAN}, "lr is nan"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_meaning_is_refused_in_a_sentence(given, message):
    with pytest.raises(EsperError, match=message):
        task(**given)
