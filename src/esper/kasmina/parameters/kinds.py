"""Kinds of modules of a population: its hosts, the seeds of each blueprint, and the gates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers, with_keyed_dropout
from esper.kasmina.parameters.flat_layout import Template, buffer_layout, parameter_layout
from esper.kasmina.parameters.frozen import check_shared, refuse_frozen
from esper.kasmina.parameters.initialization import Builds, InitTable, build_twice, deterministic_build, init_table
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import replace, tensor_dataclass, tree_map

Build = Callable[[], nn.Module]


class MisfitError(ConfigError):
    """A blueprint cannot run on features of this shape."""


Features = tuple[int, ...]
"""Shape of the features of one example: (C, H, W) or (T, D)."""
Found = TypeVar("Found")
_found: dict[tuple[int, Features | None, str], tuple[object, Any]] = {}


def once(of: object, features: Features | None, what: str, find: Callable[[], Found]) -> Found:
    """The result of `find` for an object, cached per process with the object, whose id stays unique."""
    key = (id(of), features, what)
    if key not in _found:
        _found[key] = (of, find())
    found: Found = _found[key][1]
    return found


@tensor_dataclass
class Start:
    """Initial parameters and buffers of modules of one kind. `rebuilt`: some come from a module built for each host."""

    table: InitTable
    buffers: Float[Tensor, " Q"]
    rebuilt: bool


@final
@dataclass(frozen=True)
class Kind:
    """Modules with the same layout: their template, initial values and builder; `source` is the blueprint or class."""

    name: str
    template: Template
    start: Start
    build: Build
    source: object

    def rebuild(self, seeds: list[int]) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R Q"]]:
        """Parameters and buffers of modules built under these seeds of 64 bits, on the CPU.

        Raises:
            ConfigError: another architecture than that of the first build.
        """
        params, buffers = [], []
        usual = deterministic_build(self.build) if seeds else None
        for seed in seeds:
            module = deterministic_build(self.build, seed)
            if _architecture(module) != _architecture(usual):
                raise ConfigError(
                    f"{type(module).__name__} draws its architecture at random: its layers differ between two hosts. "
                    "All hosts share one architecture; let the constructor draw weights alone."
                )
            params.append(self.template.parameters.pack(dict(module.named_parameters())))
            buffers.append(self.template.buffers.pack(dict(module.named_buffers())))
        return torch.stack(params), torch.stack(buffers)


def _architecture(module: nn.Module | None) -> list[object]:
    """The layers of a module with the shapes of their weights."""
    assert module is not None
    named = [*module.named_parameters(), *module.named_buffers()]
    return [*((path, str(layer)) for path, layer in module.named_modules()), *((name, t.shape) for name, t in named)]


def host_kind(host: Host, device: torch.device) -> Kind:
    """The kind of a host; the template takes the module itself, whose dropout layers are replaced by keyed ones.

    Raises:
        ConfigError: a frozen parameter that is drawn at random.
    """

    def build() -> nn.Module:
        return with_keyed_dropout(host.rebuild())

    builds = build_twice(build)
    check_shared(builds.module, builds.other)
    start, template = _start(builds, {}, device), Template(with_keyed_dropout(host).to(device))
    return Kind(name="host", template=template, start=start, build=build, source=type(host))


def gate_kind(channels: int, device: torch.device) -> Kind:
    """The kind of gates for features of this width."""

    def build() -> nn.Module:
        return GateNetwork(channels)

    start, template = _start(build_twice(build), {}, device), Template(deterministic_build(build).to(device))
    return Kind(name="gate", template=template, start=start, build=build, source=GateNetwork)


def seed_kind(blueprint: AbstractBlueprint, channels: int, features: Features, device: torch.device) -> Kind:
    """The kind of seeds of a blueprint for features of this shape with this many channels.

    Raises:
        MisfitError: the built module cannot run on these features, or changes their shape.
        ConfigError: it has frozen parameters, or draws random numbers without a key.
    """

    def build() -> nn.Module:
        return with_keyed_dropout(blueprint.build(channels))

    def find() -> Start:
        builds = build_twice(build)
        refuse_frozen(f"blueprint {blueprint.name!r}", builds.module)
        start = _start(builds, blueprint.birth, torch.device("cpu"))
        _check_seed(blueprint.name, builds.other, features)
        return start

    start = once(blueprint, features, "start", find)
    start = replace(start, table=tree_map(lambda x: x.to(device), start.table), buffers=start.buffers.to(device))
    template = Template(deterministic_build(build).to(device))
    return Kind(name=blueprint.name, template=template, start=start, build=build, source=blueprint)


def _check_seed(name: str, module: nn.Module, features: Features) -> None:
    """Run a seed once in train mode."""
    h = torch.randn(2, *features, generator=torch.Generator().manual_seed(0))
    try:
        delta = _trained_once(f"blueprint {name!r}", module, h)
    except ConfigError:
        raise
    except Exception as error:  # whatever layers raise that need other features
        raise MisfitError(f"blueprint {name!r} cannot run on features {tuple(h.shape)}: {error}") from error
    if delta.shape != h.shape:
        raise MisfitError(
            f"blueprint {name!r} maps features {tuple(h.shape)} to {tuple(delta.shape)}; "
            "a seed must keep the shape of its input."
        )


def outputs_of_host(kind: Kind, x: Tensor) -> Tensor:
    """Outputs of a new host without seeds in train mode, for inputs on the CPU.

    Raises:
        ConfigError: it draws random numbers without a key.
    """
    return _trained_once("the host", deterministic_build(kind.build), x, lambda slot_id, h: h)


def _trained_once(name: str, module: nn.Module, *arguments: object) -> Tensor:
    """Outputs in train mode; refuses random numbers without a key."""
    draw_for(dropout_layers(module), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        outputs: Tensor = module.train()(*arguments)
        unkeyed = not torch.equal(torch.get_rng_state(), before)
    if unkeyed:
        raise ConfigError(
            f"{name} draws from the global random generator in training, so that a host would depend on others; use "
            "layers of nn.Dropout, whose masks are keyed."
        )
    return outputs


def _start(builds: Builds, birth: Mapping[str, float], device: torch.device) -> Start:
    table = init_table(builds, parameter_layout(builds.module), birth)
    buffers, drawn = _buffers(builds.module, builds.other)
    return Start(
        table=tree_map(lambda x: x.to(device), table),
        buffers=buffers.to(device),
        rebuilt=drawn or builds.hidden or bool(table.rebuilt.any()),
    )


def _buffers(module: nn.Module, other: nn.Module) -> tuple[Tensor, bool]:
    """The initial buffers of a module, and whether they are random; `other` was built under another seed."""
    layout, values, others = buffer_layout(module), dict(module.named_buffers()), dict(other.named_buffers())
    drawn = [name for name, value in values.items() if not torch.equal(value, others[name])]
    for name in drawn:
        if not values[name].is_floating_point():
            raise ConfigError(
                f"buffer {name!r} of {type(module).__name__} is {values[name].dtype} and random, but all hosts share "
                "it; draw it from a generator with a fixed seed."
            )
    return layout.pack({spec.name: values[spec.name] for spec in layout.tensors}), bool(drawn)
