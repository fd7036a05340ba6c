"""The rules of the lifecycle: what an operation, a tick and a rollback do to slots. Pure functions on [N, S].

    rollback    a host in panic goes back to its snapshot, before the measurements are written
    apply_ops   the sampled op of each host, if it is legal and its gate passes
    tick        clocks, alpha, scheduled prunes, cooldown, automatic gates; the only writer of clocks
    feedback    success and effective op, for the next observation
    with_fossils  an episode begins with fossilized seeds

Every decision is a mask over hosts and slots; networks, optimizers and rewards are unknown here.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules import conditions
from esper.kasmina.rules.conditions import LifecycleConfig, at_target, constant, in_stages, resolve_target_slot
from esper.kasmina.rules.slot_fields import release, select, vacate
from esper.leyline.lifecycle import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGETS,
    FIRST_RAMP_STEEPNESS,
    GROWING,
    NUM_OPS,
    NUM_STAGE_VALUES,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_TICKS,
    Algorithm,
    AlphaCurve,
    AlphaMode,
    Cause,
    Head,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.messages import GateReadings, HostState, SeedCosts, SlotState, Transitions
from esper.leyline.tensor_dataclass import numbers, replace, tensor_dataclass, where

_MIN_STEEPNESS = 0.1


def ramp(x: Float[Tensor, "*b"], curve: Int[Tensor, "*b"], steepness: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Share of a ramp that is completed after the share `x` of its ticks, by curve.

    LINEAR x; COSINE (1 - cos pi x)/2; SIGMOID (s(k(x-1/2)) - s(-k/2)) / (s(k/2) - s(-k/2)) with the logistic s.
    """
    half = torch.clamp(steepness, min=_MIN_STEEPNESS) * 0.5
    low = torch.sigmoid(-half)
    sigmoid = (torch.sigmoid(half * (2.0 * x - 1.0)) - low) / (torch.sigmoid(half) - low)
    cosine = 0.5 - 0.5 * torch.cos(torch.pi * x)
    return torch.where(curve == AlphaCurve.SIGMOID, sigmoid, torch.where(curve == AlphaCurve.COSINE, cosine, x))


def retarget(
    slots: SlotState,
    where: Bool[Tensor, "N S"],
    target: Float[Tensor, "#N #S"],
    ticks: Int[Tensor, "#N #S"],
    curve: Int[Tensor, "#N #S"],
    steepness: Float[Tensor, "#N #S"],
) -> SlotState:
    """Start a ramp in the marked slots, which are in HOLD (the guards require it).

    With 0 ticks alpha becomes the target at once. A target equal to alpha leaves the slot in HOLD.
    """
    gradual = ticks > 0
    moves = gradual & (target != slots.alpha)
    direction = int(AlphaMode.UP) + (target < slots.alpha)  # DOWN is UP + 1
    return select(
        where,
        {
            "alpha_start": slots.alpha,
            "alpha": torch.where(gradual, slots.alpha, target),
            "alpha_target": target,
            "alpha_mode": direction * moves,  # HOLD is 0
            "alpha_curve": curve,
            "alpha_steepness": steepness,
            "alpha_total": ticks * moves,
            "alpha_done": 0,
        },
        slots,
    )


def step_ramps(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
    """One tick of the ramps in the marked slots."""
    done = slots.alpha_done + where
    landed = where & (done >= slots.alpha_total)
    share = done / slots.alpha_total.clamp(min=1)
    start, target = slots.alpha_start, slots.alpha_target
    moving = start + (target - start) * ramp(share, slots.alpha_curve, slots.alpha_steepness)
    moving = moving.clamp(torch.minimum(start, target), torch.maximum(start, target))
    alpha = torch.where(landed, target, torch.where(where, moving, slots.alpha))
    mode = slots.alpha_mode.masked_fill(landed, int(AlphaMode.HOLD))
    return replace(slots, alpha=alpha, alpha_done=done, alpha_mode=mode)


class OpParameters(NamedTuple):
    """Columns [N, 1]. `to_stage` is the stage that the op leads to when it takes effect at once."""

    blueprint: Tensor
    algorithm: Tensor
    first_curve: Tensor
    tempo: Tensor
    ticks: Tensor
    curve: Tensor
    to_stage: Tensor
    target: Tensor
    steepness: Tensor


_STAGE_AFTER = {
    LifecycleOp.GERMINATE: SeedStage.GERMINATED,
    LifecycleOp.SET_ALPHA_TARGET: SeedStage.BLENDING,
    LifecycleOp.PRUNE: SeedStage.PRUNED,
    LifecycleOp.FOSSILIZE: SeedStage.FOSSILIZED,
}
_STAGES = tuple(int(_STAGE_AFTER.get(op, SeedStage.UNKNOWN)) for op in LifecycleOp)


def _padded(*tables: Iterable[int | float]) -> tuple[tuple[int | float, ...], ...]:
    """Rows of one length, with zeros at the end of the shorter ones."""
    return tuple(zip(*zip_longest(*tables, fillvalue=0), strict=True))


_TABLES = (
    (
        torch.int64,
        (Head.STYLE, Head.STYLE, Head.TEMPO, Head.ALPHA_SPEED, Head.ALPHA_CURVE, Head.OP),
        _padded(STYLE_ALGORITHM, STYLE_CURVE, TEMPO_TICKS, ALPHA_SPEED_TICKS, ALPHA_CURVES, _STAGES),
    ),
    (torch.float32, (Head.ALPHA_TARGET, Head.ALPHA_CURVE), _padded(ALPHA_TARGETS, ALPHA_CURVE_STEEPNESS)),
)
"""Of the parameters behind the first, in order: their type, the heads that choose them, and the values of each."""


def op_parameters(actions: Int[Tensor, "N 8"]) -> OpParameters:
    """The parameters of each host's op."""
    device, columns = actions.device, [actions[:, Head.BLUEPRINT : Head.BLUEPRINT + 1]]
    for dtype, heads, values in _TABLES:
        chosen = actions.index_select(1, constant(tuple(map(int, heads)), torch.int64, device))
        columns.extend(constant(values, dtype, device)[numbers(len(heads), device), chosen].split(1, dim=1))
    return OpParameters(*columns)


_S = SeedStage
_FULL = 1.0 - 1e-6
_NEXT: dict[int, int] = {
    _S.GERMINATED: _S.TRAINING,
    _S.TRAINING: _S.BLENDING,
    _S.BLENDING: _S.HOLDING,
    _S.PRUNED: _S.EMBARGOED,
    _S.EMBARGOED: _S.RESETTING,
    _S.RESETTING: _S.DORMANT,
}
_AFTER_TICK = tuple(_NEXT.get(stage, stage) for stage in range(NUM_STAGE_VALUES))
"""By stage value: the next stage of a slot that the tick moves, unless its seed is removed."""


@tensor_dataclass
class OpEffects:
    """Effects of the ops. `requested` marks slots with a legal ADVANCE; `tick` decides whether it succeeds."""

    target: Int[Tensor, " N"]
    success: Bool[Tensor, " N"]
    requested: Bool[Tensor, "N S"]
    germinated: Bool[Tensor, "N S"]
    released: Bool[Tensor, "N S"]
    fossilized: Bool[Tensor, "N S"]
    transitions: Transitions
    g5_asked: Bool[Tensor, "N S"]
    g5: conditions.GateResult


@tensor_dataclass
class TickEffects:
    """Effects of the tick."""

    released: Bool[Tensor, "N S"]
    advanced: Bool[Tensor, "N S"]
    transitions: Transitions
    readings: GateReadings


def transition(
    slots: SlotState,
    moved: Bool[Tensor, "N S"],
    to_stage: int | Int[Tensor, "N S"],
    val_acc: float | Float[Tensor, "N 1"],
) -> SlotState:
    """Move the marked slots to `to_stage` and restart their clocks. The caller sets the other fields of the stage."""
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
    """Execute each host's sampled op in step `t`. The tick clears the fields of a pruned slot, after the reward.

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
    g5 = conditions.gate_5(slots, t, config)
    fossilized = g5_asked & g5.passed
    pruned = aimed[LifecycleOp.PRUNE] & ((chosen.ticks == 0) | (slots.alpha == 0.0))
    scheduled = aimed[LifecycleOp.PRUNE] ^ pruned
    retuned = aimed[LifecycleOp.SET_ALPHA_TARGET]
    refused = (g5_asked ^ fossilized) | (aimed[LifecycleOp.GERMINATE] ^ germinated)

    before, val_acc_N1 = slots.stage, hosts.val_acc[:, None]
    slots = select(retuned, {"algorithm": chosen.algorithm}, slots)
    # in HOLDING at full target, SET_ALPHA_TARGET changes the algorithm only
    holding = before == _S.HOLDING
    ramps = scheduled | (retuned & ~(holding & (chosen.target >= _FULL)))
    moved = germinated | pruned | fossilized | (ramps & holding)
    slots = transition(slots, moved, chosen.to_stage.masked_fill(scheduled, int(_S.BLENDING)), val_acc_N1)
    ramp_target = chosen.target.masked_fill(scheduled, 0.0)
    slots = retarget(slots, ramps, ramp_target, chosen.ticks, chosen.curve, chosen.steepness)
    slots = _germinate(slots, hosts.n_germinated, val_acc_N1, germinated, chosen, costs)
    contributing = fossilized & (slots.contribution >= 1.0)
    counted = {"germinated": germinated, "pruned": pruned, "fossilized": fossilized, "contributing": contributing}
    counts = {f"n_{name}": getattr(hosts, f"n_{name}") + marked.sum(dim=1) for name, marked in counted.items()}
    changed = slots.stage != before
    effects = OpEffects(
        target=target,
        success=valid & ~refused.any(dim=1),
        requested=aimed[LifecycleOp.ADVANCE],
        germinated=germinated,
        released=pruned,
        fossilized=fossilized,
        transitions=Transitions(from_stage=before, to_stage=slots.stage, cause=changed * int(Cause.OP)),
        g5_asked=g5_asked,
        g5=g5,
    )
    return slots, replace(hosts, **counts), effects


def _germinate(
    slots: SlotState,
    serial_N: Tensor,
    val_acc_N1: Tensor,
    germinated_NS: Tensor,
    chosen: OpParameters,
    costs: SeedCosts,
) -> SlotState:
    """The fields of a new seed. Its slot was DORMANT, so all other fields are empty already."""
    gated = chosen.algorithm == Algorithm.GATE
    columns = numbers(slots.stage.shape[1], slots.stage.device)
    return select(
        germinated_NS,
        {
            # the reward of this step already counts the potential of GERMINATED
            "prev_stage": int(_S.GERMINATED),
            "serial": serial_N[:, None],
            "blueprint": chosen.blueprint,
            "algorithm": chosen.algorithm,
            "has_gate": gated,
            "tempo": chosen.tempo,
            "germ_curve": chosen.first_curve,
            "params": costs.seed_params[columns, chosen.blueprint] + costs.gate_params * gated,
            "alpha_target": chosen.target,
            "alpha_curve": chosen.first_curve,
            "acc_at_germination": val_acc_N1,
        },
        slots,
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
    stage, val_acc_N1 = slots.stage, hosts.val_acc[:, None]
    occupied = stage != _S.DORMANT
    moved_before = (effects.transitions.cause > 0) | rolled_back
    epochs = slots.epochs_in_stage + (occupied & ~moved_before)
    ramping = (stage == _S.BLENDING) & (slots.alpha_mode != AlphaMode.HOLD)
    slots = step_ramps(slots, ramping)
    removed = ramping & (slots.alpha_mode == AlphaMode.HOLD) & (slots.alpha_target == 0.0)

    asked = (in_stages(stage, config.automatic) | effects.requested) & ~removed
    g2, g3 = conditions.gate_2(slots, epochs, hosts.val_acc, config), conditions.gate_3(slots, epochs, config)
    readings = conditions.readings_of(stage, asked, g2, g3, effects.g5_asked, effects.g5)
    advanced = asked & readings.passed
    cooled = epochs >= constant(_cooldown(config.embargo_epochs), torch.int64, stage.device)[stage]
    moved = advanced | removed | cooled
    to_stage = constant(_AFTER_TICK, torch.int64, stage.device)[stage].masked_fill(removed, int(_S.PRUNED))

    slots = replace(slots, age=slots.age + occupied, epochs_in_stage=torch.where(moved, slots.epochs_in_stage, epochs))
    slots = transition(slots, moved, to_stage, val_acc_N1)
    slots = _start_blending(slots, advanced & (stage == _S.TRAINING), val_acc_N1)
    slots = vacate(release(slots, effects.released | removed), stage == _S.RESETTING)
    hosts = replace(hosts, n_pruned=hosts.n_pruned + removed.sum(dim=1))

    cause = (advanced * int(Cause.AUTO)).masked_fill(advanced & effects.requested, int(Cause.ADVANCE))
    cause = cause.masked_fill(removed, int(Cause.SCHEDULED)).masked_fill(cooled, int(Cause.COOLDOWN))
    ticked = TickEffects(
        released=removed,
        advanced=advanced,
        transitions=Transitions(from_stage=stage, to_stage=slots.stage, cause=cause),
        readings=readings,
    )
    return slots, hosts, ticked


def _cooldown(embargo_epochs: int) -> tuple[int, ...]:
    """Epochs after which a slot in cooldown moves on, by stage value; never reached in the other stages."""
    waits: dict[int, int] = {_S.PRUNED: 0, _S.EMBARGOED: embargo_epochs, _S.RESETTING: 0}
    return tuple(waits.get(stage, 2**31) for stage in range(NUM_STAGE_VALUES))


def _start_blending(slots: SlotState, where_NS: Tensor, val_acc_N1: Tensor) -> SlotState:
    """Start the first ramp, from 0 to the target of the germination; its first tick is the next step's."""
    return select(
        where_NS,
        {
            "acc_at_blending_start": val_acc_N1,
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
    """The result of each host's op.

    Returns:
        The hosts; `success` [N], True where the op took effect; the effective op [N], WAIT where it did not.
    """
    op = actions[:, Head.OP]
    opened = (ops.requested & ticks.advanced).any(dim=1)
    success = ops.success & ((op != LifecycleOp.ADVANCE) | opened)
    effective = op * success  # WAIT is 0
    hosts = replace(hosts, last_op=op * active, last_success=success)
    return hosts, success, effective


def training_cost(slots: SlotState, costs: SeedCosts) -> Float[Tensor, " N"]:
    """FLOPs of a step of training these hosts and their seeds, hidden ones too, in steps of a host without seeds.

    A backward pass counts as two forward passes in all of them, so it cancels.
    """
    columns = numbers(slots.stage.shape[1], slots.stage.device)
    runs = (slots.stage >= _S.TRAINING) & (slots.stage <= _S.FOSSILIZED)
    seeds = costs.seed_flops[columns, slots.blueprint.clamp(min=0)] + costs.gate_flops * slots.has_gate
    return 1.0 + (seeds * runs).sum(dim=1) / costs.host_flops.clamp(min=1)


def with_fossils(
    slots: SlotState,
    hosts: HostState,
    blueprint: Int[torch.Tensor, "N S"],
    algorithm: Int[torch.Tensor, "N S"],
    costs: SeedCosts,
) -> tuple[SlotState, HostState]:
    """Put fossilized seeds into empty slots; `blueprint` is -1 where the slot stays empty."""
    here = blueprint >= 0
    gated = algorithm == Algorithm.GATE
    column = torch.arange(blueprint.shape[1], device=blueprint.device)
    params = costs.seed_params[column, blueprint.clamp(min=0)] + gated * costs.gate_params
    count = here.sum(dim=1)
    slots = select(
        here,
        {
            "stage": int(SeedStage.FOSSILIZED),
            "prev_stage": int(SeedStage.HOLDING),
            "serial": hosts.n_germinated[:, None] + here.cumsum(dim=1) - 1,
            "blueprint": blueprint,
            "algorithm": algorithm,
            "has_gate": gated,
            "params": params,
            "germ_curve": int(AlphaCurve.LINEAR),
            "alpha": 1.0,
            "alpha_target": 1.0,
            "alpha_mode": int(AlphaMode.HOLD),
            "alpha_curve": int(AlphaCurve.LINEAR),
        },
        slots,
    )
    return slots, replace(hosts, n_germinated=hosts.n_germinated + count, n_fossilized=hosts.n_fossilized + count)


_MEASURED = ("val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss", "committed_acc",
             "cf_total")  # fmt: skip
"""Fields of a host that a rollback clears, besides the histories."""


@tensor_dataclass
class FossilMemory:
    """Measurements of seeds at the time of their host's snapshot, which holds the weights that were measured."""

    contribution: Float[Tensor, "N S"]
    contribution_step: Int[Tensor, "N S"]
    contribution_velocity: Float[Tensor, "N S"]
    interaction_sum: Float[Tensor, "N S"]
    boost_received: Float[Tensor, "N S"]


def memory_of(slots: SlotState) -> FossilMemory:
    """The memory of a snapshot that is taken now."""
    return FossilMemory(**{name: getattr(slots, name) for name in FossilMemory.__annotations__})


def remember(memory: FossilMemory, slots: SlotState, taken: Bool[Tensor, "N S"]) -> FossilMemory:
    """`memory` with the present measurements of the marked slots."""
    return where(taken, memory_of(slots), memory)


def rollback(
    slots: SlotState, hosts: HostState, panic: Bool[Tensor, " N"], memory: FossilMemory
) -> tuple[SlotState, HostState, Bool[Tensor, "N S"]]:
    """Prune the growing seeds of the masked hosts and restore the measurements of their fossils from the snapshot.

    The clocks and the alpha of a fossil stay, because only the tick writes clocks. The measurements and histories of
    the host are cleared, and a new segment begins. Slots in cooldown are untouched.

    Returns:
        Slots, hosts, and the slots that were pruned [N, S].
    """
    pruned = in_stages(slots.stage, GROWING) & panic[:, None]
    slots = release(transition(slots, pruned, int(SeedStage.PRUNED), torch.nan), pruned)
    fossil = (slots.stage == SeedStage.FOSSILIZED) & panic[:, None]
    slots = select(fossil, dict(vars(memory)), slots)

    # x + NaN is NaN and x + 0 is x: one call clears all fields
    gone = torch.zeros_like(hosts.val_acc).masked_fill(panic, torch.nan)
    cleared = torch._foreach_add([getattr(hosts, name) for name in _MEASURED], [gone] * len(_MEASURED))
    changes = dict(zip(_MEASURED, cleared, strict=True))
    for name in ("acc_hist", "loss_hist"):
        changes[name] = getattr(hosts, name) + gone[:, None]
    changes["plateau_count"] = hosts.plateau_count * ~panic
    changes["segment"] = hosts.segment + panic
    return slots, replace(hosts, **changes), pruned
