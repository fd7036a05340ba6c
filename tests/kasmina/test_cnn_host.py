"""The convolutional host: its points, its size, its forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec, max_pool_2x2
from esper.kasmina.hosts.host import InjectionPoint, enabled_points
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


def test_points_are_listed_in_action_order_with_their_place():
    expected = (
        InjectionPoint(slot_id="r0c0", channels=8, order=0, position=0.25),
        InjectionPoint(slot_id="r0c1", channels=16, order=1, position=0.75),
        InjectionPoint(slot_id="r1c0", channels=8, order=2, position=0.5),
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


def test_disabled_slots_do_not_exist():
    met = []
    built = host(slots=["r1c0"])
    built(images(), lambda slot, h: met.append(slot) or h)
    assert met == ["r1c0"]
    assert built.execution_order() == ("r1c0",)
    assert [p.slot_id for p in built.enabled] == ["r1c0"]


def test_the_forward_pass_equals_the_layers_written_out():
    built = host()
    first, second = built.blocks
    h = F.relu(F.batch_norm(F.conv2d(images(), first.conv.weight), None, None, training=True)) * 2.0
    h = F.max_pool2d(h, 2) + 1.0
    h = F.relu(F.batch_norm(F.conv2d(h, second.conv.weight), None, None, training=True)) - 3.0
    expected = F.linear(h.mean((2, 3)), built.head.weight, built.head.bias)
    change = {"r0c0": lambda h: h * 2.0, "r1c0": lambda h: h + 1.0, "r0c1": lambda h: h - 3.0}
    torch.testing.assert_close(built(images(), lambda slot, h: change[slot](h)), expected)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([], "no slots are enabled"),
        (["r0c0", "r0c0"], "only once"),
        (["r1c1"], "no slot 'r1c1'; did you mean"),
        (["slot0"], "no slot 'slot0'; known names: r0c0"),
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
    with pytest.raises(ConfigError, match=r"images of 12x16 vanish in 2 poolings after host\.unshuffle 4"):
        host(slots=["r0c0"], of=spec(unshuffle=4, pools=2), size=(12, 16))


# -- pixel unshuffle --------------------------------------------------------------------------------------------------


def test_an_unshuffled_host_is_the_same_host_on_images_that_were_unshuffled_before():
    x = torch.randn(6, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    built, plain = host(of=cifar(unshuffle=2), size=(6, 10)), host(of=cifar(in_channels=12), size=(3, 5))
    plain.load_state_dict(built.state_dict())
    shapes = {}
    found = built(x, lambda slot, h: shapes.setdefault(slot, h.shape[1:]) and h)
    assert torch.equal(found, plain(nn.PixelUnshuffle(2)(x), lambda slot, h: h))
    assert shapes == {"r0c0": (8, 3, 5), "r1c0": (8, 1, 2), "r0c1": (16, 1, 2)}
    assert shapes == {point.slot_id: built.features(point) for point in built.enabled}


@pytest.mark.parametrize(
    ("unshuffle", "size", "fits"),
    [(2, (7, 8), "set it to 1,"), (4, (8, 6), "set it to 1 or 2,"), (6, (12, 9), "set it to 1 or 3,")],
)
def test_images_that_do_not_split_into_squares_are_refused_with_the_factors_that_fit(unshuffle, size, fits):
    with pytest.raises(ConfigError, match=rf"host.unshuffle is {unshuffle}, but images of .* {fits} or crop or pad"):
        host(slots=["r0c0"], of=spec(unshuffle=unshuffle), size=size)


# -- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 5, 4), (1, 1, 4, 7), (3, 2, 2, 2), (1, 2, 3, 3)])
def test_it_agrees_with_the_built_in_one_ties_included(shape):
    generator = torch.Generator().manual_seed(sum(shape))
    h = torch.randint(0, 3, shape, generator=generator).float().requires_grad_()  # many ties
    ours, theirs = max_pool_2x2(h), F.max_pool2d(h, 2)
    assert torch.equal(ours, theirs)
    slope = torch.randn(theirs.shape, generator=generator)
    assert torch.equal(torch.autograd.grad(ours, h, slope)[0], torch.autograd.grad(theirs, h, slope)[0])


def test_a_value_that_is_not_a_number_is_passed_on():
    h = torch.zeros(1, 1, 2, 4)
    h[0, 0, 1, 0] = torch.nan
    assert max_pool_2x2(h).isnan().tolist() == [[[[True, False]]]]
