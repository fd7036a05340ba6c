"""Generalized advantage estimation, discounted returns and advantage normalization; pure.

Shape legend: N = hosts, T = steps. A time axis is walked in N-wide operations on time-major copies, so every step reads
and writes contiguous memory and the cost in operations depends on T alone.

    row   r1  r2  r3 | r4  r5        `|` a truncated step: the value after it is the stored bootstrap value and the
          ^ trace cut ^              trace is cut, wherever in the row it lies; a terminal step is followed by 0
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.record import record
from esper.simic.agent.normalizers import masked_moments

ADVANTAGE_EPS = 1e-8


@record
class NormalizedAdvantages:
    """Advantages of mean 0 and what they were before; `floored`: the deviation was raised to the floor."""

    advantages: Float[Tensor, "N T"]
    mean: Float[Tensor, ""]
    std: Float[Tensor, ""]
    floored: Bool[Tensor, ""]


def compute_gae(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    bootstrap_values: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "N T"]:
    """Advantages `[N, T]` (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        next_t  = 0 if terminal, b_t if truncated, else v_{t+1} (0 after the last column)
        delta_t = r_t + gamma * next_t - v_t
        A_t     = delta_t + gamma * lambda * A_{t+1}     the second term only where the step is neither

    Steps that are not valid have advantage 0. The order of rounding is that of the formula, hence float64 results equal
    a scalar loop bit for bit.
    """
    after_NT = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
    after_NT = torch.where(truncated, bootstrap_values, after_NT).masked_fill(terminal, 0.0)
    delta_NT = (rewards + gamma * after_NT - values).masked_fill(~valid, 0.0)
    carries_NT = valid & ~(terminal | truncated)
    decay_NT = carries_NT.to(values.dtype) * (gamma * gae_lambda)
    return _scan(delta_NT, decay_NT, backward=True)


def discounted_returns(
    rewards: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    reset: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
) -> Float[Tensor, "N T"]:
    """Return accumulators forward in time, `G_t = r_t + gamma * G_{t-1}`, float64 `[N, T]`.

    `G_{t-1}` counts as 0 after a terminal or truncated step and at a reset; G is 0 on steps that are not valid.
    """
    begins_NT = reset.clone()
    begins_NT[:, 1:] |= (terminal | truncated | ~valid)[:, :-1]
    decay_NT = (valid & ~begins_NT).to(torch.float64) * gamma
    return _scan(rewards.to(torch.float64).masked_fill(~valid, 0.0), decay_NT, backward=False)


def normalize_advantages(
    advantages: Float[Tensor, "N T"], valid: Bool[Tensor, "N T"], std_floor: float
) -> NormalizedAdvantages:
    """`(A - mean) / (max(std, floor) + 1e-8)` over the valid steps of all hosts; 0 on the others."""
    moments = masked_moments(advantages, valid)
    std = moments.var.sqrt()
    scaled = (advantages.to(torch.float64) - moments.mean) / (std.clamp_min(std_floor) + ADVANTAGE_EPS)
    return NormalizedAdvantages(
        advantages=scaled.masked_fill(~valid, 0.0).to(advantages.dtype),
        mean=moments.mean,
        std=std,
        floored=std < std_floor,
    )


def _scan(inputs_NT: Tensor, decay_NT: Tensor, *, backward: bool) -> Tensor:
    """`y_t = inputs_t + decay_t * y_before`, walking the time axis from its end if `backward`."""
    inputs, decays = (x.t().contiguous().unbind(0) for x in (inputs_NT, decay_NT))
    order = range(len(inputs))
    carry, outputs = torch.zeros_like(inputs[0]), []
    for t in reversed(order) if backward else order:
        carry = inputs[t] + decays[t] * carry
        outputs.append(carry)
    return torch.stack(outputs[::-1] if backward else outputs, dim=1)
