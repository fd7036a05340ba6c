"""What runs in the slots of all hosts when the host does not know what grows there: everything that could.

    slot 0     host 0     host 1     host 2
    grows      conv       norm       -
    runs       conv, attention, norm, ...: every blueprint for all three hosts, and the gate
    own        conv: {0}  norm: {1}  all others: nobody

Each blueprint reads the rows of the slab as if all of them were its own. In rows of another blueprint, or empty ones,
that means nothing, and nobody hears it; what a pass learns goes to the rows that are its own.

Shape legend: N = hosts, S = slots, P = parameters of a kind, Q = buffer values of a kind.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.parameters.flat_layout import StackedTemplate
from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Slab, put_where
from esper.kasmina.rules.guards import in_stages
from esper.leyline.messages import SlotState
from esper.leyline.stages import Algorithm, AlphaMode, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tolaria.executors.fused.slots import Rows
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.static.blending import Ways, join, select

_LEARNS = frozenset({SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})


@tensor_dataclass
class SeedMasks:
    """What a pass asks of the slots. A gate is used where the algorithm is GATE, and trained where its seed is."""

    blueprint: Int[Tensor, "N S"]
    alpha: Float[Tensor, "N S"]
    active: Bool[Tensor, "N S"]
    trainable: Bool[Tensor, "N S"]
    multiplies: Bool[Tensor, "N S"]
    gated: Bool[Tensor, "N S"]
    gate_trainable: Bool[Tensor, "N S"]


def seed_masks(slots: SlotState) -> SeedMasks:
    """The masks of the present state: `running.trained_mask` and `running.blend_order` on the device."""
    trainable = in_stages(slots.stage, _LEARNS) & (slots.alpha_mode != AlphaMode.DOWN)
    gated = slots.algorithm == Algorithm.GATE
    return SeedMasks(
        blueprint=slots.blueprint,
        alpha=slots.alpha,
        active=slots.alpha > 0.0,
        trainable=trainable,
        multiplies=slots.algorithm == Algorithm.MULTIPLY,
        gated=gated,
        gate_trainable=trainable & gated & slots.has_gate,
    )


class Learning(NamedTuple):
    """Where what a pass learns of one kind in one slot belongs.

    `slope` [N, P] are the gradients of a batch, `grad` [N, P] those rows of the slab's gradients; `running` [N, Q] are
    the statistics that the pass moves, `buffers` [N, Q] those of the slab. `trained` and `moved` [N] mark the rows that
    take them.
    """

    slope: Tensor
    grad: Tensor
    running: Tensor
    buffers: Tensor
    trained: Tensor
    moved: Tensor

    def take_gradient(self) -> None:
        """Hand the gradients of the last batch to the rows that learn."""
        put_where(self.trained, self.slope, self.grad)

    def keep_buffers(self) -> None:
        """Write the statistics that moved back into the population."""
        put_where(self.moved, self.running, self.buffers)


class Candidate(NamedTuple):
    """One kind of module in one slot of all hosts; `own` [N] marks the hosts whose seed (or gate) it is."""

    rows: Rows
    own: Tensor
    learning: Learning | None


@final
@dataclass(frozen=True)
class StaticSlot:
    """One slot of all hosts, for one pass."""

    seeds: tuple[Candidate, ...]
    gate: Candidate
    ways: Ways
    own: list[Tensor]
    """`Candidate.own` of each seed, shaped as `ways`."""

    def __call__(self, h: Tensor, num_hosts: int) -> Tensor:
        """Features [B * N, ...] of all hosts after the slot."""
        h_BN = h.unflatten(0, (-1, num_hosts))
        seen = h.detach()
        deltas = [seed.rows(seen).to(h.dtype).unflatten(0, (-1, num_hosts)) for seed in self.seeds]
        gate = self.gate.rows(seen).to(h.dtype).unflatten(0, (-1, num_hosts))
        return join(h_BN, select(deltas, self.own), gate, self.ways).flatten(0, 1)

    def candidates(self) -> tuple[Candidate, ...]:
        """Everything that runs."""
        return (*self.seeds, self.gate)


class Slopes(NamedTuple):
    """Gradients of all rows of the slabs of seeds and gates, zero where nothing is learned."""

    seeds: Float[Tensor, "R P"]
    gates: Float[Tensor, "R P"]


def static_slots(
    population: Population, stacked_modules: StackedModules, masks: SeedMasks, grads: Slopes | None
) -> dict[str, StaticSlot]:
    """Every slot by its id; `grads` in a train pass."""
    p, found = population, {}
    for s, point in enumerate(p.points):
        seeds = tuple(
            _candidate(p, p.seeds, stacked_modules.seeds[channels, index], s, masks, index, grads and grads.seeds)
            for channels, index in p.seed_kinds
            if channels == point.channels
        )
        gate = _candidate(p, p.gates, stacked_modules.gates[point.channels], s, masks, None, grads and grads.gates)
        lifted = [
            _lift(mask[:, s]) for mask in (masks.active, masks.trainable, masks.multiplies, masks.gated, masks.alpha)
        ]
        found[point.slot_id] = StaticSlot(seeds, gate, Ways(*lifted), [_lift(seed.own) for seed in seeds])
    return found


def _lift(mask_N: Tensor) -> Tensor:
    return mask_N.view(-1, 1, 1, 1)


def _candidate(
    population: Population,
    slab: Slab,
    stacked: StackedTemplate,
    s: int,
    masks: SeedMasks,
    index: int | None,
    grad: Tensor | None,
) -> Candidate:
    """One kind of seed, or the gate (`index` None), in slot `s`."""
    rows = slice(s, None, population.num_slots)
    params, buffers = slab.params[rows, : stacked.parameters.total], slab.buffers[rows, : stacked.buffers.total]
    own = masks.gated[:, s] if index is None else masks.blueprint[:, s].eq(index)
    draws = population.draws(slice(None), s) if stacked.dropouts else None
    if grad is None:
        return Candidate(Rows(stacked, stacked.views(params), stacked.buffer_views(buffers)), own, None)
    learning = Learning(
        slope=torch.zeros_like(params),
        grad=grad[rows, : stacked.parameters.total],
        running=buffers.clone(),
        buffers=buffers,
        trained=own & (masks.gate_trainable if index is None else masks.trainable)[:, s],
        moved=own & (masks.trainable | masks.active)[:, s],
    )
    leaves = tuple(view.requires_grad_() for view in stacked.views(params))
    run = Rows(stacked, leaves, stacked.buffer_views(learning.running), stacked.views(learning.slope), draws)
    return Candidate(run, own, learning)
