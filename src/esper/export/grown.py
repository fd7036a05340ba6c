"""A host with its permanent seeds as a plain module: no stages, masks, slabs or optimizers.

Every weight is trainable, except those that the user froze.

GrownModule
    host           layers of the host
    grown.<slot>   Grown: seed, and the gate of algorithm GATE
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.registry import blueprint_by_name
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.attention import KeyedAttention, as_plain
from esper.kasmina.parameters.dropout import Dropout
from esper.kasmina.parameters.flat_layout import buffer_layout, drop_batch_counters, parameter_layout
from esper.kasmina.parameters.frozen import as_parameters
from esper.kasmina.parameters.initialization import deterministic_build
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

    alpha: Tensor | None

    def __init__(self, seed: nn.Module, algorithm: str, gate: nn.Module | None, alpha: float) -> None:
        super().__init__()
        self.seed, self.gate, self.algorithm = seed, gate, algorithm
        self.register_buffer("alpha", None if alpha == 1.0 else torch.tensor(alpha))

    def forward(self, h: Tensor) -> Tensor:
        """Features after the slot, of the shape of the features before it."""
        change: Tensor = self.seed(h)
        if self.algorithm == "MULTIPLY":
            change = h * torch.tanh(change)
        elif self.gate is not None:
            change = self.gate(h) * change
        return h + change if self.alpha is None else h + self.alpha * change


class GrownModule(nn.Module):
    """A host and what grew in its slots, in execution order."""

    def __init__(self, host: Host, grown: Mapping[str, Grown]) -> None:
        super().__init__()
        self.host = host
        self.grown = nn.ModuleDict({slot_key(slot): grown[slot] for slot in host.execution_order() if slot in grown})

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 -- as in the user's network
        """What the host's own network returns for inputs [B, ...]: mostly outputs [B, ...]."""
        return self.host.run(((x,), {}), self._apply_slot)

    def _apply_slot(self, slot_id: str, h: Tensor) -> Tensor:
        key = slot_key(slot_id)
        return self.grown[key](h) if key in self.grown else h

    def num_params(self) -> tuple[int, int]:
        """Parameters of the host and of what grew, tied ones counted once."""
        host, grown = (sum(p.numel() for p in part.parameters()) for part in (self.host, self.grown))
        return host, grown


@final
class GrownModuleOfSeveral(GrownModule):
    """The same where the host's own network takes several inputs, in order or by name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- as in the user's network
        """What it returns for its own arguments."""
        return self.host.run((args, kwargs), self._apply_slot)


def slot_key(slot_id: str) -> str:
    """Name of what grew in a slot; one that is named by a path, such as layer2.1, loses its dots."""
    return slot_id.replace(".", "_")


def build(host: Host, seeds: Sequence[GrownSeed]) -> GrownModule:
    """`host` with these seeds, on the CPU with untrained weights; it takes the host.

    Raises:
        RegistryError: a blueprint that is not registered.
    """
    channels = {point.slot_id: point.channels for point in host.enabled}

    def grown(seed: GrownSeed) -> Grown:
        blueprint, width = blueprint_by_name(seed.blueprint, host.family), channels[seed.slot]
        gate = deterministic_build(lambda: GateNetwork(width, host.causal)) if seed.algorithm == "GATE" else None
        return Grown(deterministic_build(lambda: blueprint.build(width)), seed.algorithm, gate, seed.alpha)

    kind = GrownModuleOfSeveral if host.takes_several else GrownModule
    module = kind(host, {seed.slot: grown(seed) for seed in seeds})
    drop_batch_counters(module)
    _use_plain_dropout(module)
    return module.eval()


def _use_plain_dropout(module: nn.Module) -> None:
    """Dropout that draws from the global generator, as a network outside of a population does."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Dropout):
                setattr(parent, name, nn.Dropout2d(child.p) if child.channels else nn.Dropout(child.p))
            elif isinstance(child, KeyedAttention):
                as_plain(child)


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


def restore_frozen(host: Host) -> None:
    """Make frozen weights parameters of the host again, of which each host of a population has a copy."""
    as_parameters(host, host.frozen)
    host.frozen = ()


def tied(module: nn.Module) -> list[tuple[str, str]]:
    """(first name, other name) of every tensor that has two names in a module."""
    first: dict[int, str] = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [(first[id(x)], name) for name, x in every if first.setdefault(id(x), name) != name]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its first name: what is saved."""
    return {name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers())}
