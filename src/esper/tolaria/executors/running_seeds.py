"""The seeds that a pass runs and trains, derived from the structure before the pass."""

from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from esper.kasmina.blending import blend, seed_input
from esper.kasmina.parameters.dropout import Draws
from esper.kasmina.parameters.layout import Template
from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.leyline.stages import Algorithm, AlphaMode, HostFamily, SeedStage
from esper.tolaria.executors.protocol import Structure


@dataclass(frozen=True)
class Bound:
    """A template, the row it runs on, and the random numbers that it draws."""

    template: Template
    params: Tensor
    buffers: Tensor
    draws: Draws | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """Run on `h`."""
        self.template.bind(self.params, self.buffers, self.draws)
        return self.template(h)


@final
@dataclass(frozen=True)
class RunningSeed:
    """One seed of one host in one pass.

    A `hidden` seed (alpha 0) leaves the features unchanged and is trained by a straight-through gradient; an `isolated`
    one sends no gradient upstream through its input.
    """

    seed: Bound
    gate: Bound | None
    algorithm: Algorithm
    alpha: Tensor
    hidden: bool
    isolated: bool

    def train(self, h: Tensor) -> Tensor:
        """Features after the slot, in a train pass."""
        return self._blended(h, seed_input(h, isolated=self.isolated), None if self.hidden else self.alpha)

    def evaluate(self, h: Tensor) -> Tensor:
        """Features after the slot, in a validation pass."""
        return self._blended(h, seed_input(h, isolated=False), self.alpha)

    def _blended(self, h: Tensor, x: Tensor, alpha: Tensor | None) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        return blend(h, self.seed(x), self.algorithm, alpha, gate)


SlotsOfHost = dict[str, RunningSeed]


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """The seeds and gates that a pass trains: host and slot of each seed, and the working copies."""

    seed_host: np.ndarray
    seed_slot: np.ndarray
    gate_of: np.ndarray
    """Row among the trained seeds of each trained gate."""
    seeds: TrainingCopy
    gates: TrainingCopy


def trained_mask(structure: Structure) -> np.ndarray:
    """[N, S]: seeds trained in the next train pass: TRAINING to FOSSILIZED and not frozen by a downward ramp."""
    trainable = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
    trained: np.ndarray = np.isin(structure.stage, trainable) & (structure.alpha_mode != AlphaMode.DOWN)
    return trained


def isolated_mask(population: Population, structure: Structure) -> np.ndarray:
    """[N, S]: seeds that send no gradient into the host: all seeds of a CNN; in other families the inactive ones."""
    isolated: np.ndarray = (structure.alpha <= 0.0) | (population.family is HostFamily.CNN)
    return isolated


_ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)


def blend_order(structure: Structure) -> np.ndarray:
    """[N, S]: how a seed blends, as a rank: ADD, MULTIPLY, GATE, each first hidden and then active."""
    algorithm = np.select([structure.algorithm == Algorithm.MULTIPLY, structure.algorithm == Algorithm.GATE], [1, 2], 0)
    ranks: np.ndarray = 2 * algorithm + (structure.alpha > 0.0)
    return ranks


def blend_of_rank(rank: int) -> tuple[Algorithm, bool]:
    """The algorithm of a rank, and whether the seed is active."""
    return _ALGORITHMS[rank // 2], bool(rank % 2)


def begin_training(population: Population, structure: Structure) -> TrainedRows:
    """Copy the rows that will be trained, as wide as the widest of them.

    They are sorted by slot, blueprint, isolation, `blend_order` and host, so that seeds that run alike are adjacent.
    """
    hosts, slots = np.nonzero(trained_mask(structure))
    isolated, blends = isolated_mask(population, structure), blend_order(structure)
    by_seed = (values[hosts, slots] for values in (blends, isolated, structure.blueprint))
    order = np.lexsort((hosts, *by_seed, slots))
    hosts, slots = hosts[order], slots[order]
    flat = hosts * population.num_slots + slots
    gated = (structure.algorithm == Algorithm.GATE) & structure.has_gate
    gate_of = np.flatnonzero(gated[hosts, slots])
    channels = [population.points[s].channels for s in slots]
    blueprints = structure.blueprint[hosts, slots].tolist()
    seed_kinds = [population.seed_kinds[c, b] for c, b in zip(channels, blueprints, strict=True)]
    gate_kinds = [population.gate_kinds[channels[i]] for i in gate_of]
    seed_widths = [kind.template.parameters.total for kind in seed_kinds]
    gate_widths = [kind.template.parameters.total for kind in gate_kinds]
    return TrainedRows(
        seed_host=hosts,
        seed_slot=slots,
        gate_of=gate_of,
        seeds=population.seeds.begin(population.index(flat), seed_widths),
        gates=population.gates.begin(population.index(flat[gate_of]), gate_widths),
    )


def finish_training(population: Population, rows: TrainedRows) -> None:
    """Write the trained rows back."""
    population.seeds.finish(rows.seeds)
    population.gates.finish(rows.gates)


def running_seeds(
    population: Population, structure: Structure, alpha: Tensor, rows: TrainedRows | None
) -> list[SlotsOfHost]:
    """The seeds of each host that a pass runs; in a train pass (with `rows`) the trained ones run on the copies.

    `alpha` [N, S] is on the device; seeds that are neither active nor trained are left out.
    """
    leaf: dict[tuple[int, int], Tensor] = {}
    gate_leaf: dict[tuple[int, int], Tensor] = {}
    if rows is not None:
        places = list(zip(rows.seed_host.tolist(), rows.seed_slot.tolist(), strict=True))
        leaf = dict(zip(places, rows.seeds.leaves, strict=True))
        gate_leaf = {places[i]: row for i, row in zip(rows.gate_of.tolist(), rows.gates.leaves, strict=True)}
    active, isolated = structure.alpha > 0.0, isolated_mask(population, structure)
    runs = active if rows is None else active | trained_mask(structure)
    hosts: list[SlotsOfHost] = [{} for _ in range(population.num_envs)]
    for n, s in zip(*np.nonzero(runs), strict=True):
        point = population.points[s]
        kind = population.seed_kinds[point.channels, int(structure.blueprint[n, s])]
        algorithm = Algorithm(int(structure.algorithm[n, s]))
        flat = n * population.num_slots + s
        gate = None
        if algorithm is Algorithm.GATE:
            gate_kind = population.gate_kinds[point.channels]
            row = gate_leaf.get((n, s), population.gates.params[flat])
            gate = _bound(gate_kind.template, row, population.gates.buffers[flat])
        row, buffers = leaf.get((n, s), population.seeds.params[flat]), population.seeds.buffers[flat]
        draws = population.draws(slice(n, n + 1), int(s), trains=rows is not None) if kind.template.draws else None
        hosts[n][point.slot_id] = RunningSeed(
            seed=_bound(kind.template, row, buffers, draws),
            gate=gate,
            algorithm=algorithm,
            alpha=alpha[n, s],
            hidden=not active[n, s],
            isolated=bool(isolated[n, s]),
        )
    return hosts


def _bound(template: Template, params: Tensor, buffers: Tensor, draws: Draws | None = None) -> Bound:
    """The template on the row, cut to its length; a leaf has that length already."""
    used = params if params.requires_grad else params[: template.parameters.total]
    return Bound(template, used, buffers[: template.buffers.total], draws)
