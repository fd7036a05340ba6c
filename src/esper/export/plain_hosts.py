"""Hosts as plain networks, which take and return what a network does, and whose slots are outputs of submodules.

host                  plain network                                       slot r0c1
of the user's model   a new one of `model`, with its own dropout etc.     the path is the name of the slot
convolutional         ConvNet                                             blocks.1 (r1c1: pools.1)
transformer           Transformer                                         the last layer of segment 1
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from esper.export.grown import Grown, GrownModule, GrownSeed
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.layers import Positions
from esper.kasmina.blueprints.registry import FunctionBlueprint, blueprint_by_name
from esper.kasmina.hosts.cnn import Block, CNNHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.module_host import ModuleHost
from esper.kasmina.hosts.transformer import Layer, TransformerHost
from esper.kasmina.parameters.initialization import deterministic_build

_SLOWER = {"flex_attention": "attention"}
"""Blueprints that compute the same as another one with a kernel of their own."""


@final
class ConvNet(nn.Module):
    """Blocks of doubling width, the first `pools` of them with a pooling behind, and a linear head."""

    def __init__(
        self, in_channels: int, base: int, blocks: int, kernel: int, pools: int, classes: int, unshuffle: int = 1
    ) -> None:
        super().__init__()
        channels = [in_channels * unshuffle**2, *(base * 2**i for i in range(blocks))]
        self.unshuffle = nn.PixelUnshuffle(unshuffle)
        self.blocks = nn.ModuleList(Block(a, b, kernel) for a, b in pairwise(channels))
        self.pools = nn.ModuleList(nn.MaxPool2d(2) if i < pools else nn.Identity() for i in range(blocks))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]."""
        x = self.unshuffle(x)
        for block, pool in zip(self.blocks, self.pools, strict=True):
            x = pool(block(x))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


@final
class Transformer(nn.Module):
    """A causal language model with a tied output."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = Positions(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        h = self.dropout(self.positions(self.embedding(x)))
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.output(self.norm(h))
        return logits


class PlainSeed(NamedTuple):
    """What grew in a slot, and the function that builds it for a width; None for a blueprint that is a class.

    `causal`: see `GateNetwork`.
    """

    seed: GrownSeed
    build: Callable[[int], nn.Module] | None
    width: int
    causal: bool


class Plain(NamedTuple):
    """What a grown network is built from.

    Attributes:
        model: gives a new network. seeds: by the path of the submodule behind which they grew, in execution order.
        module: the network and what grew, in eval mode on the CPU. compiled: whether `model` gives it in torch.compile.
    """

    model: Callable[[], nn.Module]
    seeds: dict[str, PlainSeed]
    module: GrownModule
    compiled: bool = False


def plain(host: Host, seeds: Sequence[GrownSeed]) -> Plain:
    """A plain network with the weights of `host`, and new seeds.

    Raises:
        RegistryError: a blueprint that is not registered.
    """
    model, path_of = _plain_host(host)
    built = deterministic_build(model)
    network = getattr(built, "_orig_mod", built)  # what torch.compile wraps
    _copy(host.network if isinstance(host, ModuleHost) else host, network)
    channels, builders, grown = {point.slot_id: point.channels for point in host.enabled}, {}, {}
    for seed in sorted(seeds, key=lambda seed: host.execution_order().index(seed.slot)):
        path, width = path_of(seed.slot), channels[seed.slot]
        blueprint = blueprint_by_name(_SLOWER.get(seed.blueprint, seed.blueprint), host.family)
        function = blueprint.network if isinstance(blueprint, FunctionBlueprint) else None
        builders[path] = PlainSeed(seed, function, width, host.causal)
        gate = deterministic_build(partial(GateNetwork, width, host.causal)) if seed.algorithm == "GATE" else None
        grown[path] = Grown(deterministic_build(partial(blueprint.build, width)), seed.algorithm, gate, seed.alpha)
    return Plain(model, builders, GrownModule(network, grown).eval(), compiled=built is not network)


def _plain_host(host: Host) -> tuple[Callable[[], nn.Module], Callable[[str], str]]:
    """What gives a new network, and the path of the submodule of a slot."""
    if isinstance(host, ModuleHost):
        return host.spec.model, str
    if isinstance(host, CNNHost):
        kinds = {"r0": "blocks", "r1": "pools"}
        return partial(ConvNet, **asdict(host.spec)), lambda slot: f"{kinds[slot[:2]]}.{slot[3:]}"
    assert isinstance(host, TransformerHost), f"{type(host).__name__} has no plain network"
    fields = asdict(host.spec)
    del fields["segments"]
    after = {slot: i for i, slot in host.slot_after.items()}
    return partial(Transformer, **fields), lambda slot: f"layers.{after[slot]}"


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copy tensors of equal names; a counter of batches, which hosts do not have, stays 0."""
    own: dict[str, Tensor] = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers())
    target.load_state_dict(own, strict=False)
    for name, buffer in target.named_buffers():  # some may be kept out of the state
        if name in own:
            buffer.copy_(own[name])
