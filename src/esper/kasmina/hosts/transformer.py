"""The transformer host, a causal language model with pre-normalization.

tokens -> embedding + positions -> layer ... layer -> (r0c0) -> layer ... layer -> (r0c1) -> ... -> norm -> logits
                                   segment 0                    segment 1                           tied output
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import Positions, SelfAttention
from esper.kasmina.hosts.host import Apply, Host, InjectionPoint, enabled_points
from esper.kasmina.parameters.dropout import with_keyed_dropout
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from esper.leyline.settings import AtLeast1, AtLeast2, Decay, check_fields

INIT_STD = 0.02
"""Of the weights of all linear layers and embeddings. The logits start near zero, the loss near ln(vocabulary)."""


@dataclass(frozen=True, kw_only=True)
class TransformerHostSpec:
    """Architecture of a transformer host.

    Attributes:
        vocabulary: number of tokens. width: of the features of a token. heads: of the attention.
        layers: number of layers, in `segments` parts of equal length, each of which ends with a slot.
        context: the longest sequence. dropout: of embeddings, attention weights, and the outputs of attention and MLP.
    """

    vocabulary: AtLeast2
    width: AtLeast2
    heads: AtLeast1
    layers: AtLeast1
    segments: AtLeast1
    context: AtLeast1
    dropout: Decay = 0.0
    family: ClassVar[HostFamily] = HostFamily.TRANSFORMER

    def __post_init__(self) -> None:
        check_fields(self, "host")
        for name, whole in (("heads", "width"), ("segments", "layers")):
            if getattr(self, whole) % getattr(self, name):
                raise ConfigError(f"host.{name} is {getattr(self, name)}; it must divide host.{whole}, which is "
                                  f"{getattr(self, whole)}.")  # fmt: skip

    def points(self) -> tuple[InjectionPoint, ...]:
        """All points in action order, which is the order of the forward pass."""
        return tuple(
            InjectionPoint(slot_id=f"r0c{j}", channels=self.width, order=j,
                           position=(j + 1) / self.segments) for j in range(self.segments))  # fmt: skip

    def num_params(self) -> int:
        """V D + T D + L (12 D^2 + 13 D) + 2 D."""
        d = self.width
        return (self.vocabulary + self.context) * d + self.layers * (12 * d**2 + 13 * d) + 2 * d

    def largest_activation(self, tokens: int) -> int:
        """Floats of the largest activation of one sequence: logits, hidden layer of an MLP, or attention weights."""
        return tokens * max(self.vocabulary, 4 * self.width, self.heads * tokens)

    def build(self, slot_ids: Iterable[str], example: Tensor) -> "TransformerHost":
        """A host with these slots enabled, for sequences like `example` [1, T] of token numbers.

        Raises ConfigError for a slot that does not exist, or no sequence of at most `context` tokens.
        """
        if example.dim() != 2 or example.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"a batch of inputs has the shape {tuple(example.shape)} and is {example.dtype}; a transformer host "
                "reads sequences of token numbers [B, T], int64 or int32."
            )
        return TransformerHost(self, slot_ids, tokens=example.shape[1])


@final
class Layer(nn.Module):
    """h + Attention(LN(h)), then h + MLP(LN(h))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout=dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout1, self.dropout2 = _dropout(dropout), _dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        h = h + self.dropout1(self.attention(self.norm1(h)))
        out: Tensor = h + self.dropout2(self.down(F.gelu(self.up(self.norm2(h)))))
        return out


@final
class TransformerHost(Host):
    """Layers in segments, and a tied output, without seeds."""

    family = HostFamily.TRANSFORMER

    def __init__(self, spec: TransformerHostSpec, slot_ids: Iterable[str], *, tokens: int) -> None:
        """A host with these slots enabled, for sequences of `tokens` tokens; raises ConfigError as `build`."""
        super().__init__()
        if not 1 <= tokens <= spec.context:
            raise ConfigError(
                f"sequences of {tokens} tokens do not fit host.context, which is {spec.context}; cut them into shorter "
                "windows, or enlarge host.context."
            )
        self.spec, self.tokens = spec, tokens
        self.enabled = enabled_points(spec.points(), slot_ids)
        length = spec.layers // spec.segments
        self.slot_after = {(point.order + 1) * length - 1: point.slot_id for point in self.enabled}
        self.largest_activation = spec.largest_activation(tokens)
        self.embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.positions = Positions(spec.context, spec.width)
        self.dropout = _dropout(spec.dropout)
        self.layers = nn.ModuleList(Layer(spec.width, spec.heads, spec.dropout) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        self.output = nn.Linear(spec.width, spec.vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        with_keyed_dropout(self)

    def features(self, point: InjectionPoint) -> tuple[int, int]:
        """Tokens and width of the features at a point."""
        return self.tokens, point.channels

    def rebuild(self) -> "TransformerHost":
        """A new host with newly initialized weights."""
        return TransformerHost(self.spec, self.execution_order(), tokens=self.tokens)

    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]; `apply` runs once per enabled slot, in execution order."""
        h = self.dropout(self.positions(self.embedding(x)))
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i in self.slot_after:
                h = apply(self.slot_after[i], h)
        logits: Tensor = self.output(self.norm(h))
        return logits


def _dropout(p: float) -> nn.Module:
    return nn.Dropout(p) if p else nn.Identity()
