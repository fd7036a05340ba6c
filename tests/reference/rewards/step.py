"""One reward step with memory in plain floats, one host at a time: the definition `reward_step` is held to.

Order: occupancy and alpha movement, reward of the target slot, then terms that depend on the past.
"""

import math
from dataclasses import dataclass, field, replace

from esper.leyline.lifecycle import BLENDED, GROWING, HAS_MODULE, STAGE_POTENTIAL, LifecycleOp, SeedStage
from esper.simic.rewards.reward import CONTRIBUTION_MODES, HINDSIGHT_SCALE
from esper.simic.rewards.reward_config import GAMMA, RewardConfig
from reference.rewards.modes import reward_of_row
from reference.rewards.row import NAN, DeferredPool, HostRow, RowReward, Terms, ok

_YOUNG = (SeedStage.GERMINATED, SeedStage.TRAINING)


@dataclass(frozen=True, kw_only=True)
class SlotRow:
    """One slot before the op; `contribution` and `interactions` are NaN where not measured in this step."""

    stage: int = 1
    prev_stage: int = 1
    epochs_in_stage: int = 0
    prev_epochs: int = 0
    age: int = 0
    alpha: float = 0.0
    params: int = 0
    acc_at_germination: float = NAN
    acc_at_stage_start: float = NAN
    contribution: float = NAN
    interaction_sum: float = NAN
    interactions: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """One host in one step: what it measured, the op, and what became of it."""

    epoch: int
    max_epochs: int
    op: int
    target: int
    success: bool = True
    auto_pruned: int = 0
    val_acc: float
    prev_val_acc: float = NAN
    val_loss: float = NAN
    prev_val_loss: float = NAN
    acc_hist: tuple[float, ...] = ()
    committed_acc: float = NAN
    cf_total: float = NAN
    host_params: int = 0
    compute_of_seeds: float = 0.0
    n_contributing: int = 0
    slots: tuple[SlotRow, ...]


@dataclass(kw_only=True)
class SlotMemory:
    """What is remembered of one slot; `ledger` maps a step to the help the slot gave in it."""

    escrow: float = 0.0
    ledger: dict[int, float] = field(default_factory=dict)
    deferred_scale: float = 0.0
    prev_alpha: float = 0.0
    prev_params: int = 0


@dataclass(kw_only=True)
class HostMemory:
    """What is remembered of one host."""

    slots: list[SlotMemory]
    potential: float = 0.0
    potential_before: float = 0.0


def step_of_host(x: HostStep, memory: HostMemory, w: RewardConfig) -> RowReward:
    """Reward one step of one host; updates `memory` in place."""
    op = x.op if x.success else int(LifecycleOp.WAIT)
    row = row_of_step(x, memory, w, op)
    output = reward_of_row(row, w)
    terms: Terms = dict(output.terms)
    for slot, memo in zip(x.slots, memory.slots, strict=True):
        alive = slot.stage in HAS_MODULE
        memo.prev_alpha = slot.alpha if alive else 0.0
        memo.prev_params = slot.params if alive else 0
    if w.mode == "escrow":
        memory.slots[x.target].escrow = output.escrow_next
        for slot, memo in zip(x.slots, memory.slots, strict=True):
            memo.escrow *= slot.stage in HAS_MODULE
        if row.last_step:
            terms["escrow_forfeit"] = -sum(
                memo.escrow for slot, memo in zip(x.slots, memory.slots, strict=True) if slot.stage in GROWING
            )
    if w.mode in CONTRIBUTION_MODES:
        terms["auto_prune"] = w.auto_prune_penalty * x.auto_pruned
        terms["hindsight"] = hindsight(x, memory, w, op)
        if row.last_step and not w.disable_pbrs:
            terms["germination_refund"] = -refund(x, w, op)
    if output.deferred_opened > 0:
        memory.slots[x.target].deferred_scale = output.deferred_opened
    memory.potential_before, memory.potential = memory.potential, output.potential
    return replace(output, terms=terms)


def row_of_step(x: HostStep, memory: HostMemory, w: RewardConfig, op: int) -> HostRow:
    """The row of the target slot."""
    slot = x.slots[x.target]
    live = [s for s in x.slots if s.stage in HAS_MODULE]
    known = [a for a in x.acc_hist[-w.escrow_stable_window :] if ok(a)]
    delta, loss_delta = x.val_acc - x.prev_val_acc, x.val_loss - x.prev_val_loss
    return HostRow(
        action=op,
        seed_contribution=slot.contribution,
        val_acc=x.val_acc,
        acc_delta=delta if ok(delta) else 0.0,
        has_seed=slot.stage in HAS_MODULE,
        stage=slot.stage,
        total_improvement=x.val_acc - slot.acc_at_germination,
        epochs_in_stage=slot.epochs_in_stage,
        seed_age=slot.age,
        previous_stage=slot.prev_stage,
        previous_epochs=slot.prev_epochs,
        epoch=x.epoch,
        max_epochs=x.max_epochs,
        counterfactual_improvement=x.cf_total,
        stage_improvement=x.val_acc - slot.acc_at_stage_start,
        interaction_sum=slot.interaction_sum,
        stable_val_acc=min([x.val_acc, *known]),
        escrow_credit=memory.slots[x.target].escrow,
        total_params=float(x.host_params + sum(s.params for s in live)),
        host_params=float(x.host_params),
        effective_seed_params=sum(
            (w.base_slot_rent_ratio * x.host_params + s.alpha * s.params for s in live if s.stage in BLENDED), start=0.0
        ),
        alpha_delta_sq_sum=alpha_movement(x, memory, w),
        num_active=sum(s.stage in GROWING for s in live),
        num_fossilized=sum(s.stage == SeedStage.FOSSILIZED for s in live),
        num_contributing=x.n_contributing,
        committed_acc=x.committed_acc,
        fossilized_params=float(sum(s.params for s in live if s.stage == SeedStage.FOSSILIZED)),
        compute=1.0 + x.compute_of_seeds / x.max_epochs,
        deferred_pools=tuple(
            DeferredPool(scale=memo.deferred_scale, contribution=s.contribution)
            for s, memo in zip(x.slots, memory.slots, strict=True)
        ),
        val_loss=x.val_loss,
        loss_delta=loss_delta if ok(loss_delta) else 0.0,
        potential_prev=memory.potential,
    )


def alpha_movement(x: HostStep, memory: HostMemory, w: RewardConfig) -> float:
    """How far alpha moved since the last step, weighted by the parameters that were there."""
    moved = 0.0
    for slot, memo in zip(x.slots, memory.slots, strict=True):
        alpha = slot.alpha if slot.stage in HAS_MODULE else 0.0
        moved += (alpha - memo.prev_alpha) ** 2 * memo.prev_params
    return moved / max(x.host_params, w.rent_host_params_floor) if x.host_params > 0 else 0.0


def hindsight(x: HostStep, memory: HostMemory, w: RewardConfig, op: int) -> float:
    """Write the ledgers of this step; thank a seed that is fossilized for the help it gave."""
    for slot, memo in zip(x.slots, memory.slots, strict=True):
        if slot.stage in HAS_MODULE:
            memo.ledger[x.epoch] = sum((max(i, 0.0) for i in slot.interactions if ok(i)), start=0.0)
        else:
            memo.ledger.clear()
    if op != LifecycleOp.FOSSILIZE:
        return 0.0
    u, ledger = x.slots[x.target].contribution, memory.slots[x.target].ledger
    credit = 0.0
    if u > 0:
        for step, help_given in ledger.items():
            credit += w.hindsight_weight * math.tanh(HINDSIGHT_SCALE * help_given * u) * GAMMA ** (x.epoch - step)
    ledger.clear()
    return min(w.hindsight_cap, credit)


def refund(x: HostStep, w: RewardConfig, op: int) -> float:
    """Potential that was lent at germination to seeds that never came to be blended."""
    lent = w.pbrs_weight * STAGE_POTENTIAL[SeedStage.GERMINATED]
    pruned = x.target if op == LifecycleOp.PRUNE else -1
    young = [slot for index, slot in enumerate(x.slots) if slot.stage in _YOUNG and index != pruned]
    return sum((lent * GAMMA ** (1 - slot.age) for slot in young), start=0.0)
