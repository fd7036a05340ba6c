"""Which program each host runs, and where its memory lies."""

from functools import lru_cache
from typing import Final, final

import numpy as np
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import SGDState
from esper.kasmina.parameters.population import Population, TrainingCopy
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
    step_program,
    training_program,
)
from esper.tolaria.executors.native.seed_rules import problem
from esper.tolaria.executors.native.trial import disagreement
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, trained_mask
from esper.tolaria.prefixes import PrefixStep

_FIELDS = 5
"""Numbers of a slot in a structure code: blueprint, algorithm, active, trainable, gate_trainable."""
_NOTHING = -1
CACHED_PROGRAMS: Final = 2048
"""Programs of each kind in the cache: each takes about ten kilobytes, and two milliseconds to write."""


@final
class Programs:
    """The programs of a population, cached by the structure of the host (`structure_codes`).

    `refused` maps each blueprint without a rule in some slot to the reason.

    Raises:
        ConfigError: the host has no rule.
    """

    def __init__(self, population: Population, height: int, width: int) -> None:
        self._points, host = population.points, population.host_module
        if reason := host_problem(host):
            raise ConfigError(
                f"the host has no rule in compiled C++ ({reason}); set executor to 'fused' or 'streamed'."
            )
        assert isinstance(host, CNNHost), "the only host with rules"
        template = population.host_kind.template
        self._host = HostLayout(host, template.parameters, template.buffers, height, width)
        self._gates = {c: Module(_gate(c), kind.template.parameters) for c, kind in population.gate_kinds.items()}
        self._seeds: dict[tuple[int, int], Module] = {}
        self.refused: dict[str, str] = {}
        names = {index: registry.blueprint_at(index, population.family).name for _, index in population.seed_kinds}
        for (channels, index), kind in population.seed_kinds.items():
            module, reason = _tried(registry.blueprint_at(index, population.family), channels)
            self._seeds[channels, index] = Module(module, kind.template.parameters)
            if reason is not None:
                self.refused[names[index]] = reason
        self._runnable = [_NOTHING, *(index for index, name in names.items() if name not in self.refused)]
        self._optimizer = population.optimizer_spec
        self.training = lru_cache(CACHED_PROGRAMS)(self._write_training)
        self.step = lru_cache(CACHED_PROGRAMS)(self._write_step)
        self.measuring = lru_cache(CACHED_PROGRAMS)(self._write_measuring)

    def can_run(self, codes: np.ndarray) -> np.ndarray:
        """[N]: hosts whose seeds all have rules; `codes` is [N, S, 5]."""
        return np.asarray(np.isin(codes[..., 0], self._runnable).all(axis=1))

    def _write_training(self, code: bytes) -> Program:
        """The program that trains a host of this structure, [S, 5] as bytes."""
        return training_program(self._host, self._active(code), self._optimizer)

    def _write_step(self, code: bytes) -> Program:
        """The optimizer step of such a host."""
        return step_program(self._host, self._active(code), self._optimizer)

    def _write_measuring(self, code: bytes, steps: tuple[PrefixStep, ...]) -> Program:
        """The program that measures it in the states of a plan."""
        by_slot = {self._points[step.slot].slot_id: (step.off, step.on) for step in steps}
        return measuring_program(self._host, self._active(code), by_slot)

    def _active(self, code: bytes) -> dict[str, ActiveSeed]:
        seeds = {}
        for s, row in enumerate(np.frombuffer(code, dtype=np.int64).reshape(-1, _FIELDS).tolist()):
            blueprint, algorithm, *flags = row
            if blueprint != _NOTHING:
                point = self._points[s]
                seed, gate = self._seeds[point.channels, blueprint], self._gates[point.channels]
                seeds[point.slot_id] = ActiveSeed(s, seed, gate, Algorithm(algorithm), *map(bool, flags))
        return seeds


@lru_cache(maxsize=1024)
def _tried(blueprint: AbstractBlueprint, channels: int) -> tuple[nn.Module, str | None]:
    """A seed, and why it has no rule (None: it has one); tried once per process."""
    module = deterministic_build(lambda: blueprint.build(channels))
    return module, problem(module) or disagreement(module, channels)


@lru_cache(maxsize=1024)
def _gate(channels: int) -> nn.Module:
    gate = deterministic_build(lambda: GateNetwork(channels))
    if reason := disagreement(gate, channels):
        raise ConfigError(f"compiled C++ disagrees with PyTorch about gates ({reason}); set executor to 'streamed'.")
    return gate


def structure_codes(structure: Structure, *, training: bool) -> np.ndarray:
    """[N, S, 5]: blueprint, algorithm, active, trainable, gate_trainable; -1 where nothing runs."""
    active = structure.alpha > 0.0
    trainable = trained_mask(structure) if training else np.zeros_like(active)
    gated = trainable & (structure.algorithm == Algorithm.GATE) & structure.has_gate
    codes = np.stack((structure.blueprint, structure.algorithm, active, trainable, gated), axis=-1).astype(np.int64)
    codes[~(active | trainable)] = _NOTHING
    return codes


def population_spaces(population: Population, alpha: Tensor) -> Spaces:
    """The spaces of all hosts, without a batch and gradients. The caller keeps `alpha` [N, S] alive."""
    p, spaces = population, Spaces(population.num_envs, num_spaces(population.num_slots))
    spaces.rows(Space.HOST, p.host.params)
    spaces.rows(Space.HOST_BUFFERS, p.host.buffers)
    for s in range(p.num_slots):
        rows = np.arange(p.num_envs) * p.num_slots + s
        spaces.rows(slot_space(s, SlotSpace.SEED), p.seeds.params, rows)
        spaces.rows(slot_space(s, SlotSpace.GATE), p.gates.params, rows)
        spaces.rows(slot_space(s, SlotSpace.ALPHA), alpha.view(-1), rows)
    return spaces


def training_spaces(
    population: Population, alpha: Tensor, hosts: TrainingCopy, rows: TrainedRows, decay: Tensor, lr_factor: Tensor
) -> Spaces:
    """The same for a train pass, in which trained rows lie in working copies; `decay`, `lr_factor` [N] are float32."""
    spaces, everyone = population_spaces(population, alpha), np.arange(population.num_envs)
    spaces.share(Space.DECAY, decay)
    spaces.rows(Space.RATE, lr_factor)
    _trained(spaces, hosts, Space.HOST, everyone, everyone)
    for s in range(population.num_slots):
        for working, kind, own, of_host in _rows_of_slot(rows, s):
            _trained(spaces, working, slot_space(s, kind), own, of_host)
    return spaces


def _trained(spaces: Spaces, working: TrainingCopy, space: int, own: np.ndarray, of_host: np.ndarray) -> None:
    """The five spaces from `space` on: weights, gradients and optimizer state of rows `own` of a working copy."""
    state = working.optimizer
    moments = (state.momentum,) if isinstance(state, SGDState) else (state.exp_avg, state.exp_avg_sq, state.steps)
    for k, tensor in enumerate((working.params, working.grad, *moments)):
        spaces.rows(space + k, tensor, own, of_host)


def _rows_of_slot(rows: TrainedRows, s: int) -> tuple[tuple[TrainingCopy, SlotSpace, np.ndarray, np.ndarray], ...]:
    """The working copy of seeds, then that of gates: which of its rows belong to slot `s`, and the host of each."""
    seeds = np.flatnonzero(rows.seed_slot == s)
    gates = np.flatnonzero(np.isin(rows.gate_of, seeds))
    return (
        (rows.seeds, SlotSpace.SEED, seeds, rows.seed_host[seeds]),
        (rows.gates, SlotSpace.GATE, gates, rows.seed_host[rows.gate_of[gates]]),
    )
