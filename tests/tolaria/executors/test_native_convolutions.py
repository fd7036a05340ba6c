"""Convolutions and linear layers as instructions beside PyTorch."""

import pytest
import torch
from torch import nn

from esper.tolaria.executors.native.compare import disagreement


class Behind(nn.Module):
    """Layers behind a convolution to four channels, so that the gradients of their inputs are compared, too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = nn.Conv2d(2, 4, 1), nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x))


def sequence(*layers: nn.Module) -> Behind:
    return Behind(nn.Flatten(2), *layers)


LAYERS = {
    "kernel": lambda: Behind(nn.Conv2d(4, 6, 3)),
    "stride": lambda: Behind(nn.Conv2d(4, 6, (1, 3), stride=2, padding=(0, 2))),
    "large": lambda: Behind(nn.Conv2d(4, 2, 5, stride=(2, 3), padding=2)),
    "same": lambda: Behind(nn.Conv2d(4, 5, (2, 4), padding="same")),
    "circular": lambda: Behind(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")),
    "dilation": lambda: Behind(nn.Conv2d(4, 8, 3, dilation=2, padding="same", groups=2)),
    "channelwise": lambda: Behind(nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)),
    "channelwise_large": lambda: Behind(nn.Conv2d(4, 8, (5, 2), stride=2, padding=2, groups=4)),
    "point": lambda: Behind(nn.Conv2d(4, 9, 1)),
    "strided_point": lambda: Behind(nn.Conv2d(4, 40, 1, stride=2), nn.Conv2d(40, 3, 1, stride=(1, 2))),
    "many_channels": lambda: Behind(nn.Conv2d(4, 40, 3, padding=1), nn.Conv2d(40, 11, 1), nn.Conv2d(11, 2, 3)),
    "transposed": lambda: Behind(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)),
    "transposed_groups": lambda: Behind(nn.ConvTranspose2d(4, 6, (2, 3), (2, 1), groups=2, dilation=2, bias=False)),
    "sequence": lambda: sequence(nn.Conv1d(4, 6, 3, padding=1, stride=2, dilation=2)),
    "sequence_same": lambda: sequence(nn.Conv1d(4, 6, 4, padding="same", groups=2)),
    "linear": lambda: sequence(nn.Linear(30, 20), nn.Linear(20, 1, bias=False), nn.Linear(1, 2)),
    "features": lambda: sequence(nn.Flatten(), nn.Linear(120, 33), nn.Linear(33, 7)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_agree_with_pytorch(name):
    torch.manual_seed(0)
    module = LAYERS[name]()
    assert disagreement(module, torch.zeros(19, 2, 6, 5), chunk=16) is None  # 16 lanes, then 3
    assert disagreement(module, torch.zeros(18, 2, 6, 5), dtype=torch.float32, tolerance=1e-5) is None


def test_infinite_weights_do_not_reach_examples_that_there_are_not():
    module = Behind(nn.Conv2d(4, 3, 3), nn.Conv2d(3, 3, 1, groups=3), nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        module.layers[0].weight[0, 0, 0, 0] = module.layers[1].weight[0] = torch.inf
    assert disagreement(module, torch.zeros(19, 2, 6, 5), chunk=16) is None


def test_frozen_weights_with_a_trained_bias_agree_with_pytorch():
    module = Behind(nn.Conv2d(4, 3, 3, padding=1))
    module.layers[0].weight.requires_grad_(False)
    assert disagreement(module, torch.zeros(9, 2, 6, 5)) is None
