"""Which places are proposed for slots, and what patterns of paths stand for."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts.host import Interface
from esper.kasmina.hosts.places import host_of
from esper.leyline.errors import ConfigError
from esper.leyline.structure import Structure
from user_networks import MLP, Encoder, ResNet8, Sensors, Skip, Tied


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


IMAGES, VECTORS = normal(8, 3, 12, 12), normal(8, 6)
TOKENS = torch.randint(0, 11, (8, 7), generator=torch.Generator().manual_seed(0))


def slots_of(model: Callable[[], nn.Module], example: Tensor, slots: Sequence[str] | None = None) -> list[str]:
    return [point.slot_id for point in host_of(model, slots, example).points()]


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return chain(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Head(nn.Module):
    """The mean of each channel, and logits."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.fc(h.mean(dim=(2, 3)))


class Expanding(nn.Module):
    """The block of MobileNetV2: its first layer works in the resolution of the block before it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = chain(nn.Conv2d(inputs, 2 * inputs, 1), nn.ReLU6(), conv(2 * inputs, outputs, stride))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Mixer(nn.Module):
    """A pre-norm block of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Transformer(nn.Module):
    """Tokens through `depth` blocks; a mask passes by all blocks but the last."""

    def __init__(self, depth: int, *, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.embed, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Mixer() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h * (tokens > 0)[..., None] if self.masked else h)
        return self.head(self.norm(h))


class Rejoined(nn.Module):
    """Adds in place what passes by its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.out = nn.Linear(6, 8), nn.Hardswish(), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.a(x), inplace=True)
        deeper = self.b(h)
        deeper += h
        return self.out(self.act(deeper))


class UNet(nn.Module):
    """Features of the way down come back on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down, self.bottom = conv(3, 4), conv(4, 8, 2), conv(8, 8)
        self.up, self.out = conv(12, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inc(x)
        deep = F.interpolate(self.bottom(self.down(h)), scale_factor=2)
        return self.out(self.up(torch.cat((h, deep), dim=1)))


class Experts(nn.Module):
    """Branches side by side are no chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(6, 6), nn.ModuleList(chain(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))
        self.mixed, self.out = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out(self.mixed(torch.stack([expert(h) for expert in self.experts]).sum(0)))


class Patches(nn.Module):
    """Of images one layer alone gives images; the others work on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, 8, 4, 4), chain(Mixer(), Mixer())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).mT).mean(dim=1))


def vgg() -> nn.Module:
    return chain(conv(3, 4), nn.MaxPool2d(2), conv(4, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 8), Head(8))


def mobile() -> nn.Module:
    return chain(conv(3, 4), Expanding(4, 4, 1), Expanding(4, 8, 2), Expanding(8, 8, 1), Expanding(8, 8, 2), Head(8))


def isotropic() -> nn.Module:
    return chain(conv(3, 8, 2), *(Expanding(8, 8, 1) for _ in range(8)), Head(8))


def dense() -> nn.Module:
    return chain(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Upsample(scale_factor=2))


def lazy() -> nn.Module:
    return chain(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def deep() -> nn.Module:
    return chain(nn.Linear(6, 8), *(layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "example", "expected"),
    [
        (ResNet8, IMAGES, ["layer1", "layer2", "layer3"]),
        (vgg, IMAGES, ["0", "3", "5"]),
        (mobile, IMAGES, ["1", "3", "4"]),
        (isotropic, IMAGES, ["2", "4", "6", "8"]),
        (dense, IMAGES, ["1"]),
        (lazy, IMAGES, ["2"]),
        (Sensors, normal(8, 2, 9), ["r0c0", "r0c1"]),
        (UNet, IMAGES, ["inc", "down", "bottom", "up"]),
        (Skip, normal(8, 2, 5, 5), ["a"]),
        (Patches, IMAGES, ["blocks.0", "blocks.1"]),
        (lambda: Transformer(3), TOKENS, ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda: Transformer(8), TOKENS, ["blocks.1", "blocks.3", "blocks.5", "blocks.7"]),
        (lambda: Transformer(2, masked=True), TOKENS, ["blocks.0", "blocks.1"]),
        (Encoder, TOKENS, ["encoder.layers.0", "encoder.layers.1"]),
        (Tied, torch.randint(0, 5, (8, 4)), ["embed", "mix"]),
        (Rejoined, VECTORS, ["a", "act"]),
        (MLP, VECTORS, ["body.1", "body"]),
        (Experts, VECTORS, ["first", "mixed"]),
        (deep, VECTORS, ["0", "4", "8", "10", "14", "18"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_places_are_proposed_at_the_ends_of_what_the_network_is_made_of(model, example, expected):
    assert slots_of(model, example) == expected


class Two(nn.Module):
    """Two outputs, each of a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.mean(h), self.spread(h)


def test_no_output_is_proposed_whatever_counts_of_the_result():
    example = VECTORS
    for interface in (Interface(packs=True), Interface(outputs=lambda out: out[0])):
        assert [p.slot_id for p in host_of(Two, None, example, interface=interface).points()] == ["body"]


def test_a_network_with_several_inputs_has_places():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.out(torch.tanh(self.a(a) + self.b(b)))

    structure = Structure.of((VECTORS, VECTORS))
    example = structure.pack((VECTORS, VECTORS.flip(0)))
    assert [p.slot_id for p in host_of(Sum, None, example, interface=Interface(inputs=structure)).points()] == [
        "a",
        "b",
    ]


class Detached(nn.Module):
    """No gradient reaches its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.second(self.first(x).detach())))


def test_places_that_are_refused_are_left_out():
    assert slots_of(Detached, VECTORS) == ["second"]


def test_a_network_without_a_place_and_one_that_is_refused_are_told_apart():
    with pytest.raises(ConfigError, match="Linear is a single layer, and a seed grows in front of the output layer"):
        host_of(lambda: nn.Linear(6, 2), None, VECTORS)
    with pytest.raises(ConfigError, match="a seed may grow was found in Sequential; name the submodules at whose"):
        host_of(lambda: chain(nn.Linear(6, 2)), None, VECTORS)
    with pytest.raises(ConfigError, match=r"'0\.weight' is torch\.float64"):
        host_of(lambda: chain(nn.Linear(6, 6), nn.Linear(6, 2)).double(), None, VECTORS.double())
    with pytest.raises(
        ConfigError, match=r"ResNet8 cannot process inputs \[4, 12, 12, 3\] .*; images have channels first"
    ):
        host_of(ResNet8, None, IMAGES.permute(0, 2, 3, 1))


# -- patterns ---------------------------------------------------------------------------------------------------------


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def towers() -> nn.Module:
    return named(ls=chain(nn.Linear(6, 6), nn.ReLU(), chain(nn.Linear(6, 6), nn.ReLU())), out=nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (["ls.*"], ["ls.0", "ls.1", "ls.2"]),
        (["ls.*.*"], ["ls.2.0", "ls.2.1"]),
        (["ls.[02]"], ["ls.0", "ls.2"]),
        (["ls.2", "ls.?"], ["ls.2", "ls.0", "ls.1"]),
        (["l*"], ["ls"]),
    ],
)
def test_a_pattern_stands_for_all_paths_that_match_it_part_by_part(slots, expected):
    assert slots_of(towers, VECTORS, slots) == expected


def test_what_a_pattern_matches_and_cannot_hold_a_seed_is_left_out():
    class Spare(Detached):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(6, 6)

    assert slots_of(Spare, VECTORS, ["s*", "*"]) == ["second", "out"]
    assert slots_of(Spare, VECTORS, ["out", "s*"]) == ["out", "second"]


def test_a_pattern_that_gives_no_place_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"slot 'layer\*' matches no submodule of Sequential, .*; .*names: ls, ls.0"):
        host_of(towers, ["layer*"], VECTORS)
    with pytest.raises(
        ConfigError, match=r"'f\*' matches no submodule that can hold a seed of Detached, where '\*' st"
    ):
        host_of(Detached, ["f*"], VECTORS)
    with pytest.raises(ConfigError, match="no gradient flows from the output of Detached to slot 'first'"):
        host_of(Detached, ["first", "s*"], VECTORS)
