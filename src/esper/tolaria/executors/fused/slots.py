"""Different seeds in different hosts: in each slot the hosts are grouped by blueprint, and each group runs once.

    slot 0     host 0   host 1   host 2   host 3   host 4
    grows      conv     norm     conv     -        conv (frozen)
    groups     {0, 2}, {1}, {4}                             three calls, whatever the number of hosts

Within a group the hosts are sorted by how they blend (`blend_order`), so that hosts that blend alike are one slice.
Examples of all hosts are one batch with the host as the fastest index (see `kasmina.parameters.stacked_layers`).

Shape legend: B = examples per host, N = hosts, g = hosts of a group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Int
from torch import Tensor

from esper.kasmina.blending import seed_input
from esper.kasmina.parameters.dropout import Draws, draw_for
from esper.kasmina.parameters.layout import StackedTemplate
from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.fused.blending import GroupOutputs, Piece, blend_groups
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, blend_of_rank, blend_order, isolated_mask, trained_mask


class Rows(NamedTuple):
    """A stacked module and what it runs on: parameters and buffers [g, ...], made once for a pass.

    `grads` receive the gradients of the parameters, empty where nothing is trained; `draws` are the dropout masks.
    """

    stacked: StackedTemplate
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    grads: tuple[Tensor, ...] = ()
    draws: Draws | None = None

    def __call__(self, *args: Any) -> Tensor:  # noqa: ANN401 -- whatever the module takes
        """Run on x [B * g, ...]."""
        self.stacked.bind(self.parameters, self.buffers)
        draw_for(self.stacked.dropouts, self.draws)
        return self.stacked(*args)


def frozen_rows(stacked: StackedTemplate, params: Tensor, buffers: Tensor) -> Rows:
    """Rows that are not trained."""
    return Rows(stacked, stacked.views(params), stacked.buffer_views(buffers))


def trainable_rows(stacked: StackedTemplate, working: TrainingCopy, first: int, last: int, buffers: Tensor) -> Rows:
    """Rows `first` to `last` (exclusive) of a working copy, as views: they see its optimizer steps."""
    width = stacked.parameters.total
    leaves = tuple(view.requires_grad_() for view in stacked.views(working.params[first:last, :width]))
    return Rows(stacked, leaves, stacked.buffer_views(buffers), stacked.views(working.grad[first:last, :width]))


@final
@dataclass(frozen=True, kw_only=True)
class SlotGroup:
    """Hosts in whose slot the same blueprint runs, in the order of `pieces`.

    Attributes:
        index: their rows among the hosts of the pass, None if they are all hosts in order.
        seed: the seeds. gate: the gates of the last pieces, None without one. rows: of the seeds in the population.
        pieces: hosts that blend alike. isolated: whether seeds send no gradient upstream through their input.
        running: the running statistics that a train pass updates.
    """

    index: Int[Tensor, " g"] | None
    seed: Rows
    gate: Rows | None
    rows: Int[Tensor, " g"]
    pieces: tuple[Piece, ...]
    isolated: bool
    running: Tensor

    def trained_rows(self) -> list[Rows]:
        """What the group trains."""
        return [rows for rows in (self.seed, self.gate) if rows is not None and rows.grads]

    def write_buffers(self, population: Population) -> None:
        """Write the running statistics of a train pass back into the population."""
        if self.running.shape[1]:
            population.seeds.buffers[self.rows, : self.running.shape[1]] = self.running

    def outputs(self, h_BN: Tensor) -> GroupOutputs:
        """Outputs of the seeds of these hosts for the features [B, N, ...] of all hosts."""
        num, x_BN = len(self.rows), seed_input(h_BN, isolated=self.isolated)
        x_Bg = x_BN if self.index is None else x_BN.index_select(1, self.index)
        delta_Bg = self.seed(x_Bg.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num))
        gate_Bg = None
        if self.gate is not None:
            first = _first_gated(self.pieces, num)
            gated = x_Bg if first == 0 else x_Bg[:, first:]
            gate_Bg = self.gate(gated.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num - first))
        return GroupOutputs(self.pieces, self.index, x_Bg, delta_Bg, gate_Bg)


def _first_gated(pieces: tuple[Piece, ...], num_hosts: int) -> int:
    """The first host of a group with a gate; they are its last hosts."""
    return next((piece.first for piece in pieces if piece.algorithm is Algorithm.GATE), num_hosts)


def apply_groups(groups: list[SlotGroup], h: Tensor, num_hosts: int) -> Tensor:
    """Features [B * N, ...] of all hosts after a slot."""
    h_BN = h.unflatten(0, (-1, num_hosts))
    blended: Tensor = blend_groups(h_BN, [group.outputs(h_BN) for group in groups]).flatten(0, 1)
    return blended


def slot_groups(
    population: Population,
    stacked_modules: StackedModules,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
) -> dict[str, list[SlotGroup]]:
    """The groups of each slot among `hosts` (ascending numbers); empty slots are left out.

    With `rows` (a train pass, all hosts) the trained seeds run on the working copies.
    """
    trainable = trained_mask(structure) if rows is not None else np.zeros_like(structure.stage, dtype=np.bool_)
    runs = (structure.alpha > 0.0) | trainable
    order, isolated = blend_order(structure), isolated_mask(population, structure)
    builder = _GroupBuilder(population, stacked_modules, structure, alpha, hosts)
    found: dict[str, list[SlotGroup]] = {}
    for s, point in enumerate(population.points):
        places = np.flatnonzero(runs[hosts, s])
        places = places[np.argsort(order[hosts[places], s], kind="stable")]
        here = hosts[places]
        keys = structure.blueprint[here, s] * 4 + isolated[here, s] * 2 + trainable[here, s]
        groups = [builder.group(s, places[keys == key], rows if key % 2 else None) for key in np.unique(keys)]
        if groups:
            found[point.slot_id] = groups
    return found


class _GroupBuilder(NamedTuple):
    """What all groups of a pass have in common; see `slot_groups`."""

    population: Population
    stacked_modules: StackedModules
    structure: Structure
    alpha: Tensor
    hosts: np.ndarray

    def group(self, s: int, places: np.ndarray, rows: TrainedRows | None) -> SlotGroup:
        """The group of the hosts at `places` of `hosts`, in the order of `blend_order`; `rows` if they are trained."""
        p, who = self.population, self.hosts[places]
        channels = p.points[s].channels
        flat = p.index(who * p.num_slots + s)
        stacked = self.stacked_modules.seeds[channels, int(self.structure.blueprint[who[0], s])]
        running = p.seeds.buffers[flat, : stacked.buffers.total]
        if rows is None:
            seed = frozen_rows(stacked, p.seeds.params[flat, : stacked.parameters.total], running)
        else:
            start = _row_of(rows, int(who[0]), s)
            seed = trainable_rows(stacked, rows.seeds, start, start + len(who), running)
        seed = seed._replace(draws=p.draws(p.index(who), s) if stacked.dropouts else None)
        in_order = len(places) == len(self.hosts) and bool((np.diff(places) > 0).all())
        index = p.index(places)
        pieces = self._pieces(s, who, index)
        gated = _first_gated(pieces, len(who))
        return SlotGroup(
            index=None if in_order else index,
            seed=seed,
            gate=self._gates(s, who[gated:], flat[gated:], rows),
            rows=flat,
            pieces=pieces,
            isolated=bool(isolated_mask(p, self.structure)[who[0], s]),
            running=running,
        )

    def _pieces(self, s: int, who: np.ndarray, index: Tensor) -> tuple[Piece, ...]:
        """The slices of hosts that blend alike."""
        order = blend_order(self.structure)[who, s]
        rank = len(self.population.features[self.population.points[s].channels][0])
        alpha = self.alpha[self.population.index(who), s].view(-1, *(1,) * rank)
        found = []
        for rank in np.unique(order):
            first, last = (int(i) for i in np.searchsorted(order, (rank, rank + 1)))
            algorithm, active = blend_of_rank(int(rank))
            found.append(Piece(algorithm, active, first, last, index[first:last], alpha[first:last]))
        return tuple(found)

    def _gates(self, s: int, who: np.ndarray, flat: Tensor, rows: TrainedRows | None) -> Rows | None:
        """The gates of the hosts `who`, whose seeds are the rows `flat`; None without hosts."""
        if not len(who):
            return None
        gates, stacked = self.population.gates, self.stacked_modules.gates[self.population.points[s].channels]
        buffers = gates.buffers[flat, : stacked.buffers.total]
        if rows is None:
            return frozen_rows(stacked, gates.params[flat, : stacked.parameters.total], buffers)
        first = int(np.flatnonzero(rows.gate_of == _row_of(rows, int(who[0]), s))[0])
        return trainable_rows(stacked, rows.gates, first, first + len(who), buffers)


def _row_of(rows: TrainedRows, host: int, slot: int) -> int:
    """The row of a trained seed."""
    return int(np.flatnonzero((rows.seed_host == host) & (rows.seed_slot == slot))[0])
