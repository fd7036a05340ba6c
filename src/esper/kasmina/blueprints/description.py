"""Slots and blueprints as numbers, so that a policy knows those of a new network by what they are made of.

Shape legend: S = slots, B = blueprints, K = `KINDS`.
"""

import math

import torch
from torch import nn

from esper.kasmina.blueprints.layers import SelfAttention
from esper.leyline.messages import Menu, SeedCosts

KINDS = ("exists", "convolution", "grouped", "pointwise", "vector", "attention", "depth", "narrow", "scalar")
"""Columns of `kinds_of`: the shares of the parameters by the shape of their tensor; and the rest of its values."""
_LOG_PARAMS, _LOG_STEPS, _MOST_LAYERS = 16.0, 6.0, 8.0
_WAVES = 4
"""Cosines of the place of a slot: two neighbours differ by much, as they must for a policy to tell them apart."""


def kinds_of(seed: nn.Module, channels: int) -> list[float]:
    """What a seed for features with this many channels is made of; all values are 0 to 1.

    A kernel that sees neighbours is a convolution, or grouped if it sees few channels; a matrix is pointwise; what has
    one axis, scales and biases, is a vector. `attention` says whether tokens attend to each other, `depth` counts
    the matrices and kernels, `narrow` is the smallest width between two of them as a share of the channels.
    """
    shapes = [tuple(parameter.shape) for parameter in seed.parameters()]
    total = max(1, sum(map(math.prod, shapes)))
    shares = dict.fromkeys(KINDS, 0.0) | {"exists": 1.0}
    widths = []
    for shape in shapes:
        if len(shape) > 1:
            widths.append(shape[0])
            neighbours = math.prod(shape[2:]) > 1
            kind = "pointwise" if not neighbours else "convolution" if 2 * shape[1] > channels else "grouped"
        else:
            kind = "vector" if shape else "scalar"
        shares[kind] += math.prod(shape) / total
    shares["scalar"] = float(shares["scalar"] > 0.0)
    shares["attention"] = float(any(isinstance(m, SelfAttention | nn.MultiheadAttention) for m in seed.modules()))
    shares["depth"] = min(1.0, len(widths) / _MOST_LAYERS)
    shares["narrow"] = min(1.0, min(widths, default=channels) / channels)
    return [shares[kind] for kind in KINDS]


def menu_of(costs: SeedCosts, host_params: int, *, episode_length: int, min_training_epochs: int) -> Menu:
    """The menu of an engine: slots by their place and the scale of their host, blueprints by kind and size."""
    slots = len(costs.gate_params)
    device = costs.seed_params.device
    place = (torch.arange(slots, device=device) + 0.5) / slots
    waves = torch.cos(math.pi * place[:, None] * torch.arange(1, _WAVES + 1, device=device))
    same = [1.0 / slots, math.log1p(host_params) / _LOG_PARAMS, math.log(episode_length) / _LOG_STEPS,
            min(1.0, min_training_epochs / episode_length)]  # fmt: skip
    places = torch.cat((waves, torch.tensor(same, device=device).expand(slots, -1)), dim=1)
    params, flops = costs.seed_params.to(torch.float32), costs.seed_flops.to(torch.float32)
    relative = params / max(1, host_params), flops / costs.host_flops.clamp(min=1)
    sizes = torch.stack((params.log1p() / _LOG_PARAMS, *(share.log1p() for share in relative)), dim=-1)
    return Menu(places=places, seeds=torch.cat((costs.kinds, sizes * costs.selectable[:, None]), dim=-1))
