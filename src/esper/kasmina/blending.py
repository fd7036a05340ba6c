"""How a seed's correction enters the host's features.

                     value                                gradient of the identity path
    ADD              h + alpha * delta(x)                 1
    MULTIPLY         h * (1 + alpha * tanh delta(x))      1 + alpha * tanh delta
    GATE             h + alpha * gate(x) * delta(x)       1
    straight-through h                                    1        (the seed learns as if alpha were 1)

with x = h, or h without gradient where the seed is isolated. Isolation never cuts the identity path, so a permanent
seed lets the full gradient through to what lies before it.

Shape legend: B = batch; h is [B, C, H, W] or [B, T, D].
"""

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.stages import Algorithm

Features = Float[Tensor, "B *F"]


def seed_input(h: Features, isolated: bool) -> Features:
    """What seed and gate look at: an isolated seed sends no gradient into the host through its input."""
    return h.detach() if isolated else h


def blend(
    h: Features,
    delta: Features,
    algorithm: Algorithm,
    alpha: Float[Tensor, "*A"],
    gate: Float[Tensor, "*G"] | None = None,
) -> Features:
    """The features with the seed's correction, in the dtype of `h`.

    Args:
        h: the host's features; the identity path.
        delta: the seed's output for `seed_input(h, ...)`.
        algorithm: ADD, MULTIPLY or GATE.
        alpha: 0-dimensional, or one weight per example, [B, 1, 1, 1] or [B, 1, 1].
        gate: output of the gate network; read by GATE alone, which needs it.
    """
    alpha, delta = alpha.to(h.dtype), delta.to(h.dtype)
    match algorithm:
        case Algorithm.ADD:
            return torch.addcmul(h, delta, alpha)
        case Algorithm.MULTIPLY:
            return h * (1.0 + alpha * torch.tanh(delta))
        case Algorithm.GATE:
            assert gate is not None, "GATE without the output of a gate network"
            return torch.addcmul(h, delta, alpha * gate.to(h.dtype))
    raise ValueError(f"there is no way to blend with algorithm {algorithm!r}; expected ADD, MULTIPLY or GATE.")


def straight_through(
    h: Features,
    delta_fn: Callable[[Tensor], Tensor],
    algorithm: Algorithm,
    gate_fn: Callable[[Tensor], Tensor] | None = None,
) -> Features:
    """The features unchanged to the bit, while seed and gate receive the gradient they would have at full weight.

    y = h + (u - sg(u)), where u is delta(sg h) for ADD, sg(h) * tanh delta(sg h) for MULTIPLY and
    gate(sg h) * delta(sg h) for GATE. Without it a seed that is not heard yet (alpha = 0) would have exactly zero
    gradient and could not learn.
    """
    x = h.detach()
    delta = delta_fn(x).to(h.dtype)
    match algorithm:
        case Algorithm.ADD:
            u = delta
        case Algorithm.MULTIPLY:
            u = x * torch.tanh(delta)
        case Algorithm.GATE:
            assert gate_fn is not None, "GATE without a gate network"
            u = gate_fn(x).to(h.dtype) * delta
        case _:
            raise ValueError(f"there is no way to blend with algorithm {algorithm!r}; expected ADD, MULTIPLY or GATE.")
    y: Tensor = _StraightThrough.apply(h, u)  # type: ignore[no-untyped-call]
    return y


@final
class _StraightThrough(torch.autograd.Function):
    """(h, u) -> h, with the gradient handed to both.

    An own function rather than h + (u - u.detach()): that would turn -0.0 into 0.0 and let an infinite u, which nobody
    hears yet, reach the host as NaN.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, u: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        return grad, grad
