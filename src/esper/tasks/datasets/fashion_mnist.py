"""Fashion-MNIST from its official idx files: 60,000 training and 10,000 test images of 28x28 pixels."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.idx import Bytes, read_labelled_images
from esper.tasks.datasets.images import PIXEL_MAX, Pixels
from esper.tasks.datasets.source import Source, in_folders
from esper.tasks.datasets.splits import stratified_split
from esper.tasks.datasets.variants import PLAIN, View, with_views

NUM_CLASSES = 10
NUM_TRAIN_FILE, NUM_TEST, NUM_VAL = 60_000, 10_000, 6_000
CLASS_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
SIDE = 28
MEAN, STD = 0.2860, 0.3530
VIEWS = (PLAIN, View(tile=3, region=6))
"""As `digits.VIEWS`, for blocks of 3x3 pixels."""
BORDER = 2
FEWER = (4_000, 500, 2_000)

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SOURCE = Source(
    name="fashion_mnist",
    alternatives=in_folders(FILES, ".", "fashion-mnist", "FashionMNIST/raw"),  # the last one is torchvision's
    or_gz=True,
)


def load(data_dir: Path | None, run_seed: int) -> Dataset:
    """54,000 / 6,000 / 10,000 images [1, 28, 28] of bytes; a stratified tenth of the training set is validation.

    Args:
        data_dir: the folder with the four files, each plain or .gz, or a folder above it (`SOURCE`).
        run_seed: key of the split.

    Raises:
        DataError: no folder is named, a file is missing or broken, or the files hold something else.
    """
    train_images, train_labels, test_images, test_labels = paths = SOURCE.find(data_dir)
    images, labels = _read(train_images, train_labels, NUM_TRAIN_FILE)
    y = _labels(labels)
    val, train = stratified_split(y, (NUM_VAL,), NUM_CLASSES, run_seed)
    x = _pixels(images)
    held_out, held_out_labels = _read(test_images, test_labels, NUM_TEST)
    return Dataset(
        identity={
            "name": "fashion_mnist",
            "source": str(paths[0].parent.resolve()),
            "files": tuple((path.name, path.stat().st_size) for path in paths),
            "split_seed": run_seed,
            "sizes": (len(train), len(val), NUM_TEST),
            "normalization": (PIXEL_MAX, MEAN, STD),
        },
        train=Split(x[train], y[train]),
        val=Split(x[val], y[val]),
        test=Split(_pixels(held_out), _labels(held_out_labels)),
        num_classes=NUM_CLASSES,
        class_names=CLASS_NAMES,
        inputs=Pixels((MEAN,), (STD,)),
    )


def load_views(data_dir: Path | None, run_seed: int) -> Dataset:
    """4,000 / 500 / 2,000 of the images without their border, [1, 24, 24], once in each of `VIEWS`; see `load`."""
    whole = load(data_dir, run_seed)

    def inner(split: Split, count: int) -> Split:
        return Split(split.x[:count, :, BORDER:-BORDER, BORDER:-BORDER].contiguous(), split.y[:count])

    train, val, test = (inner(split, n) for split, n in zip((whole.train, whole.val, whole.test), FEWER, strict=True))
    identity = {**whole.identity, "sizes": FEWER, "border": BORDER}
    return with_views(replace(whole, identity=identity, train=train, val=val, test=test), VIEWS, run_seed)


def _read(images: Path, labels: Path, count: int) -> tuple[Bytes, Bytes]:
    return read_labelled_images(images, labels, count=count, height=SIDE, width=SIDE, num_classes=NUM_CLASSES)


def _pixels(images: Bytes) -> Tensor:
    return torch.from_numpy(images.copy()).unsqueeze(1)  # the buffer of a file is read-only


def _labels(labels: Bytes) -> Tensor:
    return torch.from_numpy(labels.copy()).to(torch.int64)
