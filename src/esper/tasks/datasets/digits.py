"""Handwritten digits, 8x8 pixels, embedded in scikit-learn: 1,797 examples, no download.

There is no official test set, so 20 % are the test split and 20 % the validation split (360 each): validation accuracy
then has a resolution of 0.28 points, finer than the thresholds of 0.5 and 1 point that gates and rewards use.
"""

from pathlib import Path

import torch

from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.splits import stratified_split
from esper.tasks.datasets.variants import PLAIN, View, with_views

NUM_CLASSES = 10
NUM_TEST = NUM_VAL = 360
VIEWS = (PLAIN, View(tile=2, region=4))
"""The second one hides patterns of neighbouring 2x2 blocks, so that only a seed behind the first pooling finds some."""
PIXEL_MAX, MEAN, STD = 16.0, 0.3053, 0.3760


def load(data_dir: Path | None, run_seed: int) -> Dataset:
    """1,077 / 360 / 360 examples, stratified by class; x is [n, 1, 8, 8].

    Args:
        data_dir: not needed, the data come with scikit-learn.
        run_seed: key of the split.
    """
    del data_dir
    from sklearn.datasets import load_digits  # takes more than a second, which every command would pay

    pixels, targets = load_digits(return_X_y=True)
    x = ((torch.from_numpy(pixels) / PIXEL_MAX - MEAN) / STD).to(torch.float32).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(targets).to(torch.int64)
    test, val, train = stratified_split(y, (NUM_TEST, NUM_VAL), NUM_CLASSES, run_seed)
    return Dataset(
        identity={
            "name": "digits",
            "source": "sklearn.datasets.load_digits",
            "split_seed": run_seed,
            "sizes": (len(train), len(val), len(test)),
            "normalization": (PIXEL_MAX, MEAN, STD),
        },
        train=Split(x[train], y[train]),
        val=Split(x[val], y[val]),
        test=Split(x[test], y[test]),
        num_classes=NUM_CLASSES,
        class_names=tuple("0123456789"),
    )


def load_views(data_dir: Path | None, run_seed: int) -> Dataset:
    """The same examples once in each of `VIEWS`."""
    return with_views(load(data_dir, run_seed), VIEWS, run_seed)
