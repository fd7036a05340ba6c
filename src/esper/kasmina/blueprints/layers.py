"""Small layers that hosts and blueprints share, and the gate network of algorithm GATE."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def chain(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, by name."""
    return nn.Sequential(OrderedDict(layers))


class LayerScale(nn.Module):
    """gamma * h with one trainable factor per channel that starts at zero.

    A correction after a ReLU can have either sign.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(channels))

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


class NormShift(nn.Module):
    """tanh(s) * (norm(h) - h) with a scalar s that starts at zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.gain = norm, TanhScale()

    def forward(self, h: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        shifted: Tensor = self.gain(self.norm(h) - h)
        return shifted


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


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D / heads)) v, where a token sees all tokens."""
    return F.scaled_dot_product_attention(q, k, v)


@final
class SelfAttention(nn.Module):
    """Multi-head attention of each token to itself and earlier ones, with biases: 4 D^2 + 4 D parameters.

    `attend` makes of queries, keys and values [B, heads, T, D / heads] the weighted values, of the same shape; with
    `full_attention` a token sees later ones too. `dropout` is that of the weights of causal attention. Its mask is
    keyed, so in training the weights are computed without `attend`.
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


@final
class GateNetwork(nn.Module):
    """sigmoid(W2 SiLU(W1 mean(h) + b1) + b2): a number in (0, 1). C d + 2 d + 1 parameters with d = max(8, C // 4).

    One per example: the mean is over space, or over the positions of a sequence. In a `causal` host it is one per
    token: the mean is over this token and earlier ones, because the gate of a language model must not see the future.
    SiLU, because with few channels all hidden ReLU units can start dead.
    """

    def __init__(self, channels: int, causal: bool = True) -> None:
        super().__init__()
        self.causal, width = causal, max(8, channels // 4)
        self.hidden = nn.Linear(channels, width)
        self.act = nn.SiLU()
        self.out = nn.Linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 1, 1, 1], or [B, T, D] -> [B, T or 1, 1], which broadcast over the features."""
        if h.dim() == 4:
            mean = h.mean(dim=(2, 3))
        else:
            mean = _mean_of_the_past(h) if self.causal else h.mean(dim=1, keepdim=True)
        gate: Tensor = self.out(self.act(self.hidden(mean))).sigmoid()
        return gate.view(-1, 1, 1, 1) if h.dim() == 4 else gate


def _mean_of_the_past(h: Tensor) -> Tensor:
    """[B, T, D] -> [B, T, D]."""
    counts = torch.arange(1, h.shape[1] + 1, device=h.device, dtype=torch.float32)
    return (h.float().cumsum(dim=1) / counts[:, None]).to(h.dtype)
