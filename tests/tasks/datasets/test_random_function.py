"""A plain function of a batch as augmentation: seeded by host, step and batch, and the same alone and among others."""

import random

import numpy as np
import torch
from torch import Tensor

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
