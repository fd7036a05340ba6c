"""The convolutional host: its points, its size, its forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.hosts.slots import InjectionPoint, Surface, enabled_points, parse_slot_id
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError


def spec(**changes: int) -> CNNHostSpec:
    return CNNHostSpec(**({"in_channels": 1, "base": 8, "blocks": 2, "kernel": 1, "pools": 1, "classes": 10} | changes))


def cifar(**changes: int) -> CNNHostSpec:
    return spec(**({"in_channels": 3, "kernel": 3} | changes))


DIGITS = spec()
SLOTS = ("r0c0", "r0c1", "r1c0")


def host(slots=SLOTS, of=DIGITS, size=(8, 8)) -> CNNHost:
    return deterministic_build(lambda: CNNHost(of, slots, image_size=size))


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("of", "count", "offered"),
    [
        (spec(), 354, 3),
        (spec(base=4, blocks=3, kernel=3, pools=3), 1702, 6),
        (cifar(blocks=3, pools=3), 6418, 6),
        (cifar(blocks=5, pools=5), 99922, 10),
        (cifar(base=1, blocks=3, kernel=1, pools=3), 77, 6),
        (cifar(base=2, blocks=3, kernel=1, pools=0), 164, 3),
        (cifar(base=16, blocks=3, pools=3), 24346, 6),
        (cifar(base=2, blocks=5, kernel=1, pools=5), 1140, 10),
    ],
    ids=["digits", "fashion", "baseline", "scale", "impaired", "minimal", "postpool", "deep_impaired"],
)
def test_hosts_of_the_presets_have_the_tabulated_size(of, count, offered):
    assert of.num_params() == count
    assert len(of.points()) == offered
    built = host(slots=[p.slot_id for p in of.points()], of=of, size=(32, 32))
    assert count == sum(p.numel() for p in built.parameters())


def test_points_are_listed_in_action_order_with_their_place():
    expected = (
        InjectionPoint(slot_id="r0c0", channels=8, surface=Surface.PRE_POOL, order=0, position=0.25),
        InjectionPoint(slot_id="r0c1", channels=16, surface=Surface.PRE_POOL, order=1, position=0.75),
        InjectionPoint(slot_id="r1c0", channels=8, surface=Surface.POST_POOL, order=2, position=0.5),
    )
    assert DIGITS.points() == expected


@pytest.mark.parametrize("pools", range(4))
def test_the_forward_pass_meets_the_slots_in_execution_order(pools):
    of = spec(blocks=3, pools=pools)
    met = []
    built = host(slots=[p.slot_id for p in of.points()], of=of)
    built(images(), lambda slot, h: met.append(slot) or h)
    assert tuple(met) == built.execution_order()
    assert len(met) == 3 + pools


def test_each_slot_sees_the_channels_and_the_surface_that_it_declares():
    shapes = {}
    host()(images(), lambda slot, h: shapes.setdefault(slot, h.shape) and h)
    assert shapes == {"r0c0": (6, 8, 8, 8), "r1c0": (6, 8, 4, 4), "r0c1": (6, 16, 4, 4)}


def test_disabled_slots_do_not_exist():
    met = []
    built = host(slots=["r1c0"])
    built(images(), lambda slot, h: met.append(slot) or h)
    assert met == ["r1c0"]
    assert built.execution_order() == ("r1c0",)
    assert [p.slot_id for p in built.enabled] == ["r1c0"]


def test_the_order_of_the_list_of_slots_does_not_matter():
    assert host(slots=["r1c0", "r0c1", "r0c0"]).enabled == host().enabled == DIGITS.points()


def test_the_forward_pass_equals_the_layers_written_out():
    built = host()
    first, second = built.blocks
    h = F.relu(F.batch_norm(F.conv2d(images(), first.conv.weight), None, None, training=True)) * 2.0
    h = F.max_pool2d(h, 2) + 1.0
    h = F.relu(F.batch_norm(F.conv2d(h, second.conv.weight), None, None, training=True)) - 3.0
    expected = F.linear(h.mean((2, 3)), built.head.weight, built.head.bias)
    change = {"r0c0": lambda h: h * 2.0, "r1c0": lambda h: h + 1.0, "r0c1": lambda h: h - 3.0}
    torch.testing.assert_close(built(images(), lambda slot, h: change[slot](h)), expected)


def test_the_forward_pass_meets_the_enabled_slots_in_execution_order():
    built, met = host(slots=["r0c1", "r1c0"]).eval(), []

    def apply(slot, h):
        met.append(slot)
        return h

    built(images(), apply)
    assert tuple(met) == built.execution_order() == ("r1c0", "r0c1")


def test_batch_norm_counts_no_batches_and_starts_neutral():
    built = host()
    assert [name for name, _ in built.named_buffers() if "num_batches" in name] == []
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.momentum, module.eps) == (0.1, 1e-5)
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))


@pytest.mark.parametrize(
    "changes",
    [{"blocks": 1}, {"kernel": 2}, {"pools": 3}, {"pools": -1}, {"base": 0}, {"in_channels": 0}, {"classes": 1}],
)
def test_impossible_hosts_are_refused_by_the_name_of_the_value(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        spec(**changes)


def test_slot_ids_are_row_and_column():
    assert parse_slot_id("r0c12") == (0, 12)
    assert parse_slot_id("r10c0") > parse_slot_id("r9c7")


@pytest.mark.parametrize(
    "text", ["", "r0", "c0r0", "r00c1", "r0c01", "r-1c0", "R0C0", " r0c0", "r0c0 ", "r0c0\n", "r٣c0"]
)
def test_anything_else_is_no_slot_id(text):
    with pytest.raises(ConfigError, match="is no slot id"):
        parse_slot_id(text)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "no slots are enabled"),
        (["r0c0", "r0c0"], "only once"),
        (["r1c1"], "no slot 'r1c1'; did you mean"),
        (["slot0"], "is no slot id"),
    ],
)
def test_slots_that_cannot_be_enabled_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        enabled_points(DIGITS.points(), slots)


def test_a_slot_that_would_see_a_single_value_is_refused():
    one_channel = spec(base=1, blocks=2, pools=1)
    with pytest.raises(ConfigError, match=r"features at slot r1c0 of a .* image are a single value"):
        host(slots=["r0c0", "r1c0"], of=one_channel, size=(2, 3))
    host(slots=["r0c0", "r0c1"], of=one_channel, size=(2, 3))  # 6 values; two channels of one value


def test_an_image_that_is_pooled_away_is_refused():
    with pytest.raises(ConfigError, match="vanish in 3 poolings"):
        host(slots=["r0c0"], of=spec(blocks=3, pools=3), size=(7, 32))
