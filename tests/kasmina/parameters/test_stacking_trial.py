"""Which hosts run for many at once, and what is said of those that do not: sequence networks as people write them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.population import host_kind
from esper.kasmina.parameters.stacking import HOST_EXAMPLES, Vmapped, stacked_host
from esper.leyline.errors import StackingError

V, T, D = 11, 5, 8
"""Words, length and width."""
TOKENS = torch.randint(0, V, (HOST_EXAMPLES, T), generator=torch.Generator().manual_seed(0))


def layer(forward: Callable[[nn.Module, Tensor], Tensor], build: Callable[[], object]) -> type[nn.Module]:
    """A class of layers [B, T, D] -> the same, which work with what `build` gives, as their `own`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = build()

        def forward(self, h: Tensor) -> Tensor:
            return forward(self, h)

    return Layer


def attention() -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


Gain = layer(lambda of, h: h * of.own, lambda: nn.Parameter(torch.full((D,), 0.9)))
Einsum = layer(
    lambda of, h: torch.einsum("btd,de->bte", h, of.own).tanh(), lambda: nn.Parameter(0.3 * torch.randn(D, D))
)
Bilinear = layer(lambda of, h: h + of.own(h, h.flip(1)), lambda: nn.Bilinear(D, D, D))
Normed = layer(lambda of, h: of.own(h.transpose(1, 2)).transpose(1, 2), lambda: nn.BatchNorm1d(D))
Attending = layer(lambda of, h: h + of.own(h, h, h, need_weights=False)[0], attention)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool = True, both: bool = False) -> None:
        super().__init__()
        width = D // 2 if both else D
        self.layer, self.first = kind(D, width, batch_first=batch_first, bidirectional=both), batch_first
        self.start = nn.Parameter(torch.zeros(1 + both, 1, width))

    def forward(self, h: Tensor) -> Tensor:
        start = self.start.expand(-1, len(h), -1).contiguous()
        state = (start, start) if isinstance(self.layer, nn.LSTM) else start
        h = h if self.first else h.transpose(0, 1)
        out, _ = self.layer(h, state)
        return out if self.first else out.transpose(0, 1)


class Scaled(nn.Module):
    """The backward pass reads one buffer after another was written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((D,), 0.5))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        h = h * self.scale
        if self.training:
            self.passes.add_(1.0)
        return h


MIXERS: tuple[Callable[[], nn.Module], ...] = (
    Gain,
    Einsum,
    Bilinear,
    Normed,
    Attending,
    lambda: Recurrent(nn.LSTM),
    lambda: Recurrent(nn.GRU, batch_first=False),
    lambda: Recurrent(nn.RNN, both=True),
    lambda: nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D)),
    lambda: nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True, norm_first=True),
)
POSITIONS = ("none", "table of all", "first rows", "one row", "raw")


class Sequence(nn.Module):
    """Embedding, positions, mixers, head; `body` is the slot."""

    def __init__(self, positions: str, mixers: list[Callable[[], nn.Module]], *, tied: bool, padded: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D, padding_idx=0 if padded else None)
        self.positions = positions
        if positions in ("table of all", "first rows", "one row"):
            self.place = nn.Embedding(T, D)
        elif positions == "raw":
            self.place = nn.Parameter(0.1 * torch.randn(T, D))
        self.body, *rest = [mixer() for mixer in mixers]
        self.rest = nn.Sequential(*rest)
        self.out = nn.Linear(D, V, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.positions == "table of all":
            h = h + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        elif self.positions == "first rows":
            h = h + self.place.weight[: tokens.shape[1]]
        elif self.positions == "one row":
            h = h + self.place(torch.arange(tokens.shape[1], device=tokens.device)[None])
        elif self.positions == "raw":
            h = h + self.place
        return self.out(self.rest(self.body(h)))


def stacked(model: Callable[[], nn.Module]) -> nn.Module:
    """The module for many hosts of the network, or StackingError."""
    host = deterministic_build(lambda: ModuleHostSpec.of(model, ["body"], TOKENS).build(["body"], TOKENS[:1]))
    return stacked_host(host_kind(host, torch.device("cpu")).build, TOKENS)


@pytest.mark.parametrize("positions", POSITIONS)
def test_several_layers_run_for_many_hosts_at_once_whatever_their_positions_are(positions):
    first = POSITIONS.index(positions)
    for mixers in (MIXERS[first::5], MIXERS[first + 1 :: 4]):
        stacked(lambda mixers=mixers: Sequence(positions, mixers, tied=bool(first % 2), padded=False))


@pytest.mark.parametrize("mixer", [*MIXERS, Scaled])
@pytest.mark.parametrize("tied", [False, True])
def test_every_layer_runs_for_many_hosts_beside_positions_without_an_axis_of_examples(mixer, tied):
    assert isinstance(stacked(lambda: Sequence("table of all", [mixer], tied=tied, padded=True)), Vmapped)


def test_what_can_be_stacked_layer_by_layer_is():
    post_norm = partial(nn.TransformerEncoderLayer, D, 2, 16, batch_first=True)
    plain = stacked(lambda: Sequence("none", [Attending, *MIXERS[-2:], post_norm], tied=True, padded=False))
    assert not any(isinstance(layer, Vmapped) for layer in plain.modules())


class Reading(nn.Module):
    """Reads a number of its features, which differs between hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        y = self.layer(h)
        return y if y.mean().item() > 0.0 else 2.0 * y


def test_a_host_that_needs_its_own_numbers_is_refused_with_the_layer_and_the_error_of_pytorch():
    with pytest.raises(StackingError) as caught:
        stacked(lambda: Sequence("none", [nn.Tanh, Reading], tied=False, padded=False))
    said = str(caught.value)
    assert "gives other results for many hosts at once than for one, first in layer 'network.rest.0' (Reading)" in said
    assert "with torch.vmap it fails for many hosts at once (RuntimeError in layer 'network.rest.0': " in said
    assert ".item()" in said
    assert said.endswith("use executor 'streamed'.")
