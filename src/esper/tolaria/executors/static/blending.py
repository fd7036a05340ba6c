"""The rule of `kasmina.blending` for all hosts, by masks.

    deltas     conv_light  [B, N, ...]   attention  [B, N, ...]  ...        every blueprint, for every host
    select     the delta of each host's own blueprint, zeros where nothing grows
    blend      the features of each host with its own seed

A delta that is not selected may be infinite or NaN, because weights of one blueprint mean nothing as those of another.
So values, and gradients of parameters and hosts, are selected with `where` and never multiplied by a mask.

Shape legend: B = examples per host, N = hosts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.blending import delta_grad, factor_grad, signal_of, weight_of
from esper.leyline.stages import Algorithm


class BlendMasks(NamedTuple):
    """How the seeds of one slot blend; each [N, 1, 1, 1], to broadcast over features [B, N, C, H, W]."""

    active: Tensor
    trainable: Tensor
    multiplies: Tensor
    gated: Tensor
    alpha: Tensor

    def choose(self, by: Callable[[Algorithm], Any]) -> Tensor:
        """The tensor that `by` gives for each host's own algorithm."""
        add_or_gate = torch.where(self.gated, by(Algorithm.GATE), by(Algorithm.ADD))
        return torch.where(self.multiplies, by(Algorithm.MULTIPLY), add_or_gate)


def select(deltas: list[Float[Tensor, "B N *F"]], own: list[Bool[Tensor, "N *ones"]]) -> Float[Tensor, "B N *F"]:
    """The delta of each host's own blueprint; `own[i]` marks the hosts of `deltas[i]`, each host once at most."""
    selected: Tensor = _Select.apply(own, *deltas)  # type: ignore[no-untyped-call]
    return selected


@final
class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: list[Tensor], *deltas: Tensor) -> Tensor:  # noqa: ANN401
        """The selected values."""
        ctx.own = own
        selected = torch.where(own[0], deltas[0], 0.0)
        for mask, delta in zip(own[1:], deltas[1:], strict=True):
            torch.where(mask, delta, selected, out=selected)
        return selected

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Each delta gets the gradient of its own hosts.

        A product, which is vectorized where `torch.where` is not, is safe here: a NaN stays within its own host, and
        parameters of other blueprints do not take the gradient.
        """
        return (None, *(grad * mask.to(grad.dtype) for mask in ctx.own))


def blend_masked(
    h: Float[Tensor, "B N *F"], delta: Float[Tensor, "B N *F"], gate: Float[Tensor, "B N *G"], masks: BlendMasks
) -> Float[Tensor, "B N *F"]:
    """Features of all hosts after a slot, unchanged to the bit for hosts without an active seed."""
    blended: Tensor = _Blend.apply(h, h.detach(), delta, gate, masks)  # type: ignore[no-untyped-call]
    return blended


@final
class _Blend(torch.autograd.Function):
    """Seeds see h without gradient (`own`), so h gets its gradient by the identity path, and by MULTIPLY's factor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, own: Tensor, delta: Tensor, gate: Tensor, masks: BlendMasks) -> Tensor:  # noqa: ANN401
        """The blended features."""
        alpha = torch.where(masks.active, masks.alpha, 1.0).to(h.dtype)
        signal = masks.choose(lambda algorithm: signal_of(algorithm, delta))
        weight = masks.choose(lambda algorithm: weight_of(algorithm, alpha, own, gate))
        ctx.masks = masks
        ctx.save_for_backward(signal, weight, alpha, gate)
        return torch.where(masks.active, torch.addcmul(h, signal, weight), h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of h, delta and gate; zero for seeds that are not trainable."""
        signal, weight, alpha, gate = ctx.saved_tensors
        masks: BlendMasks = ctx.masks
        grad_h = grad_delta = grad_gate = None
        if ctx.needs_input_grad[0]:
            scaled = grad + factor_grad(grad, signal, alpha, grad)
            grad_h = torch.where(masks.multiplies & masks.active, scaled, grad)
        if ctx.needs_input_grad[2]:
            found = masks.choose(lambda algorithm: delta_grad(algorithm, grad, signal, weight))
            grad_delta = torch.where(masks.trainable, found, 0.0)
        if ctx.needs_input_grad[3]:
            found = factor_grad(grad, signal, alpha, gate)
            grad_gate = torch.where(masks.gated & masks.trainable, found, 0.0)
        return grad_h, None, grad_delta, grad_gate, None
