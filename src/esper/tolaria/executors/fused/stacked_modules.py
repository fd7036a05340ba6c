"""Stacked modules of the host, seeds and gates of a population, made once."""

from typing import final

import torch
from torch import Tensor

from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import StackedTemplate, drop_batch_counters
from esper.kasmina.parameters.population import Features, Kind, Population, once
from esper.kasmina.parameters.stacking import stacked_host, vmapped, way_to_stack
from esper.leyline.errors import StackingError


@final
class StackedModules:
    """Host, seeds and gates of a population for many hosts at once.

    One template serves all seeds of a blueprint and width: it is bound to its rows right before each call. `examples`
    [HOST_EXAMPLES, ...] are inputs of the host.

    Raises:
        StackingError: the host or a blueprint computes something else when stacked, or draws random numbers.
    """

    def __init__(self, population: Population, examples: Tensor) -> None:
        device, host = population.device, population.host_kind
        for kind in (host, *population.seed_kinds.values()):
            if kind.template.global_rng:
                of = "the host" if kind is host else f"blueprint {kind.name!r}"
                raise StackingError(
                    f"{of} draws from the global random generators in its forward pass, which are seeded for one host "
                    "at a time; use executor 'streamed', or nn.Dropout, whose masks are drawn for many hosts."
                )
        self.host = StackedTemplate(
            stacked_host(host.build, examples).to(device), host.template.parameters, host.template.buffers
        )
        self.host.share(host.template.shared)
        self.seeds = {
            (channels, index): _stacked(kind, population.features[channels], device)
            for (channels, index), kind in population.seed_kinds.items()
        }
        self.gates = {
            channels: _stacked(kind, population.features[channels], device)
            for channels, kind in population.gate_kinds.items()
        }

    @property
    def dropouts(self) -> bool:
        """Whether the host or a seed draws dropout masks."""
        return any(template.dropouts for template in (self.host, *self.seeds.values()))

    def train(self, mode: bool) -> None:
        """Set train or eval mode everywhere."""
        for template in (self.host, *self.seeds.values(), *self.gates.values()):
            template.train(mode)


def _stacked(kind: Kind, shapes: tuple[Features, ...], device: torch.device) -> StackedTemplate:
    module = deterministic_build(kind.build)
    drop_batch_counters(module)
    ways = [
        once(kind.source, shape, "way", lambda shape=shape: way_to_stack(kind.name, module, torch.zeros(1, *shape)))  # type: ignore[misc]
        for shape in shapes
    ]
    stack = vmapped if vmapped in ways else ways[0]  # what one shape needs works for the others
    return StackedTemplate(stack(module).to(device), kind.template.parameters, kind.template.buffers)
