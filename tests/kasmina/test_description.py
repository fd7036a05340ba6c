"""Blueprints and slots as numbers, by hand."""

import math

import pytest
import torch
from torch import nn

import tiny
from esper.kasmina.blueprints import blueprint_at, blueprint_by_name
from esper.kasmina.blueprints.registry import KINDS, kinds_of, menu_of
from esper.leyline.lifecycle import HostFamily
from esper.leyline.messages import SeedCosts

NOTHING = dict.fromkeys(KINDS, 0.0)


def described(name: str, family: HostFamily, channels: int) -> dict[str, float]:
    seed = blueprint_by_name(name, family).build(channels)
    return dict(zip(KINDS, kinds_of(seed, channels), strict=True))


@pytest.mark.parametrize(
    ("name", "family", "channels", "total", "parts", "others"),
    [
        # a kernel of 16 x 16 x 9; norm and layer scale have 3 x 16
        ("conv_light", HostFamily.CNN, 16, 2352, {"convolution": 2304, "vector": 48}, {"depth": 1 / 8, "narrow": 1.0}),
        # kernels of 16 x 1 x 9 and 16 x 16
        ("depthwise", HostFamily.CNN, 16, 448, {"grouped": 144, "pointwise": 256, "vector": 48},
         {"depth": 2 / 8, "narrow": 1.0}),
        # 8 channels between: 8 x 16, 8 x 8 x 9, 16 x 8; half of the channels is few
        ("bottleneck", HostFamily.CNN, 16, 880, {"grouped": 576, "pointwise": 256, "vector": 48},
         {"depth": 3 / 8, "narrow": 0.5}),
        # scale and shift, and one scalar; no matrix
        ("norm", HostFamily.CNN, 16, 33, {"vector": 32}, {"narrow": 1.0, "scalar": 1.0}),
        # 8 x 32 and 32 x 8
        ("lora", HostFamily.TRANSFORMER, 32, 512, {"pointwise": 512}, {"depth": 2 / 8, "narrow": 0.25}),
        # 96 x 32 + 32 x 32 and biases
        ("attention", HostFamily.TRANSFORMER, 32, 4224, {"pointwise": 4096, "vector": 128},
         {"attention": 1.0, "depth": 2 / 8, "narrow": 1.0}),
    ],
)  # fmt: skip
def test_what_a_blueprint_is_made_of(name, family, channels, total, parts, others):
    want = NOTHING | {"exists": 1.0} | {kind: count / total for kind, count in parts.items()} | others
    assert described(name, family, channels) == pytest.approx(want)


def test_a_seed_without_parameters_exists_and_is_nothing_else():
    assert dict(zip(KINDS, kinds_of(nn.Identity(), 4), strict=True)) == NOTHING | {"exists": 1.0, "narrow": 1.0}


def test_a_menu_by_hand():
    kinds = torch.rand(2, 3, len(KINDS), generator=torch.Generator().manual_seed(0))
    costs = SeedCosts(
        seed_params=torch.tensor([[0, 500, 70], [0, 2000, 70]]),
        gate_params=torch.tensor([3, 3]),
        seed_flops=torch.tensor([[0, 900, 50], [0, 300, 50]]),
        gate_flops=torch.tensor([6, 6]),
        host_flops=torch.tensor(300),
        selectable=torch.tensor([False, True, False]),
        kinds=kinds,
    )
    menu = menu_of(costs, 1000, episode_length=60, min_training_epochs=10)
    root = math.sqrt(0.5)  # the slots are in the middle of the halves: cosines of 45 and 135 degrees and multiples
    same = [1 / 2, math.log(1001) / 16, math.log(60) / 6, 10 / 60]
    torch.testing.assert_close(menu.places, torch.tensor([[root, 0, -root, -1, *same], [-root, 0, root, -1, *same]]))
    torch.testing.assert_close(menu.seeds[..., : len(KINDS)], kinds)
    sizes = torch.zeros(2, 3, 3)
    sizes[0, 1] = torch.tensor([math.log(501) / 16, math.log(1.5), math.log(4.0)])
    sizes[1, 1] = torch.tensor([math.log(2001) / 16, math.log(3.0), math.log(2.0)])
    torch.testing.assert_close(menu.seeds[..., len(KINDS) :], sizes)


def test_an_engine_describes_what_can_grow_in_each_of_its_slots_and_nothing_else():
    spec = tiny.engine(2, 6).spec
    assert spec.menu.seeds.shape[:2] == (spec.num_slots, spec.num_blueprints)
    assert spec.menu.places.unique(dim=0).shape[0] == spec.num_slots
    chosen = torch.zeros(spec.num_blueprints, dtype=torch.bool)
    chosen[list(spec.selectable)] = True
    exists = spec.menu.seeds[..., KINDS.index("exists")]
    assert torch.equal(exists, chosen.float().expand_as(exists))
    assert not spec.menu.seeds[:, ~chosen].any()
    for index in spec.selectable:
        want = kinds_of(blueprint_at(index, spec.family).build(4), 4)  # r0c0 has 4 channels
        assert spec.menu.seeds[0, index, : len(KINDS)].tolist() == pytest.approx(want)
