"""Blueprints for convolutional hosts: h [B, C, H, W] -> delta of the same shape.

A new seed must not disturb its host, yet every one of its parameters must learn from the first steps on. So the branch
ends with a layer scale of 0.01 after its last normalization or activation; an exact zero is used only where a linear
map or a bounded factor ends the branch. A zero in front of a normalization or a ReLU would stop all gradients there.
"""

from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import BIRTH_SCALE, LayerScale, TanhScale
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.leyline.stages import HostFamily

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


def _chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


@final
class ConvLight(AbstractBlueprint):
    """gamma * ReLU(GN(Conv3x3(h)))."""

    name = "conv_light"
    family = HostFamily.CNN
    birth = {"scale.gamma": BIRTH_SCALE}  # noqa: RUF012 -- declared as a read-only Mapping

    def build(self, channels: int) -> nn.Module:
        """Conv, norm, ReLU, scale."""
        return _chain(
            conv=_conv(channels, channels, 3), norm=_group_norm(channels), act=nn.ReLU(), scale=LayerScale(channels)
        )

    def num_params(self, channels: int) -> int:
        """9 C^2 + 3 C."""
        return 9 * channels**2 + 3 * channels


@final
class ChannelAttention(nn.Module):
    """h * tanh(W2 SiLU(W1 mean_space(h)) + b2), one factor per channel; zero at birth because W2 and b2 are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, width, bias=False)
        self.act = nn.SiLU()
        self.excite = nn.Linear(width, channels)
        nn.init.zeros_(self.excite.weight)
        nn.init.zeros_(self.excite.bias)

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        factor_BC = torch.tanh(self.excite(self.act(self.squeeze(h.mean(dim=(2, 3))))))
        return h * factor_BC.view(*factor_BC.shape, 1, 1)


@final
class Attention(AbstractBlueprint):
    """Channel attention (squeeze and excitation, Hu et al. 2018) with a signed, bounded factor."""

    name = "attention"
    family = HostFamily.CNN
    birth = {"excite.weight": 0.0, "excite.bias": 0.0}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """See `ChannelAttention`."""
        return ChannelAttention(channels)

    def num_params(self, channels: int) -> int:
        """2 C r + C with r = max(1, C // 4)."""
        return 2 * channels * max(1, channels // 4) + channels


@final
class NormShift(nn.Module):
    """tanh(s) * (GN(h) - h) with a scalar s that is zero at birth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _group_norm(channels)
        self.gain = TanhScale()

    def forward(self, h: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        shifted: Tensor = self.gain(self.norm(h) - h)
        return shifted


@final
class Norm(AbstractBlueprint):
    """A step from h towards its normalized self."""

    name = "norm"
    family = HostFamily.CNN
    birth = {"gain.strength": 0.0}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """See `NormShift`."""
        return NormShift(channels)

    def num_params(self, channels: int) -> int:
        """2 C + 1."""
        return 2 * channels + 1


@final
class Depthwise(AbstractBlueprint):
    """gamma * ReLU(GN(Conv1x1(DWConv3x3(h))))."""

    name = "depthwise"
    family = HostFamily.CNN
    birth = {"scale.gamma": BIRTH_SCALE}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """Depthwise convolution, pointwise convolution, norm, ReLU, scale."""
        return _chain(
            depthwise=_conv(channels, channels, 3, groups=channels),
            pointwise=_conv(channels, channels, 1),
            norm=_group_norm(channels),
            act=nn.ReLU(),
            scale=LayerScale(channels),
        )

    def num_params(self, channels: int) -> int:
        """C^2 + 12 C."""
        return channels**2 + 12 * channels


@final
class Bottleneck(AbstractBlueprint):
    """gamma * GN(Conv1x1(ReLU(Conv3x3(ReLU(Conv1x1(h)))))) through max(8, C // 4) channels."""

    name = "bottleneck"
    family = HostFamily.CNN
    birth = {"scale.gamma": BIRTH_SCALE}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """Down, 3x3, up; norm and scale at the end."""
        width = max(8, channels // 4)
        return _chain(
            down=_conv(channels, width, 1),
            down_act=nn.ReLU(),
            conv=_conv(width, width, 3),
            conv_act=nn.ReLU(),
            up=_conv(width, channels, 1),
            norm=_group_norm(channels),
            scale=LayerScale(channels),
        )

    def num_params(self, channels: int) -> int:
        """2 C b + 9 b^2 + 3 C with b = max(8, C // 4)."""
        width = max(8, channels // 4)
        return 2 * channels * width + 9 * width**2 + 3 * channels


@final
class ConvSmall(AbstractBlueprint):
    """gamma * ReLU(GN(Conv1x1(h)))."""

    name = "conv_small"
    family = HostFamily.CNN
    birth = {"scale.gamma": BIRTH_SCALE}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """Pointwise convolution, norm, ReLU, scale."""
        return _chain(
            conv=_conv(channels, channels, 1), norm=_group_norm(channels), act=nn.ReLU(), scale=LayerScale(channels)
        )

    def num_params(self, channels: int) -> int:
        """C^2 + 3 C."""
        return channels**2 + 3 * channels


@final
class ConvHeavy(AbstractBlueprint):
    """gamma * ReLU(GN(Conv3x3(ReLU(GN(Conv3x3(h))))))."""

    name = "conv_heavy"
    family = HostFamily.CNN
    birth = {"scale.gamma": BIRTH_SCALE}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        """Two 3x3 convolutions, each with norm and ReLU, and a scale."""
        return _chain(
            conv1=_conv(channels, channels, 3),
            norm1=_group_norm(channels),
            act1=nn.ReLU(),
            conv2=_conv(channels, channels, 3),
            norm2=_group_norm(channels),
            act2=nn.ReLU(),
            scale=LayerScale(channels),
        )

    def num_params(self, channels: int) -> int:
        """18 C^2 + 5 C."""
        return 18 * channels**2 + 5 * channels


CNN_BLUEPRINTS: tuple[AbstractBlueprint, ...] = (
    ConvLight(),
    Attention(),
    Norm(),
    Depthwise(),
    Bottleneck(),
    ConvSmall(),
    ConvHeavy(),
)
