"""The rulebook: what an operation does, and what a tick does. Pure functions on [N, S].

One control step, after the measurements are in:

    apply_ops   the sampled op of each host, if it is legal and its gate agrees
    tick        clocks, alpha, scheduled prunes, cooldown, gates that open by themselves; the only writer of clocks
    feedback    what the controller will be told in the next step

Everything is a mask over hosts and slots; nothing here knows networks, optimizers or rewards.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina import alpha, gates
from esper.kasmina.config import LifecycleConfig
from esper.kasmina.guards import advance_active_seed, at_target, in_stages, resolve_target_slot
from esper.kasmina.slot_fields import release, select, vacate
from esper.leyline.actions import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGETS,
    FIRST_RAMP_STEEPNESS,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_TICKS,
    Head,
    LifecycleOp,
)
from esper.leyline.messages import GateReadings, HostState, SlotState, Transitions
from esper.leyline.record import record, replace
from esper.leyline.stages import Algorithm, AlphaMode, Cause, SeedStage

_S = SeedStage
_FULL = 1.0 - 1e-6


@record
class SeedCosts:
    """What a seed would add: parameters by slot and blueprint, and of a gate by slot; which may be chosen at all."""

    seed_params: Int[Tensor, "S P"]
    gate_params: Int[Tensor, " S"]
    selectable: Bool[Tensor, " P"]


@record
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


@record
class TickEffects:
    """What the tick did. `auto_pruned` counts seeds lost without a PRUNE request."""

    released: Bool[Tensor, "N S"]
    advanced: Bool[Tensor, "N S"]
    auto_pruned: Int[Tensor, " N"]
    transitions: Transitions
    readings: GateReadings


@lru_cache(maxsize=64)
def _values(values: tuple[float | int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _look_up(values: tuple[float | int, ...], index: Tensor) -> Tensor:
    """Value of each index, as a column [N, 1]."""
    return _values(values, index.device)[index][:, None]


def transition(
    slots: SlotState, moved: Bool[Tensor, "N S"], to_stage: Int[Tensor, "N S"], val_acc: Float[Tensor, " N"]
) -> SlotState:
    """Move the marked slots to `to_stage`; their clocks restart. Entry effects are the caller's."""
    return select(
        moved,
        {
            "prev_stage": slots.stage,
            "prev_epochs": slots.epochs_in_stage,
            "stage": to_stage,
            "epochs_in_stage": 0,
            "acc_at_stage_start": val_acc[:, None],
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
    """Execute each host's sampled op in step `t`.

    Hosts with `active` False (rolled back in this step) execute nothing. An op that is illegal or refused by its gate
    changes nothing.
    """
    target, valid = resolve_target_slot(actions, legal, slots.has_gate)
    valid = valid & active
    op = actions[:, Head.OP]
    here = at_target(target, slots.stage.shape[1]) & valid[:, None]

    def aims(which: LifecycleOp) -> Tensor:
        return here & (op == which)[:, None]

    germinated = aims(LifecycleOp.GERMINATE) & costs.selectable[actions[:, Head.BLUEPRINT]][:, None]
    g5_asked = aims(LifecycleOp.FOSSILIZE)
    g5 = gates.gate_5(slots, t, config)
    fossilized = g5_asked & g5.passed
    pruning = aims(LifecycleOp.PRUNE)
    ticks = _look_up(ALPHA_SPEED_TICKS, actions[:, Head.ALPHA_SPEED])
    pruned_now = pruning & ((ticks == 0) | (slots.alpha == 0.0))
    retuned = aims(LifecycleOp.SET_ALPHA_TARGET)
    refused = (g5_asked & ~fossilized) | (aims(LifecycleOp.GERMINATE) & ~germinated)

    before = slots.stage
    slots = _set_algorithm(slots, retuned, actions)
    slots = _move_by_op(slots, hosts.val_acc, germinated, pruned_now, fossilized, pruning, retuned, actions)
    slots = _germinate(slots, hosts, germinated, actions, costs)
    slots = release(slots, pruned_now)
    hosts = _count(hosts, slots, germinated, pruned_now, fossilized)
    changed = slots.stage != before
    effects = OpEffects(
        target=target,
        success=valid & ~refused.any(dim=1),
        requested=advance_active_seed(slots, target, valid & (op == LifecycleOp.ADVANCE)),
        germinated=germinated,
        released=pruned_now,
        fossilized=fossilized,
        transitions=Transitions(from_stage=before, to_stage=slots.stage, cause=changed * int(Cause.OP)),
        g5_asked=g5_asked,
        g5=g5,
    )
    return slots, hosts, effects


def _set_algorithm(slots: SlotState, retuned_NS: Tensor, actions_N8: Tensor) -> SlotState:
    wanted = _look_up(STYLE_ALGORITHM, actions_N8[:, Head.STYLE])
    return replace(slots, algorithm=torch.where(retuned_NS, wanted, slots.algorithm))


def _move_by_op(
    slots: SlotState,
    val_acc_N: Tensor,
    germinated_NS: Tensor,
    pruned_now_NS: Tensor,
    fossilized_NS: Tensor,
    pruning_NS: Tensor,
    retuned_NS: Tensor,
    actions_N8: Tensor,
) -> SlotState:
    """Stage changes of all ops, then the ramps that SET_ALPHA_TARGET and a scheduled PRUNE start."""
    holding = slots.stage == _S.HOLDING
    target = _look_up(ALPHA_TARGETS, actions_N8[:, Head.ALPHA_TARGET])
    scheduled = pruning_NS & ~pruned_now_NS
    lowered = retuned_NS & ~(holding & (target >= _FULL))  # HOLDING at full target: only the algorithm changes
    ramps = scheduled | lowered
    to_stage = torch.where(germinated_NS, int(_S.GERMINATED), int(_S.BLENDING))
    to_stage = torch.where(pruned_now_NS, int(_S.PRUNED), to_stage)
    to_stage = torch.where(fossilized_NS, int(_S.FOSSILIZED), to_stage)
    moved = germinated_NS | pruned_now_NS | fossilized_NS | (ramps & holding)
    slots = transition(slots, moved, to_stage, val_acc_N)
    return alpha.retarget(
        slots,
        ramps,
        target=torch.where(scheduled, 0.0, target),
        ticks=_look_up(ALPHA_SPEED_TICKS, actions_N8[:, Head.ALPHA_SPEED]),
        curve=_look_up(ALPHA_CURVES, actions_N8[:, Head.ALPHA_CURVE]),
        steepness=_look_up(ALPHA_CURVE_STEEPNESS, actions_N8[:, Head.ALPHA_CURVE]),
    )


def _germinate(slots: SlotState, hosts: HostState, where_NS: Tensor, actions_N8: Tensor, costs: SeedCosts) -> SlotState:
    """Entry fields of a new seed. Its slot was DORMANT, so whatever is not named here is empty already."""
    blueprint, style = actions_N8[:, Head.BLUEPRINT], actions_N8[:, Head.STYLE]
    algorithm = _look_up(STYLE_ALGORITHM, style)
    curve = _look_up(STYLE_CURVE, style)
    gated = (algorithm == Algorithm.GATE).expand_as(where_NS)
    params = costs.seed_params.t()[blueprint] + costs.gate_params * gated
    return select(
        where_NS,
        {
            # the step of the germination already carries the potential of GERMINATED
            "prev_stage": int(_S.GERMINATED),
            "prev_epochs": 0,
            "age": 0,
            "serial": hosts.n_germinated[:, None],
            "blueprint": blueprint[:, None],
            "algorithm": algorithm,
            "has_gate": gated,
            "tempo": _look_up(TEMPO_TICKS, actions_N8[:, Head.TEMPO]),
            "germ_curve": curve,
            "params": params,
            "alpha_target": _look_up(ALPHA_TARGETS, actions_N8[:, Head.ALPHA_TARGET]),
            "alpha_curve": curve,
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
    epochs = torch.where(occupied & ~moved_before, slots.epochs_in_stage + 1, slots.epochs_in_stage)
    stage = slots.stage
    blending = stage == _S.BLENDING
    removing = blending & (slots.alpha_mode == AlphaMode.DOWN) & (slots.alpha_target == 0.0)
    slots = alpha.step(slots, blending & (slots.alpha_mode != AlphaMode.HOLD))

    g2 = gates.gate_2(slots, epochs, hosts.val_acc, config)
    g3 = gates.gate_3(slots, epochs, config)
    removed = removing & (slots.alpha_mode == AlphaMode.HOLD)
    to_training, to_blending, to_holding = _gate_moves(stage, effects.requested, removed, g2, g3, config)
    advanced = to_training | to_blending | to_holding
    embargoed = stage == _S.PRUNED
    resetting = (stage == _S.EMBARGOED) & (epochs >= config.embargo_epochs)
    dormant = stage == _S.RESETTING
    cooling = embargoed | resetting | dormant
    moved = advanced | removed | cooling
    # every move but three goes one stage value up; HOLDING skips the unused 5
    to_stage = torch.where(removed, int(_S.PRUNED), torch.where(dormant, int(_S.DORMANT), stage + 1 + to_holding))

    slots = replace(slots, age=slots.age + occupied, epochs_in_stage=torch.where(moved, slots.epochs_in_stage, epochs))
    slots = transition(slots, moved, to_stage, hosts.val_acc)
    slots = _enter_blending(slots, to_blending, hosts.val_acc)
    slots = vacate(release(slots, removed), dormant)
    hosts = replace(hosts, n_pruned=hosts.n_pruned + removed.sum(dim=1))

    cause = advanced * int(Cause.AUTO) + (advanced & effects.requested) * (int(Cause.ADVANCE) - int(Cause.AUTO))
    cause = cause + removed * int(Cause.SCHEDULED) + cooling * int(Cause.COOLDOWN)
    asked = _asks_gate(stage, effects.requested, config) & ~removed
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


def _gate_moves(
    stage_NS: Tensor,
    requested_NS: Tensor,
    removed_NS: Tensor,
    g2: gates.GateResult,
    g3: gates.GateResult,
    config: LifecycleConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots that pass G1, G2 and G3 in this tick."""
    asks = _asks_gate(stage_NS, requested_NS, config) & ~removed_NS
    return (
        asks & (stage_NS == _S.GERMINATED),
        asks & (stage_NS == _S.TRAINING) & g2.passed,
        asks & (stage_NS == _S.BLENDING) & g3.passed,
    )


def _enter_blending(slots: SlotState, where_NS: Tensor, val_acc_N: Tensor) -> SlotState:
    """TRAINING is over: the first ramp is set up; its first tick is the next step's."""
    slots = select(where_NS, {"acc_at_blending_start": val_acc_N[:, None]}, slots)
    return alpha.retarget(
        slots,
        where_NS,
        target=slots.alpha_target,
        ticks=slots.tempo,
        curve=slots.germ_curve,
        steepness=_values((FIRST_RAMP_STEEPNESS,), where_NS.device)[:, None],
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
    effective = torch.where(success, op, int(LifecycleOp.WAIT))
    hosts = replace(hosts, last_op=op * active, last_success=success)  # WAIT is 0
    return hosts, success, effective
