"""Adam on one flat vector of all P parameters; a tensor `take` decides on the device whether to step."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.tensor_dataclass import tensor_dataclass

CLIP_EPS = 1e-6


@tensor_dataclass
class AdamState:
    """Moments of all parameters in their order, and the number of steps taken."""

    exp_avg: Float[Tensor, " P"]
    exp_avg_sq: Float[Tensor, " P"]
    step: Float[Tensor, ""]


def initial_adam_state(parameters: Sequence[Tensor]) -> AdamState:
    """Zero moments on the device of the parameters."""
    flat = flatten(parameters)
    step = torch.zeros((), dtype=torch.float64, device=flat.device)
    return AdamState(exp_avg=torch.zeros_like(flat), exp_avg_sq=torch.zeros_like(flat), step=step)


def adam_step(
    gradient: Float[Tensor, " P"],
    state: AdamState,
    take: Bool[Tensor, ""],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float,
) -> tuple[Float[Tensor, " P"], AdamState]:
    """The difference to subtract from the parameters, and the next state (Kingma and Ba, 2015, algorithm 1).

    Without `take` the difference is exactly zero and the state unchanged, even for a gradient that is not finite.
    """
    beta1, beta2 = betas
    step = state.step + 1.0
    step_size = (lr / (1.0 - beta1**step)).to(gradient.dtype)
    correction = (1.0 - beta2**step).sqrt().to(gradient.dtype)
    exp_avg = torch.lerp(state.exp_avg, gradient, 1.0 - beta1)
    exp_avg_sq = (state.exp_avg_sq * beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    # in place: allocating vectors of this length costs more than the arithmetic
    difference = exp_avg_sq.sqrt().div_(correction).add_(eps)
    torch.div(exp_avg, difference, out=difference).mul_(step_size).masked_fill_(~take, 0.0)
    return difference, AdamState(
        exp_avg=torch.where(take, exp_avg, state.exp_avg, out=exp_avg),
        exp_avg_sq=torch.where(take, exp_avg_sq, state.exp_avg_sq, out=exp_avg_sq),
        step=torch.where(take, step, state.step),
    )


def flatten(tensors: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """All tensors in one vector, in their order; a copy."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def clip_by_norm(gradient: Float[Tensor, " P"], norm: Float[Tensor, ""], limit: float) -> Float[Tensor, " P"]:
    """`gradient` scaled down to the length `limit` where its length `norm` is above it."""
    return gradient * (limit / (norm + CLIP_EPS)).clamp_max(1.0).to(gradient.dtype)


def subtract_(parameters: Sequence[Tensor], difference: Float[Tensor, " P"]) -> None:
    """Subtract a flat vector from the parameters in place."""
    chunks = torch.split(difference, [p.numel() for p in parameters])
    with torch.no_grad():
        torch._foreach_sub_(list(parameters), [c.view_as(p) for c, p in zip(chunks, parameters, strict=True)])
