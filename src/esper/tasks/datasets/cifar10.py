"""CIFAR-10 from its official Python folder: 50,000 training and 10,000 test images of 3x32x32 pixels.

A copy whose pixels were changed, by JPEG for instance, is read as well. Accuracies on it are not those of CIFAR-10,
so `identity["copy"]` says what it is: "official" by the MD5 sums, else the first line of `label.txt` in the folder
(such as "JPEG q75"), else "modified copy".

The files are pickles, and a pickle may call any function by its name; all names but the three by which numpy stores an
array are refused.
"""

import hashlib
import io
import math
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tasks.datasets import Dataset, Source, Split, in_folders, read_bytes, stratified_split
from esper.tasks.datasets.images import PIXEL_MAX, CropAndFlip, Pixels

NUM_CLASSES = 10
NUM_PER_FILE, NUM_VAL = 10_000, 5_000
SHAPE = (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

OFFICIAL = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""MD5 sums of the official files, in the order of the examples; the last file is the test set."""
SOURCE = Source(
    name="cifar10", alternatives=in_folders(tuple(OFFICIAL), "cifar-10-batches-py", ".", "cifar10/cifar-10-batches-py")
)
LABEL = "label.txt"
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load(data_dir: Path | None, run_seed: int) -> Dataset:
    """45,000 / 5,000 / 10,000 images [3, 32, 32] of bytes; a stratified tenth of the training set is validation.

    Args:
        data_dir: the folder with the six files, or a folder above it (`SOURCE`).
        run_seed: key of the split.

    Raises:
        DataError: no folder is named, a file is missing or broken, or the files hold something else.
    """
    paths = SOURCE.find(data_dir)
    contents = [read_bytes(path) for path in paths]
    sums = tuple(hashlib.md5(content, usedforsecurity=False).hexdigest() for content in contents)
    parts = [_examples(path, content) for path, content in zip(paths, contents, strict=True)]
    x, y = (torch.cat(column) for column in zip(*parts[:-1], strict=True))
    val, train = stratified_split(y, (NUM_VAL,), NUM_CLASSES, run_seed)
    return Dataset(
        identity={
            "name": "CIFAR-10",
            "source": str(paths[0].parent.resolve()),
            "copy": "official" if sums == tuple(OFFICIAL.values()) else _label(paths[0].with_name(LABEL)),
            "files": tuple((path.name, md5) for path, md5 in zip(paths, sums, strict=True)),
            "split_seed": run_seed,
            "sizes": (len(train), len(val), len(parts[-1][1])),
            "normalization": (PIXEL_MAX, MEAN, STD),
        },
        train=Split(x[train], y[train]),
        val=Split(x[val], y[val]),
        test=Split(*parts[-1]),
        num_classes=NUM_CLASSES,
        class_names=CLASS_NAMES,
        inputs=Pixels(MEAN, STD),
        augmentation=CropAndFlip(padding=4),
    )


_ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _RefusedError(Exception):
    """The name of a global that a pickle may not use."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """What numpy stores an array with; others are refused."""
        if (module, name) not in _ARRAY_NAMES:
            raise _RefusedError(f"{module}.{name}")
        return getattr(np, name, np.zeros(0).__reduce__()[0])


def _read_batch(path: Path, content: bytes) -> dict[str, object]:
    """The fields of one file.

    Raises:
        DataError: the pickle is damaged, names a global that is not needed for arrays, or holds no dictionary.
    """
    try:
        found = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()  # Python 2 wrote the official files
    except _RefusedError as error:
        raise DataError(
            f"{path}: the pickle names the global {error}, expected plain values and numpy arrays only; it could run "
            "code and was not read, use the official file."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{path}: found {len(content)} bytes that are not a complete pickle ({type(error).__name__}: {error}); "
            "fetch the file again."
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: found a pickled {type(found).__name__}, expected a dict; this is another file.")
    return {name.decode() if isinstance(name, bytes) else str(name): value for name, value in found.items()}


def _examples(path: Path, content: bytes) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] of bytes and labels [n] of one file."""
    fields = _read_batch(path, content)
    if not {"data", "labels"} <= fields.keys():
        raise DataError(f"{path}: found the fields {', '.join(fields)}, expected data and labels; this is another "
                        "file, use the official one.")  # fmt: skip
    pixels, labels, size = fields["data"], fields["labels"], (NUM_PER_FILE, math.prod(SHAPE))
    if not isinstance(pixels, np.ndarray) or pixels.shape != size or pixels.dtype != np.uint8:
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else f"a {type(pixels).__name__}"
        raise DataError(f"{path}: data is {found}, expected an array of uint8 {size}; use the official file.")
    if not isinstance(labels, list) or len(labels) != NUM_PER_FILE:
        found = f"{len(labels)} values" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: labels holds {found}, expected a list of {NUM_PER_FILE}; use the official file.")
    for place, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise DataError(f"{path}: labels[{place}] is {label!r}, expected 0..{NUM_CLASSES - 1}; this is another "
                            "data set or the file is damaged.")  # fmt: skip
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).view(-1, *SHAPE), torch.tensor(labels)


def _label(path: Path) -> str:
    """First line of the label file; "modified copy" without one."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return lines[0].strip() if lines and lines[0].strip() else "modified copy"
