"""What a few forward passes of a user's network tell: the features of its slots, their order, and sizes.

The weights are disturbed first, so that layers that start at zero show what passes through them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import module_checks as checks
from esper.kasmina.hosts.module_pass import plain_pass, recorded_pass, replaced_outputs
from esper.kasmina.hosts.slots import InjectionPoint, Surface
from esper.kasmina.parameters.dropout import with_keyed_dropout
from esper.kasmina.parameters.flat_layout import drop_batch_counters
from esper.kasmina.parameters.frozen import count_params, frozen_parameters, own_frozen
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError
from esper.leyline.stages import HostFamily

Model = Callable[[], nn.Module]
"""Gives a new network in every call."""
_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """What the probe found, for one example.

    Attributes:
        points: the slots in action order. shapes: of the output of each slot's module.
        inputs, outputs: shapes of an input and its output. shares_prefix: of each slot (see `Host.shares_prefixes`).
        causal: whether no output depends on later positions. own_frozen: paths of the frozen parameters that each host
            has a copy of.
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
    own_frozen: tuple[str, ...] = ()


def new_network(model: Model) -> nn.Module:
    """A network of the user's with keyed dropout and without batch counters.

    Raises:
        ConfigError: `model` gives no module, or a normalization that needs its counter.
    """
    network = model()
    if not isinstance(network, nn.Module):
        raise ConfigError(f"the model gives a {type(network).__name__}; it must give an nn.Module.")
    network = with_keyed_dropout(network)
    drop_batch_counters(network)
    return network


def probe(model: Model, slots: Sequence[str], example: Tensor) -> ModuleFacts:
    """Run the network of `model` on inputs like `example` [B, ...].

    Raises:
        ConfigError: the network cannot be a host (see `module_checks`).
    """
    _check_model(model)
    network, again = (deterministic_build(lambda: new_network(model)) for _ in range(2))
    checks.check_weights(network, again)
    checks.check_paths(network, slots)
    _disturb(network.eval())
    x, others = _inputs(example).split(_ROWS)
    with torch.no_grad():
        checks.check_examples(network, slots, x, others)
        checks.check_binding(network, again, x)
        facts = _facts(network, slots, x)
    if frozen_parameters(network):
        other = deterministic_build(lambda: new_network(model), seed=1)
        facts = replace(facts, own_frozen=own_frozen(network, other))
    checks.check_training(network, slots, x)
    return facts


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


def _facts(network: nn.Module, slots: Sequence[str], x: Tensor) -> ModuleFacts:
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
        shares_prefix=tuple(_shares_prefix(network, slot, x) for slot in slots),
        causal=_is_causal(network, x, run.output),
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


def _is_causal(network: nn.Module, x: Tensor, outputs: Tensor) -> bool:
    """Whether outputs [B, T, ...] of x [B, T, ...] keep their first half where inputs change in the second half."""
    if x.shape[:2] != outputs.shape[:2]:
        return False
    half = x.shape[1] // 2
    changed = torch.cat((x[:, :half], x.roll(1, dims=0)[:, half:]), dim=1)
    return checks.near(plain_pass(network, changed)[:, :half], outputs[:, :half])


def _inputs(example: Tensor) -> Tensor:
    """Twice `_ROWS` different inputs: those of the example, or others with its values if there are too few."""
    if example.dim() == 0 or not example.numel():
        raise ConfigError(f"the example is {list(example.shape)}; it must be inputs [B, ...] as in the data.")
    if len(example) >= 2 * _ROWS:
        return example[: 2 * _ROWS].cpu().clone()
    generator, values = torch.Generator().manual_seed(0), example.detach().cpu().flatten()
    shape = (2 * _ROWS, *example.shape[1:])
    drawn = values[torch.randint(len(values), shape, generator=generator)]
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
