"""Variants of images whose parts were moved: they decide where in a network a spatial seed can help.

    View(tile=2, region=4)    within each 4x4 region, the four 2x2 tiles of every image lie in an order of their own

A layer that sees whole regions loses nothing; one that compares neighbouring tiles finds no pattern there.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.random import Stream, word_rows
from esper.tasks.datasets import Dataset, Split, SplitName


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
