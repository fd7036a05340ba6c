"""The gate network of algorithm GATE: the weight of a seed for each example."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn


def _width(channels: int) -> int:
    return max(8, channels // 4)


def num_gate_params(channels: int) -> int:
    """C d + 2 d + 1 with d = max(8, C // 4)."""
    return channels * _width(channels) + 2 * _width(channels) + 1


@final
class GateNetwork(nn.Module):
    """sigmoid(W2 SiLU(W1 mean(h) + b1) + b2): one number in (0, 1) per example; the mean is over space or tokens.

    SiLU, because with few channels all hidden ReLU units can start dead.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(channels, _width(channels))
        self.act = nn.SiLU()
        self.out = nn.Linear(_width(channels), 1)

    def forward(self, h: Float[Tensor, "B *F"]) -> Float[Tensor, "B *ones"]:
        """The gate of each example, shaped to broadcast over its features [B, C, H, W] or [B, T, D]."""
        mean_BC = h.mean(dim=(2, 3) if h.dim() == 4 else 1)
        gate_B1: Tensor = self.out(self.act(self.hidden(mean_BC))).sigmoid()
        return gate_B1.view(-1, *(1,) * (h.dim() - 1))
