"""What a few forward passes of a user's network tell: the features of its slots, their order, and sizes.

The weights are disturbed first, so that layers that start at zero show what passes through them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts import module_checks as checks
from esper.kasmina.hosts.interface import ONE_TENSOR, Arguments, Interface
from esper.kasmina.hosts.module_pass import plain_pass, recorded_pass, replaced_outputs
from esper.kasmina.hosts.slots import InjectionPoint, Surface
from esper.kasmina.parameters.flat_layout import drop_batch_counters
from esper.kasmina.parameters.frozen import count_params, frozen_parameters, own_frozen
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.kinds import prepared
from esper.leyline.errors import ConfigError
from esper.leyline.stages import HostFamily
from esper.leyline.structure import flatten, unflatten

Model = Callable[[], nn.Module]
"""Gives a new network in every call."""
_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """What the probe found, for one example.

    Attributes:
        points: the slots in action order. shapes: of the output of each slot's module.
        inputs, outputs: shapes of an input and its output. shares_prefix: of each slot (see `Host.shares_prefixes`).
        dtype: of the inputs. edited: of each slot, whether its output is edited in place behind it.
        built_by_pass: whether a first forward pass finds shapes or adds layers (nn.LazyLinear). global_rng: see `Host`.
        causal: whether no output depends on later positions.
        own_frozen: paths of the frozen parameters that each host has a copy of.
    """

    family: HostFamily
    points: tuple[InjectionPoint, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_params: int
    largest_activation: int
    shares_prefix: tuple[bool, ...]
    causal: bool
    dtype: torch.dtype = torch.float32
    edited: tuple[bool, ...] = ()
    built_by_pass: bool = False
    global_rng: bool = False
    own_frozen: tuple[str, ...] = ()


def new_network(model: Model, example: Arguments | None = None) -> nn.Module:
    """A network of the user's with keyed dropout and without batch counters.

    With an `example` of its arguments it runs once in evaluation first, so that lazy layers find their shapes.

    Raises:
        ConfigError: `model` gives no module, or a normalization that needs its counter.
    """
    try:
        network = model()
    except Exception as error:  # any error of the user's code
        raise ConfigError(f"the model cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"the model gives a {type(network).__name__}; it must give an nn.Module.")
    if example is not None:
        modes = {layer: layer.training for layer in network.modules()}
        with torch.no_grad():
            try:
                network.eval()(*example[0], **example[1])
            except Exception as error:  # any error of the user's code
                raise ConfigError(
                    f"the first pass of {type(network).__name__}, in which lazy layers find their shapes, fails on "
                    f"inputs like the example: {error}"
                ) from error
        for layer in network.modules():
            layer.training = modes.get(layer, True)
    network = prepared(network)
    drop_batch_counters(network)
    return network


def probe(model: Model, slots: Sequence[str], example: Tensor, interface: Interface = ONE_TENSOR) -> ModuleFacts:
    """Run the network of `model` on inputs like `example` [B, ...].

    Raises:
        ConfigError: the network cannot be a host (see `module_checks`).
    """
    _check_model(model)
    x, others = _inputs(example, interface).split(_ROWS)
    first = interface.arguments(x[:1])

    def built(example: Arguments | None) -> nn.Module:
        return interface.attach(deterministic_build(lambda: new_network(model, example)))

    network, again = built(None), built(None)
    if built_by_pass := _is_built_by_pass(network, again, x):
        network, again = built(first), built(first)
        checks.check_weights(network, again)
    checks.check_paths(network, slots)
    _disturb(network.eval())
    with torch.no_grad():
        checks.check_examples(network, slots, x, others)
        facts = _facts(network, slots, x, interface)
    if frozen_parameters(network):
        other = deterministic_build(lambda: new_network(model, first if built_by_pass else None), seed=1)
        facts = replace(facts, own_frozen=own_frozen(network, other))
    run = checks.check_training(network, slots, x)
    checks.check_binding(network, again, x)
    return replace(
        facts,
        built_by_pass=built_by_pass,
        edited=tuple(of or checks.is_edited(slot, run) for of, slot in zip(facts.edited, slots, strict=True)),
        global_rng=facts.global_rng or run.draws,
    )


def _is_built_by_pass(network: nn.Module, again: nn.Module, x: Tensor) -> bool:
    """Whether a network has lazy layers, or gets further weights in its first forward pass; `again` is run.

    Raises:
        ConfigError: two builds do not fit each other.
    """
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        return True
    checks.check_weights(network, again)
    with torch.no_grad():
        plain_pass(again.eval(), x)
    names, more = ({name for name, _ in (*of.named_parameters(), *of.named_buffers())} for of in (network, again))
    return names != more


def _check_model(model: Model) -> None:
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigError(
            f"the model is a {type(model).__name__}, but every host needs a network of its own; pass the class, or a "
            "function that builds and returns the network."
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ConfigError(
            f"the model cannot be called without arguments: {error}; pass a function that builds the network, e.g. "
            "functools.partial(Network, 10)."
        ) from error


def _facts(network: nn.Module, slots: Sequence[str], x: Tensor, interface: Interface) -> ModuleFacts:
    run = recorded_pass(network, x)
    order = [call.path for call in run.calls]
    shapes = [tuple(run.of(slot)[0].output.shape[1:]) for slot in slots]
    points = tuple(
        InjectionPoint(slot_id=slot, channels=shape[0] if len(shape) == 3 else shape[-1], surface=Surface.OUTPUT,
                       order=i, position=(order.index(slot) + 1) / len(order))
        for i, (slot, shape) in enumerate(zip(slots, shapes, strict=True))
    )  # fmt: skip
    return ModuleFacts(
        family=_family(slots, shapes),
        points=points,
        shapes=tuple(shapes),
        inputs=tuple(x.shape[1:]),
        outputs=tuple(run.output.shape[1:]),
        num_params=count_params(network, ()),
        largest_activation=max(x.numel(), *(_largest(call.output) for call in run.calls)) // len(x),
        shares_prefix=tuple(not run.draws and _shares_prefix(network, slot, x) for slot in slots),
        dtype=x.dtype,
        edited=tuple(checks.is_edited(slot, run) for slot in slots),
        global_rng=run.draws,
        causal=_is_causal(network, x, run.output, interface),
    )


def _family(slots: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> HostFamily:
    """The family of features [C, H, W], or of sequences [T, D] and vectors [D]."""
    families = {
        slot: HostFamily.CNN if len(of) == 3 else HostFamily.TRANSFORMER for slot, of in zip(slots, shapes, strict=True)
    }
    if len(set(families.values())) > 1:
        found = ", ".join(f"{slot} {list(shape)}" for slot, shape in zip(slots, shapes, strict=True))
        raise ConfigError(
            f"the slots give features of two families: {found}; choose slots that are all [C, H, W], or all [T, D] or "
            "[D], because blueprints belong to one family."
        )
    return families[slots[0]]


def _shares_prefix(network: nn.Module, slot: str, x: Tensor) -> bool:
    """Whether the network continues with twice the rows behind a slot, as if they were examples of their own."""

    def run(change: Callable[[Tensor], Tensor]) -> Tensor:
        with replaced_outputs(network, lambda _, h: change(h), [slot]):
            out: Tensor = plain_pass(network, x)
        return out

    def changed(h: Tensor) -> Tensor:
        return 0.5 * h + 0.1

    try:
        together = run(lambda h: torch.cat((h, changed(h))))
    except ConfigError:
        return False  # something from before the slot has the old number of rows
    return checks.near(together, torch.cat((run(lambda h: h), run(changed))))


def _is_causal(network: nn.Module, x: Tensor, outputs: Tensor, interface: Interface) -> bool:
    """Whether outputs [B, T, ...] of inputs [B, T, ...] keep their first half where those change in the second half."""
    tensors, form = flatten(x if interface.inputs is None else interface.inputs.unpack(x))
    half = outputs.shape[1] // 2 if outputs.dim() > 1 else 0
    sequences = [of.dim() > 1 and of.shape[:2] == outputs.shape[:2] for of in tensors]
    if not any(sequences):
        return False
    changed = unflatten(
        form,
        [
            torch.cat((of[:, :half], of.roll(1, dims=0)[:, half:]), dim=1) if sequence else of
            for of, sequence in zip(tensors, sequences, strict=True)
        ],
    )
    batch = changed if interface.inputs is None else interface.inputs.pack(changed)
    return checks.near(plain_pass(network, batch)[:, :half], outputs[:, :half])


def _inputs(example: Tensor, interface: Interface) -> Tensor:
    """Twice `_ROWS` different inputs: those of the example, or others with its values if there are too few.

    The tensors of one example belong together, so several are drawn as they are.
    """
    if example.dim() == 0 or not example.numel():
        raise ConfigError(f"the example is {list(example.shape)}; it must be inputs [B, ...] as in the data.")
    if len(example) >= 2 * _ROWS:
        return example[: 2 * _ROWS].cpu().clone()
    generator, values = torch.Generator().manual_seed(0), example.detach().cpu()
    shape = (2 * _ROWS, *example.shape[1:])
    if interface.inputs is None:
        drawn = values.flatten()[torch.randint(values.numel(), shape, generator=generator)]
    else:
        drawn = values[torch.arange(len(values)).repeat(2 * _ROWS)[: 2 * _ROWS]]
    if drawn.is_floating_point():
        scale = float(values.std(correction=0)) or 1.0
        drawn = drawn + scale * torch.randn(shape, generator=generator)
    return drawn


@torch.no_grad()
def _disturb(network: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for p in network.parameters() if p.requires_grad):
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def _largest(output: Any) -> int:  # noqa: ANN401 -- whatever a module of the user's returns
    """Elements of the largest tensor in an output."""
    if isinstance(output, Tensor):
        return output.numel()
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return max((_largest(part) for part in parts), default=0)
