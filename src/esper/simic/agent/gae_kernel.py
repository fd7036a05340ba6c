"""Generalized advantage estimation as one Triton kernel; `advantages.gae_scan` is its reference in PyTorch.

One lane processes one host from the last step to the first; in [T, N] neighbouring lanes load neighbouring addresses.
Imported only for CUDA tensors where Triton is installed. Shape legend: N = hosts, T = steps.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

_LANES = 128


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gae(numbers, flags, discount, decay, out, num_hosts, num_steps, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """`numbers` [3, T, N]: rewards, values, bootstrap values. `flags` [3, T, N]: terminal, truncated, valid."""
    host = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = host < num_hosts
    plane = num_hosts * num_steps
    gamma = tl.load(discount + host, mask=inside, other=0.0)
    gamma_lambda = tl.load(decay + host, mask=inside, other=0.0)
    advantage = tl.zeros([LANES], out.dtype.element_ty)
    value_after = tl.zeros([LANES], out.dtype.element_ty)
    for i in range(num_steps):
        at = (num_steps - 1 - i) * num_hosts + host
        reward = tl.load(numbers + at, mask=inside, other=0.0)
        value = tl.load(numbers + plane + at, mask=inside, other=0.0)
        bootstrap = tl.load(numbers + 2 * plane + at, mask=inside, other=0.0)
        terminal = tl.load(flags + at, mask=inside, other=0) != 0
        truncated = tl.load(flags + plane + at, mask=inside, other=0) != 0
        valid = tl.load(flags + 2 * plane + at, mask=inside, other=0) != 0
        following = tl.where(terminal, 0.0, tl.where(truncated, bootstrap, value_after))
        delta = tl.where(valid, gamma * following + reward - value, 0.0)
        advantage = delta + tl.where(valid, tl.where(terminal | truncated, 0.0, gamma_lambda), gamma) * advantage
        value_after = tl.where(valid, value, gamma * value_after)
        tl.store(out + at, tl.where(valid, advantage, 0.0), mask=inside)


@torch.no_grad()
def gae_on_cuda(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    bootstrap_values: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float | Float[Tensor, " N"],
    gae_lambda: float | Float[Tensor, " N"],
) -> Float[Tensor, "N T"]:
    """`advantages.compute_gae`; the result is a view `[N, T]` of time-major memory."""
    num_hosts, num_steps = values.shape
    numbers_3TN = torch.stack((rewards.t(), values.t(), bootstrap_values.t()))
    flags_3TN = torch.stack((terminal.t(), truncated.t(), valid.t())).view(torch.uint8)
    out_TN = torch.empty_like(numbers_3TN[0])
    _gae[(triton.cdiv(num_hosts, _LANES),)](
        numbers_3TN,
        flags_3TN,
        _per_host(gamma, values),
        _per_host(gamma * gae_lambda, values),
        out_TN,
        num_hosts,
        num_steps,
        LANES=_LANES,
        enable_fp_fusion=False,  # round product and sum separately, as `gae_scan` does
    )
    return out_TN.t()


def _per_host(number: float | Tensor, like: Tensor) -> Tensor:
    """[N] of the dtype of `like`: Triton passes a Python number in single precision."""
    if isinstance(number, Tensor):
        return number.to(like.dtype).contiguous()
    return torch.full((like.shape[0],), number, dtype=like.dtype, device=like.device)
