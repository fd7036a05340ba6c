"""The rule of `kasmina.blending` for all seeds of a slot, by slices of hosts, in one operation with its own gradient.

Autograd would fill a gradient of all features with zeros for every selection of hosts; here each row is written once.

Shape legend: B = examples per host, N = hosts, g = hosts of a group, k = hosts of a piece.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.blending import delta_grad, factor_grad, signal_of, weight_of
from esper.leyline.stages import Algorithm


class Piece(NamedTuple):
    """Hosts `first` to `last` (exclusive) of a group: they blend by the same algorithm, with all seeds active or none.

    `hosts` [k] are their rows among all hosts, `alpha` [k, 1, ..., 1] their blend weights.
    """

    algorithm: Algorithm
    active: bool
    first: int
    last: int
    hosts: Int[Tensor, " k"]
    alpha: Tensor

    def of(self, x_Bg: Tensor) -> Tensor:
        """The piece's part of a tensor of the group."""
        return x_Bg[:, self.first : self.last]

    def alpha_of(self, dtype: torch.dtype) -> Tensor | None:
        """The blend weights, None where the seeds are hidden."""
        return self.alpha.to(dtype) if self.active else None


class GroupOutputs(NamedTuple):
    """Outputs of the seeds of one group: `own` [B, g, ...] is h at their hosts, `gate` covers the last pieces' hosts.

    `hosts` [g] are the group's rows among all hosts, None if the group is all of them in order.
    """

    pieces: tuple[Piece, ...]
    hosts: Int[Tensor, " g"] | None
    own: Tensor
    delta: Tensor
    gate: Tensor | None


def blend_groups(h: Float[Tensor, "B N *F"], groups: list[GroupOutputs]) -> Float[Tensor, "B N *F"]:
    """Features of all hosts after a slot."""
    plans = tuple((group.pieces, group.hosts) for group in groups)
    parts = (part for group in groups for part in (group.own.detach(), group.delta, group.gate))
    blended: Tensor = _Blend.apply(h, plans, *parts)  # type: ignore[no-untyped-call]
    return blended


_Plans = tuple[tuple[tuple[Piece, ...], Tensor | None], ...]


@final
class _Blend(torch.autograd.Function):
    """The output of a hidden seed is not read: infinite or NaN, it does not reach the host."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, plans: _Plans, *parts: Tensor | None) -> Tensor:  # noqa: ANN401
        """The blended features."""
        total = h.clone()
        signals: list[Tensor] = []
        weights: list[Tensor | None] = []
        for (pieces, _), (own, delta, gate) in zip(plans, _triples(parts), strict=True):
            for piece in pieces:
                alpha, gate_k = piece.alpha_of(h.dtype), _of_gate(piece, pieces, gate)
                signal = signal_of(piece.algorithm, piece.of(delta))
                weight = weight_of(piece.algorithm, alpha, piece.of(own), gate_k)
                if alpha is not None and weight is not None:
                    total.index_add_(1, piece.hosts, signal * weight)
                signals.append(signal)
                weights.append(weight)
        ctx.plans = plans
        ctx.save_for_backward(*(part for _, *rest in _triples(parts) for part in rest), *signals, *weights)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient of h, then (nothing, that of delta, that of the gate) of each group."""
        grad = grad.contiguous()  # once, instead of in every selection below
        found: list[Tensor | None] = []
        saved, num_parts = ctx.saved_tensors, 2 * len(ctx.plans)
        num_pieces = (len(saved) - num_parts) // 2
        computed = iter(zip(saved[num_parts:-num_pieces], saved[-num_pieces:], strict=True))
        to_host, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        multiplies = any(_scales_host(piece) for pieces, _ in ctx.plans for piece in pieces)
        grad_h = grad.clone() if multiplies and to_host else grad
        for i, (pieces, hosts) in enumerate(ctx.plans):
            delta, gate = saved[2 * i : 2 * i + 2]
            grad_group = grad if hosts is None else grad.index_select(1, hosts)
            grad_delta = torch.empty_like(delta) if needed[3 * i + 1] else None
            grad_gate = torch.empty_like(gate) if gate is not None and needed[3 * i + 2] else None
            for piece in pieces:
                (signal, weight), of_value, alpha = next(computed), piece.of(grad_group), piece.alpha_of(grad.dtype)
                if _scales_host(piece) and to_host:
                    of_host = factor_grad(of_value, signal, alpha, signal)
                    grad_h.index_add_(1, piece.hosts, of_host)
                if grad_delta is not None:
                    delta_grad(piece.algorithm, of_value, signal, weight, out=piece.of(grad_delta))
                if (into := _of_gate(piece, pieces, grad_gate)) is not None:
                    into.copy_(factor_grad(of_value, signal, alpha, into))
            found += [None, grad_delta, grad_gate]
        return grad_h, None, *found


def _scales_host(piece: Piece) -> bool:
    return piece.active and piece.algorithm is Algorithm.MULTIPLY


def _of_gate(piece: Piece, pieces: tuple[Piece, ...], gate: Tensor | None) -> Tensor | None:
    """The piece's part of the gates, which begin at the group's first GATE piece; None for other pieces."""
    if gate is None or piece.algorithm is not Algorithm.GATE:
        return None
    begin = next(other.first for other in pieces if other.algorithm is Algorithm.GATE)
    return gate[:, piece.first - begin : piece.last - begin]


def _triples(parts: tuple[Any, ...]) -> list[tuple[Any, Any, Any]]:
    return list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
