"""A toy host of sequences with the slots of the tiny task, its seeds and its data: a second family for every test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.host import Apply, Host, InjectionPoint, enabled_points
from esper.leyline.lifecycle import HostFamily
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import PADDING, NextToken
from tiny import EXECUTION_ORDER, SLOTS

VOCABULARY, TOKENS, WIDTH = 7, 5, 6
OBJECTIVE = NextToken(VOCABULARY)


class Tanh(nn.Module):
    """A layer that no stacking rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.slope * h)


class Centred(nn.Module):
    """Mixes the examples of a batch, so that a host depends on others when it is stacked."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(dim=0)


@dataclass(frozen=True)
class TokenHostSpec:
    """Tokens -> embedding -> three layers with a slot after each -> logits.

    `around`: each layer with its slot is a residual branch, so that the features before a slot are used after it.
    """

    dropout: float = 0.0
    around: bool = False
    activation: type[nn.Module] = nn.Tanh
    family: HostFamily = HostFamily.TRANSFORMER

    def points(self) -> tuple[InjectionPoint, ...]:
        return tuple(
            InjectionPoint(slot_id=slot, channels=WIDTH, order=i,
                           position=EXECUTION_ORDER.index(slot) / 3)
            for i, slot in enumerate(SLOTS)
        )  # fmt: skip

    def num_params(self) -> int:
        return sum(p.numel() for p in TokenHost(self, SLOTS).parameters())

    def build(self, slot_ids, example: Tensor) -> "TokenHost":
        assert example.dtype == torch.int64
        return TokenHost(self, slot_ids)


class TokenHost(Host):
    family = HostFamily.TRANSFORMER
    largest_activation = TOKENS * VOCABULARY

    def __init__(self, spec: TokenHostSpec, slot_ids) -> None:
        super().__init__()
        self.spec, self.enabled = spec, enabled_points(spec.points(), slot_ids)
        self.shares_prefixes = not spec.around
        self.embed = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in EXECUTION_ORDER)
        self.activation, self.dropout = spec.activation(), nn.Dropout(spec.dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def execution_order(self) -> tuple[str, ...]:
        return tuple(slot for slot in EXECUTION_ORDER if slot in {point.slot_id for point in self.enabled})

    def features(self, point: InjectionPoint) -> tuple[int, ...]:
        return TOKENS, WIDTH

    def rebuild(self) -> nn.Module:
        return TokenHost(self.spec, [point.slot_id for point in self.enabled])

    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        h = self.embed(F.one_hot(x, VOCABULARY).float())
        for slot, layer in zip(EXECUTION_ORDER, self.layers, strict=True):
            found = self.dropout(self.activation(layer(h)))
            h = h + apply(slot, found) if self.spec.around else apply(slot, h + found)
        return self.head(h)


def host(**changes) -> TokenHost:
    return TokenHost(TokenHostSpec(**changes), SLOTS)


def tokens(train: int = 40, val: int = 30, test: int = 20) -> Dataset:
    """The next token is the present one plus two, except where it is random. Some last tokens are padding."""
    generator = torch.Generator().manual_seed(2)

    def split(n: int) -> Split:
        x = torch.randint(VOCABULARY, (n, TOKENS), generator=generator)
        noise = torch.rand(n, TOKENS, generator=generator) < 0.2
        y = torch.where(noise, torch.randint(VOCABULARY, (n, TOKENS), generator=generator), (x + 2) % VOCABULARY)
        y[::3, -1] = PADDING
        return Split(x, y)

    return Dataset(identity={"name": "tokens"}, train=split(train), val=split(val), test=split(test))


class TokenMlp(AbstractBlueprint):
    """A seed for features [T, D]."""

    name, family = "token_mlp", HostFamily.TRANSFORMER
    init = {}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, 9), nn.GELU(), nn.Linear(9, channels))

    def num_params(self, channels: int) -> int:
        return sum(p.numel() for p in self.build(channels).parameters())


class TokenScale(AbstractBlueprint):
    """Another one, which drops elements."""

    name, family = "token_scale", HostFamily.TRANSFORMER
    init = {}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.3))

    def num_params(self, channels: int) -> int:
        return channels * (channels + 1)


@contextmanager
def token_seeds() -> Iterator[None]:
    """The two blueprints, registered."""
    own = [TokenMlp(), TokenScale()]
    for blueprint in own:
        registry.register(blueprint)
    try:
        yield
    finally:
        for blueprint in reversed(own):
            registry.unregister(blueprint.name)
