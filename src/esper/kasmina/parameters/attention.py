"""`nn.MultiheadAttention` by operations of its own: with keyed dropout, and on stacked weights.

PyTorch's forward pass draws the mask of its weights from the global generator, and computes with the weights of the
inner layer `out_proj` without a call of it. This one takes the same arguments, and gives the same results.

Shape legend: R = rows (examples, of all hosts where weights are stacked), H = heads, T and S = queries and keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

        Raises:
            ValueError: inputs without an axis of examples, or `is_causal` without the mask that it describes.
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


def with_drop(layer: nn.MultiheadAttention, drop: nn.Module) -> None:
    """Give attention the layer that drops its weights, in place."""
    layer.__class__ = KeyedAttention
    layer._modules["drop"] = drop
