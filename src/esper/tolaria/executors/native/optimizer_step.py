"""One optimizer step of all hosts, seeds and gates that a batch gave gradients to, in one call of the machine."""

from collections.abc import Callable
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.optimizers import AdamWState, SGDState
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Working
from esper.tolaria.executors.native.assembler import Program
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload
from esper.tolaria.executors.native.optimizer_programs import (
    DECAY,
    HOST,
    Part,
    TrainedSlot,
    num_step_spaces,
    optimizer_program,
    row_space,
    seed_row,
)
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows

_KEPT = 2048
"""Programs that are kept."""


@final
class OptimizerStep:
    """Programs of optimizer steps, the last ones are kept; `decay_mask` [P] are the elements of a host that decay."""

    def __init__(self, population: Population, decay_mask: Tensor, machine: Machine) -> None:
        self._population, self._machine = population, machine
        self._decay = decay_mask.to(torch.float32)
        self._program = lru_cache(_KEPT)(self._write)

    def of(self, structure: Structure, hosts: Working, rows: TrainedRows) -> Callable[[], None]:
        """The step of a train pass on this memory."""
        p = self._population
        slots: list[list[TrainedSlot]] = [[] for _ in range(p.num_envs)]
        gated = set(rows.gate_of.tolist())
        for k, (n, s) in enumerate(zip(rows.seed_host.tolist(), rows.seed_slot.tolist(), strict=True)):
            channels = p.points[s].channels
            seed = p.seed_kinds[channels, int(structure.blueprint[n, s])].template.parameters.total
            gate = p.gate_kinds[channels].template.parameters.total if k in gated else None
            slots[n].append(TrainedSlot(s, seed, gate))
        work = Workload.of_each([self._program(tuple(own)) for own in slots])
        spaces = self._spaces(hosts, rows)
        return lambda: self._machine.run(work, spaces, 1)

    def _write(self, slots: tuple[TrainedSlot, ...]) -> Program:
        p = self._population
        return optimizer_program(p.optimizer_spec, p.host_kind.template.parameters.total, slots)

    def _spaces(self, hosts: Working, rows: TrainedRows) -> Spaces:
        p = self._population
        spaces = Spaces(p.num_envs, num_step_spaces(p.num_slots))
        spaces.share(DECAY, self._decay)
        _fill(spaces, hosts, np.arange(p.num_envs), HOST, np.arange(p.num_envs))
        for s in range(p.num_slots):
            here = np.flatnonzero(rows.seed_slot == s)
            gates = np.flatnonzero(np.isin(rows.gate_of, here))
            _fill(spaces, rows.seeds, rows.seed_host[here], seed_row(s), here)
            _fill(spaces, rows.gates, rows.seed_host[rows.gate_of[gates]], seed_row(s) + 1, gates)
        return spaces


def _fill(spaces: Spaces, working: Working, hosts: np.ndarray, row: int, places: np.ndarray) -> None:
    """The spaces of row `row` of these hosts: rows `places` of a working copy."""
    state = working.optimizer
    tensors: dict[Part, Tensor] = {Part.WEIGHTS: working.params, Part.GRADIENT: working.grad}
    if isinstance(state, SGDState):
        tensors[Part.FIRST] = state.momentum
    else:
        assert isinstance(state, AdamWState)
        tensors |= {Part.FIRST: state.exp_avg, Part.SECOND: state.exp_avg_sq, Part.STEPS: state.steps}
    for part, tensor in tensors.items():
        spaces.rows(row_space(row, part), tensor, places, hosts)
