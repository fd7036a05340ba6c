"""Generalized advantage estimation, discounted returns and advantage normalization; pure.

Shape legend: N = hosts, T = steps. A time axis is walked in N-wide operations on time-major copies, so every step reads
and writes contiguous memory and the cost in operations depends on T alone.

    row   r1  r2  r3 | r4  r5        `|` a truncated step: the value after it is the stored bootstrap value and the
          ^ trace cut ^              trace is cut, wherever in the row it lies; a terminal step is followed by 0

    row   r1  r2  --  r4             a step that is not valid took time and nothing else: r2 is followed by
                                     gamma * v4, and the trace goes on with one more gamma
"""

from importlib.util import find_spec

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.agent.normalizers import masked_moments

ADVANTAGE_EPS = 1e-8
_HAS_TRITON = find_spec("triton") is not None


@tensor_dataclass
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
    gamma: float | Float[Tensor, " N"],
    gae_lambda: float | Float[Tensor, " N"],
) -> Float[Tensor, "N T"]:
    """Advantages `[N, T]` (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        next_t  = 0 if terminal, b_t if truncated, else w_{t+1} (0 after the last column)
        delta_t = r_t + gamma * next_t - v_t
        A_t     = delta_t + gamma * lambda * T_{t+1}     the second term only where the step is neither

    w and T are v and A at valid steps; at the others w_t = gamma * w_{t+1} and T_t = gamma * T_{t+1}, so that time
    passes, but no decision is counted. The advantage of a step that is not valid is 0, and its flags mean nothing.
    `gamma` and `gae_lambda` are one number for all hosts or one for each.
    Nothing is differentiated: the result carries no gradient. The order of rounding is that of the formula, hence
    float64 results equal a scalar loop bit for bit. On CUDA one kernel does it all where Triton is installed.
    """
    arguments = (rewards, values, bootstrap_values, terminal, truncated, valid)
    if values.is_cuda and _HAS_TRITON:
        from esper.simic.agent.gae_kernel import gae_on_cuda

        return gae_on_cuda(*arguments, gamma, gae_lambda)
    return gae_scan(*arguments, gamma, gae_lambda)


@torch.no_grad()
def gae_scan(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    bootstrap_values: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float | Float[Tensor, " N"],
    gae_lambda: float | Float[Tensor, " N"],
) -> Float[Tensor, "N T"]:
    """`compute_gae` in PyTorch's own operators, on any device.

    Fresh memory costs more than the arithmetic here, so few slabs are taken and the rest is done in place.
    """
    discount, trace = _against(values, gamma), _against(values, gamma * gae_lambda)
    waits_NT = ~valid
    onward_NT = _scan_(values.masked_fill(waits_NT, 0.0), waits_NT * discount, backward=True)
    delta_NT = torch.empty_like(values, memory_format=torch.contiguous_format)
    delta_NT[:, :-1] = onward_NT[:, 1:]
    delta_NT[:, -1:] = 0.0
    torch.where(truncated, bootstrap_values, delta_NT, out=delta_NT)
    delta_NT.masked_fill_(terminal, 0.0)
    delta_NT.mul_(discount).add_(rewards).sub_(values).masked_fill_(waits_NT, 0.0)
    decay_NT = torch.where(valid, trace, discount).masked_fill_(valid & (terminal | truncated), 0.0)
    return _scan_(delta_NT, decay_NT, backward=True).masked_fill_(waits_NT, 0.0)


def discounted_returns(
    rewards: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
) -> Float[Tensor, "N T"]:
    """Return accumulators forward in time, `G_t = r_t + gamma * G_{t-1}`, float64 `[N, T]`.

    `G_{t-1}` counts as 0 after a valid step that is terminal or truncated, r_t where a step is not valid.
    """
    decay_NT = torch.full_like(rewards, gamma, dtype=torch.float64)
    decay_NT[:, 1:].masked_fill_((valid & (terminal | truncated))[:, :-1], 0.0)
    return _scan_(rewards.to(torch.float64).masked_fill(~valid, 0.0), decay_NT, backward=False)


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


def _against(rows_NT: Tensor, number: float | Tensor) -> Tensor:
    """A number for all hosts, or [N], in the form that is multiplied with rows."""
    return number[:, None] if isinstance(number, Tensor) else rows_NT.new_full((), number)


def _scan_(inputs_NT: Tensor, decay_NT: Tensor, *, backward: bool) -> Tensor:
    """`y_t = inputs_t + decay_t * y_before`; written over `inputs_NT`.

    The time axis is walked from its end if `backward`. A product and a sum, not one fused operation: some kernels would
    round a fused one once instead of twice, and only in that part of a row that fills whole vector registers.
    """
    inputs_TN = inputs_NT.t().contiguous()
    inputs, decays = inputs_TN.unbind(0), decay_NT.t().contiguous().unbind(0)
    order = range(len(inputs))
    carry, product = torch.zeros_like(inputs[0]), torch.empty_like(inputs[0])
    for t in reversed(order) if backward else order:
        torch.mul(decays[t], carry, out=product)
        carry = inputs[t].add_(product)
    return inputs_NT.copy_(inputs_TN.t())
