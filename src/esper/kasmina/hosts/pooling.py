"""2x2 max pooling that is fast on CPUs for contiguous features, where F.max_pool2d needs channels-last to be fast.

Ties go to the first of the window in reading order, as in `F.max_pool2d`: columns are compared first, then rows.
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor


def max_pool_2x2(h: Tensor) -> Tensor:
    """[..., H, W] -> [..., H // 2, W // 2]; an odd last row or column is left out."""
    if h.device.type != "cpu":
        return F.max_pool2d(h, 2)
    pooled: Tensor = _MaxPool.apply(h)  # type: ignore[no-untyped-call]
    return pooled


@final
class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:  # noqa: ANN401
        """The larger of two columns, then of two rows."""
        wide = torch.maximum(*_columns(h))
        ctx.save_for_backward(h, wide)
        return torch.maximum(*_rows(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        """The gradient at the largest of each window, zero elsewhere."""
        h, wide = ctx.saved_tensors
        covered = h.shape[-2] % 2 == 0 and h.shape[-1] % 2 == 0
        grad_wide, grad_h = torch.empty_like(wide), torch.empty_like(h) if covered else torch.zeros_like(h)
        _share(grad, _rows(wide), _rows(grad_wide))
        _share(grad_wide, _columns(h), _columns(grad_h))
        return grad_h


def _columns(h: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right column of each window."""
    height, width = h.shape[-2] // 2 * 2, h.shape[-1] // 2 * 2
    even = h[..., :height, :width]
    return even[..., ::2], even[..., 1::2]


def _rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower row of each window."""
    return wide[..., ::2, :], wide[..., 1::2, :]


def _share(grad: Tensor, values: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    """Pass `grad` to the larger of two values, to the first if they are equal."""
    # a product with a mask of floats is vectorized, `torch.where` is not
    second_wins = (values[1] > values[0]).to(grad.dtype)
    torch.mul(grad, second_wins, out=into[1])
    torch.sub(grad, into[1], out=into[0])
