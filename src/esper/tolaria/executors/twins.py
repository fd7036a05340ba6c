"""The stacked twins of everything that a population runs, made once."""

from typing import final

import torch
from torch import nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.initialization import deterministic_build
from esper.kasmina.lowering import can_lower_layers, lower, lower_layers
from esper.kasmina.population import Kind, Population
from esper.kasmina.stacking import StackedTemplate, drop_batch_counters

_TRIAL_SIZE = 4
"""Height and width of the features that a twin is tried on."""


@final
class Twins:
    """Host, seeds and gates of a population for many hosts at once.

    Seeds that share a width are one template: it is bound to its rows immediately before each call.
    """

    def __init__(self, population: Population) -> None:
        device = population.device
        self.host = StackedTemplate(
            lower_layers(population.host_module).to(device),
            population.host_kind.template.parameters,
            population.host_kind.template.buffers,
        )
        self.seeds: dict[tuple[int, int], StackedTemplate] = {}
        for (channels, index), kind in population.seed_kinds.items():
            blueprint = registry.blueprint_at(index, population.topology)
            module = deterministic_build(lambda blueprint=blueprint, channels=channels: blueprint.build(channels))  # type: ignore[misc]
            self.seeds[channels, index] = _twin(module, channels, kind, device)
        self.gates: dict[int, StackedTemplate] = {}
        for channels, kind in population.gate_kinds.items():
            module = deterministic_build(lambda channels=channels: GateNetwork(channels))  # type: ignore[misc]
            self.gates[channels] = _twin(module, channels, kind, device)

    def train(self, mode: bool) -> None:
        """Set train or eval mode everywhere."""
        for template in (self.host, *self.seeds.values(), *self.gates.values()):
            template.train(mode)


def _twin(module: nn.Module, channels: int, kind: Kind, device: torch.device) -> StackedTemplate:
    drop_batch_counters(module)
    example = torch.zeros(1, channels, _TRIAL_SIZE, _TRIAL_SIZE)
    return StackedTemplate(lower(module, example).to(device), kind.template.parameters, kind.template.buffers)


def can_fuse(population: Population) -> bool:
    """Whether the host has only layers that can be stacked; seeds always can."""
    return can_lower_layers(population.host_module)
