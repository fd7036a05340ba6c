"""Different seeds in different hosts: in each slot the hosts are grouped by blueprint, and each group runs once.

    slot 0     host 0   host 1   host 2   host 3   host 4
    grows      conv     norm     conv     -        conv (frozen)
    groups     {0, 2}, {1}, {4}                             three calls, whatever the number of hosts

Within a group the hosts are ordered by how the seed's output joins the host's, so that each way is one slice
(`running.blend_order`).

Examples of all hosts are one batch whose rows have the host as the fastest index (see
`kasmina.parameters.stacked_layers`).

Shape legend: B = examples per host, N = hosts, g = hosts of a group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Int
from torch import Tensor

from esper.kasmina.parameters.dropout import Draws, draw_for
from esper.kasmina.parameters.flat_layout import StackedTemplate
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Working
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.fused.blending import GroupOutputs, Piece, join
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows, blend_of_rank, blend_order, isolated_mask, trained_mask


class Rows(NamedTuple):
    """A stacked skeleton and what it runs on: parameters and buffers [g, ...], made once for a pass.

    `grads` are where the gradients of the parameters belong, empty where nothing is learned; `draws` are the masks of
    dropout.
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


def fixed(stacked: StackedTemplate, params: Tensor, buffers: Tensor) -> Rows:
    """Rows that do not learn."""
    return Rows(stacked, stacked.views(params), stacked.buffer_views(buffers))


def learning(stacked: StackedTemplate, working: Working, first: int, last: int, buffers: Tensor) -> Rows:
    """Rows `first` to `last` (exclusive) of a working copy; what an optimizer does to them is seen here."""
    width = stacked.parameters.total
    leaves = tuple(view.requires_grad_() for view in stacked.views(working.params[first:last, :width]))
    return Rows(stacked, leaves, stacked.buffer_views(buffers), stacked.views(working.grad[first:last, :width]))


@final
@dataclass(frozen=True, kw_only=True)
class SlotGroup:
    """Hosts in whose slot the same blueprint runs, in the order of `pieces`.

    Attributes:
        index: their rows among the hosts of the pass, None where it is every host in order.
        seed: the seeds. gate: the gates of the last pieces, None without one. rows: of the seeds in the population.
        pieces: hosts whose seeds join alike. isolated: whether seeds send no gradient upstream through their input.
        running: the running statistics that a train pass moves.
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

    def keep_buffers(self, population: Population) -> None:
        """Write running statistics that a train pass moved back into the population."""
        if self.running.shape[1]:
            population.seeds.buffers[self.rows, : self.running.shape[1]] = self.running

    def joining(self, h_BN: Tensor) -> GroupOutputs:
        """What the seeds of these hosts put out for the features [B, N, ...] of all hosts."""
        num, seen = len(self.rows), h_BN.detach() if self.isolated else h_BN
        x_Bg = seen if self.index is None else seen.index_select(1, self.index)
        delta_Bg = self.seed(x_Bg.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num))
        gate_Bg = None
        if self.gate is not None:
            first = next(piece.first for piece in self.pieces if piece.algorithm is Algorithm.GATE)
            gated = x_Bg if first == 0 else x_Bg[:, first:]
            gate_Bg = self.gate(gated.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num - first))
        return GroupOutputs(self.pieces, self.index, x_Bg, delta_Bg, gate_Bg)


def apply_groups(groups: list[SlotGroup], h: Tensor, num_hosts: int) -> Tensor:
    """Features [B * N, ...] of all hosts after a slot."""
    h_BN = h.unflatten(0, (-1, num_hosts))
    joined: Tensor = join(h_BN, [group.joining(h_BN) for group in groups]).flatten(0, 1)
    return joined


def slot_groups(
    population: Population,
    stacked_modules: StackedModules,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
) -> dict[str, list[SlotGroup]]:
    """The groups of each slot among `hosts` (ascending numbers); empty slots are left out.

    With `rows` (a train pass, all hosts) the seeds that learn run on the working copies.
    """
    trainable = trained_mask(structure) if rows is not None else np.zeros_like(structure.stage, dtype=np.bool_)
    runs = (structure.alpha > 0.0) | trainable
    order, isolated = blend_order(structure), isolated_mask(population, structure)
    found: dict[str, list[SlotGroup]] = {}
    for s, point in enumerate(population.points):
        places = np.flatnonzero(runs[hosts, s])
        places = places[np.argsort(order[hosts[places], s], kind="stable")]
        here = hosts[places]
        keys = structure.blueprint[here, s] * 4 + isolated[here, s] * 2 + trainable[here, s]
        groups = [
            _group(
                population, stacked_modules, structure, alpha, rows if key % 2 else None, hosts, places[keys == key], s
            )
            for key in np.unique(keys)
        ]
        if groups:
            found[point.slot_id] = groups
    return found


def _group(
    population: Population,
    stacked_modules: StackedModules,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
    places: np.ndarray,
    s: int,
) -> SlotGroup:
    """The group of the hosts at `places` of `hosts`, ordered by how they join; `rows` if they learn."""
    who = hosts[places]
    channels = population.points[s].channels
    flat = population.index(who * population.num_slots + s)
    stacked = stacked_modules.seeds[channels, int(structure.blueprint[who[0], s])]
    running = population.seeds.buffers[flat, : stacked.buffers.total]
    if rows is None:
        seed = fixed(stacked, population.seeds.params[flat, : stacked.parameters.total], running)
    else:
        start = int(np.flatnonzero((rows.seed_host == who[0]) & (rows.seed_slot == s))[0])
        seed = learning(stacked, rows.seeds, start, start + len(who), running)
    seed = seed._replace(draws=population.draws(population.index(who), s) if stacked.dropouts else None)
    in_order = len(places) == len(hosts) and bool((np.diff(places) > 0).all())
    index = population.index(places)
    pieces = _pieces(structure, alpha[population.index(who), s], index, who, s)
    gated = next((piece.first for piece in pieces if piece.algorithm is Algorithm.GATE), len(who))
    return SlotGroup(
        index=None if in_order else index,
        seed=seed,
        gate=_gates(population, stacked_modules.gates[channels], rows, who[gated:], s, flat[gated:]),
        rows=flat,
        pieces=pieces,
        isolated=bool(isolated_mask(population, structure)[who[0], s]),
        running=running,
    )


def _pieces(structure: Structure, alpha: Tensor, index: Tensor, who: np.ndarray, s: int) -> tuple[Piece, ...]:
    """The slices of a group, whose hosts are in the order of `blend_order`."""
    order = blend_order(structure)[who, s]
    lifted = alpha.view(-1, 1, 1, 1)
    found = []
    for rank in np.unique(order):
        first, last = (int(i) for i in np.searchsorted(order, (rank, rank + 1)))
        algorithm, active = blend_of_rank(int(rank))
        found.append(Piece(algorithm, active, first, last, index[first:last], lifted[first:last]))
    return tuple(found)


def _gates(
    population: Population, stacked: StackedTemplate, rows: TrainedRows | None, who: np.ndarray, s: int, flat: Tensor
) -> Rows | None:
    """The gates of the hosts `who`, whose seeds are the rows `flat`; None for nobody."""
    if not len(who):
        return None
    buffers = population.gates.buffers[flat, : stacked.buffers.total]
    if rows is None:
        return fixed(stacked, population.gates.params[flat, : stacked.parameters.total], buffers)
    first_gated = np.flatnonzero((rows.seed_host == who[0]) & (rows.seed_slot == s))[0]
    first = int(np.flatnonzero(rows.gate_of == first_gated)[0])
    return learning(stacked, rows.gates, first, first + len(who), buffers)
