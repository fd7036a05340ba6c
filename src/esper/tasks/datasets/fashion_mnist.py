"""Fashion-MNIST from its official idx files: 60,000 training and 10,000 test images of 28x28 pixels.

An idx file, plain or gzip-compressed:

    bytes 0-1   0, 0
    byte  2     type of the values; 8 = unsigned byte, the only one used here
    byte  3     number of axes
    then        one big-endian 32-bit size per axis, then the values, row-major
"""

import gzip
import math
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tasks.datasets import Dataset, Source, Split, in_folders, read_bytes, stratified_split
from esper.tasks.datasets.images import PIXEL_MAX, PLAIN, Pixels, View, with_views

NUM_CLASSES = 10
NUM_TRAIN_FILE, NUM_TEST, NUM_VAL = 60_000, 10_000, 6_000
CLASS_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
SIDE = 28
MEAN, STD = 0.2860, 0.3530
VIEWS = (PLAIN, View(tile=3, region=6))
"""As `images.DIGIT_VIEWS`, for blocks of 3x3 pixels."""
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
    x, y = read_labelled_images(train_images, train_labels, NUM_TRAIN_FILE)
    val, train = stratified_split(y, (NUM_VAL,), NUM_CLASSES, run_seed)
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
        test=Split(*read_labelled_images(test_images, test_labels, NUM_TEST)),
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


def read_labelled_images(images: Path, labels: Path, count: int) -> tuple[Tensor, Tensor]:
    """Images [count, 1, 28, 28] of bytes and their labels [count].

    Raises:
        DataError: a file is missing or damaged, or they are not the announced data set.
    """
    x, y = read_idx(images, (count, SIDE, SIDE)), read_idx(labels, (count,)).to(torch.int64)
    if (highest := int(y.max())) >= NUM_CLASSES:
        raise DataError(
            f"{labels}: found the label {highest}, expected 0..{NUM_CLASSES - 1}; this is another data set or the file "
            "is damaged, fetch it again."
        )
    return x.unsqueeze(1), y


def read_idx(path: Path, shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """The array in an idx file of unsigned bytes; a name that ends in .gz is decompressed.

    Raises:
        DataError: the file is missing, or is not a complete idx file of that shape with nothing behind it.
    """
    content = read_bytes(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: expected a complete gzip file, found a damaged one ({error}); fetch the file again."
            ) from error
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
    start, expected = len(header), math.prod(shape)
    words = f"an idx file of {' x '.join(map(str, shape))} unsigned bytes"
    if content[:start] != header:
        raise DataError(
            f"{path}: found {_announced(content)}, expected {words}; this is another data set, name the folder of the "
            "right one."
        )
    if (found := len(content) - start) != expected:
        state = "truncated" if found < expected else "followed by other bytes"
        raise DataError(f"{path}: found {found} values, expected {words}; the data are {state}, fetch the file again.")
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8, offset=start).reshape(shape))


def _announced(content: bytes) -> str:
    """What the header of a file says."""
    axes = content[3] if len(content) > 3 else 0
    if content[:2] != b"\0\0" or not axes or len(content) < 4 + 4 * axes:
        return f"a file that begins with the bytes {' '.join(map(str, content[:4])) or '(none)'}"
    sizes = np.frombuffer(content, dtype=">u4", count=axes, offset=4)
    return f"an idx file of {' x '.join(map(str, sizes))} values of type {content[2]}"
