"""Batch normalization by batch statistics, in passes over memory that a CPU vectorizes.

    y = (x - mean) / sqrt(var + eps) * weight + bias         mean, var of each channel over examples and space

PyTorch's own kernel for contiguous features sums one value after the other in double precision; this is used where all
hosts are normalized at once. Whether it is faster depends on the machine, see `benchmarks/choices.py`.

Shape legend: B = examples, M = channels of all hosts, P = places in space.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor


class Normalized(NamedTuple):
    """`y` [B, M, *space]; `mean` and biased `var` [M] of the batch, without gradient."""

    y: Tensor
    mean: Tensor
    var: Tensor


def normalize_batch(
    x: Float[Tensor, "B M *P"], weight: Float[Tensor, " M"], bias: Float[Tensor, " M"], eps: float
) -> Normalized:
    """Normalize every channel by its own batch."""
    y, mean, var = _BatchNorm.apply(x.flatten(2), weight, bias, eps)  # type: ignore[no-untyped-call]
    return Normalized(y.view(x.shape), mean, var)


def _channel_sum(x_BMP: Tensor) -> Float[Tensor, " M"]:
    """Over space first: that is the direction in which memory runs."""
    return x_BMP.sum(dim=2).sum(dim=0)


@final
class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """y, mean, var."""
        count = x.shape[0] * x.shape[2]
        mean_M = _channel_sum(x) / count
        centered = x - mean_M[:, None]
        var_M = torch.linalg.vector_norm(centered, dim=2).square_().sum(dim=0) / count
        inverse_M = (var_M + eps).rsqrt_()
        # a product and a sum: with two broadcast factors `addcmul` is slower than both
        y = (centered * (inverse_M * weight)[:, None]).add_(bias[:, None])
        ctx.save_for_backward(centered, inverse_M, weight)
        ctx.mark_non_differentiable(mean_M, var_M)
        return y, mean_M, var_M

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
        """With n values per channel: dx = s (g - sum g / n - x^ sum(g x^) / n), where s = weight / sqrt(var + eps)."""
        centered, inverse_M, weight = ctx.saved_tensors
        count = centered.shape[0] * centered.shape[2]
        grad_sum_M, aligned_M = _channel_sum(grad), _channel_sum(grad * centered) * inverse_M
        scale_M = weight * inverse_M
        grad_x = grad * scale_M[:, None]
        grad_x.sub_(centered * (scale_M * inverse_M * aligned_M / count)[:, None])
        grad_x.sub_((scale_M * grad_sum_M / count)[:, None])
        return grad_x, aligned_M, grad_sum_M, None
