"""Kinds of modules: what a population needs to know of a host, a blueprint or a gate before it has one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers, with_keyed_dropout
from esper.kasmina.parameters.flat_layout import Template, buffer_layout, parameter_layout
from esper.kasmina.parameters.initialization import Builds, InitTable, build_twice, deterministic_build, init_table
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import replace, tensor_dataclass, tree_map

Build = Callable[[], nn.Module]
Features = tuple[int, int, int]
"""Channels, height and width."""
Found = TypeVar("Found")
_found: dict[tuple[int, Features | None, str], tuple[object, Any]] = {}


def once(of: object, features: Features | None, what: str, find: Callable[[], Found]) -> Found:
    """What `find` finds out of an object, asked once in a process; the object is kept, so that its identity is."""
    key = (id(of), features, what)
    if key not in _found:
        _found[key] = (of, find())
    found: Found = _found[key][1]
    return found


@tensor_dataclass
class Start:
    """How modules of one kind start. `rebuilt`: some of it is no table, so each newborn is built anew."""

    table: InitTable
    buffers: Float[Tensor, " Q"]
    rebuilt: bool


@final
@dataclass(frozen=True)
class Kind:
    """One kind of module: its skeleton, how it starts, and how one is built; `source` is the blueprint or the class."""

    name: str
    template: Template
    start: Start
    build: Build
    source: object

    def rebuild(self, seeds: list[int]) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R Q"]]:
        """Parameters and buffers of modules that are built under these seeds of 64 bits, on the CPU."""
        params, buffers = [], []
        for seed in seeds:
            module = deterministic_build(self.build, seed)
            params.append(self.template.parameters.pack(dict(module.named_parameters())))
            buffers.append(self.template.buffers.pack(dict(module.named_buffers())))
        return torch.stack(params), torch.stack(buffers)


def host_kind(host: CNNHost, device: torch.device) -> Kind:
    """The kind of a host; the module itself becomes the skeleton."""
    slots = [point.slot_id for point in host.enabled]

    def build() -> nn.Module:
        return CNNHost(host.spec, slots, image_size=host.image_size)

    start = _start(build_twice(build), {}, device)
    return Kind(name="host", template=Template(host.to(device)), start=start, build=build, source=CNNHost)


def gate_kind(channels: int, device: torch.device) -> Kind:
    """The kind of gates for features of this width."""

    def build() -> nn.Module:
        return GateNetwork(channels)

    start = _start(build_twice(build), {}, device)
    skeleton = Template(deterministic_build(build).to(device))
    return Kind(name="gate", template=skeleton, start=start, build=build, source=GateNetwork)


def seed_kind(blueprint: AbstractBlueprint, features: Features, device: torch.device) -> Kind:
    """The kind of seeds of a blueprint for such features.

    Raises:
        ConfigError: what the blueprint builds cannot grow: its output has another shape than its input, or it draws
            random numbers that have no key.
    """

    def build() -> nn.Module:
        return with_keyed_dropout(blueprint.build(features[0]))

    def find() -> Start:
        builds = build_twice(build)
        start = _start(builds, blueprint.birth, torch.device("cpu"))
        _check_seed(blueprint.name, builds.other, features)
        return start

    start = once(blueprint, features, "start", find)
    start = replace(start, table=tree_map(lambda x: x.to(device), start.table), buffers=start.buffers.to(device))
    skeleton = Template(deterministic_build(build).to(device))
    return Kind(name=blueprint.name, template=skeleton, start=start, build=build, source=blueprint)


def _check_seed(name: str, module: nn.Module, features: Features) -> None:
    """Run a seed once in train mode."""
    draw_for(dropout_layers(module), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
    h = torch.randn(2, *features, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        delta = module.train()(h)
        unkeyed = not torch.equal(torch.get_rng_state(), before)
    if delta.shape != h.shape:
        raise ConfigError(
            f"blueprint {name!r} makes {tuple(delta.shape)} of features {tuple(h.shape)}; "
            "a seed must keep the shape of its input."
        )
    if unkeyed:
        raise ConfigError(
            f"blueprint {name!r} draws from the global random generator when it is trained, so that a host would "
            "depend on who drew before it; use layers of nn.Dropout, whose masks are keyed here."
        )


def _start(builds: Builds, birth: Mapping[str, float], device: torch.device) -> Start:
    table = init_table(builds, parameter_layout(builds.module), birth)
    buffers, drawn = _buffers(builds.module, builds.other)
    return Start(
        table=tree_map(lambda x: x.to(device), table),
        buffers=buffers.to(device),
        rebuilt=drawn or bool(table.rebuilt.any()),
    )


def _buffers(module: nn.Module, other: nn.Module) -> tuple[Tensor, bool]:
    """The buffers that a module starts with, and whether they were drawn: `other` was built under another seed."""
    layout, values, others = buffer_layout(module), dict(module.named_buffers()), dict(other.named_buffers())
    drawn = [name for name, value in values.items() if not torch.equal(value, others[name])]
    for name in drawn:
        if not values[name].is_floating_point():
            raise ConfigError(
                f"buffer {name!r} of {type(module).__name__} is {values[name].dtype} and random, but all hosts share "
                "it; draw it from a generator with a seed of your own."
            )
    return layout.pack({spec.name: values[spec.name] for spec in layout.tensors}), bool(drawn)
