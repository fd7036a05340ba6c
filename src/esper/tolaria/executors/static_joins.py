"""Which seed of a slot is a host's own, and how it enters the host's features, by masks: the twin of `fused_joins`.

    deltas     conv_light  [B, N, ...]   attention  [B, N, ...]  ...        every blueprint, for every host
    select     the delta of each host's own blueprint, zeros where nothing grows
    join       h + alpha u where the seed is heard, h elsewhere; u is delta | h tanh delta | gate delta

What is not selected may be infinite or NaN (weights of a seed read as those of another blueprint mean nothing), so
values are chosen and never multiplied by a mask; so is every gradient before it reaches parameters or a host.

Shape legend: B = examples per host, N = hosts.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Ways(NamedTuple):
    """How the seeds of one slot join their hosts; each [N, 1, 1, 1], to broadcast over features [B, N, C, H, W]."""

    heard: Tensor
    learns: Tensor
    multiplies: Tensor
    gated: Tensor
    alpha: Tensor


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
        bent = torch.tanh(delta)
        spoken = torch.where(ways.multiplies, own * bent, torch.where(ways.gated, delta * gate, delta))
        joined = torch.where(ways.heard, h + spoken * ways.alpha.to(h.dtype), h)
        ctx.ways = ways
        ctx.save_for_backward(own, delta, gate, bent)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of h, delta and gate: of a hidden seed as if alpha were 1, of one that does not learn none."""
        own, delta, gate, bent = ctx.saved_tensors
        ways: Ways = ctx.ways
        weighted = grad * torch.where(ways.heard, ways.alpha, 1.0).to(grad.dtype)
        scales_host = ways.multiplies & ways.heard
        grad_h = torch.where(scales_host, grad + weighted * bent, grad) if ctx.needs_input_grad[0] else None
        grad_delta = grad_gate = None
        if ctx.needs_input_grad[2]:
            direct = torch.where(ways.gated, weighted * gate, weighted)
            slope = torch.where(ways.multiplies, weighted * own * (1.0 - bent * bent), direct)
            grad_delta = torch.where(ways.learns, slope, 0.0)
        if ctx.needs_input_grad[3]:
            opened = (weighted * delta).sum_to_size(gate.shape)
            grad_gate = torch.where(ways.gated & ways.learns, opened, 0.0)
        return grad_h, None, grad_delta, grad_gate, None
