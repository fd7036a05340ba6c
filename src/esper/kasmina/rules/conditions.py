"""Conditions of the rulebook: its settings, quality gates and guards.

Gates that a seed must pass before its next stage:

    G1  GERMINATED -> TRAINING     always
    G2  TRAINING -> BLENDING       trained long enough, gradients healthy (strict: improvement and gradient ratio)
    G3  BLENDING -> HOLDING        alpha has reached 1 (strict: after min_blending_epochs)
    G5  HOLDING -> FOSSILIZED      contribution measured in this step (strict: at least g5_contribution)

A missing measurement fails the check that needs it. All thresholds are inclusive.

Guards: which operation is legal on which slot. No other code decides this.

    op                stage of the slot            alpha_mode   further condition
    WAIT              any                          any
    GERMINATE         DORMANT                      any          room for a seed; sequential: no young seed, no cooldown
    SET_ALPHA_TARGET  BLENDING, HOLDING            HOLD         a gated style only where the seed has a gate network
    PRUNE             GERMINATED..HOLDING          HOLD         age >= min_prune_age
    FOSSILIZE         HOLDING                      HOLD
    ADVANCE           stages whose gate is manual  HOLD, UP
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from esper.leyline.lifecycle import (
    COOLDOWN,
    GROWING,
    HAS_MODULE,
    NUM_STAGE_VALUES,
    STYLE_ALGORITHM,
    Algorithm,
    AlphaMode,
    Head,
    LifecycleOp,
    SeedStage,
    stages_mask,
)
from esper.leyline.messages import GateReadings, SlotState
from esper.leyline.settings import AtLeast0, AtLeast1, check_fields
from esper.leyline.tensor_dataclass import numbers, tensor_dataclass

GATED = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING)
"""The stages in front of G1, G2 and G3."""


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Limits and thresholds of the lifecycle. Epochs are control steps, accuracies percentage points."""

    max_seeds: AtLeast0 | None = None
    """Most live seeds of a host; None means one per slot, 0 means no limit."""
    sequential: bool = True
    """Whether a seed may germinate only while no other slot is GERMINATED, TRAINING or in cooldown."""
    min_prune_age: AtLeast0 = 5
    """Age from which PRUNE is legal, so that a seed has time to show its value."""
    embargo_epochs: AtLeast0 = 5
    """Epochs for which a pruned slot stays EMBARGOED."""
    interaction_limit: Annotated[int, Field(ge=0, le=4)] = 4
    """Most players for which single and pair coalitions are evaluated."""
    shapley_limit: Annotated[int, Field(ge=0, le=6)] = 6
    """Most live seeds for which Shapley values are reported at the end of an episode."""
    measured_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the validation examples on which each step measures; what is kept is measured on all of them."""
    fossils_as_players: bool = False
    """Whether contributions of fossilized seeds are measured too; set by the reward mode."""
    gate_mode: Literal["permissive", "strict"] = "permissive"
    """Strict gates also require improvement, a gradient ratio, blending time and a contribution of 1 pp."""
    auto_g1: bool = True
    auto_g2: bool = True
    auto_g3: bool = True
    """Whether the tick asks the gate; otherwise ADVANCE does."""
    min_training_epochs: AtLeast1 = 10
    min_blending_epochs: AtLeast1 = 10
    g2_health: float = 0.7
    g2_improvement: float = 0.5
    g2_ratio: float = 0.10
    g5_contribution: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "lifecycle")

    @property
    def automatic(self) -> frozenset[SeedStage]:
        """Stages whose gate is asked in each tick, without ADVANCE."""
        gated = zip(GATED, (self.auto_g1, self.auto_g2, self.auto_g3), strict=True)
        return frozenset(stage for stage, automatic in gated if automatic)


class FailedCheck(IntFlag):
    """Bits of `GateReadings.failed_checks`."""

    EPOCHS = 1
    HEALTH_MISSING = 2
    EXPLODING = 4
    HEALTH_LOW = 8
    IMPROVEMENT = 16
    RATIO = 32
    ALPHA = 64
    CONTRIBUTION_MISSING = 128
    CONTRIBUTION_LOW = 256


@tensor_dataclass
class GateResult:
    """Result of one gate for every slot, in whatever stage the slot is."""

    failed: Int[Tensor, "N S"]
    score: Float[Tensor, "N S"]

    @property
    def passed(self) -> Bool[Tensor, "N S"]:
        """No check failed."""
        return self.failed == 0


@lru_cache(maxsize=256)
def constant(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tuple of numbers, or of such tuples, on a device, where it is copied to once."""
    return torch.tensor(values, dtype=dtype, device=device)


def _result(failed: dict[FailedCheck, Tensor], score: Tensor) -> GateResult:
    """The result of a gate from the masks of its failed checks."""
    bits = torch.stack(tuple(failed.values()), dim=-1) * constant(tuple(map(int, failed)), torch.int64, score.device)
    return GateResult(failed=bits.sum(dim=-1), score=score)


def _share(x: Tensor, full: float) -> Tensor:
    """`x / full`, clipped to [0, 1]; 0 where x is missing."""
    return torch.nan_to_num(x / full, nan=0.0).clamp(0.0, 1.0)


def gate_2(
    slots: SlotState, epochs: Int[Tensor, "N S"], val_acc: Float[Tensor, " N"], c: LifecycleConfig
) -> GateResult:
    """TRAINING -> BLENDING; `epochs` are the completed epochs in the stage."""
    improvement = val_acc[:, None] - slots.acc_at_stage_start
    failed = {FailedCheck.EPOCHS: epochs < c.min_training_epochs}
    if c.gate_mode == "strict":
        failed[FailedCheck.IMPROVEMENT] = ~(improvement >= c.g2_improvement)
        failed[FailedCheck.RATIO] = ~(slots.grad_ratio_ema >= c.g2_ratio)
    else:
        missing = torch.isnan(slots.grad_health)
        failed[FailedCheck.HEALTH_MISSING] = missing
        failed[FailedCheck.EXPLODING] = slots.grad_exploding & ~missing
        failed[FailedCheck.HEALTH_LOW] = slots.grad_health < c.g2_health
    return _result(failed, _share(improvement, 5.0))


def gate_3(slots: SlotState, epochs: Int[Tensor, "N S"], c: LifecycleConfig) -> GateResult:
    """BLENDING -> HOLDING."""
    short_of_one = (
        (slots.alpha_target < 1.0 - 1e-6)
        | (slots.alpha_mode != AlphaMode.HOLD)
        | ((slots.alpha - slots.alpha_target).abs() > 1e-6)
    )
    failed = {FailedCheck.ALPHA: short_of_one}
    if c.gate_mode == "strict":
        failed[FailedCheck.EPOCHS] = epochs < c.min_blending_epochs
    return _result(failed, slots.alpha)


def gate_5(slots: SlotState, t: int | Int[Tensor, ""], c: LifecycleConfig) -> GateResult:
    """HOLDING -> FOSSILIZED in step `t`."""
    missing = slots.contribution_step != t
    failed = {FailedCheck.CONTRIBUTION_MISSING: missing}
    if c.gate_mode == "strict":
        failed[FailedCheck.CONTRIBUTION_LOW] = ~missing & ~(slots.contribution >= c.g5_contribution)
    return _result(failed, _share(slots.contribution, 10.0).masked_fill(missing, 0.0))


def readings_of(
    stage: Int[Tensor, "N S"],
    asked: Bool[Tensor, "N S"],
    g2: GateResult,
    g3: GateResult,
    g5_asked: Bool[Tensor, "N S"],
    g5: GateResult,
) -> GateReadings:
    """The result of the gate that each slot asked: G5 by FOSSILIZE (`g5_asked`), the others in the tick (`asked`)."""
    assert int(SeedStage.GERMINATED) == 2
    gate = (stage - 1) * asked + g5_asked * 5  # the stages 2, 3, 4 ask the gates 1, 2, 3
    at_g2, at_g3 = gate == 2, gate == 3
    failed = torch.where(at_g2, g2.failed, torch.where(at_g3, g3.failed, g5.failed * g5_asked))
    score = torch.where(at_g2, g2.score, torch.where(at_g3, g3.score, g5.score.masked_fill(~g5_asked, 1.0)))
    return GateReadings(gate=gate, passed=(gate > 0) & (failed == 0), score=score, failed_checks=failed)


_S, _M = SeedStage, AlphaMode
_ANY_MODE = frozenset(AlphaMode)
_STILL = frozenset({_M.HOLD})
_BLOCKS_GERMINATION = frozenset({_S.GERMINATED, _S.TRAINING}) | COOLDOWN
"""With `sequential`, no slot may germinate while another one is in these stages."""
_GATED_STYLES = tuple(algorithm == Algorithm.GATE for algorithm in STYLE_ALGORITHM)


def in_stages(stage: Int[Tensor, "N S"], stages: frozenset[SeedStage]) -> Bool[Tensor, "N S"]:
    """Whether each slot's stage is one of `stages`."""
    return constant(stages_mask(stages), torch.bool, stage.device)[stage]


@lru_cache(maxsize=64)
def _rule_table(automatic: frozenset[SeedStage], device: torch.device) -> Tensor:
    """`[((stage * 3 + mode) * 2 + aged) * 2 + free, op]`, bool: the rules above, one row per slot state.

    `aged`: old enough for PRUNE; `free`: the host may germinate.
    """
    rules = {
        LifecycleOp.WAIT: (frozenset(SeedStage), _ANY_MODE),
        LifecycleOp.GERMINATE: (frozenset({_S.DORMANT}), _ANY_MODE),
        LifecycleOp.SET_ALPHA_TARGET: (frozenset({_S.BLENDING, _S.HOLDING}), _STILL),
        LifecycleOp.PRUNE: (GROWING, _STILL),
        LifecycleOp.FOSSILIZE: (frozenset({_S.HOLDING}), _STILL),
        LifecycleOp.ADVANCE: (frozenset(GATED) - automatic, frozenset({_M.HOLD, _M.UP})),
    }

    def allowed(op: LifecycleOp, stage: int, mode: AlphaMode, aged: bool, free: bool) -> bool:
        blocked = (op is LifecycleOp.PRUNE and not aged) or (op is LifecycleOp.GERMINATE and not free)
        return stage in rules[op][0] and mode in rules[op][1] and not blocked

    states = itertools.product(range(NUM_STAGE_VALUES), AlphaMode, (False, True), (False, True))
    return torch.tensor([[allowed(op, *state) for op in LifecycleOp] for state in states], device=device)


def legal_ops(slots: SlotState, config: LifecycleConfig) -> Bool[Tensor, "N 6 S"]:
    """`legal[n, op, s]`, which masks, execution, effective ops and baselines all use."""
    table = _rule_table(config.automatic, slots.stage.device)
    aged = slots.age >= config.min_prune_age
    state = (slots.stage * 3 + slots.alpha_mode) * 4 + aged * 2 + _may_germinate(slots, config)[:, None]
    return table[state].transpose(1, 2).contiguous()


def _may_germinate(slots: SlotState, config: LifecycleConfig) -> Bool[Tensor, " N"]:
    """Hosts that may germinate another seed, if a slot is DORMANT."""
    num_slots = slots.stage.shape[1]
    max_seeds = num_slots if config.max_seeds is None else config.max_seeds
    free = torch.ones_like(slots.stage[:, 0], dtype=torch.bool)
    if config.sequential:
        free = ~in_stages(slots.stage, _BLOCKS_GERMINATION).any(dim=1)
    if 0 < max_seeds < num_slots:  # otherwise a DORMANT slot suffices
        free = free & (in_stages(slots.stage, HAS_MODULE).sum(dim=1) < max_seeds)
    return free


def resolve_target_slot(
    actions: Int[Tensor, "N 8"], legal: Bool[Tensor, "N 6 S"], has_gate: Bool[Tensor, "N S"]
) -> tuple[Int[Tensor, " N"], Bool[Tensor, " N"]]:
    """The slot each host's op aims at (the slot head), and whether the op is legal there with its style."""
    target_N, op_N, hosts_N = actions[:, Head.SLOT], actions[:, Head.OP], numbers(len(legal), legal.device)
    gated = constant(_GATED_STYLES, torch.bool, op_N.device)[actions[:, Head.STYLE]]
    wants_gate = (op_N == LifecycleOp.SET_ALPHA_TARGET) & gated
    return target_N, legal[hosts_N, op_N, target_N] & (has_gate[hosts_N, target_N] | ~wants_gate)


def at_target(target: Int[Tensor, " N"], num_slots: int) -> Bool[Tensor, "N S"]:
    """One-hot of the target slot."""
    return target[:, None] == numbers(num_slots, target.device)
