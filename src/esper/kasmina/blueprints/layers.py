"""Small layers that blueprints share."""

import torch
from torch import Tensor, nn

BIRTH_SCALE = 0.01
"""Initial value of every layer scale: small against normalized activations, but gradients pass."""


class LayerScale(nn.Module):
    """gamma * h with one trainable factor per channel, so that a correction after a ReLU can have either sign."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), BIRTH_SCALE))

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return h * self.gamma.view(-1, 1, 1)


class TanhScale(nn.Module):
    """tanh(s) * h with one trainable scalar that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        return torch.tanh(self.strength) * h
