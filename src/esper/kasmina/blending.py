"""The blend rule: how the output of a seed enters the features of its host, in value and gradient.

    value      h + weight * signal     of an active seed (alpha > 0); h to the bit if the seed is hidden

                signal          weight
    ADD         delta           alpha
    MULTIPLY    tanh delta      alpha * h
    GATE        delta           alpha * gate

    gradient   through signal and weight; of a hidden seed as if alpha were 1 (straight-through: with alpha = 0 it would
               be zero). h gets the incoming gradient, and that through the weight of an active MULTIPLY

delta and gate are the outputs of the seed and its gate network for h, detached if the seed is isolated. Isolation never
cuts the path from h to the value, so earlier layers get the full gradient.

`blend` is the rule for one seed. Executors that blend the seeds of many hosts apply the same functions (`signal_of`,
`weight_of`, `delta_grad`, `factor_grad`) to slices or under masks.

Shape legend: B = batch; h is [B, C, H, W] or [B, T, D].
"""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.leyline.lifecycle import Algorithm

Features = Float[Tensor, "B *F"]


def seed_input(h: Tensor, *, isolated: bool) -> Tensor:
    """What a seed in a slot with features `h` gets: without gradient if it is `isolated`, and always contiguous.

    PyTorch's GroupNorm crashes in the backward pass of a channels-last input that needs no gradient, and a blueprint
    may call `view`.
    """
    return (h.detach() if isolated else h).contiguous()


def signal_of(algorithm: Algorithm, delta: Tensor) -> Tensor:
    """The signal; raises ValueError for an algorithm that blends nothing."""
    if algorithm is Algorithm.MULTIPLY:
        return torch.tanh(delta)
    if algorithm in (Algorithm.ADD, Algorithm.GATE):
        return delta
    raise ValueError(f"there is no way to blend with algorithm {algorithm!r}; expected ADD, MULTIPLY or GATE.")


def weight_of(algorithm: Algorithm, alpha: Tensor | None, h: Tensor, gate: Tensor | None) -> Tensor | None:
    """The weight. None stands for 1, also as the alpha of a hidden seed."""
    if algorithm is Algorithm.ADD:
        return alpha
    factor = h if algorithm is Algorithm.MULTIPLY else gate
    assert factor is not None, "GATE without the output of a gate network"
    return factor if alpha is None else factor * alpha


def delta_grad(
    algorithm: Algorithm, grad: Tensor, signal: Tensor, weight: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """The gradient of delta from that of the value, written into `out` if it is given."""
    if algorithm is Algorithm.MULTIPLY:
        assert weight is not None, "the weight of MULTIPLY is at least h"
        found: Tensor = torch.ops.aten.tanh_backward(grad * weight, signal)
        return found if out is None else out.copy_(found)
    if weight is not None:
        return torch.mul(grad, weight, out=out)
    return grad if out is None else out.copy_(grad)


def factor_grad(grad: Tensor, signal: Tensor, alpha: Tensor | None, factor: Tensor) -> Tensor:
    """The gradient of the other factor of alpha in the weight: h for MULTIPLY, the gate for GATE."""
    found = (grad * signal).sum_to_size(factor.shape)
    return found if alpha is None else found * alpha


def blend(
    h: Features,
    delta: Features,
    algorithm: Algorithm,
    alpha: Float[Tensor, "*A"] | None,
    gate: Float[Tensor, "*G"] | None = None,
) -> Features:
    """The features after the slot, in the dtype of `h`, from the outputs of a seed and, for GATE, of its gate network.

    `alpha` is 0-dimensional, or one weight per example, [B, 1, 1, 1] or [B, 1, 1]; None for a hidden seed.
    """
    others = (None if x is None else x.to(h.dtype) for x in (alpha, gate))
    blended: Tensor = _Blend.apply(h, delta.to(h.dtype), algorithm, *others)  # type: ignore[no-untyped-call]
    return blended


@final
class _Blend(torch.autograd.Function):
    """The output of a hidden seed is not used in the value, so infinities and NaN do not reach the host."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        h: Tensor,
        delta: Tensor,
        algorithm: Algorithm,
        alpha: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """The blended features."""
        signal, weight = signal_of(algorithm, delta), weight_of(algorithm, alpha, h, gate)
        ctx.algorithm = algorithm
        ctx.save_for_backward(signal, weight, alpha, gate)
        return h.view_as(h) if alpha is None or weight is None else torch.addcmul(h, signal, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of h, delta and gate."""
        (signal, weight, alpha, gate), algorithm = ctx.saved_tensors, ctx.algorithm
        grad_h, grad_delta, grad_gate = grad, None, None
        if algorithm is Algorithm.MULTIPLY and alpha is not None:
            grad_h = grad + factor_grad(grad, signal, alpha, grad)
        if ctx.needs_input_grad[1]:
            grad_delta = delta_grad(algorithm, grad, signal, weight)
        if algorithm is Algorithm.GATE and ctx.needs_input_grad[4]:
            grad_gate = factor_grad(grad, signal, alpha, gate)
        return grad_h, grad_delta, None, None, grad_gate
