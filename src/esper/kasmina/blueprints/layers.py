"""Small layers that hosts and blueprints share."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BIRTH_SCALE = 0.01
"""Initial value of every layer scale: small against normalized activations, but gradients pass."""


def chain(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, by name."""
    return nn.Sequential(OrderedDict(layers))


class LayerScale(nn.Module):
    """gamma * h with one trainable factor per channel, so that a correction after a ReLU can have either sign."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), BIRTH_SCALE))

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] or [B, T, D] -> the same."""
        return h * (self.gamma if h.dim() == 3 else self.gamma.view(-1, 1, 1))


class TanhScale(nn.Module):
    """tanh(s) * h with one trainable scalar that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        return torch.tanh(self.strength) * h


class Positions(nn.Module):
    """h plus one trainable vector per position; sequences may be shorter than `context`."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context, width))
        nn.init.normal_(self.weight)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return h + self.weight[: h.shape[1]]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D / heads)) v, where a token sees itself and earlier ones."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@final
class CausalAttention(nn.Module):
    """Multi-head attention of each token to itself and earlier ones, with biases: 4 D^2 + 4 D parameters.

    `dropout` is that of the attention weights. Its mask is keyed, so the weights are computed in training; without
    dropout, and in evaluation mode, `attend` does it all: it makes of queries, keys and values [B, heads, T, D / heads]
    the weighted values, of the same shape.
    """

    def __init__(
        self, width: int, heads: int, *, dropout: float = 0.0, attend: Callable[..., Tensor] = causal_attention
    ) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout: Any = nn.Dropout(dropout) if dropout else None
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if not self.training or self.dropout is None:
            mixed = self.attend(q, k, v)
        elif isinstance(self.dropout, nn.Dropout):  # a network that left esper
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=True)
        else:
            mixed = self.dropout.attend(q, k, v)
        mapped: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return mapped
