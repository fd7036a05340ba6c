"""Which program each host runs and where its memory lies: a structure of the population in terms of the machine."""

from functools import lru_cache
from typing import final

import numpy as np
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Working
from esper.leyline.errors import ConfigError
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.native.assembler import Program
from esper.tolaria.executors.native.machine import Spaces
from esper.tolaria.executors.native.networks import (
    ActiveSeed,
    HostLayout,
    Module,
    SlotSpace,
    Space,
    host_problem,
    measuring_program,
    num_spaces,
    slot_space,
    training_program,
)
from esper.tolaria.executors.native.seed_rules import problem
from esper.tolaria.executors.native.trial import disagreement
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, trained_mask
from esper.tolaria.prefixes import PrefixPlan, PrefixStep

_WHAT = 5
"""Numbers that say what runs in a slot: blueprint, algorithm, heard, learns, whether the gate learns."""
_NOTHING = -1
_KEPT = 2048
"""Programs of each kind that are kept: some ten kilobytes each, and about two milliseconds to write again."""


@final
class Programs:
    """The programs of a population, by the structure of the host; the last ones are kept.

    `refused` says of each blueprint that has no rule in some slot why not.

    Raises:
        ConfigError: the host has no rule.
    """

    def __init__(self, population: Population, height: int, width: int) -> None:
        self._points = population.points
        if reason := host_problem(population.host_module):
            raise ConfigError(
                f"the host has no rule in compiled C++ ({reason}); set executor to 'fused' or 'streamed'."
            )
        template = population.host_kind.template
        self._host_layout = HostLayout(population.host_module, template.parameters, template.buffers, height, width)
        self._gates = {c: Module(_gate(c), kind.template.parameters) for c, kind in population.gate_kinds.items()}
        self._seeds: dict[tuple[int, int], Module] = {}
        self.refused: dict[str, str] = {}
        for (channels, index), kind in population.seed_kinds.items():
            blueprint = registry.blueprint_at(index, population.family)
            module, reason = _tried(blueprint, channels)
            self._seeds[channels, index] = Module(module, kind.template.parameters)
            if reason is not None:
                self.refused[blueprint.name] = reason
        known = [i for _, i in self._seeds if registry.blueprint_at(i, population.family).name not in self.refused]
        self._runnable = [_NOTHING, *sorted({*known})]
        self._training = lru_cache(_KEPT)(self._write_training)
        self._measuring = lru_cache(_KEPT)(self._write_measuring)

    def can_run(self, what: np.ndarray) -> np.ndarray:
        """[N]: hosts whose seeds all have rules; `what` is [N, S, 5]."""
        runnable = np.isin(what[..., 0], self._runnable)
        fine: np.ndarray = np.asarray(runnable.all(axis=1))
        return fine

    def training(self, what: np.ndarray) -> Program:
        """Of a host in whose slots this runs, [S, 5]."""
        return self._training(what.tobytes())

    def measuring(self, what: np.ndarray, plan: PrefixPlan) -> Program:
        """Of a host in whose slots this runs, [S, 5], for the states of a plan."""
        return self._measuring(what.tobytes(), plan.steps)

    def _write_training(self, what: bytes) -> Program:
        return training_program(self._host_layout, self._grown(what))

    def _write_measuring(self, what: bytes, steps: tuple[PrefixStep, ...]) -> Program:
        parting = {self._points[step.slot].slot_id: (step.off, step.on) for step in steps}
        return measuring_program(self._host_layout, self._grown(what), parting)

    def _grown(self, what: bytes) -> dict[str, ActiveSeed]:
        seeds = {}
        rows = np.frombuffer(what, dtype=np.int64).reshape(-1, _WHAT).tolist()
        for s, (blueprint, algorithm, active, trainable, gate_trainable) in enumerate(rows):
            if blueprint != _NOTHING:
                channels = self._points[s].channels
                seeds[self._points[s].slot_id] = ActiveSeed(
                    s=s,
                    seed=self._seeds[channels, blueprint],
                    gate=self._gates[channels],
                    algorithm=Algorithm(algorithm),
                    active=bool(active),
                    trainable=bool(trainable),
                    gate_trainable=bool(gate_trainable),
                )
        return seeds


@lru_cache(maxsize=1024)
def _tried(blueprint: AbstractBlueprint, channels: int) -> tuple[nn.Module, str | None]:
    """A seed as it is built, and why it has no rule (None: it has one); tried once in a process."""
    module = deterministic_build(lambda: blueprint.build(channels))
    return module, problem(module) or disagreement(module, channels)


@lru_cache(maxsize=1024)
def _gate(channels: int) -> nn.Module:
    gate = deterministic_build(lambda: GateNetwork(channels))
    if reason := disagreement(gate, channels):
        raise ConfigError(f"compiled C++ disagrees with PyTorch about gates ({reason}); set executor to 'streamed'.")
    return gate


def structure_codes(structure: Structure, *, training: bool) -> np.ndarray:
    """[N, S, 5]: blueprint, algorithm, heard, learns, whether the gate learns; -1 where nothing runs."""
    active = structure.alpha > 0.0
    trainable = trained_mask(structure) if training else np.zeros_like(active)
    gated = trainable & (structure.algorithm == Algorithm.GATE) & structure.has_gate
    what = np.stack((structure.blueprint, structure.algorithm, active, trainable, gated), axis=-1).astype(np.int64)
    what[~(active | trainable)] = _NOTHING
    return what


def population_spaces(population: Population, alpha: Tensor) -> Spaces:
    """Of the population as it is: no batch, and no gradients. `alpha` [N, S] must be kept alive."""
    p, spaces = population, Spaces(population.num_envs, num_spaces(population.num_slots))
    spaces.rows(Space.HOST, p.host.params)
    spaces.rows(Space.HOST_BUFFERS, p.host.buffers)
    numbers = np.arange(p.num_envs)
    for s in range(p.num_slots):
        rows = numbers * p.num_slots + s
        spaces.rows(slot_space(s, SlotSpace.SEED), p.seeds.params, rows)
        spaces.rows(slot_space(s, SlotSpace.GATE), p.gates.params, rows)
        spaces.rows(slot_space(s, SlotSpace.ALPHA), alpha.view(-1), rows)
    return spaces


def training_spaces(population: Population, alpha: Tensor, hosts: Working, rows: TrainedRows) -> Spaces:
    """Of a train pass: what is trained lies in working copies, the rest in the population."""
    spaces = population_spaces(population, alpha)
    spaces.rows(Space.HOST, hosts.params)
    spaces.rows(Space.HOST_GRADS, hosts.grad)
    for s in range(population.num_slots):
        here = np.flatnonzero(rows.seed_slot == s)
        gates = np.flatnonzero(np.isin(rows.gate_of, here))
        seeded, gated = rows.seed_host[here], rows.seed_host[rows.gate_of[gates]]
        spaces.rows(slot_space(s, SlotSpace.SEED), rows.seeds.params, here, seeded)
        spaces.rows(slot_space(s, SlotSpace.SEED_GRADS), rows.seeds.grad, here, seeded)
        spaces.rows(slot_space(s, SlotSpace.GATE), rows.gates.params, gates, gated)
        spaces.rows(slot_space(s, SlotSpace.GATE_GRADS), rows.gates.grad, gates, gated)
    return spaces
