"""Tiny examples that can be learned in seconds."""

import torch
from torch import Tensor

COUNT = 96
"""Examples of each data set."""


def images(classes: int = 3, size: int = 8, channels: int = 3, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Images [n, channels, size, size] with one pattern per class and noise, and their classes [n]."""
    generator = torch.Generator().manual_seed(11)
    patterns = torch.randn(classes, channels, size, size, generator=generator)
    y = torch.arange(count) % classes
    return patterns[y] + 0.5 * torch.randn(count, channels, size, size, generator=generator), y


def masks(size: int = 8) -> tuple[Tensor, Tensor]:
    """Images [n, 3, size, size] of bright squares on noise, and whether each pixel is of the square, 0 or 1."""
    generator = torch.Generator().manual_seed(12)
    corner = torch.randint(0, size // 2, (COUNT, 2, 1, 1), generator=generator)
    place = torch.arange(size)
    rows, columns = place[:, None], place[None, :]
    inside = (
        (rows >= corner[:, 0]) & (rows < corner[:, 0] + 4) & (columns >= corner[:, 1]) & (columns < corner[:, 1] + 4)
    )
    noise = 0.3 * torch.randn(COUNT, 3, size, size, generator=generator)
    return noise + inside[:, None], inside[:, None].float()


def vectors(features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Vectors [n, features] around one centre per class, and their classes [n]."""
    generator = torch.Generator().manual_seed(13)
    centres = 2.0 * torch.randn(classes, features, generator=generator)
    y = torch.arange(COUNT) % classes
    return centres[y] + torch.randn(COUNT, features, generator=generator), y
