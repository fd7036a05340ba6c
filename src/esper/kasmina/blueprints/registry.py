"""The registry of blueprints, by index and host family.

    index   0     1           2 ... 4                       5 ... 7    8 ... 12       13 ...
    name    noop  conv_light  attention, norm, depthwise    cnn only   transformer    registered by users
                              (one network per family under one name and index)

The index is the value of the blueprint head. Built-in names have fixed indices, whether or not a family has a network
for them; blueprints of users follow in the order of registration.

A policy knows the slots and blueprints of a new network by what they are made of: `kinds_of` and `menu_of` say it in
numbers. Shape legend: S = slots, B = blueprints, K = `KINDS`.
"""

import abc
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import final

import torch
from torch import nn

from esper.kasmina.blueprints.layers import SelfAttention
from esper.leyline.errors import RegistryError, is_again, nearest
from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS, HostFamily
from esper.leyline.messages import Menu, SeedCosts

NOOP = "noop"
_CNN = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")
_TRANSFORMER = ("lora", "lora_large", "mlp_small", "mlp", "flex_attention")
BUILTIN_NAMES = (NOOP, *_CNN, *_TRANSFORMER)
"""Name of each fixed index."""
assert len(BUILTIN_NAMES) == NUM_BUILTIN_BLUEPRINTS


class AbstractBlueprint(abc.ABC):
    """How to build one kind of seed.

    Attributes:
        name: unique within a family. family: the hosts that it fits.
        init: parameters that start at a constant (name in the built module -> value), whatever `build` gives them, so
            that the output of a new seed is zero or close to zero. least_tokens: of sequences, from which on it does
            more than scale features; a host with shorter ones alone does not grow it. both_ways: what takes its place
            in hosts whose outputs depend on later tokens, None for itself.
    """

    name: str
    family: HostFamily
    init: Mapping[str, float] = MappingProxyType({})
    least_tokens: int = 1
    both_ways: "AbstractBlueprint | None" = None

    @abc.abstractmethod
    def build(self, channels: int) -> nn.Module:
        """The network h -> delta, of equal shape and dtype, for features with `channels` channels."""

    def within(self, *, causal: bool) -> "AbstractBlueprint":
        """What a host grows whose outputs depend on no later tokens (`causal`), or on all."""
        return self if causal or self.both_ways is None else self.both_ways


@final
class FunctionBlueprint(AbstractBlueprint):
    """A blueprint that a function builds, whose name it has; `both_ways` builds what takes its place."""

    def __init__(
        self,
        family: HostFamily,
        network: Callable[[int], nn.Module],
        init: Mapping[str, float],
        least_tokens: int = 1,
        both_ways: Callable[[int], nn.Module] | None = None,
    ) -> None:
        self.name, self.family, self.init, self.network = network.__name__, family, init, network
        self.least_tokens = least_tokens
        if both_ways is not None:
            self.both_ways = FunctionBlueprint(family, both_ways, init, least_tokens)
            self.both_ways.name = self.name

    def build(self, channels: int) -> nn.Module:
        """The network for features with `channels` channels."""
        network = self.network(channels)
        for name, value in self.init.items():
            nn.init.constant_(network.get_parameter(name), value)
        return network


_names: list[str] = list(BUILTIN_NAMES)
_entries: dict[tuple[int, HostFamily], AbstractBlueprint] = {}


def register(blueprint: AbstractBlueprint) -> int:
    """Add a blueprint and return its index, the first free one from 13 on.

    Registering the same object again changes nothing and returns its index. Blueprints of several families can share
    a name, and then share its index. Raises RegistryError if the name is built in, taken, or not an identifier.
    """
    name = _checked_name(blueprint)
    if name in BUILTIN_NAMES:
        if _entries.get((BUILTIN_NAMES.index(name), blueprint.family)) is blueprint:
            return BUILTIN_NAMES.index(name)
        raise RegistryError(f"the blueprint name {name!r} is built in; register yours under another name.")
    if name not in _names:
        _names.append(name)
    return _enter(_names.index(name), blueprint)


def register_builtin(blueprint: AbstractBlueprint) -> int:
    """Register a blueprint of this package at the index that is reserved for its name."""
    return _enter(BUILTIN_NAMES.index(blueprint.name), blueprint)


def unregister(name: str) -> None:
    """Remove the latest registration, for all its families; raises RegistryError for any other name."""
    if name in BUILTIN_NAMES or name != _names[-1]:
        own = ", ".join(_names[NUM_BUILTIN_BLUEPRINTS:]) or "none"
        raise RegistryError(
            f"{name!r} cannot be unregistered: only your last blueprint can, so that indices stay fixed. "
            f"Registered, in order: {own}."
        )
    index = len(_names) - 1
    for family in HostFamily:
        _entries.pop((index, family), None)
    _names.pop()


def blueprint_at(index: int, family: HostFamily) -> AbstractBlueprint:
    """The blueprint with this index in this family; raises RegistryError if there is none, as for 0 (`noop`)."""
    found = _entries.get((index, family))
    if found is None:
        raise RegistryError(
            f"there is no blueprint {index} for {family.name.lower()} hosts; "
            f"indices that can be grown there: {', '.join(map(str, selectable(family))) or 'none'}."
        )
    return found


def blueprint_by_name(name: str, family: HostFamily) -> AbstractBlueprint:
    """The blueprint with this name in this family; raises RegistryError, which names the nearest, if there is none."""
    if name not in _names or (_names.index(name), family) not in _entries:
        known = [_names[index] for index in selectable(family)]
        raise RegistryError(f"there is no blueprint {name!r} for {family.name.lower()} hosts; {nearest(name, known)}")
    return _entries[_names.index(name), family]


def selectable(family: HostFamily) -> tuple[int, ...]:
    """Indices a controller may choose for hosts of this family, ascending; never 0."""
    return tuple(sorted(index for index, of in _entries if of == family))


def num_blueprints() -> int:
    """Size of the blueprint head: one more than the largest index."""
    return len(_names)


def names() -> tuple[str, ...]:
    """Name of each index, reserved ones included."""
    return tuple(_names)


def _enter(index: int, blueprint: AbstractBlueprint) -> int:
    taken = _entries.setdefault((index, blueprint.family), blueprint)
    if is_again(getattr(blueprint, "network", None), getattr(taken, "network", None)):  # e.g. a cell of a notebook
        taken = _entries[index, blueprint.family] = blueprint
    if taken is not blueprint:
        raise RegistryError(
            f"the blueprint name {blueprint.name!r} is taken by {type(taken).__name__} for "
            f"{blueprint.family.name.lower()} hosts; choose another name, or unregister that one first."
        )
    return index


def _checked_name(blueprint: AbstractBlueprint) -> str:
    name = getattr(blueprint, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise RegistryError(f"{blueprint!r} is named {name!r}; a blueprint needs an identifier such as 'conv_light'.")
    if not isinstance(getattr(blueprint, "family", None), HostFamily):
        raise RegistryError(f"the blueprint {name!r} has no family; set HostFamily.CNN or HostFamily.TRANSFORMER.")
    return name


KINDS = ("exists", "convolution", "grouped", "pointwise", "vector", "attention", "depth", "narrow", "scalar")
"""Columns of `kinds_of`: the shares of the parameters by the shape of their tensor; and the rest of its values."""
_LOG_PARAMS, _LOG_STEPS, _MOST_LAYERS = 16.0, 6.0, 8.0
_WAVES = 4
"""Cosines of the place of a slot: two neighbours differ by much, as they must for a policy to tell them apart."""


def kinds_of(seed: nn.Module, channels: int) -> list[float]:
    """What a seed for features with this many channels is made of; all values are 0 to 1.

    A kernel that sees neighbours is a convolution, or grouped if it sees few channels; a matrix is pointwise; what has
    one axis, scales and biases, is a vector. `attention` says whether tokens attend to each other, `depth` counts
    the matrices and kernels, `narrow` is the smallest width between two of them as a share of the channels.
    """
    shapes = [tuple(parameter.shape) for parameter in seed.parameters()]
    total = max(1, sum(map(math.prod, shapes)))
    shares = dict.fromkeys(KINDS, 0.0) | {"exists": 1.0}
    widths = []
    for shape in shapes:
        if len(shape) > 1:
            widths.append(shape[0])
            neighbours = math.prod(shape[2:]) > 1
            kind = "pointwise" if not neighbours else "convolution" if 2 * shape[1] > channels else "grouped"
        else:
            kind = "vector" if shape else "scalar"
        shares[kind] += math.prod(shape) / total
    shares["scalar"] = float(shares["scalar"] > 0.0)
    shares["attention"] = float(any(isinstance(m, SelfAttention | nn.MultiheadAttention) for m in seed.modules()))
    shares["depth"] = min(1.0, len(widths) / _MOST_LAYERS)
    shares["narrow"] = min(1.0, min(widths, default=channels) / channels)
    return [shares[kind] for kind in KINDS]


def menu_of(costs: SeedCosts, host_params: int, *, episode_length: int, min_training_epochs: int) -> Menu:
    """The menu of an engine: slots by their place and the scale of their host, blueprints by kind and size."""
    slots = len(costs.gate_params)
    device = costs.seed_params.device
    place = (torch.arange(slots, device=device) + 0.5) / slots
    waves = torch.cos(math.pi * place[:, None] * torch.arange(1, _WAVES + 1, device=device))
    same = [1.0 / slots, math.log1p(host_params) / _LOG_PARAMS, math.log(episode_length) / _LOG_STEPS,
            min(1.0, min_training_epochs / episode_length)]  # fmt: skip
    places = torch.cat((waves, torch.tensor(same, device=device).expand(slots, -1)), dim=1)
    params, flops = costs.seed_params.to(torch.float32), costs.seed_flops.to(torch.float32)
    relative = params / max(1, host_params), flops / costs.host_flops.clamp(min=1)
    sizes = torch.stack((params.log1p() / _LOG_PARAMS, *(share.log1p() for share in relative)), dim=-1)
    return Menu(places=places, seeds=torch.cat((costs.kinds, sizes * costs.selectable[:, None]), dim=-1))
