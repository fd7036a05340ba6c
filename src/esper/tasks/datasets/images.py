"""Images as bytes: normalization and augmentation on the device."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.random import Stream, word_rows

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
