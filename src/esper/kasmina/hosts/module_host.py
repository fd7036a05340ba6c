"""A user's own network as a host, without editing it: the slots are outputs of named submodules.

    spec = ModuleHostSpec.of(ResNet, ["stem", "layer2.1"], example)
    host = spec.build(["stem"], example)

output of the submodule    features    family
[B, C, H, W]               (C, H, W)   CNN
[B, T, D]                  (T, D)      TRANSFORMER
[B, D]                     (1, D)      TRANSFORMER: a sequence of one token

A batch is one tensor [B, ...] for executors, and so are the outputs. The network itself may take and return several:

    forward(x, apply)  =  collected(run(arguments(x), apply))

    arguments(x)               (args, kwargs) of the network, e.g. ((), {"input_ids": ..., "attention_mask": ...})
    run(arguments, apply)      what the network returns, e.g. a dataclass with .logits; `apply` at the slots
    collected(result)          what the objective takes: `outputs=` of the user's, or several tensors packed

So a saved network is `run` with the arguments as they come; it knows no packed batches. Its figures are those of
`objective.scores(host.collected(saved(*args, **kwargs)), y)`.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from esper.kasmina.hosts.host import Apply, Host
from esper.kasmina.hosts.interface import ONE_TENSOR, Arguments, Interface
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
    interface: Interface = ONE_TENSOR

    @classmethod
    def of(
        cls,
        model: Model,
        slots: Sequence[str],
        example: Tensor,
        *,
        outputs: tuple[int, ...] | None = None,
        interface: Interface = ONE_TENSOR,
    ) -> "ModuleHostSpec":
        """Probe a network.

        Args:
            model: a class, function or partial that gives a new network x -> outputs in every call.
            slots: paths of submodules, in action order.
            example: a batch [B, ...] as the interface takes it; eight or more, or else the probe makes some up from
                their values.
            outputs: expected shape of the output for one example, e.g. (10,) for ten classes; None for any.
            interface: how the network is called, and what its result becomes.

        Raises:
            ConfigError: the network cannot be a host; the message says which module, and the way out.
        """
        if isinstance(slots, str) or not slots or len(set(slots)) < len(slots):
            raise ConfigError(f"slots is {slots!r}; it must be a list of different paths of submodules, at least one.")
        facts = probe(model, slots, example, interface)
        if outputs is not None and facts.outputs != outputs:
            raise ConfigError(
                f"the network gives outputs {list(facts.outputs)} for one example, but the task needs "
                f"{list(outputs)}; change its last layer."
            )
        return cls(model=model, facts=facts, interface=interface)

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
        self.global_rng = spec.facts.global_rng
        example = torch.zeros(1, *spec.facts.inputs, dtype=spec.facts.dtype)
        self.network = new_network(spec.model, self.arguments(example) if spec.facts.built_by_pass else None)
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
        """Outputs [B, ...] of a batch [B, ...]; `apply` runs once per enabled slot, in execution order.

        Raises:
            ConfigError: this pass calls the slots otherwise than the probe found.
        """
        return self.collected(self.run(self.arguments(x), apply))

    def arguments(self, x: Tensor) -> Arguments:
        """See the module docstring."""
        return self.spec.interface.arguments(x)

    def collected(self, result: Any) -> Tensor:  # noqa: ANN401 -- whatever the network returns
        """See the module docstring."""
        return self.spec.interface.collected(self.network, result)

    def run(self, arguments: Arguments, apply: Apply) -> Any:  # noqa: ANN401
        """See the module docstring; raises ConfigError as `forward`."""
        args, kwargs = arguments
        met: list[str] = []
        trains = torch.is_grad_enabled()
        shapes = {point.slot_id: self.spec.facts.shapes[point.order] for point in self.enabled}
        edited = {point.slot_id for point in self.enabled if self.spec.facts.edited[point.order]}

        def at_slot(slot_id: str, h: Tensor) -> Tensor:
            met.append(slot_id)
            # a network may run what is frozen under no_grad, but seeds learn
            guarded = trains and not torch.is_grad_enabled()
            with torch.enable_grad() if guarded else nullcontext():
                # by the shape of the probe, because torch.fx cannot trace a test of the features
                out = apply(slot_id, h) if len(shapes[slot_id]) > 1 else apply(slot_id, h[:, None]).squeeze(1)
                # a seed needs what it got, so the layer that edits it gets a tensor of its own
                return out.clone() if slot_id in edited and out is not h else out

        with replaced_outputs(self.network, at_slot, self._order):
            result = self.network(*args, **kwargs)
        left_out = set(self._order) - set(met) if self.global_rng else ()  # e.g. by stochastic depth
        if tuple(met) != tuple(slot for slot in self._order if slot not in left_out):
            raise ConfigError(
                f"a forward pass of {type(self.network).__name__} met the slots {', '.join(met) or 'not at all'}, but "
                f"the probe met {', '.join(self._order)}; the path through the network must not depend on the inputs."
            )
        return result
