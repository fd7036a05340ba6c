"""Frozen parameters: which ones hosts share, and how those that each host has a copy of move and come back."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import (
    Template,
    as_buffers,
    check_shared,
    count_params,
    digest,
    own_frozen,
    parameter_layout,
)
from esper.kasmina.parameters.population import seed_kind
from esper.kasmina.parameters.stacking import vmapped, way_to_stack
from esper.leyline.errors import ConfigError
from esper.leyline.stages import HostFamily


def loaded(layer: nn.Module) -> nn.Module:
    """A frozen layer with the same weights in every build."""
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape) + i)
    return layer.requires_grad_(False)


def own(build: Callable[[], nn.Module]) -> tuple[str, ...]:
    return own_frozen(deterministic_build(build), deterministic_build(build, seed=1))


def test_loaded_weights_are_shared_and_drawn_ones_are_each_hosts_own():
    build = lambda: nn.Sequential(loaded(nn.Linear(3, 3)), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))  # noqa: E731
    assert own(build) == ("1.weight", "1.bias")


def test_frozen_weights_beside_trained_ones_or_running_statistics_are_each_hosts_own():
    def build() -> nn.Module:
        partly, attention = loaded(nn.Linear(3, 3)), loaded(nn.MultiheadAttention(4, 2))
        partly.bias.requires_grad_(True)
        attention.in_proj_bias.requires_grad_(True)
        plain = loaded(nn.BatchNorm2d(3, track_running_stats=False))
        return nn.ModuleList([partly, loaded(nn.BatchNorm2d(3)), plain, loaded(nn.LayerNorm(3)), attention])

    assert own(build) == ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "4.in_proj_weight")


class Tied(nn.Module):
    """One table in two layers, the second of which has a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = loaded(nn.Embedding(5, 3)), nn.Linear(3, 5)
        self.out.weight = self.embed.weight


def test_a_tied_weight_is_one_kind_in_all_of_its_layers():
    assert own(Tied) == ("embed.weight", "out.weight")


def test_frozen_parameters_become_buffers_and_tied_ones_count_once():
    net = Tied()
    as_buffers(net, own(Tied))
    assert [name for name, _ in net.named_parameters()] == ["out.bias"]
    assert count_params(net, own(Tied)) == 15 + 5


def test_a_row_holds_no_frozen_parameters():
    net = nn.Sequential(loaded(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert [spec.name for spec in parameter_layout(net).tensors] == ["1.weight", "1.bias"]
    template = Template(net)
    template.bind(torch.ones(template.parameters.total), torch.zeros(0))
    # 0.weight = [[-1, -1/3], [1/3, 1]], 0.bias = [0, 2]; ones in the second layer
    torch.testing.assert_close(template(torch.tensor([[3.0, 0.0]])), torch.tensor([[-3.0 + 1.0 + 2.0 + 1.0]]))


class Mixed(nn.Module):
    """A weight that no stacked class knows, around a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.ones(3)), loaded(nn.Linear(3, 3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.gain * self.inner(h)


def test_a_layer_without_a_rule_runs_by_vmap_on_what_hosts_share():
    assert own(Mixed) == ()
    assert way_to_stack("mixed", Mixed(), torch.zeros(1, 4, 3)) is vmapped


def test_the_digest_tells_other_frozen_weights_and_ignores_trained_ones():
    def net(shift: float = 0.0) -> nn.Module:
        first = loaded(nn.Linear(2, 2))
        first.bias += shift
        return nn.Sequential(first, nn.Linear(2, 2))

    assert int(digest(net())) == int(digest(net())) != int(digest(net(1e-6)))
    assert digest(nn.Linear(2, 2)) is None


def test_frozen_parameters_that_nothing_could_share_are_refused():
    builds = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"'weight' of Linear is frozen and drawn at random.*register it as a buffer"):
        check_shared(*builds)

    def frozen(channels: int) -> nn.Module:
        return nn.Conv2d(channels, channels, 1).requires_grad_(False)

    with pytest.raises(ConfigError, match=r"'weight' of blueprint 'frozen' is frozen.*register constants as buffers"):
        seed_kind(FunctionBlueprint(HostFamily.CNN, frozen, {}), 2, (2, 4, 4), torch.device("cpu"))
