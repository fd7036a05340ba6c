"""The losses of PPO with eight heads, as pure functions of one evaluated minibatch.

Shape legend: R = any leading axes (rows and steps), 8 = heads. With x = clip(new - old, +-20) and the masks

    causal    the executed op reads the head, and the step is valid
    choice    the head had two or more values for the op and slot of the step
    used      causal and not forced (another op than WAIT was legal)
    open      valid, not forced, and the head has two or more choices for some legal op

A mean over a mask without steps is 0.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.lifecycle import HEADS, Head
from esper.leyline.tensor_dataclass import tensor_dataclass

LOG_RATIO_LIMIT = 20.0


@tensor_dataclass
class LossInputs:
    """One minibatch after the forward pass; `advantages` and `returns` of the rollout, scaled."""

    log_prob: Float[Tensor, "*R 8"]
    old_log_prob: Float[Tensor, "*R 8"]
    entropy: Float[Tensor, "*R 8"]
    entropy_avail: Float[Tensor, "*R 8"]
    causal: Bool[Tensor, "*R 8"]
    choice: Bool[Tensor, "*R 8"]
    available: Bool[Tensor, "*R 8"]
    advantages: Float[Tensor, "*R"]
    values: Float[Tensor, "*R"]
    returns: Float[Tensor, "*R"]
    valid: Bool[Tensor, "*R"]
    forced: Bool[Tensor, "*R"]


@tensor_dataclass
class LossWeights:
    """Coefficients of one update; those that change over the run are tensors, so that a compiled loss stays valid."""

    value: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    floor: Float[Tensor, ""]
    clip: float
    forced_value: float


@tensor_dataclass
class Losses:
    """The terms of the loss and their sum, `policy + c_v * value + c_e * entropy + floor`."""

    policy: Float[Tensor, ""]
    value: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    floor: Float[Tensor, ""]
    total: Float[Tensor, ""]


@tensor_dataclass
class RatioStatistics:
    """Change of the policy since the rollout.

    `approx_kl`: KL divergence, a mean over heads and steps. `clip_fraction`: share of the decisions whose probability,
    the product over the heads, changed by more than epsilon. `largest_change`: of a log-probability.
    """

    approx_kl: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    largest_change: Float[Tensor, ""]


def ppo_losses(x: LossInputs, weights: LossWeights) -> Losses:
    """All terms of the loss of one minibatch."""
    policy = policy_loss(x, weights.clip)
    value = value_loss(x, weights.forced_value)
    entropy = entropy_loss(x)
    floor = floor_loss(x) * weights.floor
    total = policy + weights.value * value + weights.entropy * entropy + floor
    return Losses(policy=policy, value=value, entropy=entropy, floor=floor, total=total)


def policy_loss(x: LossInputs, clip: float) -> Float[Tensor, ""]:
    """Clipped surrogate (Schulman et al., "Proximal policy optimization", 2017, eq. 7), summed over the heads."""
    ratio = _log_ratio(x).exp()
    advantages = x.advantages[..., None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    return -_mean_per_head(surrogate, _used(x)).sum()


def value_loss(x: LossInputs, forced_weight: float) -> Float[Tensor, ""]:
    """`1/2 sum w (V - R)^2 / sum w` over valid steps; w is `forced_weight` on forced steps and 1 elsewhere."""
    weight = torch.where(x.forced, forced_weight, 1.0) * x.valid
    return 0.5 * (weight * (x.values - x.returns).square()).sum() / weight.sum().clamp_min(1e-6)


def entropy_loss(x: LossInputs) -> Float[Tensor, ""]:
    """Minus the weighted sum of the normalized entropies of the heads."""
    return -(_constants(x.entropy.device).bonus * _mean_per_head(x.entropy, _used(x))).sum()


def floor_loss(x: LossInputs) -> Float[Tensor, ""]:
    """Weighted squares of what the mean entropies of open heads lack to their floors."""
    constants = _constants(x.entropy.device)
    open_ = x.available & (x.valid & ~x.forced)[..., None]
    shortfall = (constants.floor - _mean_per_head(x.entropy_avail, open_)).clamp_min(0.0)
    return (constants.floor_weight * shortfall.square() * _per_head(open_).any(dim=0)).sum()


def ratio_statistics(x: LossInputs, clip: float) -> RatioStatistics:
    """Divergence by the estimator `r - 1 - log r` (Schulman, "Approximating KL divergence", 2020), and ratios.

    A forced step is no decision: its ratio is always 1.
    """
    causal = x.causal & x.valid[..., None]
    log_ratio = _log_ratio(x).detach() * causal
    divergence = (log_ratio.exp() - 1.0 - log_ratio).sum() / causal.sum().clamp_min(1)
    decided = x.valid & ~x.forced
    outside = ((log_ratio.sum(-1).exp() - 1.0).abs() > clip) & decided
    return RatioStatistics(
        approx_kl=divergence,
        clip_fraction=outside.sum() / decided.sum().clamp_min(1),
        largest_change=log_ratio.abs().amax(),
    )


def head_entropies(x: LossInputs) -> tuple[Float[Tensor, " 9"], Float[Tensor, " 9"]]:
    """Mean normalized entropy of each head over the steps that used it with a choice, and their number.

    The last number is for all heads but op together: what an operation is done with. A head with one value has no
    entropy: it says nothing about exploration.
    """
    used = _used(x) & x.choice
    sums, steps = _per_head(x.entropy.detach().masked_fill(~used, 0.0)).sum(0), _per_head(used).sum(0)
    sums, steps = (torch.cat((values, values[: Head.OP].sum(0, keepdim=True))) for values in (sums, steps))
    return sums / steps.clamp_min(1), steps.to(x.entropy.dtype)


@tensor_dataclass
class _HeadConstants:
    bonus: Float[Tensor, " 8"]
    floor: Float[Tensor, " 8"]
    floor_weight: Float[Tensor, " 8"]


@lru_cache
def _constants(device: torch.device) -> _HeadConstants:
    """The entropy columns of `HEADS` on a device."""
    return _HeadConstants(
        bonus=torch.tensor([head.bonus for head in HEADS], device=device),
        floor=torch.tensor([head.floor for head in HEADS], device=device),
        floor_weight=torch.tensor([head.floor_weight for head in HEADS], device=device),
    )


def _log_ratio(x: LossInputs) -> Tensor:
    return (x.log_prob - x.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _used(x: LossInputs) -> Tensor:
    return x.causal & (x.valid & ~x.forced)[..., None]


def _per_head(values: Tensor) -> Tensor:
    """`[*R, 8]` as `[steps, 8]`."""
    return values.reshape(-1, values.shape[-1])


def _mean_per_head(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked steps, `[8]`."""
    count = _per_head(mask).sum(dim=0).clamp_min(1)
    return _per_head(values.masked_fill(~mask, 0.0)).sum(dim=0) / count
