"""Small layers that hosts and blueprints share."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from esper.kasmina.parameters.dropout import Dropout

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


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [B, heads, T, D / heads] -> the weighted values, of the same shape."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D / heads)) v, where a token sees itself and earlier ones."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@final
class CausalAttention(nn.Module):
    """Multi-head attention of each token to itself and earlier ones, with biases: 4 D^2 + 4 D parameters.

    `dropout` is that of the attention weights. Its mask is keyed, so the weights are computed in training; without
    dropout, and in evaluation mode, `attend` does it all.
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, attend: Attend = causal_attention) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self._drop_and_attend(q, k, v) if self.training and self.dropout else self.attend(q, k, v)
        mapped: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return mapped

    def _drop_and_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.dropout is not None
        if not isinstance(self.dropout, Dropout):  # a network that left esper
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=True)
        mixed: Tensor = _DroppedAttention.apply(q, k, v, self.dropout)
        return mixed


_QUERIES = 32
"""Tokens whose attention weights are computed at once; weights of tokens later than all of these are skipped."""


@final
class _DroppedAttention(torch.autograd.Function):
    """Causal attention with dropped weights, for some queries after others; the gradient works in the same memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:  # noqa: ANN401
        """[B, heads, T, D / heads] each -> the same."""
        lead, tokens = q.shape[:2], q.shape[2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ctx.factor, ctx.scale, kept = 1.0 / math.sqrt(q.shape[-1]), dropout.scale, []
        later = torch.full((tokens, tokens), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        mixed = torch.empty_like(v)
        for first, end in _parts(tokens):
            weights = torch.baddbmm(later[first:end, :end], q[:, first:end], k[:, :end].mT, alpha=ctx.factor)
            weights = weights.softmax(dim=-1, dtype=q.dtype)
            mask = dropout.mask((*lead, end - first, end)).flatten(0, 1)
            mixed[:, first:end] = torch.bmm(weights * mask.to(weights.dtype), v[:, :end])
            kept += [weights, mask]
        ctx.save_for_backward(q, k, v, *kept)
        scaled: Tensor = mixed.mul_(dropout.scale).unflatten(0, lead)
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of q, k and v."""
        q, k, v, *kept = ctx.saved_tensors
        lead, grad = grad.shape[:2], grad.flatten(0, 1) * ctx.scale
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (first, end), weights, mask in zip(_parts(q.shape[1]), kept[::2], kept[1::2], strict=True):
            number, of_mixed = mask.to(weights.dtype), grad[:, first:end]
            grad_v[:, :end] += torch.bmm((weights * number).mT, of_mixed)
            of_weights = torch.bmm(of_mixed, v[:, :end].mT).mul_(number)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            grad_q[:, first:end] = torch.bmm(of_scores, k[:, :end]).mul_(ctx.factor)
            grad_k[:, :end] += torch.bmm(of_scores.mT, q[:, first:end]).mul_(ctx.factor)
        return *(x.unflatten(0, lead) for x in (grad_q, grad_k, grad_v)), None


def _parts(tokens: int) -> list[tuple[int, int]]:
    """First and end of the queries of each part."""
    return [(first, min(first + _QUERIES, tokens)) for first in range(0, tokens, _QUERIES)]
