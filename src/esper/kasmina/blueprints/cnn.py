"""Blueprints for convolutional hosts: h [B, C, H, W] -> delta of the same shape.

A new seed leaves its host as it is, with every algorithm, yet all of its parameters receive gradients from the second
step on. So a branch ends with a layer scale, a linear layer or a bounded factor that starts at zero. A zero before a
normalization or a ReLU would stop the gradients of all layers before it for good.
"""

from typing import final

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import LayerScale, NormShift, chain
from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.leyline.lifecycle import HostFamily

_MAX_GROUPS = 32
_MIN_GROUP = 16


def num_groups(channels: int) -> int:
    """Groups of a normalization: the largest g <= 32 that divides `channels` and leaves at least min(16, C) in each.

    No group is a single value then, so a 1x1 map is not normalized away as long as C*H*W > 1.
    """
    smallest = min(_MIN_GROUP, channels)
    return max(g for g in range(1, _MAX_GROUPS + 1) if channels % g == 0 and channels // g >= smallest)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(num_groups(channels), channels)


def _conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


@final
class ChannelAttention(nn.Module):
    """h * tanh(W2 SiLU(W1 mean_space(h)) + b2), one factor per channel; W2 and b2 start at zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, width, bias=False)
        self.act = nn.SiLU()
        self.excite = nn.Linear(width, channels)

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        factor_BC = torch.tanh(self.excite(self.act(self.squeeze(h.mean(dim=(2, 3))))))
        return h * factor_BC.view(*factor_BC.shape, 1, 1)


def conv_light(c: int) -> nn.Module:
    """ReLU(GN(Conv3x3(h))), scaled: 9 C^2 + 3 C parameters."""
    return chain(conv=_conv(c, c, 3), norm=_group_norm(c), act=nn.ReLU(), scale=LayerScale(c))


def attention(c: int) -> nn.Module:
    """Squeeze and excitation (Hu et al. 2018), signed and bounded: 2 C r + C parameters with r = max(1, C // 4)."""
    return ChannelAttention(c)


def norm(c: int) -> nn.Module:
    """A step from h towards GN(h): 2 C + 1 parameters."""
    return NormShift(_group_norm(c))


def depthwise(c: int) -> nn.Module:
    """ReLU(GN(Conv1x1(DWConv3x3(h)))), scaled: C^2 + 12 C parameters."""
    return chain(
        depthwise=_conv(c, c, 3, groups=c),
        pointwise=_conv(c, c, 1),
        norm=_group_norm(c),
        act=nn.ReLU(),
        scale=LayerScale(c),
    )


def bottleneck(c: int) -> nn.Module:
    """GN(Conv1x1(ReLU(Conv3x3(ReLU(Conv1x1(h)))))), scaled: 2 C b + 9 b^2 + 3 C parameters with b = max(8, C // 4)."""
    width = max(8, c // 4)
    return chain(
        down=_conv(c, width, 1),
        down_act=nn.ReLU(),
        conv=_conv(width, width, 3),
        conv_act=nn.ReLU(),
        up=_conv(width, c, 1),
        norm=_group_norm(c),
        scale=LayerScale(c),
    )


def conv_small(c: int) -> nn.Module:
    """ReLU(GN(Conv1x1(h))), scaled: C^2 + 3 C parameters."""
    return chain(conv=_conv(c, c, 1), norm=_group_norm(c), act=nn.ReLU(), scale=LayerScale(c))


def conv_heavy(c: int) -> nn.Module:
    """ReLU(GN(Conv3x3(ReLU(GN(Conv3x3(h)))))), scaled: 18 C^2 + 5 C parameters."""
    return chain(
        conv1=_conv(c, c, 3),
        norm1=_group_norm(c),
        act1=nn.ReLU(),
        conv2=_conv(c, c, 3),
        norm2=_group_norm(c),
        act2=nn.ReLU(),
        scale=LayerScale(c),
    )


_SCALED = {"scale.gamma": 0.0}
CNN_BLUEPRINTS = (
    FunctionBlueprint(HostFamily.CNN, conv_light, _SCALED),
    FunctionBlueprint(HostFamily.CNN, attention, {"excite.weight": 0.0, "excite.bias": 0.0}),
    FunctionBlueprint(HostFamily.CNN, norm, {"gain.strength": 0.0}),
    FunctionBlueprint(HostFamily.CNN, depthwise, _SCALED),
    FunctionBlueprint(HostFamily.CNN, bottleneck, _SCALED),
    FunctionBlueprint(HostFamily.CNN, conv_small, _SCALED),
    FunctionBlueprint(HostFamily.CNN, conv_heavy, _SCALED),
)
