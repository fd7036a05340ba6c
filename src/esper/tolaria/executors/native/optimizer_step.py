"""One optimizer step of all hosts, seeds and gates that have gradients, in one call of the machine.

A host is clipped by the norm of its gradient, a seed together with its gate. Spaces of a host:

    DECAY     mask of the host's elements that decay
    then      five spaces (`Part`) for each row: the host, then the seed and gate of each slot
"""

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.optimizers import AdamWState, OptimizerSpec, SGDState
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Working
from esper.tolaria.executors.native.assembler import NUM_WORKING, Assembler, Operation, Place, Program
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload
from esper.tolaria.executors.native.structures import CACHED_PROGRAMS, rows_of_slot
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows

DECAY, HOST = NUM_WORKING, 0
Part = IntEnum("Part", "WEIGHTS GRADIENT FIRST SECOND STEPS", start=0)
"""Spaces of a row. SGD keeps its momentum in FIRST, and has neither SECOND nor STEPS."""


def seed_row(s: int) -> int:
    """The row of a slot's seed; its gate is the next."""
    return 1 + 2 * s


def row_space(row: int, part: Part) -> int:
    """The number of a row's space."""
    return DECAY + 1 + row * len(Part) + part


def num_step_spaces(num_slots: int) -> int:
    """Spaces of a step of a host with this many slots."""
    return row_space(seed_row(num_slots), Part.WEIGHTS)


class TrainedSlot(NamedTuple):
    """A trained seed in slot `s`: its number of weights, and that of its gate (None: no gate is trained)."""

    s: int
    seed: int
    gate: int | None


def optimizer_program(spec: OptimizerSpec, host: int, slots: tuple[TrainedSlot, ...]) -> Program:
    """One step of a host with `host` weights and of its seeds; gradients are not changed."""
    a = Assembler(trainable=True)
    _step(a, spec, [(HOST, host)], spec.host_lr, Place(DECAY, 0))
    for s, seed, gate in slots:
        rows = [(seed_row(s), seed)]
        if gate is not None:
            rows.append((seed_row(s) + 1, gate))
        _step(a, spec, rows, spec.seed_lr, None)
    return a.program()


def _step(a: Assembler, spec: OptimizerSpec, rows: list[tuple[int, int]], rate: float, mask: Place | None) -> None:
    """Step rows (number, weights) that are clipped together."""
    factor = a.numbers(1)
    for k, (row, count) in enumerate(rows):
        gradient = Place(row_space(row, Part.GRADIENT), 0)
        a.emit(Operation.SQUARE_NORM, gradient, factor, sizes=(count,), flag=k > 0)
    a.emit(Operation.CLIP, factor, numbers=(spec.grad_clip,))
    for row, count in rows:
        weights, gradient, *moments = (Place(row_space(row, part), 0) for part in Part)
        operands, sizes = (factor, gradient, mask, weights), (count,)
        if spec.kind == "sgd":
            numbers = (rate, spec.sgd_weight_decay, spec.momentum)
            a.emit(Operation.SGD, *operands, moments[0], sizes=sizes, numbers=numbers)
        else:
            rates = (rate, spec.adamw_weight_decay, *spec.betas, spec.eps)
            a.emit(Operation.ADAMW, *operands, *moments, sizes=sizes, numbers=rates)


@final
class OptimizerStep:
    """Writes and caches optimizer programs; `decay_mask` [P] marks the elements of a host that decay."""

    def __init__(self, population: Population, decay_mask: Tensor, machine: Machine) -> None:
        self._population, self._machine = population, machine
        self._decay = decay_mask.to(torch.float32)
        self._program = lru_cache(CACHED_PROGRAMS)(self._write)

    def of(self, structure: Structure, hosts: Working, rows: TrainedRows) -> Callable[[], None]:
        """The step function of a train pass on this memory."""
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
            for k, (working, _, own, of_host) in enumerate(rows_of_slot(rows, s)):
                _fill(spaces, working, of_host, seed_row(s) + k, own)
        return spaces


def _fill(spaces: Spaces, working: Working, hosts: np.ndarray, row: int, places: np.ndarray) -> None:
    """Set the spaces of row `row` of these hosts to rows `places` of a working copy."""
    state = working.optimizer
    tensors = [working.params, working.grad]
    if isinstance(state, SGDState):
        tensors += [state.momentum]
    else:
        assert isinstance(state, AdamWState)
        tensors += [state.exp_avg, state.exp_avg_sq, state.steps]
    for part, tensor in zip(Part, tensors, strict=False):
        spaces.rows(row_space(row, part), tensor, places, hosts)
