"""Dropout with keyed masks, which do not depend on other hosts or on the executor.

    key       64 bits of the stream DROPOUT of (run seed, host, episode, step, slot, number of the mask in this pass)
    element   i-th number of 16 bits from that key on

Whatever else draws in a pass uses the global generators of PyTorch, Python and numpy: for a module that does, they are
seeded for each pass of each host (`Draws.seeded`), and restored behind it.

When a module is built, `Dropout` replaces its layers of `nn.Dropout`, which draw from the global generator, and
`KeyedAttention` its layers of `nn.MultiheadAttention` with dropout.

Shape legend: B = examples per host, G = hosts; the host is the fastest index of the rows, as in `stacking`.
Of attention: R = rows (examples, of all hosts where weights are stacked), H = heads, T and S = queries and keys.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from esper.leyline.random import Stream, generator_seeds, seeded_generators, short_rows, words


class KeyedAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` that was given this class; its layer `drop`, if any, drops weights in training.

    It has no `bias_k`, `bias_v` or `add_zero_attn`.
    """

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[R, T, D] -> [R, T, O]."""
        return F.linear(x, weight, bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [R, T, D] (with `batch_first`, else [T, R, D]), and the weights [R, T, S] or [R, H, T, S] if needed.

        Raises ValueError for inputs without an axis of examples, or `is_causal` without the mask that it describes.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal describes attn_mask, which is None; give the causal mask as well.")
        if query.dim() != 3:
            raise ValueError(f"attention got inputs {list(query.shape)}; expected an axis of examples, [B, T, D].")
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(query, key, value))
        causal = is_causal and key_padding_mask is None
        drop = self._modules.get("drop") if self.training else None
        if need_weights or drop is not None:
            scores = q @ k.mT * (1.0 / self.head_dim**0.5)
            mask = _added(attn_mask, key_padding_mask, scores)
            attended = (scores if mask is None else scores + mask).softmax(dim=-1).to(v.dtype)
            attended = attended if drop is None else drop(attended)
            mixed = attended @ v
        else:
            mask = None if causal else _added(attn_mask, key_padding_mask, q)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, attended.mean(dim=1) if average_attn_weights else attended

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [R, T, D]."""
        same = query is key and key is value
        inputs = (query, key, value) if self.batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif same:
            return self._linear(inputs[0], self.in_proj_weight, bias).chunk(3, dim=-1)
        else:
            weights = self.in_proj_weight.chunk(3, dim=-2)
        biases = (None, None, None) if bias is None else bias.chunk(3, dim=-1)
        return tuple(map(self._linear, inputs, weights, biases))


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores [R, H, T, S] of both masks; `like` is [R, H, ...]. True means: not attended to."""
    found = []
    if attn_mask is not None:
        found.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, like.shape[:2]))
    if key_padding_mask is not None:
        found.append(key_padding_mask[:, None, None])
    numbers = (
        torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask
        for mask in found
    )
    return sum(numbers) if found else None  # type: ignore[return-value]


def can_be_keyed(layer: nn.Module) -> bool:
    """Whether a layer is an `nn.MultiheadAttention` without the rare options of `KeyedAttention`."""
    return type(layer) is nn.MultiheadAttention and layer.bias_k is None and not layer.add_zero_attn


@dataclass
class Moment:
    """Episode and step of a train pass; the executor updates them at the start of a pass."""

    run_seed: int
    episode: int = 0
    t: int = 0


_AHEAD = 16
"""Masks whose keys are drawn at once."""


@final
class Draws:
    """Random numbers of the seeds in one slot of some hosts (or of the hosts themselves), in one pass over the data."""

    def __init__(
        self, moment: Moment, hosts: Int[Tensor, " G"], slot: int, numbers: Int[Tensor, " G"] | None = None
    ) -> None:
        """`hosts` are global numbers; `numbers` are the same on the CPU, which `seeded` needs."""
        self._moment, self.hosts, self._slot, self._numbers = moment, hosts, slot, numbers
        self.count = 0
        self._keys: Int[Tensor, "A G"] | None = None
        self._first = 0  # mask of the first of these keys

    def of(self, hosts: Int[Tensor, " G"]) -> "Draws":
        """The same state for other hosts."""
        draws = Draws(self._moment, hosts, self._slot)
        draws.count = self.count
        return draws

    def seeded(self, device: torch.device) -> AbstractContextManager[object]:
        """The global generators as the next forward pass of the one host finds them."""
        now, number = self._moment, self.hosts if self._numbers is None else self._numbers
        key = {"episode": now.episode, "t": now.t, "slot": self._slot, "block": self.count}
        (seed,) = generator_seeds(now.run_seed, Stream.FORWARD_PASS, number, **key)
        self.count += 1
        return seeded_generators(seed, device)

    def kept(self, shape: tuple[int, ...], p: float) -> Bool[Tensor, "..."]:
        """The next mask, of a shape [B * G, ...]: each element is True with probability 1 - p, to a multiple of 2^-16.

        Where p = 1 the mask means nothing.
        """
        num_hosts = self.hosts.shape[0]
        one = (shape[0] // num_hosts, *shape[1:])
        numbers = short_rows(self._next_key(), math.prod(one))
        mask = numbers >= min(round(p * 2**16), 2**16 - 1) - 2**15
        return mask.view(num_hosts, *one).transpose(0, 1).flatten(0, 1)

    def _next_key(self) -> Int[Tensor, " G"]:
        """The keys of the next mask; those of `_AHEAD` masks are drawn in the time of one."""
        ahead = self.count - self._first
        if self._keys is None or not 0 <= ahead < _AHEAD:
            now, ahead, self._first = self._moment, 0, self.count
            key = {"episode": now.episode, "t": now.t, "slot": self._slot}
            blocks = torch.arange(self.count, self.count + _AHEAD, device=self.hosts.device)[:, None]
            own = words(now.run_seed, Stream.DROPOUT, self.hosts, **key, block=blocks)
            self._keys = own[..., 0] | own[..., 1] << 32
        self.count += 1
        return self._keys[ahead]


@final
class Dropout(nn.Module):
    """Inverted dropout with probability `p`; of whole channels [B * G, C] if `channels`."""

    def __init__(self, p: float, *, channels: bool) -> None:
        super().__init__()
        self.p, self.channels = p, channels
        self.draws: Draws | None = None

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0

    def mask(self, shape: tuple[int, ...]) -> Bool[Tensor, "..."]:
        """The next mask of a train pass, of a shape [B * G, ...]: which elements are kept."""
        assert self.draws is not None, "`draw_for` must be called before a train pass"
        return self.draws.kept(shape, self.p)

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, ...] -> the same."""
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.channels else tuple(x.shape)
        return x * self.mask(shape).to(x.dtype).mul_(self.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention with dropped weights, [B * G, heads, T, D / heads] each -> the same."""
        mixed: Tensor = _DroppedAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return mixed


_QUERIES = 32
"""Tokens whose attention weights are computed at once; weights of tokens later than all of these are skipped."""


@final
class _DroppedAttention(torch.autograd.Function):
    """Causal attention with dropped weights, for some queries after others; the gradient works in the same memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:  # noqa: ANN401
        """[B, heads, T, D / heads] each -> the same."""
        lead, tokens = q.shape[:2], q.shape[2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ctx.factor, ctx.scale, kept = 1.0 / math.sqrt(q.shape[-1]), dropout.scale, []
        later = torch.full((tokens, tokens), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        mixed = torch.empty_like(v)
        for first, end in _parts(tokens):
            weights = torch.baddbmm(later[first:end, :end], q[:, first:end], k[:, :end].mT, alpha=ctx.factor)
            weights = weights.softmax(dim=-1, dtype=q.dtype)
            mask = dropout.mask((*lead, end - first, end)).flatten(0, 1)
            mixed[:, first:end] = torch.bmm(weights * mask.to(weights.dtype), v[:, :end])
            kept += [weights, mask]
        ctx.save_for_backward(q, k, v, *kept)
        scaled: Tensor = mixed.mul_(dropout.scale).unflatten(0, lead)
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients of q, k and v."""
        q, k, v, *kept = ctx.saved_tensors
        lead, grad = grad.shape[:2], grad.flatten(0, 1) * ctx.scale
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (first, end), weights, mask in zip(_parts(q.shape[1]), kept[::2], kept[1::2], strict=True):
            number, of_mixed = mask.to(weights.dtype), grad[:, first:end]
            grad_v[:, :end] += torch.bmm((weights * number).mT, of_mixed)
            of_weights = torch.bmm(of_mixed, v[:, :end].mT).mul_(number)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            grad_q[:, first:end] = torch.bmm(of_scores, k[:, :end]).mul_(ctx.factor)
            grad_k[:, :end] += torch.bmm(of_scores.mT, q[:, first:end]).mul_(ctx.factor)
        return *(x.unflatten(0, lead) for x in (grad_q, grad_k, grad_v)), None


def _parts(tokens: int) -> list[tuple[int, int]]:
    """First and end of the queries of each part."""
    return [(first, min(first + _QUERIES, tokens)) for first in range(0, tokens, _QUERIES)]


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that are replaced; all but the first drop whole channels."""


def with_keyed_dropout(module: nn.Module) -> nn.Module:
    """Replace every dropout layer of `module` by one with keyed masks, in place."""
    holder = nn.ModuleList([module])
    for parent in list(holder.modules()):
        for name, child in parent._modules.items():
            if child is not None and type(child) in _DROPOUT:
                parent._modules[name] = Dropout(child.p, channels=type(child) is not nn.Dropout)  # type: ignore[arg-type]
            elif isinstance(child, nn.MultiheadAttention) and child.dropout > 0.0 and can_be_keyed(child):
                child.__class__ = KeyedAttention
                child._modules["drop"] = Dropout(child.dropout, channels=False)
    return holder[0]


def dropout_layers(module: nn.Module) -> tuple[Dropout, ...]:
    """All keyed dropout layers of a module."""
    return tuple(layer for layer in module.modules() if isinstance(layer, Dropout))


def draw_for(layers: tuple[Dropout, ...], draws: Draws | None) -> None:
    """Let these layers draw from `draws`."""
    for layer in layers:
        layer.draws = draws
