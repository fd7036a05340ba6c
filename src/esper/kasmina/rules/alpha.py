"""The blend weight alpha and its ramps.

retarget   start a ramp from the present alpha to `target` in `ticks` steps along a curve; only in alpha mode HOLD
step       one tick of every running ramp; the last one ends exactly at the target
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.slot_fields import select
from esper.leyline.messages import SlotState
from esper.leyline.stages import AlphaCurve, AlphaMode
from esper.leyline.tensor_dataclass import replace

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


def step(slots: SlotState, where: Bool[Tensor, "N S"]) -> SlotState:
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
