"""A grown network as a plain module: no stages, masks, slabs or optimizers.

    GrownModule
        network        the user's own network, or a plain one like a built-in host
        grown.<slot>   Grown: seed, and the gate of algorithm GATE; a hook applies it to the output of the slot's module

Every weight is trainable, except those that the user froze. `Grown`, `GrownModule` and the functions on their weights
refer to torch alone, because model.py has copies of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.kasmina.parameters.flat_layout import buffer_layout, parameter_layout
from esper.leyline.manifest import GrownSlot


@dataclass(frozen=True)
class GrownSeed(GrownSlot):
    """A seed of an exported host; `alpha` is below 1 only if it was still being blended in."""

    alpha: float = 1.0


@final
class Grown(nn.Module):
    """h + d for ADD, h (1 + tanh d) for MULTIPLY, h + gate(h) d for GATE, with d = seed(h).

    A seed that was still being blended in changes h by `alpha` of that.
    """

    def __init__(self, seed: nn.Module, algorithm: str, gate: nn.Module | None = None, alpha: float = 1.0) -> None:
        super().__init__()
        self.seed, self.gate, self.algorithm, self.alpha = seed, gate, algorithm, alpha

    def forward(self, h: Tensor) -> Tensor:
        """Features after the slot, of the shape of the features before it; a vector is a sequence of one token."""
        if h.dim() == 2:
            return self.forward(h[:, None]).squeeze(1)
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
    """Copy the weights of a slab's row into a module of that layout."""
    parts = (
        (parameter_layout(module), params, dict(module.named_parameters())),
        (buffer_layout(module), buffers, dict(module.named_buffers())),
    )
    for layout, row, own in parts:
        for name, value in layout.unpack(row[: layout.total]).items():
            own[name].copy_(value)
