"""Images: normalization, augmentation and views on the device, and the digits of scikit-learn.

A view moves parts of images, which decides where in a network a spatial seed can help:

    View(tile=2, region=4)    within each 4x4 region, the four 2x2 tiles of every image lie in an order of their own

A layer that sees whole regions loses nothing; one that compares neighbouring tiles finds no pattern there.

The digits (1,797 of 8x8 pixels, no download) have no official test set, so 20 % are the test split and 20 % the
validation split (360 each): validation accuracy then has a resolution of 0.28 points, finer than the thresholds of 0.5
and 1 point that gates and rewards use.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.random import Stream, word_rows
from esper.tasks.datasets import Dataset, Split, SplitName, stratified_split

PIXEL_MAX = 255.0


@final
@dataclass(frozen=True)
class Pixels:
    """(pixel / 255 - mean) / std, for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs [..., C, H, W] of a convolutional host from bytes of the same shape."""
        mean, std = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (self.mean, self.std))
        return x.to(torch.float32).div_(PIXEL_MAX).sub_(mean).div_(std)


@final
@dataclass(frozen=True)
class CropAndFlip:
    """Pad by `padding` black pixels, crop a random window of the original size, flip half of the images."""

    padding: int = 4

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n 3"]:
        """Offsets of the window, down and right, each in [0, 2 padding], and 1 where the image is flipped."""
        drawn = word_rows(run_seed, Stream.AUGMENTATION, hosts, 3 * count, episode=episode, t=t)
        sizes = torch.tensor([2 * self.padding + 1, 2 * self.padding + 1, 2], device=hosts.device)
        return (drawn.view(len(hosts), count, 3) * sizes) >> 32

    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B 3"]) -> Tensor:
        """Windows of images [N, B, C, H, W]."""
        height, width = x.shape[-2:]
        rows = torch.arange(height, device=x.device) + drawn[..., :1] - self.padding
        columns = torch.arange(width, device=x.device).expand(*drawn.shape[:2], -1)
        columns = torch.where(drawn[..., 2:] == 1, width - 1 - columns, columns) + drawn[..., 1:2] - self.padding
        inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
        place = rows.clamp(0, height - 1)[..., :, None] * width + columns.clamp(0, width - 1)[..., None, :]
        flat = x.flatten(-2)
        cropped = flat.gather(-1, place.flatten(-2)[..., None, :].expand(*flat.shape)).view(x.shape)
        return cropped * inside[..., None, :, :]


# -- views -------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class View:
    """Tiles of `tile` x `tile` pixels in random order within each region of `region` x `region` pixels.

    The order is drawn once for each image and region. Equal sizes move nothing.
    """

    tile: int = 1
    region: int = 1

    def __post_init__(self) -> None:
        if self.tile < 1 or self.region % self.tile:
            raise ConfigError(
                f"a view has tiles of {self.tile} and regions of {self.region} pixels; a region must be a multiple of "
                "a tile."
            )

    def __call__(self, x: Tensor, run_seed: int) -> Tensor:
        """The images [n, C, H, W] in this view.

        Raises:
            ConfigError: the image is not made of whole regions.
        """
        if self.tile == self.region:
            return x
        n, channels, height, width = x.shape
        if height % self.region or width % self.region:
            raise ConfigError(
                f"images of {height}x{width} pixels are not made of regions of {self.region}x{self.region}."
            )
        rows, columns, parts = height // self.region, width // self.region, self.region // self.tile
        # [n, C, region rows, tile rows, y, region columns, tile columns, x] -> [n, regions, tiles, C, y, x]
        tiles = x.reshape(n, channels, rows, parts, self.tile, columns, parts, self.tile)
        tiles = tiles.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(n, rows * columns, parts**2, -1)
        words = word_rows(run_seed, Stream.SPLIT, torch.arange(n), tiles.shape[1] * parts**2, t=1)
        order = words.view(n, tiles.shape[1], parts**2).argsort(dim=2, stable=True).to(x.device)
        moved = tiles.gather(2, order[..., None].expand_as(tiles))
        moved = moved.view(n, rows, columns, parts, parts, channels, self.tile, self.tile)
        return moved.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(x.shape)


PLAIN = View()


def with_views(dataset: Dataset, views: tuple[View, ...], run_seed: int) -> Dataset:
    """The data set with each split once in every view, one after another."""

    def split(name: SplitName, first: int) -> Split:
        of = dataset.split(name)
        images = [view(of.x, run_seed + first + i) for i, view in enumerate(views)]
        return Split(torch.cat(images), of.y.repeat(len(views)))

    count = len(views)
    return replace(
        dataset,
        identity={**dataset.identity, "views": tuple((view.tile, view.region) for view in views)},
        train=split("train", 0),
        val=split("val", count),
        test=split("test", 2 * count),
    )


# -- digits ------------------------------------------------------------------------------------------------------------

NUM_DIGITS = 10
NUM_DIGITS_TEST = NUM_DIGITS_VAL = 360
DIGIT_VIEWS = (PLAIN, View(tile=2, region=4))
"""The second one hides patterns of neighbouring 2x2 blocks, so that only a seed behind the first pooling finds some."""
DIGIT_MAX, DIGIT_MEAN, DIGIT_STD = 16.0, 0.3053, 0.3760


def load_digits(data_dir: Path | None, run_seed: int) -> Dataset:
    """1,077 / 360 / 360 examples, stratified by class; x is [n, 1, 8, 8].

    Args:
        data_dir: not needed, the data come with scikit-learn.
        run_seed: key of the split.
    """
    del data_dir
    from sklearn import datasets  # takes more than a second, which every command would pay

    pixels, targets = datasets.load_digits(return_X_y=True)
    x = ((torch.from_numpy(pixels) / DIGIT_MAX - DIGIT_MEAN) / DIGIT_STD).to(torch.float32).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(targets).to(torch.int64)
    test, val, train = stratified_split(y, (NUM_DIGITS_TEST, NUM_DIGITS_VAL), NUM_DIGITS, run_seed)
    return Dataset(
        identity={
            "name": "digits",
            "source": "sklearn.datasets.load_digits",
            "split_seed": run_seed,
            "sizes": (len(train), len(val), len(test)),
            "normalization": (DIGIT_MAX, DIGIT_MEAN, DIGIT_STD),
        },
        train=Split(x[train], y[train]),
        val=Split(x[val], y[val]),
        test=Split(x[test], y[test]),
        num_classes=NUM_DIGITS,
        class_names=tuple("0123456789"),
    )


def load_digit_views(data_dir: Path | None, run_seed: int) -> Dataset:
    """The same examples once in each of `DIGIT_VIEWS`."""
    return with_views(load_digits(data_dir, run_seed), DIGIT_VIEWS, run_seed)
