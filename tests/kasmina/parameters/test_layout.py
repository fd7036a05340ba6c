"""Flat rows: where each tensor lies, and that a module run on a row is the module."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import (
    Template,
    as_buffers,
    check_shared,
    count_params,
    digest,
    drop_batch_counters,
    own_frozen,
    parameter_layout,
)
from esper.kasmina.parameters.population import seed_kind
from esper.kasmina.parameters.stacking import vmapped, way_to_stack
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily

DIGITS = CNNHostSpec(in_channels=1, base=8, blocks=2, kernel=1, pools=1, classes=10)


def digits_host() -> CNNHost:
    return deterministic_build(lambda: CNNHost(DIGITS, ["r0c0"], image_size=(8, 8)))


def digits_images() -> torch.Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def keep(slot: str, h: torch.Tensor) -> torch.Tensor:
    return h


class Odd(nn.Module):
    """A scalar, a vector of 17, a matrix, and constants that are not floats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.arange(17.0))
        self.matrix = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("order", torch.arange(17))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return self.scale * x + self.shift[self.order].sum() + self.matrix.sum()


def test_a_layout_is_what_one_would_write_down_by_hand():
    layout = parameter_layout(Odd())
    assert [(s.name, s.shape, s.offset, s.numel, s.part) for s in layout.tensors] == [
        ("scale", (), 0, 1, 0),
        ("shift", (17,), 16, 17, 2),
        ("matrix", (4, 4), 48, 16, 4),
    ]
    assert (layout.total, layout.num_params) == (64, 34)
    expected = [0] + [3] * 15 + [1] * 17 + [3] * 15 + [2] * 16
    assert layout.segment_ids.tolist() == expected
    assert layout.matrix_mask.tolist() == [i == 2 for i in expected]
    assert layout.padding_mask.tolist() == [i == 3 for i in expected]


def test_a_bound_template_computes_what_the_module_computes():
    host = digits_host()
    template = Template(copy.deepcopy(host))
    row = template.parameters.pack(dict(host.named_parameters()))
    buffers = template.buffers.pack(dict(host.named_buffers()))
    for training in (True, False):
        host.train(training)
        template.train(training)
        template.bind(row, buffers)
        assert torch.equal(template(digits_images(), keep), host(digits_images(), keep))
    for name, value in template.buffers.unpack(buffers).items():
        assert torch.equal(value, host.get_buffer(name)), name
        assert not torch.equal(value, digits_host().get_buffer(name)), name


def test_gradients_arrive_in_the_preset_slab_and_in_no_other_row():
    host = digits_host()
    template = Template(copy.deepcopy(host))
    rows_ = template.parameters.pack({k: torch.stack([v.detach()] * 3) for k, v in host.named_parameters()})
    gradients = torch.zeros_like(rows_)
    buffers = template.buffers.pack(dict(host.named_buffers()))
    row = rows_[1].requires_grad_()
    row.grad = gradients[1]
    storage = row.grad.data_ptr()
    template.bind(row, buffers)
    template(digits_images(), keep).square().sum().backward()
    host(digits_images(), keep).square().sum().backward()
    assert row.grad.data_ptr() == storage
    assert gradients[[0, 2]].count_nonzero() == 0
    assert gradients[1, template.parameters.padding_mask].count_nonzero() == 0
    for name, gradient in template.parameters.unpack(gradients).items():
        torch.testing.assert_close(gradient[1], host.get_parameter(name).grad)


def test_batch_counters_are_dropped_or_refused():
    module = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())
    drop_batch_counters(module)
    assert sorted(module.state_dict()) == ["0.bias", "0.running_mean", "0.running_var", "0.weight"]
    with pytest.raises(ConfigError, match="momentum=None"):
        Template(nn.Sequential(nn.BatchNorm2d(2, momentum=None)))


def test_tensors_that_a_slab_cannot_hold_are_refused():
    with pytest.raises(ConfigError, match=r"'weight' is torch.float64"):
        Template(nn.Linear(2, 2).double())
    module = nn.Linear(2, 2)
    module.register_buffer("small", torch.zeros(2, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"'small' is torch.float16"):
        Template(module)


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


class FrozenTable(nn.Module):
    """One table in two layers, the second of which has a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = loaded(nn.Embedding(5, 3)), nn.Linear(3, 5)
        self.out.weight = self.embed.weight


def test_frozen_parameters_become_buffers_and_tied_ones_count_once():
    net = FrozenTable()
    as_buffers(net, own(FrozenTable))
    assert [name for name, _ in net.named_parameters()] == ["out.bias"]
    assert count_params(net, own(FrozenTable)) == 15 + 5


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
