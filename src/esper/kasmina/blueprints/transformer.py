"""Blueprints for transformer hosts: h [B, T, D] -> delta of the same shape.

A token sees no later one, except in hosts whose own outputs depend on later tokens, such as a vision transformer.

As for convolutional hosts, a new seed leaves its host as it is and all of its parameters receive gradients: each branch
ends with a linear layer or a bounded factor that starts at zero.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as block_mask_kernel

from esper.kasmina.blueprints.layers import NormShift, SelfAttention, causal_attention, chain, full_attention
from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.leyline.lifecycle import HostFamily

_HEADS = 4
_KERNEL = 4
"""Tokens that `depthwise` sees: this one and the three before it."""
_KERNEL_BOTH_WAYS = 5
"""This one, the two before it and the two behind it."""
_SMALLEST_HEAD = 16
"""Values per head, below which the block-mask kernel does not run."""


@final
class Depthwise(nn.Module):
    """A convolution of each channel of LN(h) over `kernel` tokens, this one among them.

    The others are those before it; with `padding` tokens before and behind the sequence they lie on both sides.
    """

    def __init__(self, width: int, kernel: int, padding: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        padding = kernel - 1 if padding is None else padding
        self.conv = nn.Conv1d(width, width, kernel, padding=padding, groups=width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        mixed: Tensor = self.conv(self.norm(h).transpose(1, 2))[..., : h.shape[1]]
        return mixed.transpose(1, 2)


def depthwise(d: int) -> nn.Module:
    """DWConv4(LN(h)) over this token and those before it (So et al. 2021, arXiv 2109.08668): 6 D parameters."""
    return Depthwise(d, _KERNEL)


def depthwise_both_ways(d: int) -> nn.Module:
    """DWConv5(LN(h)) over this token and the two on either side: 7 D parameters."""
    return Depthwise(d, _KERNEL_BOTH_WAYS, padding=_KERNEL_BOTH_WAYS // 2)


def norm(d: int) -> nn.Module:
    """A step from h towards LN(h): 2 D + 1 parameters."""
    return NormShift(nn.LayerNorm(d))


def attention(d: int) -> nn.Module:
    """Causal attention with 4 heads, or the most of 2 and 1 that divide D: 4 D^2 + 4 D parameters."""
    return SelfAttention(d, math.gcd(d, _HEADS))


def attention_both_ways(d: int) -> nn.Module:
    """The same, where a token sees all tokens."""
    return SelfAttention(d, math.gcd(d, _HEADS), attend=full_attention)


def flex_attention(d: int) -> nn.Module:
    """`attention`, computed by a kernel with a block mask on CUDA."""
    return SelfAttention(d, math.gcd(d, _HEADS), attend=block_mask_attention)


def lora(d: int) -> nn.Module:
    """U V h of rank 8 (Hu et al. 2021): 16 D parameters."""
    return _low_rank(d, 8)


def lora_large(d: int) -> nn.Module:
    """U V h of rank 32: 64 D parameters."""
    return _low_rank(d, 32)


def mlp_small(d: int) -> nn.Module:
    """W2 GELU(W1 h + b1) + b2 of width 2 D: 4 D^2 + 3 D parameters."""
    return _mlp(d, 2 * d)


def mlp(d: int) -> nn.Module:
    """The same of width 4 D: 8 D^2 + 5 D parameters."""
    return _mlp(d, 4 * d)


def _low_rank(d: int, rank: int) -> nn.Module:
    return chain(down=nn.Linear(d, rank, bias=False), up=nn.Linear(rank, d, bias=False))


def _mlp(d: int, width: int) -> nn.Module:
    return chain(up=nn.Linear(d, width), act=nn.GELU(), down=nn.Linear(width, d))


# -- the kernel with a block mask -------------------------------------------------------------------------------------


def block_mask_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal_attention` within 1e-4, by PyTorch's flex attention where that has a kernel: on CUDA, in wide heads."""
    if not q.is_cuda or q.shape[-1] < _SMALLEST_HEAD:
        return causal_attention(q, k, v)
    attended: Tensor = _compiled_kernel()(q, k, v, block_mask=_causal_blocks(q.shape[-2], q.device))
    return attended


@cache
def _compiled_kernel() -> Callable[..., Any]:
    return torch.compile(block_mask_kernel)


@cache
def _causal_blocks(tokens: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, query, key: query >= key, None, None, tokens, tokens, device=device)


_ATTENTION = {"out.weight": 0.0, "out.bias": 0.0}
_MLP = {"down.weight": 0.0, "down.bias": 0.0}
TRANSFORMER_BLUEPRINTS = (
    FunctionBlueprint(HostFamily.TRANSFORMER, attention, _ATTENTION, both_ways=attention_both_ways),
    FunctionBlueprint(HostFamily.TRANSFORMER, norm, {"gain.strength": 0.0}),
    FunctionBlueprint(
        HostFamily.TRANSFORMER, depthwise, {"conv.weight": 0.0}, least_tokens=2, both_ways=depthwise_both_ways
    ),
    FunctionBlueprint(HostFamily.TRANSFORMER, lora, {"up.weight": 0.0}),
    FunctionBlueprint(HostFamily.TRANSFORMER, lora_large, {"up.weight": 0.0}),
    FunctionBlueprint(HostFamily.TRANSFORMER, mlp_small, _MLP),
    FunctionBlueprint(HostFamily.TRANSFORMER, mlp, _MLP),
    FunctionBlueprint(HostFamily.TRANSFORMER, flex_attention, _ATTENTION, both_ways=attention_both_ways),
)
