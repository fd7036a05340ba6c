"""A grown network as a plain module (no stages, masks or optimizers), what it is built from, and its description.

    GrownModule
        network        the user's own network, or a plain one like a built-in host
        grown.<slot>   Grown: seed, and the gate of algorithm GATE; a hook applies it to the output of the slot's module

    host                  plain network                                       slot r0c1
    of the user's model   a new one of `model`, with its own dropout etc.     the path is the name of the slot
    convolutional         ConvNet                                             blocks.1 (r1c1: pools.1)
    transformer           Transformer                                         the last layer of segment 1

Every weight is trainable, except those that the user froze. `Grown`, `GrownModule` and the functions on their weights
refer to torch alone, because model.py has copies of them. model.json is the `Description`, of plain values alone.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from pydantic import TypeAdapter
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import GateNetwork, Positions
from esper.kasmina.blueprints.registry import AbstractBlueprint, blueprint_by_name
from esper.kasmina.hosts.cnn import Block, CNNHost
from esper.kasmina.hosts.host import Host, InjectionPoint
from esper.kasmina.hosts.module_host import ModuleHost
from esper.kasmina.hosts.transformer import Layer, TransformerHost
from esper.kasmina.hosts.weights import Loaded
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import buffer_layout, parameter_layout
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.leyline.errors import ExportError
from esper.leyline.files import read_json


@dataclass(frozen=True)
class GrownSeed(PlacedSeed):
    """A seed of an exported host; `alpha` is below 1 only if it was still being blended in."""

    alpha: float = 1.0


@final
class Grown(nn.Module):
    """h + d for ADD, h (1 + tanh d) for MULTIPLY, h + gate(h) d for GATE, with d = seed(h).

    A seed that was still being blended in changes h by `alpha` of that. Features [B, D, T] are `transposed` for it.
    """

    is_grown = True

    def __init__(
        self,
        seed: nn.Module,
        algorithm: str,
        gate: nn.Module | None = None,
        alpha: float = 1.0,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.seed, self.gate, self.algorithm, self.alpha = seed, gate, algorithm, alpha
        self.transposed = transposed

    def forward(self, h: Tensor) -> Tensor:
        """Features after the slot, of the shape of the features before it; a vector is a sequence of one token."""
        if h.dim() == 2:
            return self.forward(h[:, None]).squeeze(1)
        return self.grown(h.transpose(1, 2)).transpose(1, 2) if self.transposed else self.grown(h)

    def grown(self, h: Tensor) -> Tensor:
        """The same for features as the seed takes them."""
        change: Tensor = self.seed(h)
        if self.algorithm == "MULTIPLY":
            change = h * torch.tanh(change)
        elif self.gate is not None:
            change = self.gate(h) * change
        return h + change if self.alpha == 1.0 else h + self.alpha * change


class GrownModule(nn.Module):
    """A network and what grew at the outputs of some of its submodules; it is called as the network is."""

    def __init__(self, network: nn.Module, grown: Mapping[str, Grown]) -> None:
        super().__init__()
        self.network = network
        self.grown = nn.ModuleDict({slot_key(path): seed for path, seed in grown.items()})
        for layer in network.modules():
            if isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False  # hooks get no nested tensors
        for path, seed in grown.items():
            network.get_submodule(path).register_forward_hook(partial(grow, seed))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- whatever the network takes and returns
        """What the network returns, with what grew."""
        return self.network(*args, **kwargs)


def grow(seed: nn.Module, module: nn.Module, args: object, output: Tensor) -> object:
    """The forward hook of a slot: its features, changed by what grew there."""
    return seed(output)


def slot_key(path: str) -> str:
    """The name of what grew at a path, different for every path: layer2.1 is layer2/1."""
    key = path.replace("%", "%25").replace("/", "%2F").replace(".", "/")
    return f"%{key}" if hasattr(nn.ModuleDict(), key) else key


def state_of(module: GrownModule) -> dict[str, Tensor]:
    """What is saved: every tensor of the network by its own name, then what grew, under `grown.` or a free prefix.

    Buffers that the network keeps out of its `state_dict` are there as `grown.%buffer.<name>`.
    """
    named = module.network.state_dict()
    state = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    prefix = "grown"
    while any(name.partition(".")[0] == prefix for name in state):
        prefix += "_"
    for name, buffer in module.network.named_buffers():
        if name not in state:
            state[f"{prefix}.%buffer.{name}"] = buffer.detach()
    return state | {f"{prefix}.{name}": value for name, value in module.grown.state_dict().items()}


@torch.no_grad()
def load_state(module: GrownModule, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `state_of` into a module of the same kind; raises KeyError if one is missing."""
    names = [name for name, value in module.network.state_dict().items() if isinstance(value, Tensor)]
    module.network.load_state_dict({name: weights[name] for name in names}, strict=False)
    for name, value in state_of(module).items():
        if name not in names:
            value.copy_(weights[name])


@torch.no_grad()
def fill(module: nn.Module, params: Float[Tensor, " P"], buffers: Float[Tensor, " Q"]) -> None:
    """Copy the weights of a row into a module of that layout."""
    own: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    for layout, row in ((parameter_layout(module), params), (buffer_layout(module), buffers)):
        for name, value in layout.unpack(row[: layout.total]).items():
            own[name].copy_(value)


FORMAT = 5


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where in a run a network grew: `round` from 1, global number of the `host`, its 100·J."""

    round: int
    host: int
    objective: float


@dataclass(frozen=True, kw_only=True)
class Description:
    """A network and its origin.

    Attributes:
        task: its name. data: identity of the data set. host: class and fields of the host's specification, None if they
            are not plain values. slots: those enabled in the run. seeds: what grew.
        input_shape, input_dtype: of one example as the host gets it. normalization: how stored examples become that,
            None if they are stored so.
        host_params, grown_params: numbers of parameters. flops: of one example, a multiply-add counts as two.
        unit: name of the figure of merit. val, test: its values; None where it was not measured.
        perplexity: of a text, on the validation examples; None for others, or where it was not measured.
        classes: names of the labels in order; None where they are not known.
        tokenizer: of a text, "bytes" or the name of a file in the folder; None for others.
        origin: the round and host of a run; None where it grew in no run.
    """

    task: str
    data: dict[str, Any]
    host: dict[str, Any] | None
    slots: tuple[str, ...]
    seeds: tuple[GrownSeed, ...]
    input_shape: tuple[int, ...]
    input_dtype: str
    normalization: dict[str, Any] | None
    host_params: int
    grown_params: int
    flops: int
    unit: str
    val: float | None
    test: float | None
    perplexity: float | None = None
    classes: tuple[str, ...] | None = None
    tokenizer: str | None = None
    origin: Origin | None = None

    @property
    def architecture(self) -> Architecture:
        """What grew, without weights."""
        return Architecture(tuple(PlacedSeed(s.slot, s.blueprint, s.algorithm) for s in self.seeds))

    def example(self, batch: int = 2) -> Tensor:
        """Made-up inputs [batch, ...]: a wave, or the tokens 0 and 1."""
        number = torch.arange(batch * math.prod(self.input_shape))
        dtype = getattr(torch, self.input_dtype)
        values = torch.sin(number) if dtype.is_floating_point else number % 2
        return values.to(dtype).view(batch, *self.input_shape)

    def text(self) -> str:
        """The JSON document."""
        tree = {"format": FORMAT, **asdict(self), "architecture": self.architecture.tree()}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def read_description(path: Path) -> Description:
    """The description in model.json; raises ExportError that says what is wrong with the file."""
    again = "export the network again"
    try:
        tree = read_json(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}); name a folder made by `esper export`.") from error
    except ValueError as error:
        raise ExportError(f"{path} is not JSON ({error}): it was damaged; {again}.") from error
    found = tree.get("format") if isinstance(tree, dict) else None
    if found != FORMAT:
        raise ExportError(f"{path} has format {found!r}, but this version reads format {FORMAT}; {again}.")
    expected = {f.name for f in fields(Description)} | {"format", "architecture"}
    if wrong := sorted(expected ^ tree.keys()):
        kind = "unknown" if wrong[0] in tree else "missing"
        raise ExportError(f"{path}: the key {wrong[0]!r} is {kind}; {again}.")
    try:
        architecture, _ = Architecture.of(tree.pop("architecture")), tree.pop("format")
        description = TypeAdapter(Description).validate_python(tree)
        description.example()
        description.text()  # numbers of JSON alone
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"{path} is damaged ({error}); {again}.") from error
    if description.architecture != architecture:
        raise ExportError(f"{path} was changed: its seeds are not those of its architecture; {again}.")
    return description


def fields_of(value: object) -> dict[str, Any] | None:
    """Class and fields of a dataclass, if they survive JSON; None for anything else: nothing is stored by halves."""
    if not is_dataclass(value) or isinstance(value, type):
        return None
    kind = type(value)
    tree = {"class": f"{kind.__module__}.{kind.__qualname__}", **asdict(value)}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(tree, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return plain


def restored(tree: Mapping[str, Any] | None, package: str) -> object:
    """The dataclass of `fields_of`; None if its class is not one of this package's, which alone are imported.

    Raises TypeError or ConfigError if its fields are wrong.
    """
    values = dict(tree or {})
    place, _, name = str(values.pop("class", "")).rpartition(".")
    kind: Any = None
    if place.startswith(f"{package}.") and find_spec(place) is not None:
        kind = getattr(import_module(place), name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    return kind(**{key: _tupled(value) for key, value in values.items()})


def _tupled(value: Any) -> Any:  # noqa: ANN401 -- a value of a JSON document
    """Lists as tuples, which is what the fields of such classes are."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


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


class Plain(NamedTuple):
    """What a grown network is built from.

    Attributes:
        host: whose network it is. model: gives a new one; `compiled` says whether it comes in torch.compile.
        seeds: by the path of the submodule behind which they grew, in execution order.
        module: the network and what grew, in eval mode on the CPU.
    """

    host: Host
    model: Callable[[], nn.Module]
    seeds: dict[str, GrownSeed]
    module: GrownModule
    compiled: bool = False


def blueprint_of(seed: GrownSeed, host: Host) -> tuple[AbstractBlueprint, InjectionPoint]:
    """The blueprint of a seed, with PyTorch's own kernels, and its place; raises RegistryError."""
    point = next(point for point in host.enabled if point.slot_id == seed.slot)
    blueprint = blueprint_by_name(_SLOWER.get(seed.blueprint, seed.blueprint), host.family)
    return blueprint.within(causal=host.causal), point


def plain(host: Host, seeds: Sequence[GrownSeed]) -> Plain:
    """A plain network with the weights of `host`, and new seeds; raises RegistryError for an unknown blueprint."""
    model, path_of = _plain_host(host)
    built = deterministic_build(model)
    network = getattr(built, "_orig_mod", built)  # what torch.compile wraps
    _copy(host.network if isinstance(host, ModuleHost) else host, network)
    order, own, grown = host.execution_order().index, {}, {}
    for seed in sorted(seeds, key=lambda seed: order(seed.slot)):
        blueprint, point = blueprint_of(seed, host)
        channels = point.channels
        gate = deterministic_build(partial(GateNetwork, channels, host.causal)) if seed.algorithm == "GATE" else None
        built_seed = deterministic_build(partial(blueprint.build, channels))
        path = path_of(seed.slot)
        own[path], grown[path] = seed, Grown(built_seed, seed.algorithm, gate, seed.alpha, point.transposed)
    return Plain(host, model, own, GrownModule(network, grown).eval(), compiled=built is not network)


def _plain_host(host: Host) -> tuple[Callable[[], nn.Module], Callable[[str], str]]:
    """What gives a new network, and the path of the submodule of a slot."""
    if isinstance(host, ModuleHost):
        given = host.spec.model
        return given.model if isinstance(given, Loaded) else given, str  # the weights are those of the host
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
