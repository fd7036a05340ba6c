"""How the output of a seed enters the features of its host: the one statement of the rule, in value and gradient.

    value       h + alpha * u      where the seed is active (alpha > 0); h, to the bit, where it is hidden
    u           signal * factor

                signal          factor
    ADD         delta           1
    MULTIPLY    tanh delta      h
    GATE        delta           gate

    gradient    of u     the incoming one, times alpha where the seed is active, times 1 where it is hidden
                of h     the incoming one, and for an active MULTIPLY that of u times tanh delta

delta and gate are what the seed and its gate network give for h, or for h without gradient where the seed is isolated.
A hidden seed learns straight through, as if alpha were 1; with alpha = 0 its gradient would be exactly zero. Isolation
never cuts the path from h to the value, so a permanent seed lets the full gradient through to what lies before it.

`blend` is the rule for one seed. Executors that blend the seeds of many hosts at once arrange the same functions
(`signal_of`, `contribution`, `delta_grad`, `factor_grad`) by slices or by masks.

Shape legend: B = batch; h is [B, C, H, W] or [B, T, D].
"""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.leyline.stages import Algorithm

Features = Float[Tensor, "B *F"]


def signal_of(algorithm: Algorithm, delta: Tensor) -> Tensor:
    """What of the seed's output is blended; raises ValueError for an algorithm that blends nothing."""
    if algorithm is Algorithm.MULTIPLY:
        return torch.tanh(delta)
    if algorithm in (Algorithm.ADD, Algorithm.GATE):
        return delta
    raise ValueError(f"there is no way to blend with algorithm {algorithm!r}; expected ADD, MULTIPLY or GATE.")


def contribution(algorithm: Algorithm, signal: Tensor, h: Tensor, gate: Tensor | None) -> Tensor:
    """What is added to h at full weight, the `u` of the table."""
    factor = _factor(algorithm, h, gate)
    return signal if factor is None else signal * factor


def delta_grad(
    algorithm: Algorithm, grad: Tensor, signal: Tensor, h: Tensor, gate: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """The gradient of delta from that of u, written into `out` where that is given."""
    if algorithm is Algorithm.MULTIPLY:
        return torch.mul(grad * h, 1.0 - signal * signal, out=out)
    factor = _factor(algorithm, h, gate)
    if factor is not None:
        return torch.mul(grad, factor, out=out)
    return grad if out is None else out.copy_(grad)


def factor_grad(grad: Tensor, signal: Tensor) -> Tensor:
    """The gradient of the factor from that of u: of h for MULTIPLY; for GATE it is still to be summed over features."""
    return grad * signal


def _factor(algorithm: Algorithm, h: Tensor, gate: Tensor | None) -> Tensor | None:
    if algorithm is Algorithm.MULTIPLY:
        return h
    assert gate is not None or algorithm is Algorithm.ADD, "GATE without the output of a gate network"
    return gate if algorithm is Algorithm.GATE else None


def blend(
    h: Features,
    delta: Features,
    algorithm: Algorithm,
    alpha: Float[Tensor, "*A"] | None,
    gate: Float[Tensor, "*G"] | None = None,
) -> Features:
    """The features after the slot, in the dtype of `h`.

    Args:
        h: the host's features.
        delta: the seed's output.
        algorithm: ADD, MULTIPLY or GATE.
        alpha: 0-dimensional, or one weight per example, [B, 1, 1, 1] or [B, 1, 1]; None for a hidden seed.
        gate: output of the gate network; read by GATE alone, which needs it.
    """
    others = (None if x is None else x.to(h.dtype) for x in (alpha, gate))
    blended: Tensor = _Blend.apply(h, delta.to(h.dtype), algorithm, *others)  # type: ignore[no-untyped-call]
    return blended


@final
class _Blend(torch.autograd.Function):
    """What a hidden seed puts out is not looked at: infinite or NaN, it does not reach the host."""

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
        signal = signal_of(algorithm, delta)
        ctx.algorithm = algorithm
        ctx.save_for_backward(h, signal, alpha, gate)
        return h.view_as(h) if alpha is None else torch.addcmul(h, contribution(algorithm, signal, h, gate), alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of h, delta and gate."""
        (h, signal, alpha, gate), algorithm = ctx.saved_tensors, ctx.algorithm
        of_u = grad if alpha is None else grad * alpha
        grad_h, grad_delta, grad_gate = grad, None, None
        if algorithm is Algorithm.MULTIPLY and alpha is not None:
            grad_h = grad + factor_grad(of_u, signal)
        if ctx.needs_input_grad[1]:
            grad_delta = delta_grad(algorithm, of_u, signal, h, gate)
        if algorithm is Algorithm.GATE and ctx.needs_input_grad[4]:
            grad_gate = factor_grad(of_u, signal).sum_to_size(gate.shape)
        return grad_h, grad_delta, None, None, grad_gate
