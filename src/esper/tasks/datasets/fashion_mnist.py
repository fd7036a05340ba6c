"""Fashion-MNIST from its official idx files: 60,000 training and 10,000 test images of 28x28 pixels."""

from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.idx import Bytes, read_labelled_images
from esper.tasks.datasets.splits import stratified_split

NUM_CLASSES = 10
NUM_TRAIN_FILE, NUM_TEST, NUM_VAL = 60_000, 10_000, 6_000
SIDE = 28
PIXEL_MAX, MEAN, STD = 255.0, 0.2860, 0.3530

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FOLDERS = (".", "fashion-mnist", "FashionMNIST/raw")
"""Where the files may lie below the data folder: as they are, as usually named, as torchvision lays them."""


def load(data_dir: Path | None, run_seed: int) -> Dataset:
    """54,000 / 6,000 / 10,000 examples; validation is a stratified tenth of the official training set.

    Args:
        data_dir: the folder with the four files, each plain or .gz, or a folder above it (`FOLDERS`).
        run_seed: key of the split.

    Raises:
        DataError: no folder is named, a file is missing or broken, or the files hold something else.
    """
    train_images, train_labels, test_images, test_labels = paths = find_files(data_dir)
    images, labels = _read(train_images, train_labels, NUM_TRAIN_FILE)
    y = _labels(labels)
    val, train = stratified_split(y, (NUM_VAL,), NUM_CLASSES, run_seed)
    x = _normalized(images)
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
        test=Split(_normalized(held_out), _labels(held_out_labels)),
        num_classes=NUM_CLASSES,
    )


def find_files(data_dir: Path | None) -> tuple[Path, Path, Path, Path]:
    """The four files in the order of `FILES`, all from one folder.

    Raises:
        DataError: no folder is named, it does not exist, or a file is missing in it.
    """
    if data_dir is None:
        raise DataError(
            "fashion_mnist is read from files but no folder was named; name the one that holds them with --data-dir, "
            "data_dir in a configuration file, or the environment variable ESPER_DATA."
        )
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: there is no such folder; name the one that holds {FILES[0]}(.gz).")
    candidates = [[_plain_or_gz(data_dir / folder / name) for name in FILES] for folder in FOLDERS]
    best = max(candidates, key=lambda files: sum(path.is_file() for path in files))
    missing = [str(path) for path in best if not path.is_file()]
    if missing:
        raise DataError(
            f"{data_dir}: found no {', no '.join(missing)} (nor .gz); expected {', '.join(FILES)}, plain or .gz, in it "
            f"or in its folder {' or '.join(FOLDERS[1:])}; put them there or name another folder."
        )
    a, b, c, d = best
    return a, b, c, d


def _plain_or_gz(path: Path) -> Path:
    compressed = path.with_name(path.name + ".gz")
    return compressed if compressed.is_file() and not path.is_file() else path


def _read(images: Path, labels: Path, count: int) -> tuple[Bytes, Bytes]:
    return read_labelled_images(images, labels, count=count, height=SIDE, width=SIDE, num_classes=NUM_CLASSES)


def _normalized(images: Bytes) -> Tensor:
    x = torch.from_numpy(images.copy()).to(torch.float32).unsqueeze(1)  # the buffer of a file is read-only
    return x.div_(PIXEL_MAX).sub_(MEAN).div_(STD)


def _labels(labels: Bytes) -> Tensor:
    return torch.from_numpy(labels.copy()).to(torch.int64)
