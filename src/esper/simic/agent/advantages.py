"""Generalized advantage estimation, discounted returns and advantage normalization; pure.

Shape legend: N = hosts, T = steps. Loops over time work on time-major copies, all hosts at once.

    row   r1  r2  r3 | r4  r5        `|` a truncated step: the next value is the stored bootstrap value and the trace
                                     is cut; after a terminal step the next value is 0

    row   r1  r2  --  r4             an invalid step only takes time: the next value of r2 is gamma * v4, and the trace
                                     decays by one more gamma
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.agent.normalizers import masked_moments

ADVANTAGE_EPS = 1e-8


@tensor_dataclass
class NormalizedAdvantages:
    """Normalized advantages, and mean and deviation before; `floored`: the deviation was below the floor."""

    advantages: Float[Tensor, "N T"]
    mean: Float[Tensor, ""]
    std: Float[Tensor, ""]
    floored: Bool[Tensor, ""]


@torch.no_grad()
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

    w and T are v and A at valid steps; at invalid ones w_t = gamma * w_{t+1} and T_t = gamma * T_{t+1}. The advantage
    of an invalid step is 0 and its flags are ignored. `gamma` and `gae_lambda` are one number for all hosts or one for
    each. The result has no gradient and rounds in the order of the formula: in float64 it equals a scalar loop bit for
    bit. It works in place, because allocation costs more than arithmetic.
    """
    discount, trace = _per_row(values, gamma), _per_row(values, gamma * gae_lambda)
    invalid_NT = ~valid
    next_NT = _scan_(values.masked_fill(invalid_NT, 0.0), invalid_NT * discount, backward=True)
    delta_NT = torch.empty_like(values, memory_format=torch.contiguous_format)
    delta_NT[:, :-1] = next_NT[:, 1:]
    delta_NT[:, -1:] = 0.0
    torch.where(truncated, bootstrap_values, delta_NT, out=delta_NT)
    delta_NT.masked_fill_(terminal, 0.0)
    delta_NT.mul_(discount).add_(rewards).sub_(values).masked_fill_(invalid_NT, 0.0)
    decay_NT = torch.where(valid, trace, discount).masked_fill_(valid & (terminal | truncated), 0.0)
    return _scan_(delta_NT, decay_NT, backward=True).masked_fill_(invalid_NT, 0.0)


def paired_rewards(rewards: Float[Tensor, "N T"], valid: Bool[Tensor, "N T"], group_size: int) -> Float[Tensor, "N T"]:
    """Rewards minus the mean reward of the copies of a host in the same step: the hosts n, n + N/group_size, ...

    Copies have equal data and weights, so what a host owes to these cancels, and what the controller did remains. The
    mean leaves the host itself out, so it does not depend on the host's actions, and the expected policy gradient stays
    the same (Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019). Invalid steps count as 0.
    """
    if group_size == 1:
        return rewards
    counted_kDT = rewards.masked_fill(~valid, 0.0).view(group_size, -1, rewards.shape[1])
    others_kDT = (counted_kDT.sum(dim=0) - counted_kDT) / (group_size - 1)
    return rewards - others_kDT.flatten(0, 1)


def discounted_returns(
    rewards: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
) -> Float[Tensor, "N T"]:
    """Accumulators forward in time, `G_t = r_t + gamma * G_{t-1}`, float64 `[N, T]`.

    `G_{t-1}` is 0 after a valid step that is terminal or truncated; r_t of an invalid step is 0.
    """
    decay_NT = torch.full_like(rewards, gamma, dtype=torch.float64)
    decay_NT[:, 1:].masked_fill_((valid & (terminal | truncated))[:, :-1], 0.0)
    return _scan_(rewards.to(torch.float64).masked_fill(~valid, 0.0), decay_NT, backward=False)


def normalize_advantages(
    advantages: Float[Tensor, "N T"], valid: Bool[Tensor, "N T"], std_floor: float
) -> NormalizedAdvantages:
    """`(A - mean) / (max(std, floor) + 1e-8)` over the valid steps of all hosts; 0 at invalid ones."""
    moments = masked_moments(advantages, valid)
    std = moments.var.sqrt()
    scaled = (advantages.to(torch.float64) - moments.mean) / (std.clamp_min(std_floor) + ADVANTAGE_EPS)
    return NormalizedAdvantages(
        advantages=scaled.masked_fill(~valid, 0.0).to(advantages.dtype),
        mean=moments.mean,
        std=std,
        floored=std < std_floor,
    )


def _per_row(rows_NT: Tensor, number: float | Tensor) -> Tensor:
    """A number for all hosts, or [N], as a tensor that broadcasts against rows."""
    return number[:, None] if isinstance(number, Tensor) else rows_NT.new_full((), number)


def _scan_(inputs_NT: Tensor, decay_NT: Tensor, *, backward: bool) -> Tensor:
    """`y_t = inputs_t + decay_t * y_{t-1}`, or y_{t+1} if `backward`; written over `inputs_NT`.

    A separate product and sum: a fused operation rounds once instead of twice, in some kernels only in part of a row.
    """
    inputs_TN = inputs_NT.t().contiguous()
    inputs, decays = inputs_TN.unbind(0), decay_NT.t().contiguous().unbind(0)
    order = range(len(inputs))
    carry, product = torch.zeros_like(inputs[0]), torch.empty_like(inputs[0])
    for t in reversed(order) if backward else order:
        torch.mul(decays[t], carry, out=product)
        carry = inputs[t].add_(product)
    return inputs_NT.copy_(inputs_TN.t())
