"""Quality gates: what a seed must show before it may go on.

    G1  GERMINATED -> TRAINING     always
    G2  TRAINING -> BLENDING       trained long enough, gradients healthy (strict: improvement and gradient ratio)
    G3  BLENDING -> HOLDING        alpha has arrived at 1 (strict: after min_blending_epochs)
    G5  HOLDING -> FOSSILIZED      contribution measured in this very step (strict: at least g5_contribution)

A missing measurement fails the check that needs it. All thresholds are inclusive.
"""

from enum import IntFlag

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.config import LifecycleConfig
from esper.leyline.messages import GateReadings, SlotState
from esper.leyline.stages import AlphaMode, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass


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
    """Outcome of one gate for every slot, whether or not the slot was in the stage that asks."""

    failed: Int[Tensor, "N S"]
    score: Float[Tensor, "N S"]

    @property
    def passed(self) -> Bool[Tensor, "N S"]:
        """No check failed."""
        return self.failed == 0


def _bits(*checks: tuple[Tensor, FailedCheck]) -> Tensor:
    """Sum of the bits of the checks whose mask is set."""
    total = checks[0][0] * int(checks[0][1])
    for failed, bit in checks[1:]:
        total = total + failed * int(bit)
    return total


def _share(x: Tensor, full: float) -> Tensor:
    """`x / full` cut to [0, 1]; 0 where x is missing."""
    return torch.nan_to_num(x / full, nan=0.0).clamp(0.0, 1.0)


def gate_2(
    slots: SlotState, epochs: Int[Tensor, "N S"], val_acc: Float[Tensor, " N"], c: LifecycleConfig
) -> GateResult:
    """TRAINING -> BLENDING; `epochs` are the completed epochs in the stage."""
    improvement = val_acc[:, None] - slots.acc_at_stage_start
    too_early = (epochs < c.min_training_epochs, FailedCheck.EPOCHS)
    if c.gate_mode == "strict":
        failed = _bits(
            too_early,
            (~(improvement >= c.g2_improvement), FailedCheck.IMPROVEMENT),
            (~(slots.grad_ratio_ema >= c.g2_ratio), FailedCheck.RATIO),
        )
    else:
        missing = torch.isnan(slots.grad_health)
        failed = _bits(
            too_early,
            (missing, FailedCheck.HEALTH_MISSING),
            (slots.grad_exploding & ~missing, FailedCheck.EXPLODING),
            (slots.grad_health < c.g2_health, FailedCheck.HEALTH_LOW),
        )
    return GateResult(failed=failed, score=_share(improvement, 5.0))


def gate_3(slots: SlotState, epochs: Int[Tensor, "N S"], c: LifecycleConfig) -> GateResult:
    """BLENDING -> HOLDING."""
    arrived = (
        (slots.alpha_target >= 1.0 - 1e-6)
        & (slots.alpha_mode == AlphaMode.HOLD)
        & ((slots.alpha - slots.alpha_target).abs() <= 1e-6)
    )
    checks = [(~arrived, FailedCheck.ALPHA)]
    if c.gate_mode == "strict":
        checks.append((epochs < c.min_blending_epochs, FailedCheck.EPOCHS))
    return GateResult(failed=_bits(*checks), score=slots.alpha)


def gate_5(slots: SlotState, t: int | Int[Tensor, ""], c: LifecycleConfig) -> GateResult:
    """HOLDING -> FOSSILIZED in step `t`."""
    missing = slots.contribution_step != t
    checks = [(missing, FailedCheck.CONTRIBUTION_MISSING)]
    if c.gate_mode == "strict":
        low = ~missing & ~(slots.contribution >= c.g5_contribution)
        checks.append((low, FailedCheck.CONTRIBUTION_LOW))
    score = _share(slots.contribution, 10.0).masked_fill(missing, 0.0)
    return GateResult(failed=_bits(*checks), score=score)


def _by_gate(gate: Int[Tensor, "N S"], *of_gates: Tensor) -> Tensor:
    """What belongs to the gate of each slot, from one tensor per gate 0 .. 5."""
    return torch.stack(of_gates).gather(0, gate[None]).squeeze(0)


def readings_of(
    stage: Int[Tensor, "N S"],
    asked: Bool[Tensor, "N S"],
    g2: GateResult,
    g3: GateResult,
    g5_asked: Bool[Tensor, "N S"],
    g5: GateResult,
) -> GateReadings:
    """What each gate said to the slots that asked it; G5 is asked by FOSSILIZE, the others by the tick."""
    gate = (stage - 1) * asked + g5_asked * 5  # stages 2, 3, 4 ask gates 1, 2, 3
    assert int(SeedStage.GERMINATED) == 2  # the arithmetic of `gate` above
    nothing, whole = torch.zeros_like(g2.failed), torch.ones_like(g2.score)
    failed = _by_gate(gate, nothing, nothing, g2.failed, g3.failed, nothing, g5.failed)
    score = _by_gate(gate, whole, whole, g2.score, g3.score, whole, g5.score)
    return GateReadings(gate=gate, passed=(gate > 0) & (failed == 0), score=score, failed_checks=failed)
