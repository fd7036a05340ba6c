"""The population: N hosts and their seeds as rows of parameters, and their structural changes.

    host    [N, P]         one row per host
    seeds   [N * S, P']    one row per slot: its seed, in the layout of its blueprint
    gates   [N * S, P'']   one row per slot: its gate network, if the seed has one

The slot states say which blueprint a row holds; the caller passes it in. A train pass updates a compact copy of its
rows (`TrainingCopy`), so that an optimizer step costs no more than the trained rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.blending import blend, seed_input
from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.blueprints.registry import KINDS, AbstractBlueprint, kinds_of
from esper.kasmina.hosts.host import Host, near
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers, with_keyed_dropout
from esper.kasmina.parameters.flops import flops_of_example
from esper.kasmina.parameters.initialization import (
    Builds,
    InitTable,
    build_twice,
    deterministic_build,
    fresh_rows,
    init_table,
)
from esper.kasmina.parameters.layout import (
    FlatLayout,
    Template,
    buffer_layout,
    check_shared,
    count_params,
    digest,
    parameter_layout,
    refuse_counters,
    refuse_frozen,
    refuse_gradient_hooks,
)
from esper.kasmina.parameters.optimizers import OptimizerSpec, OptimizerState, init_state
from esper.leyline.errors import CheckpointError, ConfigError, in_words
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from esper.leyline.messages import SeedCosts
from esper.leyline.random import Stream, generator_seeds, seeded_generators
from esper.leyline.tensor_dataclass import StateTree, copy_into, named_tensors, tree_map, with_prefix


@final
@dataclass(frozen=True)
class TrainingCopy:
    """A compact copy of rows in training; `leaves[i]` is the used part of row i, with its gradient in `grad`."""

    rows: Int[Tensor, " R"]
    params: Float[Tensor, "R W"]
    grad: Float[Tensor, "R W"]
    optimizer: OptimizerState
    leaves: tuple[Tensor, ...]


@final
class FlatParameters:
    """R rows of P parameters and Q buffer values, with their optimizer state and a snapshot without it."""

    def __init__(self, shape: tuple[int, int, int], spec: OptimizerSpec, device: torch.device) -> None:
        """All zero; `shape` is (R, P, Q)."""
        num_rows, num_params, num_buffers = shape
        self.params = torch.zeros(num_rows, num_params, device=device)
        self.buffers = torch.zeros(num_rows, num_buffers, device=device)
        self.snapshot = {"params": torch.zeros_like(self.params), "buffers": torch.zeros_like(self.buffers)}
        self.optimizer = init_state(spec, self.params)

    def write(self, rows: Int[Tensor, " R"], params: Float[Tensor, "R W"], buffers: Float[Tensor, "R V"]) -> None:
        """New modules in these rows, with new optimizer state; unused elements are zero."""
        self.clear(rows)
        self.params[rows, : params.shape[1]] = params
        self.buffers[rows, : buffers.shape[1]] = buffers

    def clear(self, rows: Int[Tensor, " R"]) -> None:
        """Set everything in these rows to zero, but not their snapshot."""
        for tensor in self.tensors().values():
            tensor.index_fill_(0, rows, 0)  # an assignment would copy the number to the device and wait

    def save(self, rows: Int[Tensor, " R"]) -> None:
        """Copy parameters and buffers of these rows into the snapshot."""
        self.snapshot["params"][rows], self.snapshot["buffers"][rows] = self.params[rows], self.buffers[rows]

    def restore(self, rows: Int[Tensor, " R"]) -> None:
        """Copy these rows from the snapshot, with optimizer state as before the first step."""
        self.clear(rows)
        self.params[rows], self.buffers[rows] = self.snapshot["params"][rows], self.snapshot["buffers"][rows]

    def begin(self, rows: Int[Tensor, " R"], widths: Sequence[int]) -> TrainingCopy:
        """A compact copy of these rows for autograd; `widths` [R] is the number of used parameters of each."""
        params = self.params[rows, : max(widths, default=0)].contiguous()
        grad, width = torch.zeros_like(params), params.shape[1]
        leaves = []
        for row, row_grad, used in zip(params.unbind(0), grad.unbind(0), widths, strict=True):
            leaf = row[:used].detach().requires_grad_()
            leaf.grad = row_grad[:used]
            leaves.append(leaf)
        optimizer = tree_map(lambda x: x[rows, :width] if x.dim() > 1 else x[rows], self.optimizer)
        return TrainingCopy(rows=rows, params=params, grad=grad, optimizer=optimizer, leaves=tuple(leaves))

    def finish(self, working: TrainingCopy) -> None:
        """Write the trained rows back."""
        rows, width = working.rows, working.params.shape[1]
        self.params[rows, :width] = working.params
        for (_, old), (_, new) in zip(named_tensors(self.optimizer), named_tensors(working.optimizer), strict=True):
            if old.dim() > 1:
                old[rows, :width] = new
            else:
                old[rows] = new

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the snapshot, by name."""
        return {"params": self.params, "buffers": self.buffers, **dict(named_tensors(self.optimizer))}


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

    Its dropout is keyed; `torch.compile` is undone, in it as well; no nested tensors run through it; and weights that
    were computed from others already, as `nn.utils.weight_norm` does before every pass, have no gradient history, so
    that it can be copied. Raises ConfigError if a part was compiled by torch.jit, or a parameter has a hook.
    """
    refuse_gradient_hooks(module)
    holder = nn.ModuleList([module])
    for layer in list(holder.modules()):
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(f"{layer.original_name} was compiled by torch.jit, so it cannot run on the weights of "
                              "another host; build it without torch.jit.script.")  # fmt: skip
        layer.__dict__.pop("_compiled_call_impl", None)
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False
        for name, child in layer._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                layer._modules[name] = child._modules["_orig_mod"]
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(layer)[name] = value.detach()
    return with_keyed_dropout(holder[0])


class Start(NamedTuple):
    """How modules of a kind start: as `table` and `buffers` say, in rows of these layouts.

    `rebuilt`: some weights come from a module built for each host.
    """

    table: InitTable
    buffers: Float[Tensor, " Q"]
    rebuilt: bool
    parameters: FlatLayout
    buffer_layout: FlatLayout


@final
@dataclass(eq=False)
class Kind:
    """Modules with the same layout; `source` is the blueprint or class that `build` builds.

    `global_rng`: they draw from the global generators.
    """

    name: str
    build: Build
    source: object
    start: Start
    device: torch.device
    global_rng: bool = False

    @cached_property
    def template(self) -> Template:
        """What runs on rows. It is this kind's own, because an executor may change it, and built when it is needed."""
        return Template(deterministic_build(self.build).to(self.device), global_rng=self.global_rng)

    def new_template(self) -> Template:
        """A template of its own, on the CPU, whose weights are not used."""
        return Template(deterministic_build(self.build), global_rng=self.global_rng)

    def rebuild(self, seeds: list[int]) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R Q"]]:
        """Parameters and buffers of modules built under these seeds of 64 bits, on the CPU.

        Raises ConfigError if one of them has another architecture than that of the first build.
        """
        params, buffers = [], []
        usual = _architecture(deterministic_build(self.build))
        for seed in seeds:
            module = deterministic_build(self.build, seed)
            if _architecture(module) != usual:
                raise ConfigError(
                    f"{type(module).__name__} draws its architecture at random: its layers differ between two hosts. "
                    "All hosts share one architecture; let the constructor draw weights alone."
                )
            params.append(self.start.parameters.pack(dict(module.named_parameters())))
            buffers.append(self.start.buffer_layout.pack(dict(module.named_buffers())))
        return torch.stack(params), torch.stack(buffers)


def _architecture(module: nn.Module) -> list[object]:
    """The layers of a module with the shapes of their weights."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [*((path, str(layer)) for path, layer in module.named_modules()), *((name, t.shape) for name, t in named)]


def host_kind(host: Host, device: torch.device) -> Kind:
    """The kind of a host; the template takes the module itself, whose dropout layers are replaced by keyed ones.

    Raises ConfigError if a frozen parameter is drawn at random.
    """

    def build() -> nn.Module:
        return prepared(host.rebuild())

    builds = build_twice(build)
    check_shared(builds.module, builds.other)
    kind = _kind("host", build, type(host), _start(builds, {}), device, global_rng=host.global_rng)
    kind.template = Template(prepared(host).to(device), global_rng=host.global_rng)
    return kind


def gate_kind(channels: int, causal: bool, device: torch.device) -> Kind:
    """The kind of gates for features of this width, in a host that is causal or not."""

    def build() -> nn.Module:
        return GateNetwork(channels, causal)

    start = once(GateNetwork, (channels,), f"start {causal}", lambda: _start(build_twice(build), {}))
    return _kind("causal gate" if causal else "gate", build, GateNetwork, start, device)


def seed_kind(
    blueprint: AbstractBlueprint, channels: int, features: Features, device: torch.device, rows: int = 2
) -> Kind:
    """The kind of seeds of a blueprint for features of this shape, with this many channels and `rows` or more examples.

    Raises MisfitError if the module cannot be trained on these features, or changes their shape; ConfigError if it
    changes its input, has frozen parameters, or gives other outputs in a second pass with the same random numbers.
    """

    def build() -> nn.Module:
        try:
            module = blueprint.build(channels)
        except Exception as error:  # any error of the user's code
            raise ConfigError(
                f"blueprint {name!r} cannot be built for {channels} channels: {in_words(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"blueprint {name!r} gives a {type(module).__name__}; it must return an nn.Module.")
        if any(map(is_lazy, module.parameters())):
            raise ConfigError(
                f"blueprint {name!r} has lazy layers; give them their sizes, e.g. from channels={channels}."
            )
        return prepared(module)

    def find() -> tuple[Start, bool]:
        builds = build_twice(build)
        refuse_frozen(f"blueprint {blueprint.name!r}", builds.module)
        return _start(builds, blueprint.init), _check_seed(blueprint.name, build, features, rows)

    name = blueprint.name
    try:
        start, global_rng = once(blueprint, features, f"start {rows}", find)
    except (AttributeError, TypeError, KeyError) as error:  # two builds that differ, or `init` of another type
        raise ConfigError(
            f"blueprint {name!r} cannot be laid out: {in_words(error)}. Each call must build the same layers, and "
            "init maps names of parameters to numbers."
        ) from error
    return _kind(blueprint.name, build, blueprint, start, device, global_rng=global_rng)


def _kind(
    name: str, build: Build, source: object, start: Start, device: torch.device, *, global_rng: bool = False
) -> Kind:
    there = start._replace(table=tree_map(lambda x: x.to(device), start.table), buffers=start.buffers.to(device))
    return Kind(name, build, source, there, device, global_rng)


def _check_seed(name: str, build: Build, features: Features, rows: int) -> bool:
    """Run a seed as training and evaluation will; whether it draws from the global generators."""
    h = torch.randn(rows, *features, generator=torch.Generator().manual_seed(0))
    module, again = deterministic_build(build), deterministic_build(build)
    try:
        delta, draws = _run_once(module.train(), seed_input(h, isolated=True))
        if not isinstance(delta, Tensor):
            raise TypeError(f"it gives a {type(delta).__name__}, not a tensor")
        if delta.shape == h.shape and delta.requires_grad:  # as the gradient of a hidden seed
            blend(h, delta, Algorithm.ADD, None).sum().backward()
    except Exception as error:  # any error of the user's code
        raise MisfitError(
            f"blueprint {name!r} cannot be trained on features {tuple(h.shape)}: {in_words(error)}. Correct "
            f"its module, or choose other slots.{OF_ONE_EXAMPLE * (rows == 1)}"
        ) from error
    if not bool(delta.isfinite().all()):
        raise ConfigError(f"blueprint {name!r} gives NaN or infinity for ordinary features; look for a division by 0.")
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
        refuse_counters(f"blueprint {name!r}", again, lambda: _run_once(again, h))
        return draws or _run_once(module.eval(), h)[1]


OWN_STATE = (
    "other outputs in a second pass over the same inputs, so that a host would depend on others: it draws from a "
    "generator of its own, keeps something beside its buffers, or writes to parameters; draw from the global "
    "generators of PyTorch, Python or numpy, which are seeded for each host and step, and keep what changes in buffers "
    "that are written in place."
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
        found = f"the network cannot be trained on a batch {list(x.shape)}: {in_words(error)}."
        raise ConfigError(found + OF_ONE_EXAMPLE * (len(x) == 1)) from error


def outputs_of_host(kind: Kind, x: Tensor) -> Tensor:
    """Outputs of a new host without seeds in train mode, for inputs on the CPU; notes whether it draws."""
    with torch.no_grad():
        outputs, draws = _run_once(deterministic_build(kind.build).train(), x, lambda slot_id, h: h)
    kind.global_rng |= draws
    kind.template.global_rng = kind.global_rng
    return outputs


def channels_last(x: Tensor) -> Tensor:
    """A copy of images [B, C, H, W] that lies as [B, H, W, C] does, also where C is 1; other tensors as they are."""
    if x.dim() != 4 or not x.is_floating_point():
        return x
    _, c, h, w = x.shape
    return x.new_empty_strided(x.shape, (c * h * w, 1, c * w, c)).copy_(x)


def runs_channels_last(kind: Kind, x: Tensor) -> bool:
    """Whether a network with convolutions runs forward and backward on images that lie so, with the same outputs.

    On a CPU its convolutions are faster then, but group normalization is slower. Networks that `view` their features
    refuse them, and PyTorch's gradients of some convolutions corrupt memory (`_NarrowStrides`).
    """
    module = deterministic_build(kind.build).train()
    layers = {nn.Conv2d: False, nn.GroupNorm: False} | {type(layer): True for layer in module.modules()}
    if channels_last(x) is x or not layers[nn.Conv2d] or layers[nn.GroupNorm]:
        return False
    with _NarrowStrides() as narrow:  # type: ignore[no-untyped-call]
        usual, _ = _run_once(module, x, lambda slot_id, h: h)
    if narrow.seen:
        return False
    try:
        found, _ = _run_once(deterministic_build(kind.build).train(), channels_last(x), lambda slot_id, h: h)
        if found.requires_grad:
            found.sum().backward()
    except RuntimeError:
        return False
    return near(found.detach(), usual.detach())


class _NarrowStrides(TorchDispatchMode):
    """Sees whether a strided 1x1 convolution of fewer than 8 channels runs.

    With AVX2, oneDNN (in torch 2.13) writes outside its memory in the weight gradient of such a one where images lie
    channels-last: a crash, sooner or later.
    """

    seen = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        if func is torch.ops.aten.convolution.default:
            _, weight, _, stride = args[:4]
            self.seen |= weight.shape[1] < 8 and weight[0, 0].numel() == 1 and max(stride) > 1
        return func(*args, **(kwargs or {}))


def _sees_later_tokens(kind: Kind, features: Features) -> bool:
    """Whether outputs [B, T, D] of a seed change in the first half where its inputs change in the second half."""

    @torch.no_grad()
    def find() -> bool:
        half, generator = features[0] // 2, torch.Generator().manual_seed(0)
        h, other = torch.randn(2, 2, *features, generator=generator)
        other[:, :half] = h[:, :half]
        module = deterministic_build(kind.build).eval()
        for parameter in module.parameters():  # those that start at zero would hide it
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        first, second = (_run_once(module, x)[0][:, :half] for x in (h, other))
        return not near(first, second)

    return features[0] > 1 and once(kind.source, features, "later tokens", find)


def _run_once(module: nn.Module, *arguments: object) -> tuple[Tensor, bool]:
    """Outputs, and whether the global generators were used."""
    draw_for(dropout_layers(module), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
    with seeded_generators(0) as used:
        outputs: Tensor = module(*arguments)
        return outputs, used()


def _start(builds: Builds, init: Mapping[str, float]) -> Start:
    module, others = builds.module, dict(builds.other.named_buffers())
    parameters, layout = parameter_layout(module), buffer_layout(module)
    table = init_table(builds, parameters, init)
    values = dict(module.named_buffers())
    drawn = [name for name, value in values.items() if not torch.equal(value, others[name])]
    for name in drawn:
        if not values[name].is_floating_point():
            raise ConfigError(
                f"buffer {name!r} of {type(module).__name__} is {values[name].dtype} and random, but all hosts share "
                "it; draw it from a generator with a fixed seed."
            )
    buffers = layout.pack({spec.name: values[spec.name] for spec in layout.tensors})
    rebuilt = bool(drawn) or builds.hidden or bool(table.rebuilt.any())
    return Start(table, buffers, rebuilt, parameters, layout)


def _flops_of(kind: Kind, features: Features, batch: int) -> int:
    """FLOPs of a forward pass of one example of these features in a batch of this size."""

    def find() -> int:
        module = deterministic_build(kind.build).eval()
        return flops_of_example(lambda h: _run_once(module, h), torch.zeros(2, *features), batch)

    return once(kind.source, features, f"flops {batch}", find)


def _layers_of(kind: Kind, channels: int) -> tuple[float, ...]:
    """`kinds_of` a seed."""
    return once(kind.source, (channels,), "layers", lambda: tuple(kinds_of(deterministic_build(kind.build), channels)))


GATE_BLOCK = 2**31
"""First random block of a gate, beyond those of any seed."""
REBUILD_BLOCK = 2**30
"""The random block that seeds the generator of a rebuilt seed, beyond those of any other."""


@final
class Population:
    """N hosts of one kind with S slots each.

    Args:
        host: a new host, whose weights are not used; it is moved to the device.
        optimizer: how hosts and seeds are trained.
        num_envs: N. host_ids: global numbers [N] of the hosts, on the CPU; None for 0 to N - 1.
        run_seed: key of the random streams that draw weights.
        smallest_batch: examples of the smallest batch of training, for which blueprints must work.

    Attributes:
        features: the shapes of features with so many channels. left_out: blueprints that cannot run in all slots, and
            why; nothing grows from them in any slot.

    Raises:
        ConfigError: a blueprint runs in no slot, or none runs in all of them.
    """

    def __init__(
        self,
        host: Host,
        optimizer: OptimizerSpec,
        *,
        num_envs: int,
        run_seed: int,
        device: torch.device,
        host_ids: Int[Tensor, " N"] | None = None,
        smallest_batch: int = 2,
    ) -> None:
        self.num_envs, self.run_seed, self.device = num_envs, run_seed, device
        self.optimizer_spec = optimizer
        self.points = host.enabled
        self.num_slots = len(self.points)
        self._numbers = torch.arange(num_envs) if host_ids is None else host_ids
        self.host_ids = self._numbers.to(device)
        self.family = host.family
        self.host_module = host
        self.host_params, self._frozen = count_params(host, host.frozen), digest(host)
        self.moment = Moment(run_seed)
        self.host_kind = host_kind(host, device)
        self._shapes = shapes = {point.slot_id: host.features(point) for point in self.points}
        self.features = {
            channels: tuple({shapes[point.slot_id]: None for point in self.points if point.channels == channels})
            for channels in {point.channels: None for point in self.points}
        }
        self.gate_kinds = {channels: gate_kind(channels, host.causal, device) for channels in self.features}
        self.left_out: dict[int, str] = {}
        self.seed_kinds = self._seed_kinds(shapes, min(smallest_batch, 2), host.causal)
        slots = num_envs * self.num_slots
        self.host = self._rows_for(num_envs, [self.host_kind])
        self.seeds = self._rows_for(slots, self.seed_kinds.values())
        self.gates = self._rows_for(slots, self.gate_kinds.values())

    def _seed_kinds(self, shapes: dict[str, Features], rows: int, causal: bool) -> dict[tuple[int, int], Kind]:
        """The kinds by channels and blueprint.

        One that fits some slots but not all of them is left out, and of a `causal` host one that sees later tokens.
        """
        found: dict[tuple[int, int], Kind] = {}
        for index in registry.selectable(self.family):
            blueprint = registry.blueprint_at(index, self.family).within(causal=causal)
            kinds, misfits = dict[tuple[int, int], Kind](), []
            if self.family is HostFamily.TRANSFORMER and max(t for t, _ in shapes.values()) < blueprint.least_tokens:
                continue
            for point in self.points:
                try:
                    kind = seed_kind(blueprint, point.channels, shapes[point.slot_id], self.device, rows)
                    kinds.setdefault((point.channels, index), kind)
                except MisfitError as error:
                    misfits.append(error)
                    self.left_out[index] = f"slot {point.slot_id!r}: {error}"
                    continue
                if causal and self.family is HostFamily.TRANSFORMER and _sees_later_tokens(kind, shapes[point.slot_id]):
                    kinds.clear()
                    self.left_out[index] = (
                        f"slot {point.slot_id!r}: its output for a token depends on later tokens, which the outputs of "
                        "this network do not"
                    )
                    break
            if misfits and not kinds:
                raise misfits[0]
            found |= {} if misfits else kinds
        if not found:
            raise ConfigError(
                f"no blueprint can run in every slot; enable fewer slots. {'; '.join(self.left_out.values())}"
            )
        return {key: found[key] for key in sorted(found, key=lambda key: (list(self.features).index(key[0]), key[1]))}

    def _rows_for(self, rows: int, kinds: Iterable[Kind]) -> FlatParameters:
        """Rows that can hold any of these kinds."""
        totals = [(kind.start.parameters.total, kind.start.buffer_layout.total) for kind in kinds]
        params, buffers = (max(sizes) for sizes in zip(*totals, strict=True))
        return FlatParameters((rows, params, buffers), self.optimizer_spec, self.device)

    def costs(self, inputs: Tensor, batch: int) -> SeedCosts:
        """What seeds and gates cost by slot, and which may be chosen.

        `inputs` [n, ...] are some of the host's, `batch` is the number of examples with which it is trained.
        """
        num = registry.num_blueprints()
        params, flops_ = (torch.zeros(self.num_slots, num, dtype=torch.int64) for _ in range(2))
        selectable = torch.zeros(num, dtype=torch.bool)
        kinds = torch.zeros(self.num_slots, num, len(KINDS))
        for s, point in enumerate(self.points):
            for index in (index for channels, index in self.seed_kinds if channels == point.channels):
                kind = self.seed_kinds[point.channels, index]
                selectable[index] = True
                params[s, index] = kind.start.parameters.num_params
                kinds[s, index] = torch.tensor(_layers_of(kind, point.channels))
                flops_[s, index] = _flops_of(kind, self._shapes[point.slot_id], batch)
        gates = [self.gate_kinds[point.channels] for point in self.points]
        of_gates = [
            _flops_of(kind, features, batch) for kind, features in zip(gates, self._shapes.values(), strict=True)
        ]
        host = deterministic_build(self.host_kind.build).eval()
        of_host = once(
            getattr(self.host_module, "spec", self.host_module), tuple(inputs.shape), f"flops {batch}",
            lambda: flops_of_example(lambda x: _run_once(host, x, lambda slot_id, h: h), inputs, batch),
        )  # fmt: skip
        costs = SeedCosts(
            seed_params=params,
            gate_params=torch.tensor([gate.start.parameters.num_params for gate in gates]),
            seed_flops=flops_,
            gate_flops=torch.tensor(of_gates),
            host_flops=torch.tensor(of_host),
            selectable=selectable,
            kinds=kinds,
        )
        return tree_map(lambda x: x.to(self.device), costs)

    def draws(self, hosts: Int[Tensor, " G"] | slice, slot: int, *, trains: bool = True) -> Draws:
        """The random numbers of one pass over the data for the seeds in one slot of some hosts (row numbers).

        Measurements (not `trains`) draw the same numbers in every step.
        """
        moment = self.moment if trains else Moment(self.run_seed)
        return Draws(moment, self.host_ids[hosts], slot, self._numbers[hosts] if isinstance(hosts, slice) else None)

    def host_draws(self, hosts: Int[Tensor, " G"] | slice, *, trains: bool = True) -> Draws | None:
        """The same for the layers of the hosts themselves: the number past the last slot. None if nothing is drawn."""
        return self.draws(hosts, self.num_slots, trains=trains) if self.host_kind.template.draws else None

    # -- germination and removal -------------------------------------------------------------------------------------

    def reset(self, episode: int) -> None:
        """N new hosts with empty slots, which are also the first snapshot."""
        everyone = torch.arange(self.num_envs, device=self.device)
        self.host.write(
            everyone, *self._drawn(self.host_kind, Stream.HOST_INIT, np.arange(self.num_envs), episode=episode)
        )
        self.host.save(everyone)
        everywhere = np.ones((self.num_envs, self.num_slots), dtype=bool)
        self.release(everywhere)
        self.snapshot_seeds(everywhere)

    def germinate(self, born: np.ndarray, blueprint: np.ndarray, has_gate: np.ndarray, episode: int, t: int) -> None:
        """Draw the seeds marked in `born` [N, S] in step `t`, with their `blueprint` and `has_gate` [N, S]."""
        for s, index, hosts in _groups(born, blueprint):
            channels = self.points[s].channels
            gated = hosts[has_gate[hosts, s]]
            seed = (self.seeds, self.seed_kinds[channels, index], hosts, 0)
            for flat, kind, some, block in (seed, (self.gates, self.gate_kinds[channels], gated, GATE_BLOCK)):
                if some.size:
                    key = {"episode": episode, "t": t, "slot": s}
                    drawn = self._drawn(kind, Stream.SEED_INIT, some, first_block=block, **key)
                    flat.write(self.index(some) * self.num_slots + s, *drawn)

    def _drawn(
        self, kind: Kind, stream: Stream, hosts: np.ndarray, *, first_block: int = 0, **key: int
    ) -> tuple[Tensor, Tensor]:
        """Parameters and buffers of new modules of some hosts (row numbers)."""
        numbers = self.host_ids[self.index(hosts)]
        params = fresh_rows(kind.start.table, self.run_seed, stream, numbers, **key, first_block=first_block)
        buffers = kind.start.buffers.expand(len(hosts), -1)
        if kind.start.rebuilt:
            on_cpu = self._numbers[torch.from_numpy(hosts)]
            built, buffers = kind.rebuild(generator_seeds(self.run_seed, stream, on_cpu, **key, block=REBUILD_BLOCK))
            params = torch.where(kind.start.table.rebuilt, built.to(self.device), params)
        return params, buffers.to(self.device)

    def release(self, gone: np.ndarray) -> None:
        """Clear weights, gate and optimizer state of the seeds marked in `gone` [N, S]."""
        self._each_seed(FlatParameters.clear, gone)

    def _each_seed(self, act: Callable[[FlatParameters, Tensor], None], marked: np.ndarray) -> None:
        """Let a method act on the rows of the marked seeds [N, S] and of their gates."""
        if marked.any():
            rows = self.index(np.flatnonzero(marked))
            act(self.seeds, rows)
            act(self.gates, rows)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot_hosts(self, hosts: np.ndarray) -> None:
        """Snapshot of the marked hosts [N] with all their seeds."""
        if hosts.any():
            self.host.save(self.index(np.flatnonzero(hosts)))
            self.snapshot_seeds(np.repeat(hosts[:, None], self.num_slots, axis=1))

    def snapshot_seeds(self, seeds: np.ndarray) -> None:
        """Add the marked seeds [N, S] to the snapshots of their hosts."""
        self._each_seed(FlatParameters.save, seeds)

    def restore(self, hosts: np.ndarray, stage: np.ndarray) -> None:
        """Restore the marked hosts [N] and their fossilized seeds from the snapshot, without optimizer state."""
        if hosts.any():
            self.host.restore(self.index(np.flatnonzero(hosts)))
            self._each_seed(FlatParameters.restore, hosts[:, None] & (stage == SeedStage.FOSSILIZED))

    # -- persistence --------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """All rows and snapshots, and a digest of the frozen parameters that hosts share."""
        tree: StateTree = {} if self._frozen is None else {"frozen": self._frozen.clone()}
        for name, flat in (("host", self.host), ("seeds", self.seeds), ("gates", self.gates)):
            tree |= with_prefix(name, flat.tensors()) | with_prefix(f"{name}_snapshot", flat.snapshot)
        return tree

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names, shapes or frozen parameters differ."""
        copy_into(self.state_dict(), state, "population")
        if self._frozen is not None and int(state["frozen"]) != int(self._frozen):
            raise CheckpointError(
                "the network has other frozen parameters than when the checkpoint was written; let the model load the "
                "same weights again, or start a new run."
            )

    def rows_of_seeds(self, hosts: Int[Tensor, " g"]) -> Int[Tensor, " gS"]:
        """The rows of all slots of these hosts."""
        return (hosts[:, None] * self.num_slots + torch.arange(self.num_slots, device=self.device)).flatten()

    def index(self, numbers: np.ndarray) -> Int[Tensor, "*shape"]:
        """Row numbers as an index on the device, without a read."""
        return torch.from_numpy(numbers.astype(np.int64, copy=False)).to(self.device, non_blocking=True)


def _groups(marked: np.ndarray, blueprint: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(slot, blueprint, hosts) of the marked seeds [N, S]."""
    for s in map(int, np.flatnonzero(marked.any(axis=0))):
        for index in map(int, np.unique(blueprint[marked[:, s], s])):
            yield s, index, np.flatnonzero(marked[:, s] & (blueprint[:, s] == index))
