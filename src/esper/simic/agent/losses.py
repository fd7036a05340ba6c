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
from esper.leyline.tensor_dataclass import blank, tensor_dataclass

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


@tensor_dataclass
class Losses:
    """The terms of the loss and their sum, `policy + c_v * value + c_e * entropy + floor`."""

    policy: Float[Tensor, ""]
    value: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    floor: Float[Tensor, ""]
    total: Float[Tensor, ""]


@tensor_dataclass
class LossSums:
    """Sums over the steps of some hosts, from which everything below follows; those of all hosts are their sum.

    `surrogate`, `entropy`, `available` are [8] with gradient and have their numbers of steps after them; `choices` are
    the entropies of heads with a choice, [9], see `head_entropies`. `value` has the weights of its steps.
    """

    surrogate: Float[Tensor, " 8"]
    entropy: Float[Tensor, " 8"]
    used: Float[Tensor, " 8"]
    available: Float[Tensor, " 8"]
    open: Float[Tensor, " 8"]
    value: Float[Tensor, ""]
    value_weight: Float[Tensor, ""]
    divergence: Float[Tensor, ""]
    causal: Float[Tensor, ""]
    outside: Float[Tensor, ""]
    decided: Float[Tensor, ""]
    valid: Float[Tensor, ""]
    choices: Float[Tensor, " 9"]
    choice_steps: Float[Tensor, " 9"]


def loss_sums(x: LossInputs, clip: float, forced_weight: float) -> LossSums:
    """The sums of some hosts. A forced step is not a decision: its ratio is always 1."""
    log_ratio = _log_ratio(x)
    ratio, advantages = log_ratio.exp(), x.advantages[..., None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    decided = x.valid & ~x.forced
    used, available = x.causal & decided[..., None], x.available & decided[..., None]
    weight = torch.where(x.forced, forced_weight, 1.0) * x.valid
    causal, choices = x.causal & x.valid[..., None], used & x.choice
    change = log_ratio.detach() * causal
    outside = ((change.sum(-1).exp() - 1.0).abs() > clip) & decided
    entropies, steps = _sum_per_head(x.entropy.detach(), choices), _count_per_head(choices, x.entropy)
    return LossSums(
        surrogate=_sum_per_head(surrogate, used),
        entropy=_sum_per_head(x.entropy, used),
        used=_count_per_head(used, x.entropy),
        available=_sum_per_head(x.entropy_avail, available),
        open=_count_per_head(available, x.entropy),
        value=(weight * (x.values - x.returns).square()).sum(),
        value_weight=weight.sum(),
        divergence=(change.exp() - 1.0 - change).sum(),
        causal=causal.sum().to(x.entropy.dtype),
        outside=outside.sum().to(x.entropy.dtype),
        decided=decided.sum().to(x.entropy.dtype),
        valid=x.valid.sum().to(x.entropy.dtype),
        choices=torch.cat((entropies, entropies[: Head.OP].sum(0, keepdim=True))),
        choice_steps=torch.cat((steps, steps[: Head.OP].sum(0, keepdim=True))),
    )


def ppo_losses(sums: LossSums, weights: LossWeights) -> Losses:
    """All terms of the loss of one minibatch, from the sums over its hosts.

    policy    clipped surrogate (Schulman et al., "Proximal policy optimization", 2017, eq. 7), summed over the heads
    value     1/2 sum w (V - R)^2 / sum w; w is `forced_value_weight` on forced steps and 1 elsewhere
    entropy   minus the weighted sum of the normalized entropies of the heads
    floor     weighted squares of what the mean entropies of open heads lack to their floors
    """
    bonus, target, floor_weight = _entropy_columns(sums.entropy.device)
    policy = -(sums.surrogate / sums.used.clamp_min(1)).sum()
    value = 0.5 * sums.value / sums.value_weight.clamp_min(1e-6)
    entropy = -(bonus * (sums.entropy / sums.used.clamp_min(1))).sum()
    shortfall = (target - sums.available / sums.open.clamp_min(1)).clamp_min(0.0)
    floor = (floor_weight * shortfall.square() * (sums.open > 0)).sum() * weights.floor
    total = policy + weights.value * value + weights.entropy * entropy + floor
    return Losses(policy=policy, value=value, entropy=entropy, floor=floor, total=total)


@lru_cache
def _entropy_columns(device: torch.device) -> tuple[Tensor, ...]:
    """Bonus, floor and weight of the floor of each head, [8] each."""
    return torch.tensor([[getattr(head, name) for head in HEADS] for name in ("bonus", "floor", "floor_weight")],
                        device=device).unbind()  # fmt: skip


def approx_kl(sums: LossSums) -> Float[Tensor, ""]:
    """KL divergence of the policy since the rollout, a mean over heads and steps.

    The estimator is `r - 1 - log r` (Schulman, "Approximating KL divergence", 2020).
    """
    return sums.divergence / sums.causal.clamp_min(1)


def clip_fraction(sums: LossSums) -> Float[Tensor, ""]:
    """Share of the decisions whose probability, the product over the heads, changed by more than epsilon."""
    return sums.outside / sums.decided.clamp_min(1)


def largest_change(x: LossInputs) -> Float[Tensor, ""]:
    """The largest change of a log-probability of a decision since the rollout."""
    return (_log_ratio(x).detach() * (x.causal & x.valid[..., None])).abs().amax()


def head_entropies(sums: LossSums) -> tuple[Float[Tensor, " 9"], Float[Tensor, " 9"]]:
    """Mean normalized entropy of each head over the steps that used it with a choice, and their number.

    The last number is for all heads but op together: what an operation is done with. A head with one value has no
    entropy: it says nothing about exploration.
    """
    return sums.choices / sums.choice_steps.clamp_min(1), sums.choice_steps


def packed(sums: LossSums) -> Float[Tensor, " K"]:
    """All sums in one vector."""
    return torch.cat([x.reshape(-1) for x in vars(sums).values()])


def unpacked(vector: Float[Tensor, " K"]) -> LossSums:
    """The sums in a vector of `packed`."""
    parts = vector.split([shape.numel() for shape in _SHAPES.values()])
    return LossSums(**{name: part.view(shape) for (name, shape), part in zip(_SHAPES.items(), parts, strict=True)})


_SHAPES = {name: x.shape for name, x in vars(blank(LossSums, {}, torch.device("cpu"))).items()}
NUM_SUMS = sum(shape.numel() for shape in _SHAPES.values())
"""K."""


def _log_ratio(x: LossInputs) -> Tensor:
    return (x.log_prob - x.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sum_per_head(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the masked steps, [8]."""
    return values.masked_fill(~mask, 0.0).reshape(-1, values.shape[-1]).sum(dim=0)


def _count_per_head(mask: Tensor, like: Tensor) -> Tensor:
    """Numbers of the masked steps, [8]."""
    return mask.reshape(-1, mask.shape[-1]).sum(dim=0).to(like.dtype)
