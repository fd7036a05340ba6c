"""Different seeds in different hosts: in each slot the hosts are grouped by what runs there, and each group runs once.

    slot 0     host 0   host 1   host 2   host 3   host 4
    grows      conv     norm     conv     -        conv (frozen)
    groups     {0, 2}, {1}, {4}                             three calls, whatever the number of hosts

Examples of all hosts are one batch whose rows have the host as the fastest index (see `kasmina.lowering`).

Shape legend: B = examples per host, N = hosts, g = hosts of a group.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from esper.kasmina.population import Population
from esper.kasmina.slab import Block
from esper.kasmina.stacking import StackedTemplate
from esper.leyline.stages import Algorithm, Topology
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running import TrainedRows, trained_mask
from esper.tolaria.executors.twins import Twins


@final
@dataclass(frozen=True)
class SlotGroup:
    """Hosts in whose slot the same thing runs.

    Attributes:
        hosts: their numbers, ascending. index: the same on the device, None where it is every host.
        params, buffers: rows of the seeds [g, P] and [g, Q]. gate_params, gate_buffers: of their gates, or None.
        alpha: blend weight of each host [g]. rows: of the seeds in the population.
        hidden: they learn by a straight-through gradient and are not heard.
        learned: the working copies that the group trains.
    """

    hosts: np.ndarray
    index: Int[Tensor, " g"] | None
    seed: StackedTemplate
    params: Tensor
    buffers: Tensor
    gate: StackedTemplate | None
    gate_params: Tensor | None
    gate_buffers: Tensor | None
    algorithm: Algorithm
    alpha: Tensor
    hidden: bool
    isolated: bool
    rows: Int[Tensor, " g"]
    learned: tuple[Block, ...]

    def keep_buffers(self, population: Population) -> None:
        """Write running statistics that a train pass moved back into the population."""
        if self.buffers.shape[1]:
            population.seeds.buffers[self.rows, : self.buffers.shape[1]] = self.buffers

    def take(self, h: Tensor, num_hosts: int) -> Tensor:
        """The rows of this group's hosts: [B * N, ...] -> [B * g, ...]."""
        if self.index is None:
            return h
        taken: Tensor = h.unflatten(0, (-1, num_hosts)).index_select(1, self.index).flatten(0, 1)
        return taken

    def correction(self, x: Tensor) -> Tensor:
        """What the seeds add to (ADD, GATE) or multiply with, less one (MULTIPLY), at their present alpha."""
        self.seed.bind(self.params, self.buffers)
        delta = self.seed(x)
        if self.algorithm is Algorithm.MULTIPLY:
            delta = torch.tanh(delta)
        elif self.algorithm is Algorithm.GATE:
            assert self.gate is not None
            assert self.gate_params is not None
            assert self.gate_buffers is not None
            self.gate.bind(self.gate_params, self.gate_buffers)
            delta = delta * self.gate(x).to(delta.dtype)
        if self.hidden:
            hidden = x * delta if self.algorithm is Algorithm.MULTIPLY else delta
            silenced: Tensor = _Silent.apply(hidden)  # type: ignore[no-untyped-call]
            return silenced
        rows = x.shape[0] // len(self.hosts)
        alpha = self.alpha.to(x.dtype).repeat(rows).view(-1, *(1,) * (x.dim() - 1))
        return alpha * delta


@final
class _Silent(torch.autograd.Function):
    """u -> 0 with the gradient of u: a seed that nobody hears yet learns as if it were heard at full weight."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        """The gradient as it comes."""
        return grad


def _spread(parts: list[tuple[SlotGroup, Tensor]], like: Tensor, num_hosts: int) -> Tensor:
    """Corrections of groups as one tensor like `like`, zero for hosts of no group."""
    if len(parts) == 1 and parts[0][0].index is None:
        return parts[0][1]
    total = torch.zeros_like(like).unflatten(0, (-1, num_hosts))
    for group, part in parts:
        assert group.index is not None
        total = total.index_copy(1, group.index, part.unflatten(0, (-1, len(group.hosts))))
    spread: Tensor = total.flatten(0, 1)
    return spread


def apply_groups(groups: list[SlotGroup], h: Tensor, num_hosts: int) -> Tensor:
    """Features of all hosts after a slot: h * (1 + m) + c with the groups' corrections.

    A hidden MULTIPLY adds its (zero) correction to c: only its gradient counts.
    """
    factors: list[tuple[SlotGroup, Tensor]] = []
    sums: list[tuple[SlotGroup, Tensor]] = []
    for group in groups:
        x = group.take(h.detach() if group.isolated or group.hidden else h, num_hosts)
        multiplies = group.algorithm is Algorithm.MULTIPLY and not group.hidden
        (factors if multiplies else sums).append((group, group.correction(x).to(h.dtype)))
    if factors:
        h = h * (1.0 + _spread(factors, h.detach(), num_hosts))
    if sums:
        h = h + _spread(sums, h.detach(), num_hosts)
    return h


def slot_groups(
    population: Population,
    twins: Twins,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
) -> dict[str, list[SlotGroup]]:
    """The groups of each slot among `hosts` (ascending numbers); empty slots are left out.

    With `rows` (a train pass, all hosts) the seeds that learn run on the working copies.
    """
    learns = trained_mask(structure) if rows is not None else np.zeros_like(structure.stage, dtype=np.bool_)
    heard = structure.alpha > 0.0
    found: dict[str, list[SlotGroup]] = {}
    for s, point in enumerate(population.points):
        runs = np.flatnonzero((heard | learns)[hosts, s])
        if not runs.size:
            continue
        who = hosts[runs]
        keys = np.stack(
            (structure.blueprint[who, s], structure.algorithm[who, s], heard[who, s], learns[who, s]), axis=1
        )
        groups = []
        for key in np.unique(keys, axis=0):
            chosen = runs[(keys == key).all(axis=1)]
            group = _group(population, twins, structure, alpha, rows, hosts, chosen, s, bool(key[3]))
            groups.append(group)
        found[point.slot_id] = groups
    return found


def _group(
    population: Population,
    twins: Twins,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
    chosen: np.ndarray,
    s: int,
    learns: bool,
) -> SlotGroup:
    who = hosts[chosen]
    channels, first = population.points[s].channels, who[0]
    seed = twins.seeds[channels, int(structure.blueprint[first, s])]
    algorithm = Algorithm(int(structure.algorithm[first, s]))
    gate = twins.gates[channels] if algorithm is Algorithm.GATE else None
    flat = population.index(who * population.num_slots + s)
    everyone = len(chosen) == len(hosts)
    gate_params, learned = None, []
    if learns:
        assert rows is not None
        start = int(np.flatnonzero((rows.seed_host == first) & (rows.seed_slot == s))[0])
        learned.append(rows.seeds.block(start, start + len(who), seed.parameters.total))
        params = learned[0].leaf
        if gate is not None:
            begin = int(np.flatnonzero(rows.gate_of == start)[0])
            learned.append(rows.gates.block(begin, begin + len(who), gate.parameters.total))
            gate_params = learned[1].leaf
    else:
        params = population.seeds.params[flat, : seed.parameters.total]
        if gate is not None:
            gate_params = population.gates.params[flat, : gate.parameters.total]
    return SlotGroup(
        hosts=who,
        rows=flat,
        index=None if everyone else population.index(chosen),
        seed=seed,
        params=params,
        buffers=population.seeds.buffers[flat, : seed.buffers.total],
        gate=gate,
        gate_params=gate_params,
        gate_buffers=population.gates.buffers[flat, : gate.buffers.total] if gate is not None else None,
        algorithm=algorithm,
        alpha=alpha[:, s] if everyone and len(hosts) == population.num_envs else alpha[population.index(who), s],
        hidden=not bool(structure.alpha[first, s] > 0.0),
        isolated=population.topology is Topology.CNN,
        learned=tuple(learned),
    )
