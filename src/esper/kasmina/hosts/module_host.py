"""A user's own network as a host, without editing it: the slots are outputs of named submodules.

    spec = ModuleHostSpec.of(ResNet, ["stem", "layer2.1"], example)
    host = spec.build(["stem"], example)

output of the submodule    features    family
[B, C, H, W]               (C, H, W)   CNN
[B, T, D]                  (T, D)      TRANSFORMER
[B, D]                     (1, D)      TRANSFORMER: a sequence of one token
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from esper.kasmina.hosts.host import Apply, Host
from esper.kasmina.hosts.module_pass import replaced_outputs
from esper.kasmina.hosts.module_probe import Model, ModuleFacts, new_network, probe
from esper.kasmina.hosts.slots import InjectionPoint, enabled_points
from esper.kasmina.parameters.frozen import as_buffers
from esper.leyline.errors import ConfigError
from esper.leyline.stages import HostFamily


@final
@dataclass(frozen=True, kw_only=True)
class ModuleHostSpec:
    """The network that `model` builds, with its slots; made by `of`."""

    model: Model
    facts: ModuleFacts

    @classmethod
    def of(
        cls, model: Model, slots: Sequence[str], example: Tensor, *, outputs: tuple[int, ...] | None = None
    ) -> "ModuleHostSpec":
        """Probe a network.

        Args:
            model: a class, function or partial that gives a new network x -> outputs in every call.
            slots: paths of submodules, in action order.
            example: inputs [B, ...] as the network gets them; eight or more, or else the probe makes some up from
                their values.
            outputs: expected shape of the output for one example, e.g. (10,) for ten classes; None for any.

        Raises:
            ConfigError: the network cannot be a host; the message says which module, and the way out.
        """
        if isinstance(slots, str) or not slots or len(set(slots)) < len(slots):
            raise ConfigError(f"slots is {slots!r}; it must be a list of different paths of submodules, at least one.")
        facts = probe(model, slots, example)
        if outputs is not None and facts.outputs != outputs:
            raise ConfigError(
                f"the network gives outputs {list(facts.outputs)} for one example, but the task needs "
                f"{list(outputs)}; change its last layer."
            )
        return cls(model=model, facts=facts)

    @property
    def family(self) -> HostFamily:
        """Decided by the number of axes of the features."""
        return self.facts.family

    def points(self) -> tuple[InjectionPoint, ...]:
        """All slots in the user's order."""
        return self.facts.points

    def num_params(self) -> int:
        """Number of parameters, frozen ones included; tied ones count once."""
        return self.facts.num_params

    def build(self, slot_ids: Iterable[str], example: Tensor) -> "ModuleHost":
        """A host with these slots enabled, for inputs like `example` [1, ...].

        Raises:
            ConfigError: a slot that does not exist, or inputs of another shape than the probed ones.
        """
        if tuple(example.shape[1:]) != self.facts.inputs:
            raise ConfigError(
                f"the data have inputs {list(example.shape[1:])}, but the network was probed with "
                f"{list(self.facts.inputs)}; probe it with an example of the data."
            )
        return ModuleHost(self, slot_ids)


@final
class ModuleHost(Host):
    """The user's network, with dropout whose masks are keyed."""

    def __init__(self, spec: ModuleHostSpec, slot_ids: Iterable[str]) -> None:
        """A new network; raises ConfigError if a slot does not exist."""
        super().__init__()
        self.spec = spec
        self.enabled = enabled_points(spec.points(), slot_ids)
        self.family = spec.family
        self.largest_activation = spec.facts.largest_activation
        self.causal = spec.facts.causal
        self.shares_prefixes = all(spec.facts.shares_prefix[point.order] for point in self.enabled)
        self.network = new_network(spec.model)
        as_buffers(self.network, spec.facts.own_frozen)
        self.frozen = tuple(f"network.{path}" for path in spec.facts.own_frozen)
        self._order = tuple(point.slot_id for point in sorted(self.enabled, key=lambda point: point.position))

    def execution_order(self) -> tuple[str, ...]:
        """The enabled slot ids in the order of `forward`."""
        return self._order

    def features(self, point: InjectionPoint) -> tuple[int, ...]:
        """(C, H, W), or (T, D) with T = 1 for a vector."""
        shape = self.spec.facts.shapes[point.order]
        return (1, *shape) if len(shape) == 1 else shape

    def rebuild(self) -> "ModuleHost":
        """A host with a newly built network."""
        return ModuleHost(self.spec, [point.slot_id for point in self.enabled])

    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        """Outputs [B, ...] of inputs [B, ...]; `apply` runs once per enabled slot, in execution order.

        Raises:
            ConfigError: this pass calls the slots otherwise than the probe found.
        """
        met: list[str] = []
        trains = torch.is_grad_enabled()
        shapes = {point.slot_id: self.spec.facts.shapes[point.order] for point in self.enabled}

        def at_slot(slot_id: str, h: Tensor) -> Tensor:
            met.append(slot_id)
            # a network may run what is frozen under no_grad, but seeds learn
            guarded = trains and not torch.is_grad_enabled()
            with torch.enable_grad() if guarded else nullcontext():
                # by the shape of the probe, because torch.fx cannot trace a test of the features
                return apply(slot_id, h) if len(shapes[slot_id]) > 1 else apply(slot_id, h[:, None]).squeeze(1)

        with replaced_outputs(self.network, at_slot, self._order):
            outputs: Tensor = self.network(x)
        if tuple(met) != self._order:
            raise ConfigError(
                f"a forward pass of {type(self.network).__name__} met the slots {', '.join(met) or 'not at all'}, but "
                f"the probe met {', '.join(self._order)}; the path through the network must not depend on the inputs."
            )
        return outputs
