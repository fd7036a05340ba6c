"""Hosts that unshuffle their images, 6x10 with two channels, train and are measured alike in every executor."""

import pytest
import torch
from against_streamed import EXECUTORS, compare, grow_different_seeds

from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.images import CropAndFlip
from tiny import CLASSES, SLOTS

SPEC = CNNHostSpec(in_channels=2, base=4, blocks=2, kernel=3, pools=1, classes=CLASSES, unshuffle=2)
SIZE = (6, 10)  # 3x5 after it, which is odd


def images(augmentation: CropAndFlip | None = None) -> Dataset:
    generator = torch.Generator().manual_seed(6)

    def split(count: int) -> Split:
        return Split(torch.randn(count, 2, *SIZE, generator=generator), torch.arange(count) % CLASSES)

    splits = {"train": split(40), "val": split(30), "test": split(20)}
    return Dataset(identity={"name": "wide"}, **splits, num_classes=CLASSES, augmentation=augmentation)


def settings(augmentation: CropAndFlip | None = None) -> dict[str, object]:
    host = deterministic_build(lambda: CNNHost(SPEC, SLOTS, image_size=SIZE))
    return {"host": host, "data": images(augmentation)}


@pytest.mark.parametrize("executor", ["native", "fused"])
@pytest.mark.parametrize("augmentation", [None, CropAndFlip(1)], ids=["plain", "augmented"])
def test_hosts_with_seeds_are_those_of_the_streamed_executor(executor, augmentation):
    compare(EXECUTORS[executor], grow_different_seeds, num_envs=5, **settings(augmentation))
