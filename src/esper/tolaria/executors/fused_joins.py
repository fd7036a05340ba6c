"""How the outputs of all seeds of a slot enter the features of their hosts, in one operation with its own gradient.

    value      h + alpha u                                     of hosts whose seed is heard; h alone where it is hidden
    u          delta (ADD) | h tanh delta (MULTIPLY) | gate delta (GATE)

    gradient   of delta, gate: that of u times alpha, or times 1 where the seed is hidden and learns straight through
               of h: the incoming one, and for a heard MULTIPLY that of u as well

`kasmina.blending` states the same rules for one seed. Left to autograd, every selection of hosts would fill a gradient
of all features with zeros; here each host's rows are written once.

Shape legend: B = examples per host, N = hosts, g = hosts of a group, k = hosts of a piece.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esper.leyline.stages import Algorithm


class Piece(NamedTuple):
    """Hosts `first` to `last` (exclusive) of a group: their seeds join alike, and all are heard or none is.

    `hosts` [k] are their rows among all hosts, `alpha` [k, 1, ..., 1] their blend weights.
    """

    algorithm: Algorithm
    heard: bool
    first: int
    last: int
    hosts: Int[Tensor, " k"]
    alpha: Tensor

    def of(self, x_Bg: Tensor) -> Tensor:
        """The piece's part of a tensor of the group."""
        return x_Bg[:, self.first : self.last]


class Joining(NamedTuple):
    """What the seeds of one group put out: `own` [B, g, ...] is h at their hosts, `gate` is of the last pieces' hosts.

    `hosts` [g] are the group's rows among all hosts, None where it is all of them in order.
    """

    pieces: tuple[Piece, ...]
    hosts: Int[Tensor, " g"] | None
    own: Tensor
    delta: Tensor
    gate: Tensor | None


def join(h: Float[Tensor, "B N *F"], groups: list[Joining]) -> Float[Tensor, "B N *F"]:
    """Features of all hosts after a slot."""
    plans = tuple((group.pieces, group.hosts) for group in groups)
    parts = (part for group in groups for part in (group.own.detach(), group.delta, group.gate))
    joined: Tensor = _Join.apply(h, plans, *parts)  # type: ignore[no-untyped-call]
    return joined


_Plans = tuple[tuple[tuple[Piece, ...], Tensor | None], ...]


@final
class _Join(torch.autograd.Function):
    """See the head of this file. A hidden seed's output is not even looked at: infinite or NaN, nobody hears it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, plans: _Plans, *parts: Tensor | None) -> Tensor:  # noqa: ANN401
        """The joined features."""
        total = h.clone()
        kept: list[Tensor | None] = []
        for (pieces, _), (own, delta, gate) in zip(plans, _triples(parts), strict=True):
            for piece in pieces:
                bent = torch.tanh(piece.of(delta)) if piece.algorithm is Algorithm.MULTIPLY else None
                kept.append(bent)
                if not piece.heard:
                    continue
                if bent is not None:
                    spoken = piece.of(own) * bent
                elif piece.algorithm is Algorithm.GATE:
                    spoken = piece.of(delta) * _of_gate(piece, pieces, gate)
                else:
                    spoken = piece.of(delta)
                total.index_add_(1, piece.hosts, spoken * piece.alpha.to(h.dtype))
        ctx.plans = plans
        ctx.save_for_backward(*parts, *kept)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient of h, then (nothing, that of delta, that of the gate) of each group."""
        grad = grad.contiguous()  # once, instead of in every selection below
        num_parts, found = 3 * len(ctx.plans), []
        parts, kept = ctx.saved_tensors[:num_parts], iter(ctx.saved_tensors[num_parts:])
        needed = ctx.needs_input_grad[2:]
        multiplies = any(_scales_host(piece) for pieces, _ in ctx.plans for piece in pieces)
        grad_h = grad.clone() if multiplies and ctx.needs_input_grad[0] else grad
        for i, ((pieces, hosts), (own, delta, gate)) in enumerate(zip(ctx.plans, _triples(parts), strict=True)):
            learns, gate_learns = needed[3 * i + 1], gate is not None and needed[3 * i + 2]
            slope = grad if hosts is None else grad.index_select(1, hosts)
            grad_delta = torch.empty_like(delta) if learns else None
            grad_gate = torch.empty_like(gate) if gate_learns else None
            for piece in pieces:
                bent, weighted = next(kept), piece.of(slope)
                if piece.heard:
                    weighted = weighted * piece.alpha.to(grad.dtype)
                if bent is not None and piece.heard and ctx.needs_input_grad[0]:
                    grad_h.index_add_(1, piece.hosts, (weighted * bent).to(grad_h.dtype))
                if grad_delta is None:
                    continue
                into = piece.of(grad_delta)
                if bent is not None:
                    torch.mul(weighted * piece.of(own), 1.0 - bent * bent, out=into)
                elif piece.algorithm is Algorithm.GATE:
                    opened = _of_gate(piece, pieces, gate)
                    torch.mul(weighted, opened, out=into)
                    if grad_gate is not None:
                        of_gate = (weighted * piece.of(delta)).sum_to_size(opened.shape)
                        _of_gate(piece, pieces, grad_gate).copy_(of_gate)
                else:
                    into.copy_(weighted)
            found += [None, grad_delta, grad_gate]
        return grad_h, None, *found


def _scales_host(piece: Piece) -> bool:
    return piece.heard and piece.algorithm is Algorithm.MULTIPLY


def _of_gate(piece: Piece, pieces: tuple[Piece, ...], gate: Tensor | None) -> Tensor:
    """The piece's part of the gates; they begin with the group's first piece that has one."""
    assert gate is not None, "GATE without the output of a gate network"
    begin = next(other.first for other in pieces if other.algorithm is Algorithm.GATE)
    return gate[:, piece.first - begin : piece.last - begin]


def _triples(parts: tuple[Any, ...]) -> list[tuple[Any, Any, Any]]:
    return list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
