"""Hosts of the tiny task that were grown by hand and trained for a few steps."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import tiny
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.training import running_seeds
from esper.tolaria.state import RolloutStats
from toys import ToyClient

ARCHITECTURES = tuple(
    Architecture(tuple(map(PlacedSeed, tiny.SLOTS, *kinds)))
    for kinds in (
        (("conv_light", "attention", "norm"), ("ADD", "MULTIPLY", "GATE")),
        (("depthwise", "bottleneck", "conv_heavy"), ("GATE", "ADD", "MULTIPLY")),
        (("conv_small", "norm", "attention"), ("MULTIPLY", "GATE", "ADD")),
    )
)


class GrownHosts(NamedTuple):
    """An engine at the end of an episode, and the statistics of that."""

    engine: VectorizedEngine
    stats: RolloutStats


def grown(*architectures: Architecture, steps: int = 4, of: TaskSpec | None = None) -> GrownHosts:
    """One host of each architecture, of the tiny task or another one on its images."""
    engine = tiny.engine(len(architectures), steps, of=of)
    client = ToyClient(engine.spec)
    engine.reset(client, 0)
    engine.add_fossils(architectures)
    stats = engine.rollout(client)
    assert stats is not None
    return GrownHosts(engine, stats)


def outputs(hosts: GrownHosts, n: int, x: Tensor, *, alpha: Mapping[str, float] | None = None) -> Tensor:
    """Of host `n` with all seeds or those of `alpha`, by the code that measures coalitions."""
    data = hosts.engine.executor.data
    population, structure = data.population, data.structure
    weights = dict.fromkeys(tiny.SLOTS, 1.0) if alpha is None else alpha
    weight_NS = torch.tensor([[weights.get(slot, 0.0) for slot in tiny.SLOTS]]).expand(structure.stage.shape)
    seeds = running_seeds(population, structure, weight_NS, None)[n]
    template = population.host_kind.template
    template.train(False)
    for kind in (*population.seed_kinds.values(), *population.gate_kinds.values()):
        kind.template.train(False)
    template.bind(population.host.params[n], population.host.buffers[n])
    with torch.no_grad():
        return template(x, lambda slot, h: seeds[slot].evaluate(h) if slot in weights else h)
