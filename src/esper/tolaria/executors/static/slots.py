"""Every blueprint runs in every slot of every host, and masks select each host's own.

    slot 0     host 0     host 1     host 2
    grows      conv       norm       -
    runs       conv, attention, norm, ...: every blueprint for all three hosts, and the gate
    own        conv: {0}  norm: {1}  all others: no host

Each blueprint reads all rows of the slab as its own weights. Its outputs for rows of another blueprint, and for empty
rows, are meaningless and are never selected; only its own rows take its gradients and running statistics.

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
from esper.tolaria.executors.fused.slots import Rows, frozen_rows
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.static.blending import BlendMasks, blend_masked, select

_TRAINABLE = frozenset({SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})


@tensor_dataclass
class SeedMasks:
    """What a pass needs of the slots. A gate runs where the algorithm is GATE, and is trained where its seed is."""

    blueprint: Int[Tensor, "N S"]
    alpha: Float[Tensor, "N S"]
    active: Bool[Tensor, "N S"]
    trainable: Bool[Tensor, "N S"]
    multiplies: Bool[Tensor, "N S"]
    gated: Bool[Tensor, "N S"]
    gate_trainable: Bool[Tensor, "N S"]


def seed_masks(slots: SlotState) -> SeedMasks:
    """`trained_mask` and `blend_order` of `running_seeds`, on the device."""
    trainable = in_stages(slots.stage, _TRAINABLE) & (slots.alpha_mode != AlphaMode.DOWN)
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


class SlabUpdate(NamedTuple):
    """The masked writes of a train pass into the rows of one kind in one slot.

    `batch_grad` [N, P] are the gradients of a batch; rows marked by `trained` [N] take them into `grad` [N, P], which
    are gradients of the slab. `running` [N, Q] are the running statistics of the pass; rows marked by `moved` [N] take
    them into `buffers` [N, Q] of the slab.
    """

    batch_grad: Tensor
    grad: Tensor
    running: Tensor
    buffers: Tensor
    trained: Tensor
    moved: Tensor

    def write_grad(self) -> None:
        """After each batch."""
        put_where(self.trained, self.batch_grad, self.grad)

    def write_buffers(self) -> None:
        """After the last batch."""
        put_where(self.moved, self.running, self.buffers)


class Candidate(NamedTuple):
    """One kind of module in one slot of all hosts; `own` [N] marks the hosts whose seed (or gate) it is."""

    rows: Rows
    own: Tensor
    update: SlabUpdate | None


@final
@dataclass(frozen=True)
class StaticSlot:
    """One slot of all hosts, for one pass; `own` is `Candidate.own` of each seed, shaped as `masks`."""

    seeds: tuple[Candidate, ...]
    gate: Candidate
    masks: BlendMasks
    own: list[Tensor]

    def __call__(self, h: Tensor, num_hosts: int) -> Tensor:
        """Features [B * N, ...] of all hosts after the slot."""
        h_BN, x = h.unflatten(0, (-1, num_hosts)), h.detach()
        *deltas, gate = (c.rows(x).to(h.dtype).unflatten(0, (-1, num_hosts)) for c in self.candidates())
        return blend_masked(h_BN, select(deltas, self.own), gate, self.masks).flatten(0, 1)

    def candidates(self) -> tuple[Candidate, ...]:
        """Everything that runs; the gate is last."""
        return (*self.seeds, self.gate)


def static_slots(
    population: Population,
    stacked_modules: StackedModules,
    masks: SeedMasks,
    grads: tuple[Tensor, Tensor] | None,
) -> dict[str, StaticSlot]:
    """Every slot by its id; in a train pass `grads` are the gradients [R, P] of the slabs of seeds and gates."""
    p, found = population, {}
    seed_grad, gate_grad = grads or (None, None)
    for s, point in enumerate(p.points):
        seeds = tuple(
            _candidate(p, p.seeds, stacked_modules.seeds[channels, index], s, masks, index, seed_grad)
            for channels, index in p.seed_kinds
            if channels == point.channels
        )
        gate = _candidate(p, p.gates, stacked_modules.gates[point.channels], s, masks, None, gate_grad)
        lifted = (getattr(masks, name)[:, s].view(-1, 1, 1, 1) for name in BlendMasks._fields)
        own = [seed.own.view(-1, 1, 1, 1) for seed in seeds]
        found[point.slot_id] = StaticSlot(seeds, gate, BlendMasks(*lifted), own)
    return found


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
    if grad is None:
        return Candidate(frozen_rows(stacked, params, buffers), own, None)
    update = SlabUpdate(
        batch_grad=torch.zeros_like(params),
        grad=grad[rows, : stacked.parameters.total],
        running=buffers.clone(),
        buffers=buffers,
        trained=own & (masks.gate_trainable if index is None else masks.trainable)[:, s],
        moved=own & (masks.trainable | masks.active)[:, s],
    )
    leaves = tuple(view.requires_grad_() for view in stacked.views(params))
    draws = population.draws(slice(None), s) if stacked.dropouts else None
    run = Rows(stacked, leaves, stacked.buffer_views(update.running), stacked.views(update.batch_grad), draws)
    return Candidate(run, own, update)
