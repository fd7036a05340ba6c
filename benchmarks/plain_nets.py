"""Grown networks and their training loop in plain PyTorch: the reference of `plain_loops.py`, without code of esper.

A network is a small CNN or a causal transformer with a `Grown` block after some of its layers. Its parameters have the
names that esper gives them (`seeds.<slot>.seed.conv.weight`), so that both can start from the same weights.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Blend = Literal["ADD", "MULTIPLY", "GATE"]


@dataclass(frozen=True, kw_only=True)
class Grown:
    """What one slot holds: a blueprint, how it is blended and how strongly, and the slot's channels."""

    slot: str
    blueprint: str
    blend: Blend
    alpha: float
    channels: int


def _chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


# -- seeds of a CNN ---------------------------------------------------------------------------------------------------


class LayerScale(nn.Module):
    """One factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 0.01))

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return h * self.gamma.view(-1, 1, 1)


class TanhScale(nn.Module):
    """One bounded factor."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return torch.tanh(self.strength) * h


class ChannelAttention(nn.Module):
    """Squeeze and excitation, signed."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(c, max(1, c // 4), bias=False), nn.Linear(max(1, c // 4), c)

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return h * torch.tanh(self.excite(F.silu(self.squeeze(h.mean((2, 3))))))[:, :, None, None]


class NormShift(nn.Module):
    """A step towards the normalized features."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.gain = norm, TanhScale()

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return self.gain(self.norm(h) - h)


def _group_norm(c: int) -> nn.GroupNorm:
    groups = max(g for g in range(1, 33) if c % g == 0 and c // g >= min(16, c))
    return nn.GroupNorm(groups, c)


def _conv(a: int, b: int, k: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, padding=k // 2, groups=groups, bias=False)


def image_seed(name: str, c: int) -> nn.Module:
    """The seed of a CNN with `c` channels."""
    b, scale = max(8, c // 4), LayerScale(c)
    if name == "conv_light":
        return _chain(conv=_conv(c, c, 3), norm=_group_norm(c), act=nn.ReLU(), scale=scale)
    if name == "conv_small":
        return _chain(conv=_conv(c, c, 1), norm=_group_norm(c), act=nn.ReLU(), scale=scale)
    if name == "attention":
        return ChannelAttention(c)
    if name == "norm":
        return NormShift(_group_norm(c))
    if name == "depthwise":
        parts = {"depthwise": _conv(c, c, 3, c), "pointwise": _conv(c, c, 1), "norm": _group_norm(c)}
        return _chain(**parts, act=nn.ReLU(), scale=scale)
    if name == "bottleneck":
        parts = {"down": _conv(c, b, 1), "down_act": nn.ReLU(), "conv": _conv(b, b, 3), "conv_act": nn.ReLU()}
        return _chain(**parts, up=_conv(b, c, 1), norm=_group_norm(c), scale=scale)
    assert name == "conv_heavy", name
    first = {"conv1": _conv(c, c, 3), "norm1": _group_norm(c), "act1": nn.ReLU()}
    return _chain(**first, conv2=_conv(c, c, 3), norm2=_group_norm(c), act2=nn.ReLU(), scale=scale)


# -- seeds of a transformer -------------------------------------------------------------------------------------------


class CausalAttention(nn.Module):
    """Multi-head attention to earlier tokens, by PyTorch's own operator."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(mixed.transpose(1, 2).flatten(2))


class CausalDepthwise(nn.Module):
    """A convolution of each channel over four tokens, behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 4, groups=width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return self.conv(F.pad(self.norm(h).transpose(1, 2), (3, 0))).transpose(1, 2)


def token_seed(name: str, d: int) -> nn.Module:
    """The seed of a transformer of width `d`."""
    if name in ("attention", "flex_attention"):
        return CausalAttention(d, 4)
    if name == "depthwise":
        return CausalDepthwise(d)
    if name == "norm":
        return NormShift(nn.LayerNorm(d))
    if name in ("lora", "lora_large"):
        rank = 8 if name == "lora" else 32
        return _chain(down=nn.Linear(d, rank, bias=False), up=nn.Linear(rank, d, bias=False))
    width = {"mlp_small": 2, "mlp": 4}[name] * d
    return _chain(up=nn.Linear(d, width), act=nn.GELU(), down=nn.Linear(width, d))


# -- networks ---------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """The weight of a seed for each image, or for each token from what came before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = max(8, channels // 4)
        self.hidden, self.out = nn.Linear(channels, width), nn.Linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        if h.dim() == 4:
            return self.out(F.silu(self.hidden(h.mean((2, 3))))).sigmoid()[:, :, None, None]
        past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]
        return self.out(F.silu(self.hidden(past))).sigmoid()


class GrownBlock(nn.Module):
    """A seed blended into the features; the seeds of a CNN send no gradient to earlier layers."""

    def __init__(self, grown: Grown, *, images: bool) -> None:
        super().__init__()
        self.blend, self.alpha, self.images = grown.blend, grown.alpha, images
        self.seed = (image_seed if images else token_seed)(grown.blueprint, grown.channels)
        self.gate = Gate(grown.channels) if grown.blend == "GATE" else None

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        x = h.detach() if self.images else h
        delta = self.seed(x)
        if self.blend == "MULTIPLY":
            return h + self.alpha * h * torch.tanh(delta)
        return h + self.alpha * (delta if self.gate is None else self.gate(x) * delta)


class Block(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv, self.norm = _conv(a, b, 3), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return F.relu(self.norm(self.conv(x)))


class PlainCNN(nn.Module):
    """Blocks of doubling width, each followed by its grown seed and a pooling."""

    def __init__(self, channels: Sequence[int], classes: int, grown: Sequence[Grown]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairwise(channels))
        self.head = nn.Linear(channels[-1], classes)
        self.seeds = nn.ModuleDict({g.slot: GrownBlock(g, images=True) for g in grown})

    def forward(self, x: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if f"r0c{i}" in self.seeds:
                x = self.seeds[f"r0c{i}"](x)
            x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    """Attention and MLP with pre-normalization."""

    def __init__(self, d: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = CausalAttention(d, heads, p)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(p)

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        h = h + self.dropout(self.attention(self.norm1(h)))
        return h + self.dropout(self.down(F.gelu(self.up(self.norm2(h)))))


class Positions(nn.Module):
    """A vector per position."""

    def __init__(self, context: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(context, d))

    def forward(self, h: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        return h + self.weight[: h.shape[1]]


class PlainTransformer(nn.Module):
    """Layers, each followed by its grown seed, and a tied output."""

    def __init__(
        self, vocabulary: int, d: int, heads: int, layers: int, context: int, p: float, grown: Sequence[Grown]
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, d), Positions(context, d)
        self.dropout, self.norm = nn.Dropout(p), nn.LayerNorm(d)
        self.layers = nn.ModuleList(Layer(d, heads, p) for _ in range(layers))
        self.output = nn.Linear(d, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.seeds = nn.ModuleDict({g.slot: GrownBlock(g, images=False) for g in grown})

    def forward(self, x: Tensor) -> Tensor:
        """Features or outputs of a batch."""
        h = self.dropout(self.positions(self.embedding(x)))
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if f"r0c{i}" in self.seeds:
                h = self.seeds[f"r0c{i}"](h)
        return self.output(self.norm(h))


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples on the device of the networks: x [n, ...] and y [n] or [n, T]; `orders` [N, n] are those of training."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    orders: Tensor
    batch_train: int
    batch_val: int


Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> mean loss of a batch."""


class PlainLoops:
    """N networks, each trained by a loop of its own.

    `loss`: cross-entropy if not given; else there is no share of right answers. `fused`: PyTorch's fused optimizer
    step. `channels_last`: of networks and images. `compiled`: by `torch.compile`.
    """

    def __init__(
        self, nets: Sequence[nn.Module], data: Data, *, adamw: bool, lr: float, loss: Loss | None = None,
        fused: bool = True, channels_last: bool = False, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.nets, self.data = nets, data
        self.optimizers = [_optimizer(net, adamw=adamw, lr=lr, fused=fused) for net in nets]
        self._loss, self._classifies = _loss if loss is None else loss, loss is None
        self._layout = torch.channels_last if channels_last else None
        if channels_last:
            for net in nets:
                net.to(memory_format=torch.channels_last)
        self._called = [torch.compile(net) if compiled else net for net in nets]

    def _batch(self, x: Tensor) -> Tensor:
        return x if self._layout is None else x.contiguous(memory_format=self._layout)

    def train(self) -> list[float]:
        """Every network over its examples once; the mean loss of each."""
        (x, y), losses = self.data.train, []
        for net, called, optimizer, order in zip(
            self.nets, self._called, self.optimizers, self.data.orders, strict=True
        ):
            net.train()
            owners = [[p for name, p in net.named_parameters() if not name.startswith("seeds.")]]
            owners += [list(block.parameters()) for block in getattr(net, "seeds", nn.ModuleDict()).children()]
            total = torch.zeros((), device=x.device)
            for chosen in order.split(self.data.batch_train):
                loss = self._loss(called(self._batch(x[chosen])), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                for parameters in owners:
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                total += loss.detach() * len(chosen) / len(order)
            losses.append(total)
        return torch.stack(losses).tolist()

    @torch.no_grad()
    def evaluate(self) -> list[tuple[float, float]]:
        """Mean loss and share of right answers of each network on the validation examples."""
        (x, y), found = self.data.val, []
        for net, called in zip(self.nets, self._called, strict=True):
            net.eval()
            loss, hits = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
            for some_x, some_y in zip(x.split(self.data.batch_val), y.split(self.data.batch_val), strict=True):
                outputs = called(self._batch(some_x))
                loss += self._loss(outputs, some_y) * len(some_y) / len(y)
                if self._classifies:
                    hits += (outputs.argmax(-1) == some_y).sum()
            found.append(torch.stack((loss, hits / y.numel())))
        return [(loss, share) for loss, share in torch.stack(found).tolist()]


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _optimizer(net: nn.Module, *, adamw: bool, lr: float, fused: bool) -> torch.optim.Optimizer:
    """Decay of the network itself (of its matrices only with AdamW), none of its seeds."""
    own = {name: p for name, p in net.named_parameters() if not name.startswith("seeds.")}
    decayed = [p for p in own.values() if not adamw or p.dim() > 1]
    others = [p for p in net.parameters() if all(p is not d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1 if adamw else 5e-4}, {"params": others, "weight_decay": 0.0}]
    if adamw:
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused)
