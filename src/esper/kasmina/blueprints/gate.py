"""The gate network of algorithm GATE: the weight of a seed for each example, or each token."""

from typing import final

import torch
from torch import Tensor, nn


def _width(channels: int) -> int:
    return max(8, channels // 4)


def num_gate_params(channels: int) -> int:
    """C d + 2 d + 1 with d = max(8, C // 4)."""
    return channels * _width(channels) + 2 * _width(channels) + 1


@final
class GateNetwork(nn.Module):
    """sigmoid(W2 SiLU(W1 mean(h) + b1) + b2): a number in (0, 1).

    One per example: the mean is over space, or over the positions of a sequence. In a `causal` host it is one per
    token: the mean is over this token and earlier ones, because the gate of a language model must not see the future.
    SiLU, because with few channels all hidden ReLU units can start dead.
    """

    def __init__(self, channels: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.hidden = nn.Linear(channels, _width(channels))
        self.act = nn.SiLU()
        self.out = nn.Linear(_width(channels), 1)

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
