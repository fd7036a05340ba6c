"""The LSTM of the policy: one step, and a whole sequence with its own backward pass.

    a = W_x x + b + W_h h        (i, f, g, o) = (sigmoid, sigmoid, tanh, sigmoid)(a)
    c' = f c + i g               h' = o tanh(c')                      before step t: h, c are zeroed where reset[t]

Backwards, with dh and dc the gradients of h' and c':

    dc  += dh o (1 - tanh^2 c')
    da_o = dh tanh(c') o (1 - o)     da_i = dc g i (1 - i)     da_f = dc c f (1 - f)     da_g = dc i (1 - g^2)
    dh   = da W_h  and  dc = dc f    of the step before, zeroed where reset[t];  dW_h = sum over t of da^T h

All factors but dh and dc are computed for many steps at once, and so is dW_h. That leaves six operators per step, where
autograd needs about forty.

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
    """H' of every step from the state (h0, c0), which `reset[:, 0]` may zero; differentiable once."""
    outputs: Tensor = _Sequence.apply(gates_x, h0, c0, reset, recurrent_weight)  # type: ignore[no-untyped-call]
    return outputs


_BLOCK = 2**17
"""Elements of one factor computed at once, so that they stay in the cache."""


@final
class _Sequence(torch.autograd.Function):
    """The equations above; time is the first axis."""

    @staticmethod
    def forward(ctx: Any, gates_x: Tensor, h: Tensor, c: Tensor, reset: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        """All steps, written into the tensors that the backward pass needs."""
        hosts, steps, _ = gates_x.shape
        fresh, inputs = reset.t()[..., None], gates_x.transpose(0, 1)
        gates = gates_x.new_empty(steps, hosts, gates_x.shape[-1])
        h_before, c_before, tanh_c_all, outputs = gates.new_empty(4, steps, hosts, h.shape[-1]).unbind()
        every = (fresh, inputs, h_before, c_before, tanh_c_all, outputs, gates, *gates.chunk(4, dim=-1))
        transposed, zero = weight.t(), gates.new_zeros(())
        for new, x_in, h_in, c_in, tanh_c, out, a, a_i, a_f, a_g, a_o in zip(
            *(x.unbind(0) for x in every), strict=True
        ):
            torch.where(new, zero, h, out=h_in)  # a product would keep NaN across a reset
            torch.where(new, zero, c, out=c_in)
            torch.addmm(x_in, h_in, transposed, out=a)
            a_i.sigmoid_()
            a_f.sigmoid_()
            a_g.tanh_()
            a_o.sigmoid_()
            c = torch.mul(a_f, c_in).addcmul_(a_i, a_g)
            torch.tanh(c, out=tanh_c)
            h = torch.mul(a_o, tanh_c, out=out)
        ctx.save_for_backward(gates, (~fresh).to(gates.dtype), h_before, c_before, tanh_c_all, weight)
        return outputs.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of the gate inputs, the initial state and the recurrent weight."""
        gates, keep, h_before, c_before, tanh_c_all, weight = ctx.saved_tensors
        steps, hosts, width = tanh_c_all.shape
        grads = torch.empty_like(gates)
        inner, outer = grads[..., : 3 * width].unflatten(-1, (3, width)), grads[..., 3 * width :]
        given = (grad.transpose(0, 1), grads, inner, outer, keep)
        dh_before, dc = gates.new_zeros(2, hosts, width).unbind()
        grad_weight, keep_after = torch.zeros_like(weight), keep[0]  # multiplies zeros in the last step
        block = max(1, _BLOCK // (hosts * width))
        for end in range(steps, 0, -block):
            here = slice(max(0, end - block), end)
            factors = _factors(gates[here], c_before[here], tanh_c_all[here], keep[here])
            for grad_h, da, da_inner, da_outer, keep_here, of_cell, of_gates, of_output, carried in zip(
                *(reversed(x.unbind(0)) for x in (*(x[here] for x in given), *factors)), strict=True
            ):
                dh = torch.addcmul(grad_h, dh_before, keep_after)
                dc = torch.addcmul(dc, dh, of_cell)
                torch.mul(dh, of_output, out=da_outer)
                torch.mul(dc[:, None], of_gates, out=da_inner)
                dc, dh_before, keep_after = dc * carried, da @ weight, keep_here
            grad_weight.addmm_(grads[here].flatten(0, 1).t(), h_before[here].flatten(0, 1))
        return grads.transpose(0, 1), dh_before * keep_after, dc, None, grad_weight


def _factors(gates: Tensor, c_before: Tensor, tanh_c_all: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """Factors: dh to dc, dc to (da_i, da_f, da_g), dh to da_o, dc to dc of the step before."""
    i, f, g, o = gates.chunk(4, dim=-1)
    of_gates = torch.stack((g * i * (1.0 - i), c_before * f * (1.0 - f), i * (1.0 - g * g)), dim=-2)
    return o * (1.0 - tanh_c_all * tanh_c_all), of_gates, tanh_c_all * o * (1.0 - o), f * keep
