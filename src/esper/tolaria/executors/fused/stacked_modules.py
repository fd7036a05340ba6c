"""Stacked modules of the host, seeds and gates of a population, made once."""

from typing import final

import torch

from esper.kasmina.parameters.flat_layout import StackedTemplate, drop_batch_counters
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.kinds import Features, Kind, once
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.stacked_layers import can_stack_layers, stack_layers
from esper.kasmina.parameters.stacking_trial import way_to_stack


@final
class StackedModules:
    """Host, seeds and gates of a population for many hosts at once.

    One template serves all seeds of a blueprint and width: it is bound to its rows right before each call.

    Raises:
        StackingError: a blueprint computes something else when stacked.
    """

    def __init__(self, population: Population) -> None:
        device = population.device
        self.host = StackedTemplate(
            stack_layers(population.host_module).to(device),
            population.host_kind.template.parameters,
            population.host_kind.template.buffers,
        )
        self.seeds = {
            (channels, index): _stacked(kind, population.features[channels], device)
            for (channels, index), kind in population.seed_kinds.items()
        }
        self.gates = {
            channels: _stacked(kind, population.features[channels], device)
            for channels, kind in population.gate_kinds.items()
        }

    def train(self, mode: bool) -> None:
        """Set train or eval mode everywhere."""
        for template in (self.host, *self.seeds.values(), *self.gates.values()):
            template.train(mode)


def _stacked(kind: Kind, features: Features, device: torch.device) -> StackedTemplate:
    module = deterministic_build(kind.build)
    drop_batch_counters(module)
    stack = once(kind.source, features, "way", lambda: way_to_stack(kind.name, module, torch.zeros(1, *features)))
    return StackedTemplate(stack(module).to(device), kind.template.parameters, kind.template.buffers)


def can_fuse(population: Population) -> bool:
    """Whether the host has only layers that can be stacked; seeds always can."""
    return can_stack_layers(population.host_module)
