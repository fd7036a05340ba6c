"""The recurrence of the policy, one cell after another under autograd.

Shape legend: N = hosts, T = steps, H = width, G = 4 H gates.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.tamiyo.network import lstm_cell


def lstm_steps(
    gates_x: Float[Tensor, "N T G"],
    h: Float[Tensor, "N H"],
    c: Float[Tensor, "N H"],
    reset: Bool[Tensor, "N T"],
    recurrent_weight: Float[Tensor, "G H"],
) -> Float[Tensor, "N T H"]:
    """`lstm_sequence` by autograd."""
    outputs = []
    for gates, fresh in zip(gates_x.unbind(1), reset[..., None].unbind(1), strict=True):
        h, c = lstm_cell(gates, h.masked_fill(fresh, 0.0), c.masked_fill(fresh, 0.0), recurrent_weight)
        outputs.append(h)
    return torch.stack(outputs, dim=1)
