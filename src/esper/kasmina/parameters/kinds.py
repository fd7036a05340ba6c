"""Kinds of modules of a population: its hosts, the seeds of each blueprint, and the gates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from esper.kasmina.blending import blend, seed_input
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers, with_keyed_dropout
from esper.kasmina.parameters.flat_layout import Template, buffer_layout, parameter_layout
from esper.kasmina.parameters.frozen import check_shared, refuse_frozen
from esper.kasmina.parameters.initialization import Builds, InitTable, build_twice, deterministic_build, init_table
from esper.leyline.errors import ConfigError
from esper.leyline.random import seeded_generators
from esper.leyline.stages import Algorithm
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


def prepared(module: nn.Module) -> nn.Module:
    """A new module as hosts and seeds run it.

    Its dropout is keyed; `torch.compile` is undone, in it as well; and weights that were computed from others already,
    as `nn.utils.weight_norm` does before every pass, have no gradient history, so that it can be copied.

    Raises:
        ConfigError: a part was compiled by torch.jit.
    """
    holder = nn.ModuleList([module])
    for layer in list(holder.modules()):
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(f"{layer.original_name} was compiled by torch.jit, so it cannot run on the weights of "
                              "another host; build it without torch.jit.script.")  # fmt: skip
        layer.__dict__.pop("_compiled_call_impl", None)
        for name, child in layer._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                layer._modules[name] = child._modules["_orig_mod"]
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(layer)[name] = value.detach()
    return with_keyed_dropout(holder[0])


@tensor_dataclass
class Start:
    """Initial parameters and buffers of modules of one kind.

    `rebuilt`: some come from a module built for each host. `global_rng`: see `Template`.
    """

    table: InitTable
    buffers: Float[Tensor, " Q"]
    rebuilt: bool
    global_rng: bool = False


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
        return prepared(host.rebuild())

    builds = build_twice(build)
    check_shared(builds.module, builds.other)
    start, template = _start(builds, {}, device), Template(prepared(host).to(device), global_rng=host.global_rng)
    return Kind(name="host", template=template, start=start, build=build, source=type(host))


def gate_kind(channels: int, causal: bool, device: torch.device) -> Kind:
    """The kind of gates for features of this width, in a host that is causal or not."""

    def build() -> nn.Module:
        return GateNetwork(channels, causal)

    start, template = _start(build_twice(build), {}, device), Template(deterministic_build(build).to(device))
    return Kind(name="gate", template=template, start=start, build=build, source=GateNetwork)


def seed_kind(
    blueprint: AbstractBlueprint, channels: int, features: Features, device: torch.device, rows: int = 2
) -> Kind:
    """The kind of seeds of a blueprint for features of this shape, with this many channels and `rows` or more examples.

    Raises:
        MisfitError: the built module cannot be trained on these features, or changes their shape.
        ConfigError: it changes its input, has frozen parameters, or gives other outputs in a second pass with the same
            random numbers.
    """

    def build() -> nn.Module:
        return prepared(blueprint.build(channels))

    def find() -> Start:
        builds = build_twice(build)
        refuse_frozen(f"blueprint {blueprint.name!r}", builds.module)
        start = _start(builds, blueprint.birth, torch.device("cpu"))
        return replace(start, global_rng=_check_seed(blueprint.name, build, features, rows))

    start = once(blueprint, features, f"start {rows}", find)
    start = replace(start, table=tree_map(lambda x: x.to(device), start.table), buffers=start.buffers.to(device))
    template = Template(deterministic_build(build).to(device), global_rng=start.global_rng)
    return Kind(name=blueprint.name, template=template, start=start, build=build, source=blueprint)


def _check_seed(name: str, build: Build, features: Features, rows: int) -> bool:
    """Run a seed as training and evaluation will; whether it draws from the global generators."""
    h = torch.randn(rows, *features, generator=torch.Generator().manual_seed(0))
    module, again = deterministic_build(build), deterministic_build(build)
    try:
        delta, draws = _run_once(module.train(), seed_input(h, isolated=True))
        if delta.shape == h.shape and delta.requires_grad:  # as the gradient of a hidden seed
            blend(h, delta, Algorithm.ADD, None).sum().backward()
    except Exception as error:  # any error of the user's code
        raise MisfitError(
            f"blueprint {name!r} cannot be trained on features {tuple(h.shape)}: {str(error).rstrip('.')}. Correct "
            f"its module, or choose other slots.{OF_ONE_EXAMPLE * (rows == 1)}"
        ) from error
    if h._version:
        raise ConfigError(
            f"blueprint {name!r} edits its input in place, which are the features of the host; let its first operation "
            "make a new tensor, e.g. nn.ReLU() instead of nn.ReLU(inplace=True)."
        )
    if delta.shape != h.shape:
        raise MisfitError(
            f"blueprint {name!r} maps features {tuple(h.shape)} to {tuple(delta.shape)}; "
            "a seed must keep the shape of its input."
        )
    with torch.no_grad():
        if not torch.equal(_run_once(again.train(), h)[0], delta):
            raise ConfigError(f"blueprint {name!r} gives {OWN_STATE}")
        return draws or _run_once(module.eval(), h)[1]


OWN_STATE = (
    "other outputs in a second pass over the same inputs, so that a host would depend on others: it draws from a "
    "generator of its own, or keeps something beside its buffers; draw from the global generators of PyTorch, Python "
    "or numpy, which are seeded for each host and step, and keep what changes in buffers that are written in place."
)
"""What is wrong with a module whose passes are not determined by its inputs, weights, buffers and seeds."""


OF_ONE_EXAMPLE = (
    " Training has a batch of one example, and normalization over a batch needs two: give a larger batch, more "
    "examples, other layers (nn.LayerNorm), or for an incomplete last batch last_batch='merge' or 'drop'."
)
"""The way out for a module that fails on a batch of one."""


def check_smallest_batch(build: Build, x: Tensor) -> None:
    """Run a new host in training on inputs x as its smallest batch has them; raises ConfigError if it fails."""
    try:
        _run_once(deterministic_build(build).train(), x, lambda slot_id, h: h)
    except Exception as error:  # any error of the user's code
        found = f"the network cannot be trained on a batch {list(x.shape)}: {str(error).rstrip('.')}."
        raise ConfigError(found + OF_ONE_EXAMPLE * (len(x) == 1)) from error


def outputs_of_host(kind: Kind, x: Tensor) -> Tensor:
    """Outputs of a new host without seeds in train mode, for inputs on the CPU; notes whether it draws."""
    with torch.no_grad():
        outputs, draws = _run_once(deterministic_build(kind.build).train(), x, lambda slot_id, h: h)
    kind.template.global_rng |= draws
    return outputs


def _run_once(module: nn.Module, *arguments: object) -> tuple[Tensor, bool]:
    """Outputs, and whether the global generators were used."""
    draw_for(dropout_layers(module), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
    with seeded_generators(0) as used:
        outputs: Tensor = module(*arguments)
        return outputs, used()


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
