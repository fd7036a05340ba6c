"""Networks as people write them, in ways that make copying, tracing or pickling hard; grown by hand."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.export.grown import Description, GrownSeed, plain
from esper.export.network import GrownNetwork
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.hosts.weights import Copies
from esper.kasmina.parameters.initialization import deterministic_build
from user_networks import Padded, Sensors

VECTORS = torch.linspace(-1.0, 1.0, 60).view(10, 6)
TOKENS = (torch.arange(70) * 7 % 11).view(10, 7)
IMAGES = torch.linspace(-1.0, 1.0, 1080).view(10, 3, 6, 6)


@dataclass
class Config:
    width: int = 8


CONFIG = Config(width=8)
size = x = torch.arange(3)
"""What no lambda below means: each has an argument of this name."""
PREPARE = {"halve": lambda x: x / 2}
ACTIVATIONS = {"gelu": nn.GELU}


class WithConfig(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.act = config, ACTIVATIONS["gelu"]()
        self.a, self.o = nn.Linear(6, config.width), nn.Linear(config.width, 3)

    def forward(self, x): return self.o(self.act(self.a(x)))  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.cell, self.o = kind(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.o(self.cell(self.mix(self.embed(tokens)))[0][:, -1])


class Positions(nn.Module):
    """`torch.arange` of a size, as in every GPT; its name is that of one of our layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.o = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.o(self.encoder(self.embed(tokens) + self.pos(torch.arange(tokens.shape[1]))).mean(dim=1))


class LayerScale(nn.Module):
    """Named like a layer of the seed that grows in it; tied weights, a buffer outside of the state, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, bias=False), nn.Linear(8, 3)
        self.e = nn.Conv2d(8, 8, 1, bias=False)
        self.e.weight = self.d.weight
        self.o.requires_grad_(False)
        self.register_buffer("scale", torch.rand(8, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.e(torch.tanh(self.d(self.c(x)))) * self.scale).mean(dim=(2, 3)))


class Names(nn.Module):
    """Two slots that differ in a dot, slots with names of methods of dictionaries, and a layer `grown`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"1": nn.Linear(6, 6)})
        self.layer_1, self.grown, self.o = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.values, self.keys = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.keys(self.values(self.grown(self.layer_1(self.layer["1"](x))))))


class Normed(nn.Module):
    """A parametrization, which cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.a(x))


def inner(width: int) -> type[nn.Module]:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, width), nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(torch.relu(self.a(x)))

    return Inner


WIDTH = [8]


def _without_source(body: str) -> type[nn.Module]:
    names = {"nn": nn, "torch": torch, "F": F, "WIDTH": WIDTH, "__name__": "__main__"}
    code = (
        "class Nowhere(nn.Module):\n"
        " def __init__(self):\n"
        "  super().__init__()\n"
        "  self.a, self.o = nn.Linear(6, WIDTH[0]), nn.Linear(WIDTH[0], 3)\n"
        f" def forward(self, x):\n  {body}\n"
    )
    exec(code, names)
    return names["Nowhere"]


NO_SOURCE = CHANGED = _without_source("return self.o(self.a(x))")
CRASHES = _without_source(
    "import os, signal\n  if torch.compiler.is_exporting(): os.kill(os.getpid(), signal.SIGSEGV)\n"
    "  return self.o(self.a(x))"
)
PARAMETRIZED = Copies(Normed())
CASES = {
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), ["0"], VECTORS, "mlp"),
    "config": (partial(WithConfig, CONFIG), ["a"], VECTORS, "attention"),
    "config in a lambda": (lambda: WithConfig(Config(width=8)), ["a"], VECTORS, "lora"),
    "lambda with an argument": (lambda size=8: WithConfig(Config(width=size)), ["a"], VECTORS, "norm"),
    "lstm": (partial(Recurrent, nn.LSTM), ["mix"], TOKENS, "attention"),
    "gru": (partial(Recurrent, nn.GRU), ["mix"], TOKENS, "norm"),
    "positions": (Positions, ["encoder.layers.0"], TOKENS, "flex_attention"),
    "collision": (LayerScale, ["c", "d"], IMAGES, "conv_light"),
    "names": (Names, ["layer.1", "layer_1", "values", "keys", "grown"], VECTORS, "mlp_small"),
    "closure": (inner(8), ["a"], VECTORS, "norm"),
    "convolutions over time": (partial(Sensors, 2), ["r0c0", "r0c1"], torch.randn(4, 2, 10), "lora"),
    "padding": (Padded, ["encoder.layers.0"], TOKENS, "norm"),
    "parametrization": (Normed, ["a"], VECTORS, "mlp"),
}
"""Model, slots, inputs, and the blueprint that grew in every slot."""


def network_of(model, slots: list[str], x: Tensor, blueprint: str, **more: object) -> GrownNetwork:
    """The network with a gated seed in every slot, and weights of its own in all of them."""
    spec = ModuleHostSpec.of(model, slots, x)
    host = deterministic_build(lambda: spec.build(slots, x[:1]))
    seeds = tuple(GrownSeed(slot, blueprint, "GATE") for slot in slots)
    found = plain(host, seeds)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*found.module.parameters(), *found.module.buffers()):
            if tensor.is_floating_point():
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator).abs()
    description = Description(
        task="toy", data={}, host=None, slots=tuple(slots), seeds=seeds, input_shape=tuple(x.shape[1:]),
        input_dtype=str(x.dtype).removeprefix("torch."), normalization=None, host_params=0, grown_params=0, flops=0,
        unit="accuracy", val=None, test=None,
    )  # fmt: skip
    return GrownNetwork(plain=found, description=description, **more)
