"""Tiny data sets that something can be learned from; every call gives the same."""

import torch
from torch import Tensor


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def pictures(channels: int = 3, size: int = 16, classes: int = 4, count: int = 96) -> tuple[Tensor, Tensor]:
    """Noise on a gradient whose direction is the class: x [n, C, size, size], y [n]."""
    generator = _generator()
    y = torch.randint(classes, (count,), generator=generator)
    angle = y * (3.14159 / classes)
    line = torch.linspace(-1.0, 1.0, size)
    ramp = angle.cos()[:, None, None] * line + angle.sin()[:, None, None] * line[:, None]
    return ramp[:, None] + 0.3 * torch.randn(count, channels, size, size, generator=generator), y


def tokens(length: int = 12, vocabulary: int = 17, count: int = 96) -> Tensor:
    """Sequences that count upwards from a random token, with a few mistakes: [n, length]."""
    generator = _generator()
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    noise = (torch.rand(count, length, generator=generator) < 0.05).long()
    return (start + torch.arange(length) + noise) % vocabulary


def waves(length: int = 256, classes: int = 4, count: int = 96) -> tuple[Tensor, Tensor]:
    """Sines in noise, whose frequency is the class: x [n, length], y [n]."""
    generator = _generator()
    y = torch.randint(classes, (count,), generator=generator)
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    time = torch.linspace(0.0, 6.28, length)
    return (time * (3.0 * (y[:, None] + 1)) + phase).sin() + 0.2 * torch.randn(count, length, generator=generator), y


def rows(features: int = 8, count: int = 96) -> tuple[Tensor, Tensor]:
    """Numbers, and whether the product of the first two is positive: x [n, features], y [n]."""
    x = torch.randn(count, features, generator=_generator())
    return x, (x[:, 0] * x[:, 1] > 0).long()


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
