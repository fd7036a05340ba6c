"""The rulebook: what an operation does, and what a tick does. Pure functions on [N, S].

One control step, after the measurements are in:

    apply_ops   the sampled op of each host, if it is legal and its gate agrees
    tick        clocks, alpha, scheduled prunes, cooldown, gates that open by themselves; the only writer of clocks
    feedback    what the controller will be told in the next step

Everything is a mask over hosts and slots; nothing here knows networks, optimizers or rewards.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules import alpha, gates
from esper.kasmina.rules.config import LifecycleConfig
from esper.kasmina.rules.guards import advance_active_seed, at_target, in_stages, numbers, resolve_target_slot
from esper.kasmina.rules.op_parameters import OpParameters, op_parameters
from esper.kasmina.rules.slot_fields import release, select, vacate
from esper.leyline.actions import (
    FIRST_RAMP_STEEPNESS,
    NUM_OPS,
    Head,
    LifecycleOp,
)
from esper.leyline.messages import GateReadings, HostState, SlotState, Transitions
from esper.leyline.stages import Algorithm, AlphaMode, Cause, SeedStage
from esper.leyline.tensor_dataclass import replace, tensor_dataclass

_S = SeedStage
_FULL = 1.0 - 1e-6


@tensor_dataclass
class SeedCosts:
    """What a seed would add: parameters by slot and blueprint, and of a gate by slot; which may be chosen at all."""

    seed_params: Int[Tensor, "S P"]
    gate_params: Int[Tensor, " S"]
    selectable: Bool[Tensor, " P"]


@tensor_dataclass
class OpEffects:
    """What the ops did. `success` is the op's own; ADVANCE is decided by the tick (`requested`)."""

    target: Int[Tensor, " N"]
    success: Bool[Tensor, " N"]
    requested: Bool[Tensor, "N S"]
    germinated: Bool[Tensor, "N S"]
    released: Bool[Tensor, "N S"]
    fossilized: Bool[Tensor, "N S"]
    transitions: Transitions
    g5_asked: Bool[Tensor, "N S"]
    g5: gates.GateResult


@tensor_dataclass
class TickEffects:
    """What the tick did. `auto_pruned` counts seeds lost without a PRUNE request."""

    released: Bool[Tensor, "N S"]
    advanced: Bool[Tensor, "N S"]
    auto_pruned: Int[Tensor, " N"]
    transitions: Transitions
    readings: GateReadings


def transition(
    slots: SlotState,
    moved: Bool[Tensor, "N S"],
    to_stage: int | Int[Tensor, "N S"],
    val_acc: float | Float[Tensor, "N 1"],
) -> SlotState:
    """Move the marked slots to `to_stage`; their clocks restart. Entry effects are the caller's."""
    return select(
        moved,
        {
            "prev_stage": slots.stage,
            "prev_epochs": slots.epochs_in_stage,
            "stage": to_stage,
            "epochs_in_stage": 0,
            "acc_at_stage_start": val_acc,
        },
        slots,
    )


def apply_ops(
    slots: SlotState,
    hosts: HostState,
    actions: Int[Tensor, "N 8"],
    legal: Bool[Tensor, "N 6 S"],
    active: Bool[Tensor, " N"],
    t: int | Int[Tensor, ""],
    costs: SeedCosts,
    config: LifecycleConfig,
) -> tuple[SlotState, HostState, OpEffects]:
    """Execute each host's sampled op in step `t`; what a pruned slot held is forgotten by the tick.

    Hosts with `active` False (rolled back in this step) execute nothing. An op that is illegal or refused by its gate
    changes nothing.
    """
    target, valid = resolve_target_slot(actions, legal, slots.has_gate)
    valid = valid & active
    here = at_target(target, slots.stage.shape[1]) & valid[:, None]
    ops = actions[:, Head.OP, None] == numbers(NUM_OPS, actions.device)
    aimed = (here[:, None] & ops[..., None]).unbind(1)
    chosen = op_parameters(actions)

    germinated = aimed[LifecycleOp.GERMINATE] & costs.selectable[chosen.blueprint]
    g5_asked = aimed[LifecycleOp.FOSSILIZE]
    g5 = gates.gate_5(slots, t, config)
    fossilized = g5_asked & g5.passed
    pruning = aimed[LifecycleOp.PRUNE]
    pruned_now = pruning & ((chosen.ticks == 0) | (slots.alpha == 0.0))
    retuned = aimed[LifecycleOp.SET_ALPHA_TARGET]
    refused = (g5_asked ^ fossilized) | (aimed[LifecycleOp.GERMINATE] ^ germinated)

    before = slots.stage
    slots = _set_algorithm(slots, retuned, chosen)
    slots = _move_by_op(slots, hosts.val_acc, germinated, pruned_now, fossilized, pruning, retuned, chosen)
    slots = _germinate(slots, hosts, germinated, chosen, costs)
    hosts = _count(hosts, slots, germinated, pruned_now, fossilized)
    changed = slots.stage != before
    effects = OpEffects(
        target=target,
        success=valid & ~refused.any(dim=1),
        requested=advance_active_seed(slots, target, valid & (actions[:, Head.OP] == LifecycleOp.ADVANCE)),
        germinated=germinated,
        released=pruned_now,
        fossilized=fossilized,
        transitions=Transitions(from_stage=before, to_stage=slots.stage, cause=changed * int(Cause.OP)),
        g5_asked=g5_asked,
        g5=g5,
    )
    return slots, hosts, effects


def _set_algorithm(slots: SlotState, retuned_NS: Tensor, chosen: OpParameters) -> SlotState:
    return replace(slots, algorithm=torch.where(retuned_NS, chosen.algorithm, slots.algorithm))


def _move_by_op(
    slots: SlotState,
    val_acc_N: Tensor,
    germinated_NS: Tensor,
    pruned_now_NS: Tensor,
    fossilized_NS: Tensor,
    pruning_NS: Tensor,
    retuned_NS: Tensor,
    chosen: OpParameters,
) -> SlotState:
    """Stage changes of all ops, then the ramps that SET_ALPHA_TARGET and a scheduled PRUNE start."""
    holding = slots.stage == _S.HOLDING
    scheduled = pruning_NS ^ pruned_now_NS
    # HOLDING at full target: only the algorithm changes
    ramps = scheduled | (retuned_NS & ~(holding & (chosen.target >= _FULL)))
    to_stage = torch.full_like(slots.stage, int(_S.BLENDING)).masked_fill(germinated_NS, int(_S.GERMINATED))
    to_stage = to_stage.masked_fill(pruned_now_NS, int(_S.PRUNED)).masked_fill(fossilized_NS, int(_S.FOSSILIZED))
    moved = germinated_NS | pruned_now_NS | fossilized_NS | (ramps & holding)
    slots = transition(slots, moved, to_stage, val_acc_N[:, None])
    return alpha.retarget(
        slots,
        ramps,
        target=chosen.target * ~scheduled,
        ticks=chosen.ticks,
        curve=chosen.curve,
        steepness=chosen.steepness,
    )


def _germinate(
    slots: SlotState, hosts: HostState, where_NS: Tensor, chosen: OpParameters, costs: SeedCosts
) -> SlotState:
    """Entry fields of a new seed. Its slot was DORMANT, so whatever is not named here is empty already."""
    gated = (chosen.algorithm == Algorithm.GATE).expand_as(where_NS)
    params = costs.seed_params.t()[chosen.blueprint.squeeze(1)] + costs.gate_params * gated
    return select(
        where_NS,
        {
            # the step of the germination already carries the potential of GERMINATED
            "prev_stage": int(_S.GERMINATED),
            "serial": hosts.n_germinated[:, None],
            "blueprint": chosen.blueprint,
            "algorithm": chosen.algorithm,
            "has_gate": gated,
            "tempo": chosen.tempo,
            "germ_curve": chosen.first_curve,
            "params": params,
            "alpha_target": chosen.target,
            "alpha_curve": chosen.first_curve,
            "acc_at_germination": hosts.val_acc[:, None],
        },
        slots,
    )


def _count(
    hosts: HostState, slots: SlotState, germinated_NS: Tensor, pruned_NS: Tensor, fossilized_NS: Tensor
) -> HostState:
    contributing = fossilized_NS & (slots.contribution >= 1.0)
    return replace(
        hosts,
        n_germinated=hosts.n_germinated + germinated_NS.sum(dim=1),
        n_pruned=hosts.n_pruned + pruned_NS.sum(dim=1),
        n_fossilized=hosts.n_fossilized + fossilized_NS.sum(dim=1),
        n_contributing=hosts.n_contributing + contributing.sum(dim=1),
    )


def tick(
    slots: SlotState,
    hosts: HostState,
    effects: OpEffects,
    rolled_back: Bool[Tensor, "N S"],
    config: LifecycleConfig,
) -> tuple[SlotState, HostState, TickEffects]:
    """End the step: clocks advance, ramps move, and each slot makes at most one transition.

    `rolled_back` marks slots that a rollback pruned in this step. Slots that changed their stage by op or rollback
    start counting in the next step.
    """
    moved_before = (effects.transitions.cause > 0) | rolled_back
    occupied = slots.stage != _S.DORMANT
    epochs = slots.epochs_in_stage + (occupied & ~moved_before)
    stage = slots.stage
    blending = stage == _S.BLENDING
    removing = blending & (slots.alpha_mode == AlphaMode.DOWN) & (slots.alpha_target == 0.0)
    slots = alpha.step(slots, blending & (slots.alpha_mode != AlphaMode.HOLD))

    g2 = gates.gate_2(slots, epochs, hosts.val_acc, config)
    g3 = gates.gate_3(slots, epochs, config)
    removed = removing & (slots.alpha_mode == AlphaMode.HOLD)
    asked = _asks_gate(stage, effects.requested, config) & ~removed
    to_training = asked & (stage == _S.GERMINATED)
    to_blending = asked & (stage == _S.TRAINING) & g2.passed
    to_holding = asked & blending & g3.passed
    advanced = to_training | to_blending | to_holding
    dormant = stage == _S.RESETTING
    cooling = (stage == _S.PRUNED) | ((stage == _S.EMBARGOED) & (epochs >= config.embargo_epochs)) | dormant
    moved = advanced | removed | cooling
    # every move but two goes one stage value up; HOLDING skips the unused 5
    to_stage = (stage + 1 + to_holding).masked_fill(removed, int(_S.PRUNED)).masked_fill(dormant, int(_S.DORMANT))

    slots = replace(slots, age=slots.age + occupied, epochs_in_stage=torch.where(moved, slots.epochs_in_stage, epochs))
    slots = transition(slots, moved, to_stage, hosts.val_acc[:, None])
    slots = _enter_blending(slots, to_blending, hosts.val_acc)
    slots = vacate(release(slots, effects.released | removed), dormant)
    hosts = replace(hosts, n_pruned=hosts.n_pruned + removed.sum(dim=1))

    cause = advanced * int(Cause.AUTO) + (advanced & effects.requested) * (int(Cause.ADVANCE) - int(Cause.AUTO))
    cause = cause + removed * int(Cause.SCHEDULED) + cooling * int(Cause.COOLDOWN)
    return (
        slots,
        hosts,
        TickEffects(
            released=removed,
            advanced=advanced,
            auto_pruned=torch.zeros_like(hosts.n_pruned),  # in this rulebook every removal was requested
            transitions=Transitions(from_stage=stage, to_stage=slots.stage, cause=cause),
            readings=gates.readings_of(stage, asked, g2, g3, effects.g5_asked, effects.g5),
        ),
    )


def _asks_gate(stage_NS: Tensor, requested_NS: Tensor, config: LifecycleConfig) -> Tensor:
    """Slots in a stage with a gate that opens by itself, or whose ADVANCE asks for it."""
    gated = ((_S.GERMINATED, config.auto_g1), (_S.TRAINING, config.auto_g2), (_S.BLENDING, config.auto_g3))
    by_itself = frozenset(stage for stage, auto in gated if auto)
    return in_stages(stage_NS, by_itself) | requested_NS


def _enter_blending(slots: SlotState, where_NS: Tensor, val_acc_N: Tensor) -> SlotState:
    """TRAINING is over: the first ramp goes up from 0 to the target that was given with the seed.

    Its first tick is the next step's. Alpha, its start and the ticks that are done have been 0 since the germination.
    """
    return select(
        where_NS,
        {
            "acc_at_blending_start": val_acc_N[:, None],
            "alpha_mode": int(AlphaMode.UP),
            "alpha_curve": slots.germ_curve,
            "alpha_steepness": FIRST_RAMP_STEEPNESS,
            "alpha_total": slots.tempo,
        },
        slots,
    )


def feedback(
    hosts: HostState,
    actions: Int[Tensor, "N 8"],
    ops: OpEffects,
    ticks: TickEffects,
    active: Bool[Tensor, " N"],
) -> tuple[HostState, Bool[Tensor, " N"], Int[Tensor, " N"]]:
    """Tell the hosts what became of their op.

    Returns:
        The hosts; `success` [N], True where the op took effect; the effective op [N], WAIT where it did not.
    """
    op = actions[:, Head.OP]
    opened = (ops.requested & ticks.advanced).any(dim=1)
    success = ops.success & ((op != LifecycleOp.ADVANCE) | opened)
    effective = op * success  # WAIT is 0
    hosts = replace(hosts, last_op=op * active, last_success=success)
    return hosts, success, effective
