"""The arithmetic of the recurrent core: one step of an LSTM, and a whole sequence with a gradient of its own.

    a = W_x x + b + W_h h        (i, f, g, o) = (sigmoid, sigmoid, tanh, sigmoid)(a)
    c' = f c + i g               h' = o tanh(c')                      before step t: h, c are zeroed where reset[t]

Backwards, with dh and dc the gradients of h' and c':

    dc  += dh o (1 - tanh^2 c')
    da_o = dh tanh(c') o (1 - o)     da_i = dc g i (1 - i)     da_f = dc c f (1 - f)     da_g = dc i (1 - g^2)
    dh   = da W_h  and  dc = dc f    of the step before, zeroed where reset[t];  dW_h = sum over t of da^T h

All factors but dh and dc are known after the forward pass and are computed for many steps at once, and so is dW_h. Six
operators are left in a step, where automatic differentiation needs about forty.

Shape legend: N = hosts, T = steps, H = width, G = 4 H gates in the order i, f, g, o.
"""

from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def lstm_cell(
    gates_x: Float[Tensor, "N G"],
    h: Float[Tensor, "N H"],
    c: Float[Tensor, "N H"],
    recurrent_weight: Float[Tensor, "G H"],
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000); (h', c')."""
    i, f, g, o = torch.addmm(gates_x, h, recurrent_weight.t()).chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def lstm_sequence(
    gates_x: Float[Tensor, "N T G"],
    h0: Float[Tensor, "N H"],
    c0: Float[Tensor, "N H"],
    reset: Bool[Tensor, "N T"],
    recurrent_weight: Float[Tensor, "G H"],
) -> Float[Tensor, "N T H"]:
    """H' of every step, from the state (h0, c0), which the first step may reset; differentiable once."""
    outputs: Tensor = _Sequence.apply(gates_x, h0, c0, reset, recurrent_weight)  # type: ignore[no-untyped-call]
    return outputs


_BLOCK = 2**17
"""Numbers of one factor that are computed at once: few steps of many hosts, which stay in the cache, many of few."""


def lstm_steps(
    gates_x: Float[Tensor, "N T G"],
    h: Float[Tensor, "N H"],
    c: Float[Tensor, "N H"],
    reset: Bool[Tensor, "N T"],
    recurrent_weight: Float[Tensor, "G H"],
) -> Float[Tensor, "N T H"]:
    """The slow twin of `lstm_sequence`: the cell, step after step, under automatic differentiation."""
    outputs = []
    for gates, fresh in zip(gates_x.unbind(1), reset[..., None].unbind(1), strict=True):
        h, c = lstm_cell(gates, h.masked_fill(fresh, 0.0), c.masked_fill(fresh, 0.0), recurrent_weight)
        outputs.append(h)
    return torch.stack(outputs, dim=1)


@final
class _Sequence(torch.autograd.Function):
    """See the head of this file. Inside, time is the first axis."""

    @staticmethod
    def forward(ctx: Any, gates_x: Tensor, h: Tensor, c: Tensor, reset: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        """The steps, each written where the backward pass looks for it."""
        hosts, steps, _ = gates_x.shape
        fresh, inputs = reset.t()[..., None], gates_x.transpose(0, 1)
        gates = gates_x.new_empty(steps, hosts, gates_x.shape[-1])
        h_before, c_before, bent, outputs = gates.new_empty(4, steps, hosts, h.shape[-1]).unbind()
        every = (fresh, inputs, h_before, c_before, bent, outputs, gates, *gates.chunk(4, dim=-1))
        transposed, zero = weight.t(), gates.new_zeros(())
        for new, told, h_in, c_in, tanh_c, out, a, a_i, a_f, a_g, a_o in zip(
            *(x.unbind(0) for x in every), strict=True
        ):
            torch.where(new, zero, h, out=h_in)  # no product: what is not finite must not survive a reset
            torch.where(new, zero, c, out=c_in)
            torch.addmm(told, h_in, transposed, out=a)
            a_i.sigmoid_()
            a_f.sigmoid_()
            a_g.tanh_()
            a_o.sigmoid_()
            c = torch.mul(a_f, c_in).addcmul_(a_i, a_g)
            torch.tanh(c, out=tanh_c)
            h = torch.mul(a_o, tanh_c, out=out)
        ctx.save_for_backward(gates, (~fresh).to(gates.dtype), h_before, c_before, bent, weight)
        return outputs.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of the gates' inputs, of the first state, and of the recurrent weight."""
        gates, keep, h_before, c_before, bent, weight = ctx.saved_tensors
        steps, hosts, width = bent.shape
        grads = torch.empty_like(gates)
        inner, outer = grads[..., : 3 * width].unflatten(-1, (3, width)), grads[..., 3 * width :]
        given = (grad.transpose(0, 1), grads, inner, outer, keep)
        dh_before, dc = gates.new_zeros(2, hosts, width).unbind()
        of_weight, kept = torch.zeros_like(weight), keep[0]  # which multiplies zeros in the last step
        block = max(1, _BLOCK // (hosts * width))
        for end in range(steps, 0, -block):
            here = slice(max(0, end - block), end)
            factors = _factors(gates[here], c_before[here], bent[here], keep[here])
            for told, da, da_inner, da_outer, kept_here, of_cell, of_gates, of_output, carried in zip(
                *(reversed(x.unbind(0)) for x in (*(x[here] for x in given), *factors)), strict=True
            ):
                dh = torch.addcmul(told, dh_before, kept)
                dc = torch.addcmul(dc, dh, of_cell)
                torch.mul(dh, of_output, out=da_outer)
                torch.mul(dc[:, None], of_gates, out=da_inner)
                dc, dh_before, kept = dc * carried, da @ weight, kept_here
            of_weight.addmm_(grads[here].flatten(0, 1).t(), h_before[here].flatten(0, 1))
        return grads.transpose(0, 1), dh_before * kept, dc, None, of_weight


def _factors(gates: Tensor, c_before: Tensor, bent: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """What a unit of dh adds to dc, what dc adds to (da_i, da_f, da_g), dh to da_o, and what of dc goes a step back."""
    i, f, g, o = gates.chunk(4, dim=-1)
    of_gates = torch.stack((g * i * (1.0 - i), c_before * f * (1.0 - f), i * (1.0 - g * g)), dim=-2)
    return o * (1.0 - bent * bent), of_gates, bent * o * (1.0 - o), f * keep
