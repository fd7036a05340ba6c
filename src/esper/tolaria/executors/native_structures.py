"""Which program each host runs and where its memory lies: a structure of the population in terms of the machine."""

from functools import lru_cache
from typing import final

import numpy as np
from torch import Tensor

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.initialization import deterministic_build
from esper.kasmina.native.assembler import Program
from esper.kasmina.native.machine import addresses_of
from esper.kasmina.native.networks import (
    Growth,
    Module,
    Skeleton,
    SlotSpace,
    Space,
    measuring_program,
    num_spaces,
    slot_space,
    training_program,
)
from esper.kasmina.native.seeds import has_rule
from esper.kasmina.population import Population
from esper.kasmina.slab import Working
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running import TrainedRows, trained_mask
from esper.tolaria.prefixes import PrefixPlan, PrefixStep

_WHAT = 5
"""Numbers that say what runs in a slot: blueprint, algorithm, heard, learns, whether the gate learns."""
_NOTHING = -1
_KEPT = 2048
"""Programs of each kind that are kept: some ten kilobytes each, and about two milliseconds to write again."""


@final
class Programs:
    """The programs of a population, by the structure of the host; the last ones are kept."""

    def __init__(self, population: Population, height: int, width: int) -> None:
        self._points = population.points
        template = population.host_kind.template
        self._skeleton = Skeleton(population.host_module, template.parameters, template.buffers, height, width)
        self._seeds, self._gates = _modules(population)
        everywhere = {point.channels for point in self._points}
        self._known = {index for _, index in self._seeds if all((c, index) in self._seeds for c in everywhere)}
        self._training = lru_cache(_KEPT)(self._write_training)
        self._measuring = lru_cache(_KEPT)(self._write_measuring)

    def can_run(self, what: np.ndarray) -> np.ndarray:
        """[N]: hosts whose seeds all have rules; `what` is [N, S, 5]."""
        runnable = np.isin(what[..., 0], [_NOTHING, *self._known])
        fine: np.ndarray = np.asarray(runnable.all(axis=1))
        return fine

    def training(self, what: np.ndarray) -> Program:
        """Of a host in whose slots this runs, [S, 5]."""
        return self._training(what.tobytes())

    def measuring(self, what: np.ndarray, plan: PrefixPlan) -> Program:
        """Of a host in whose slots this runs, [S, 5], for the states of a plan."""
        return self._measuring(what.tobytes(), plan.steps)

    def _write_training(self, what: bytes) -> Program:
        return training_program(self._skeleton, self._grown(what))

    def _write_measuring(self, what: bytes, steps: tuple[PrefixStep, ...]) -> Program:
        parting = {self._points[step.slot].slot_id: (step.off, step.on) for step in steps}
        return measuring_program(self._skeleton, self._grown(what), parting)

    def _grown(self, what: bytes) -> dict[str, Growth]:
        grown = {}
        rows = np.frombuffer(what, dtype=np.int64).reshape(-1, _WHAT).tolist()
        for s, (blueprint, algorithm, heard, learns, gate_learns) in enumerate(rows):
            if blueprint != _NOTHING:
                channels = self._points[s].channels
                grown[self._points[s].slot_id] = Growth(
                    s=s,
                    seed=self._seeds[channels, blueprint],
                    gate=self._gates[channels],
                    algorithm=Algorithm(algorithm),
                    heard=bool(heard),
                    learns=bool(learns),
                    gate_learns=bool(gate_learns),
                )
        return grown


def _modules(population: Population) -> tuple[dict[tuple[int, int], Module], dict[int, Module]]:
    """Seeds that there are rules for by (channels, blueprint), and gates by channels."""
    seeds, gates = {}, {}
    for (channels, index), kind in population.seed_kinds.items():
        blueprint = registry.blueprint_at(index, population.topology)
        module = deterministic_build(lambda blueprint=blueprint, channels=channels: blueprint.build(channels))  # type: ignore[misc]
        if has_rule(module):
            seeds[channels, index] = Module(module, kind.template.parameters)
    for channels, kind in population.gate_kinds.items():
        module = deterministic_build(lambda channels=channels: GateNetwork(channels))  # type: ignore[misc]
        gates[channels] = Module(module, kind.template.parameters)
    return seeds, gates


def what_runs(structure: Structure, *, training: bool) -> np.ndarray:
    """[N, S, 5]: blueprint, algorithm, heard, learns, whether the gate learns; -1 where nothing runs."""
    heard = structure.alpha > 0.0
    learns = trained_mask(structure) if training else np.zeros_like(heard)
    gated = learns & (structure.algorithm == Algorithm.GATE) & structure.has_gate
    what = np.stack((structure.blueprint, structure.algorithm, heard, learns, gated), axis=-1).astype(np.int64)
    what[~(heard | learns)] = _NOTHING
    return what


def no_addresses(population: Population) -> np.ndarray:
    """[N, spaces] to be filled in."""
    return np.zeros((population.num_envs, num_spaces(population.num_slots)), dtype=np.int64)


def population_addresses(population: Population, alpha: Tensor) -> np.ndarray:
    """[N, spaces] of the population as it is: no batch, and no gradients. `alpha` [N, S] must be kept alive."""
    p, base = population, no_addresses(population)
    base[:, Space.HOST] = addresses_of(p.host.params)
    base[:, Space.HOST_BUFFERS] = addresses_of(p.host.buffers) if p.host.buffers.numel() else 0
    numbers = np.arange(p.num_envs)
    for s in range(p.num_slots):
        rows = numbers * p.num_slots + s
        base[:, slot_space(s, SlotSpace.SEED)] = addresses_of(p.seeds.params, rows)
        base[:, slot_space(s, SlotSpace.GATE)] = addresses_of(p.gates.params, rows)
        base[:, slot_space(s, SlotSpace.ALPHA)] = addresses_of(alpha.view(-1), rows)
    return base


def training_addresses(population: Population, alpha: Tensor, hosts: Working, rows: TrainedRows) -> np.ndarray:
    """[N, spaces] of a train pass: what learns lies in working copies, the rest in the population."""
    base = population_addresses(population, alpha)
    base[:, Space.HOST] = addresses_of(hosts.params)
    base[:, Space.HOST_SLOPES] = addresses_of(hosts.grad)
    for s in range(population.num_slots):
        here = np.flatnonzero(rows.seed_slot == s)
        base[rows.seed_host[here], slot_space(s, SlotSpace.SEED)] = addresses_of(rows.seeds.params, here)
        base[rows.seed_host[here], slot_space(s, SlotSpace.SEED_SLOPES)] = addresses_of(rows.seeds.grad, here)
        gated = np.flatnonzero(np.isin(rows.gate_of, here))
        of = rows.seed_host[rows.gate_of[gated]]
        base[of, slot_space(s, SlotSpace.GATE)] = addresses_of(rows.gates.params, gated)
        base[of, slot_space(s, SlotSpace.GATE_SLOPES)] = addresses_of(rows.gates.grad, gated)
    return base
