"""Toy functions of hosts, one for each rule, and numbers that are awkward for them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ODD = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-30, -1e-30, 3e38, 80.0, -80.0, 0.5, 2.5, -3.5)


def floats(n: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[n, columns]: every odd number somewhere, else numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=generator, dtype=torch.float64) * 4.0
    x = x * 10.0 ** torch.randint(-3, 4, (n, columns), generator=generator)
    for i, value in enumerate(ODD):
        x.view(-1)[(7 * i + seed) % x.numel()] = value
    return x.to(dtype)


def integers(n: int, columns: int, seed: int = 0, low: int = -9, high: int = 10) -> Tensor:
    return torch.randint(low, high, (n, columns), generator=torch.Generator().manual_seed(seed))


def truths(n: int, columns: int, seed: int = 0) -> Tensor:
    return integers(n, columns, seed) > 0


TABLE = torch.tensor([[0.5, -1.0, 3.0], [2.0, 0.0, -0.0], [7.0, 8.0, 9.0], [math.nan, 1.0, -math.inf]])
WORDS = torch.arange(20)[:, None] * torch.tensor([3, 5])
MARKS = torch.tensor([True, False, False, True])
MATRIX = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])

Function = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""Of floats [N, 3], whole numbers [N, 3], truth values [N, 3], and indices [N, 3] from 0 to 3."""

FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x, i, m, k: (x + 2.0, x - i, 3.0 - x, x * x, x / 3.0, 1.0 / x, -x, x.abs(), x.sign()),
    "of whole numbers": lambda x, i, m, k: (i + 1, i - 4, i * i, -i, i.abs(), i.sign(), i % 4, i // 3, i / 2),
    "scaled sums": lambda x, i, m, k: (torch.add(x, i, alpha=2.0), torch.sub(x, x * x, alpha=0.5), torch.rsub(x, 1.0)),
    "of truth values": lambda x, i, m, k: (m & (i > 0), m | (i > 0), m ^ (i > 0), ~m, m * (i > 2), m.logical_not()),
    "comparisons": lambda x, i, m, k: (x < 0.5, x <= 0.5, x > i, x >= 1, x == 1.0, x != i, i == k, m == (i > 0)),
    "comparisons into numbers": lambda x, i, m, k: torch.gt(x, 0.5, out=torch.empty_like(x)),
    "extremes of two": lambda x, i, m, k: (
        torch.maximum(x, i.float()), torch.minimum(x, x.roll(1, 1)), torch.fmax(x, -x), torch.fmin(x, x.roll(1, 1)),
        torch.maximum(i, k), torch.minimum(m, i > 0),
    ),
    "limits": lambda x, i, m, k: (x.clamp(-1.0, 2.0), x.clamp(min=0.5), x.clamp(max=i.float()), x.relu(), i.clamp(0,
        3)),
    "what is no number": lambda x, i, m, k: (
        x.isnan(), x.isinf(), x.isfinite(), x.nan_to_num(), x.nan_to_num(nan=7.0), x.nan_to_num(0.5, -1.0, -2.0),
        x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), i.nan_to_num(),
    ),
    "choices": lambda x, i, m, k: (
        torch.where(m, x, 0.0), torch.where(x > 0, i, -1), torch.where(m, m, i > 0), x.masked_fill(m, math.nan),
        torch.where(m, x.double(), 0.25), torch.where(torch.tensor([True, False, True]), x, -x),
    ),
    "conversions": lambda x, i, m, k: (
        i.float(), i.double(), m.float(), m.long(), m.double(), i.bool(), x.double().float(), x.bool(),
        x.nan_to_num().clamp(-1e6, 1e6).long(),
    ),
    "rounding": lambda x, i, m, k: (x.round(), x.floor(), torch.div(i, 3, rounding_mode="floor")),
    "joined": lambda x, i, m, k: (
        torch.cat((x, i, m), dim=1), torch.stack((x, -x)), torch.stack((x[:, 0], i[:, 1]), dim=-1), torch.cat((m,
        ~m)[:1]),
    ),
    "views": lambda x, i, m, k: (
        x[:, 1:], x.unsqueeze(1).expand(-1, 2, -1) + 0.0, x[:, [2]] * 2, x.unbind(1)[0] + 1.0,
        x.split([1, 2], dim=1)[1] - 1.0, x.t().contiguous().t() + x, torch.chunk(x, 3, dim=1)[2].squeeze(1) * 2.0,
    ),
    "padded": lambda x, i, m, k: (F.pad(x, (1, 2), value=math.nan), F.pad(i, (0, 1)), x.roll(2, 1)),
    "in place": lambda x, i, m, k: _in_place(x, i, m),
    "sums": lambda x, i, m, k: (
        i.sum(1), m.sum(dim=1), i.sum(dim=1, keepdim=True), x.double().mul(0).nan_to_num().sum(-1), i.cumsum(1),
        i.prod(1),
        m.float().mean(1), (x > 0).sum(-1, dtype=torch.float64),
    ),
    "extremes of many": lambda x, i, m, k: (
        x.amax(1), x.amin(1), i.amax(1), m.any(1), m.all(1), m.any(1, keepdim=True), x[:, [0, 0, 1]].amax(1),
        i.argmax(1), x.argmax(dim=1), i.float().argmax(1, keepdim=True),
    ),
    "looked up": lambda x, i, m, k: (TABLE[k], TABLE[:, 0][k], MARKS[k], WORDS[k * 5], WORDS[k], TABLE.index_select(0,
        k[:, 0])),
    "gathered": lambda x, i, m, k: (
        x.gather(1, k.clamp(max=2)), i.gather(1, k[:, :1].clamp(max=2)), m.gather(1, k.clamp(max=2)),
        torch.cat((x, x), 1).gather(1, k), torch.cat((x, x, x, x), 1).gather(1, k * 3), TABLE.expand(len(k), 4,
        3).gather(1, k[:, None]),
    ),
    "scattered": lambda x, i, m, k: (
        torch.cat((x, x), 1).scatter(1, k[:, :1], i.float()), x.scatter(1, k.clamp(max=2), 5.0), m.scatter(1, k[:,
        :2].clamp(max=2), ~m),
    ),
    "embedded": lambda x, i, m, k: F.embedding(k, TABLE),
    "products with constants": lambda x, i, m, k: (x.nan_to_num(0, 1, 1) @ MATRIX.t(), MATRIX @ x.nan_to_num(0, 1,
        1).t()),
    "powers of two": lambda x, i, m, k: (x.square(), x.pow(2)),
    "made alike": lambda x, i, m, k: (
        torch.zeros_like(x) + x, torch.full_like(x, 2.0) * i, x.new_zeros(x.shape) + i, torch.ones_like(i) - i,
        x.new_full(x.shape, 3.0) + x, x.new_ones(x.shape) + x, torch.empty_like(x).copy_(i),
        x.new_empty(x.shape).copy_(i),
        x.clone().fill_(2.0) + x, i.clone().zero_() + i,
    ),
    "other names": lambda x, i, m, k: (
        torch.clamp_min(x, 0.5), torch.clamp_max(x, 0.5), torch.logical_and(m, i > 0), torch.logical_or(m, i > 0),
    ),
    "many at once": lambda x, i, m, k: torch._foreach_add([x, i], [x, k]),
}  # fmt: skip
"""By what they do; exact, to the bit."""

COMBINED: Function = lambda x, i, m, k: (  # noqa: E731
    torch.addcmul(x, x, x, value=0.5), torch.addcmul(x, i.float(), x), torch.lerp(x, -x, 0.25), torch.lerp(x,
        i.float(), 0.75),
)  # fmt: skip
"""What a processor may round once or twice."""

CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": torch.log, "log1p": torch.log1p, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
        "cos": torch.cos,
    "sqrt": torch.sqrt, "reciprocal": torch.reciprocal, "power": lambda x: x.abs().clamp(max=1e4) ** 1.7,
        "root of powers": lambda x: 0.995**x.clamp(-99, 99),
}  # fmt: skip
"""To a few units in the last place."""


def _in_place(x: Tensor, i: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Writes into parts of fresh tensors, and reads other views of them."""
    y = x.clone()
    y[:, 1] = i[:, 0]
    y[:, 2].mul_(2.0).add_(1.0)
    y.masked_fill_(m, -1.0)
    z = torch.zeros(len(x), 4)
    z[:, :3].copy_(i)
    z[:, 3] = y.sum(1).nan_to_num_(nan=5.0, posinf=1.0, neginf=-1.0)
    return y, y.clone(), z, y.t().clamp_(0.0, 1.0).t()
