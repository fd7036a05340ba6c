"""A plain function of a batch as augmentation: seeded by host, step and batch, and the same alone and among others."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.leyline.errors import DataError
from esper.leyline.random import Stream, generator_states, seeded_generators, words
from esper.leyline.structure import Structure
from esper.tasks.datasets import Dataset, RandomFunction, Split
from esper.tolaria.batches import SharedBatchIterator

CPU = torch.device("cpu")


def noisy(x: Tensor) -> Tensor:
    """Edits its argument, and draws from all three global generators."""
    x += torch.randn_like(x)
    x *= 1.0 + np.random.rand()
    return x.flip(0) if random.random() < 0.5 else x


def numbered(function: object, n: int = 10) -> Dataset:
    split = Split(torch.arange(n, dtype=torch.float32)[:, None].expand(-1, 3).clone(), torch.arange(n))
    return Dataset(identity={"name": "n"}, train=split, val=split, test=split, augmentation=RandomFunction(function))


def test_a_batch_is_what_the_function_gives_under_the_number_of_its_host_step_and_first_example():
    batches = SharedBatchIterator(numbered(noisy), 2, 4, "train", 7, CPU)
    batches.begin(3, 2, torch.tensor([5, 9]))
    found = [x for x, _ in batches]
    for i, host in enumerate((5, 9)):
        for at, x in zip((0, 4, 8), found, strict=True):
            block = words(7, Stream.AUGMENTATION, torch.tensor(host), episode=2, t=3, block=at // 4)
            with seeded_generators(int(block[at % 4])):
                want = noisy(batches.data.x[batches.order[i, at : at + 4]].clone())
            assert torch.equal(x[i], want)


def test_data_and_global_generators_stay_as_they_were():
    data, states = numbered(noisy), generator_states()
    before = data.train.x.clone()
    batches = SharedBatchIterator(data, 2, 4, "train", 7, CPU)
    batches.begin(1, 0, torch.arange(2))
    assert len(list(batches)) == 3
    assert torch.equal(data.train.x, before)
    assert generator_states() == states
    assert torch.equal(next(iter(SharedBatchIterator(data, 1, 10, "val", 7, CPU))).x, before)


def test_tuples_and_dictionaries_come_and_go_as_they_are_given():
    x = {"image": torch.rand(4, 2, 2), "mask": torch.tensor([[True, False, True]] * 4)}
    structure = Structure.of(x)
    seen = []

    def shuffled(x: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append({name: (tuple(of.shape), of.dtype) for name, of in x.items()})
        return {"image": -x["image"], "mask": ~x["mask"]}

    packed = structure.pack(x).expand(2, 4, -1)
    function = RandomFunction(shuffled, structure)
    found = structure.unpack(function(packed, function.draw(0, torch.arange(2), 0, 1, 4)))
    assert seen == [{"image": ((4, 2, 2), torch.float32), "mask": ((4, 3), torch.bool)}] * 2
    assert torch.equal(found["image"], -x["image"].expand(2, -1, -1, -1))
    assert torch.equal(found["mask"], ~x["mask"].expand(2, -1, -1))


# -- a function of inputs and targets ----------------------------------------------------------------------------------

PICTURES = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
MASKS = (PICTURES[:, 0] > 0.5).long()


def flipped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each picture and its mask are mirrored or not."""
    mirrored = torch.rand(len(x)) < 0.5
    x[mirrored], y[mirrored] = x[mirrored].flip(-1), y[mirrored].flip(-1)
    return x, y


class Segments(nn.Module):
    """[B, 1, 8, 8] -> logits of each pixel [B, 2, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none").mean((1, 2))


def segmentation(augmentation: object) -> esper.Task:
    pairs = PICTURES, MASKS
    return esper.Task(Segments, ["one"], pairs, pairs, pairs, 16, loss=pixels, augmentation=augmentation)


def test_a_function_of_two_arguments_changes_targets_with_their_inputs():
    data = segmentation(flipped).spec.load(None, 0)
    batches = SharedBatchIterator(data, 2, 16, "train", 7, CPU)
    batches.begin(1, 0, torch.arange(2))
    changed = 0
    for number, (x, y) in enumerate(batches):
        assert torch.equal(y, (x[:, :, 0] > 0.5).long())
        own = batches.order[:, 16 * number :][:, :16]
        assert torch.equal(x.flatten(2).sort().values, PICTURES[own].flatten(2).sort().values)
        changed += int((x != PICTURES[own]).any(dim=(2, 3, 4)).sum())
    assert 0 < changed < 96
    assert torch.equal(data.train.y, MASKS)


@pytest.mark.parametrize("executor", ["fused", "native"])
def test_every_executor_trains_on_targets_that_were_changed(executor):
    losses = {}
    for name in ("streamed", executor):
        grown = esper.grow(segmentation(flipped), "wait_only", steps=3, executor=name, progress=False)
        losses[name] = grown.points
    assert losses[executor] == pytest.approx(losses["streamed"], abs=1e-3)
    plain = esper.grow(segmentation(None), "wait_only", steps=3, executor="streamed", progress=False)
    assert abs(plain.points - losses["streamed"]) > 1e-3


def test_targets_in_a_dictionary_come_and_go_as_they_are_given():
    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return pixels(outputs, targets["mask"]) * targets["weight"]

    def heavier(x: Tensor, y: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"mask": 1 - y["mask"], "weight": 2.0 * y["weight"]}

    pairs = PICTURES, {"mask": MASKS, "weight": torch.ones(48)}
    task = esper.Task(Segments, ["one"], pairs, pairs, pairs, 16, loss=loss, augmentation=heavier)
    data = task.spec.load(None, 0)
    batches = SharedBatchIterator(data, 1, 16, "train", 7, CPU)
    batches.begin(1, 0, torch.arange(1))
    structure = data.augmentation.targets.structure
    for number, (_, y) in enumerate(batches):
        found, own = structure.unpack(y[0]), batches.order[0, 16 * number :][:16]
        assert torch.equal(found["mask"], 1 - MASKS[own])
        assert torch.equal(found["weight"], torch.full((16,), 2.0))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, y: (x, y + 1), "gives targets from 1 to 2, but those of the examples are 0 to 1"),
        (lambda x, y: x, "it gives a tensor"),
        (lambda x, y: (x, y.float()), "keep shapes and dtypes"),
        (lambda x, y: (x[..., :4], y[..., :4]), "keep shapes and dtypes"),
        (lambda x, y: (x, y[torch.randperm(len(y), generator=SEEDED)]), "gives other examples in a second call"),
    ],
    ids=["new labels", "inputs alone", "another dtype", "another shape", "a generator of its own"],
)
def test_changes_of_targets_that_cannot_be_trained_on_are_refused(function, said):
    with pytest.raises(DataError, match=said):
        segmentation(function)


SEEDED = torch.Generator().manual_seed(0)


def test_a_module_of_two_arguments_gets_targets_and_a_default_is_no_second_argument():
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, y

    for function, takes in ((Both(), True), (lambda x, strength=0.5: x * strength, False), (nn.Identity(), False)):
        assert (segmentation(function).spec.load(None, 0).augmentation.targets is not None) == takes
