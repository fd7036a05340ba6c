"""The rule of `kasmina.blending` for all hosts, by masks: which seed of a slot is a host's own, and how it is blended.

    deltas     conv_light  [B, N, ...]   attention  [B, N, ...]  ...        every blueprint, for every host
    select     the delta of each host's own blueprint, zeros where nothing grows
    join       the features of each host with its own seed

What is not selected may be infinite or NaN (weights of a seed read as those of another blueprint mean nothing), so
values are chosen and never multiplied by a mask; so is every gradient before it reaches parameters or a host.

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


class Ways(NamedTuple):
    """How the seeds of one slot join their hosts; each [N, 1, 1, 1], to broadcast over features [B, N, C, H, W]."""

    active: Tensor
    trainable: Tensor
    multiplies: Tensor
    gated: Tensor
    alpha: Tensor

    def choose(self, by: Callable[[Algorithm], Tensor | None]) -> Tensor:
        """What `by` gives for each host's own algorithm."""
        add, multiply, gate = (by(algorithm) for algorithm in (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE))
        assert add is not None
        assert multiply is not None
        assert gate is not None
        return torch.where(self.multiplies, multiply, torch.where(self.gated, gate, add))


def select(deltas: list[Float[Tensor, "B N *F"]], own: list[Bool[Tensor, "N *ones"]]) -> Float[Tensor, "B N *F"]:
    """The delta of each host's own blueprint; `own[i]` marks the hosts of `deltas[i]`, each host once at most."""
    chosen: Tensor = _Select.apply(own, *deltas)  # type: ignore[no-untyped-call]
    return chosen


@final
class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: list[Tensor], *deltas: Tensor) -> Tensor:  # noqa: ANN401
        """The chosen values."""
        ctx.own = own
        chosen = torch.where(own[0], deltas[0], 0.0)
        for mine, delta in zip(own[1:], deltas[1:], strict=True):
            torch.where(mine, delta, chosen, out=chosen)
        return chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Each delta gets the gradient of its own hosts.

        A product is enough here, and is vectorized where `torch.where` is not: a gradient that is NaN is that of its
        host alone, and parameters of other blueprints do not take theirs.
        """
        return (None, *(grad * mine.to(grad.dtype) for mine in ctx.own))


def join(
    h: Float[Tensor, "B N *F"], delta: Float[Tensor, "B N *F"], gate: Float[Tensor, "B N *G"], ways: Ways
) -> Float[Tensor, "B N *F"]:
    """Features of all hosts after a slot; those of hosts whose seed is not heard unchanged to the bit."""
    joined: Tensor = _Join.apply(h, h.detach(), delta, gate, ways)  # type: ignore[no-untyped-call]
    return joined


@final
class _Join(torch.autograd.Function):
    """Seeds see h without gradient (`own`), so h gets its gradient by the identity path, and by MULTIPLY's factor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, own: Tensor, delta: Tensor, gate: Tensor, ways: Ways) -> Tensor:  # noqa: ANN401
        """The joined features."""
        alpha = torch.where(ways.active, ways.alpha, 1.0).to(h.dtype)
        signal = ways.choose(lambda algorithm: signal_of(algorithm, delta))
        weight = ways.choose(lambda algorithm: weight_of(algorithm, alpha, own, gate))
        ctx.ways = ways
        ctx.save_for_backward(signal, weight, alpha, gate)
        return torch.where(ways.active, torch.addcmul(h, signal, weight), h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of h, delta and gate: those of a seed that does not learn are zero."""
        signal, weight, alpha, gate = ctx.saved_tensors
        ways: Ways = ctx.ways
        grad_h = grad_delta = grad_gate = None
        if ctx.needs_input_grad[0]:
            of_host = factor_grad(grad, signal, alpha, grad)
            grad_h = torch.where(ways.multiplies & ways.active, grad + of_host, grad)
        if ctx.needs_input_grad[2]:
            found = ways.choose(lambda algorithm: delta_grad(algorithm, grad, signal, weight))
            grad_delta = torch.where(ways.trainable, found, 0.0)
        if ctx.needs_input_grad[3]:
            opened = factor_grad(grad, signal, alpha, gate)
            grad_gate = torch.where(ways.gated & ways.trainable, opened, 0.0)
        return grad_h, None, grad_delta, grad_gate, None
