"""Networks that nobody has prepared, in plain PyTorch: the subjects of `own_networks.py`.

Those with `seeds` run the modules in it behind the layers of their names; it is empty where esper grows its own.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Seeded(nn.Module):
    """A network whose layers may have a module behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.ModuleDict()

    def behind(self, name: str, h: Tensor) -> Tensor:
        """The features behind a layer."""
        return self.seeds[name](h) if name in self.seeds else h


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet8(Seeded):
    """[B, 3, H, W] -> logits [B, 10]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Block(width, width, 1)
        self.layer2 = Block(width, 2 * width, 2)
        self.layer3 = Block(2 * width, 4 * width, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W]."""
        h = self.stem(x)
        for name in ("layer1", "layer2", "layer3"):
            h = self.behind(name, self.get_submodule(name)(h))
        return self.head(torch.flatten(self.pool(h), 1))


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """Wider, depthwise, narrower."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int = 4) -> None:
        super().__init__()
        wide = inputs * factor
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True),
            Excite(wide), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return x + self.body(x) if self.adds else self.body(x)


class MobileNet(nn.Module):
    """[B, 3, H, W] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.layer1, self.layer2 = Inverted(8, 8, 1), Inverted(8, 16, 2)
        self.layer3, self.layer4 = Inverted(16, 16, 1), Inverted(16, 24, 2)
        self.last = nn.Sequential(nn.Conv2d(24, 64, 1, bias=False), nn.BatchNorm2d(64), nn.SiLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W]."""
        return self.head(self.last(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))))


class MLP(nn.Module):
    """[B, F] -> logits [B, classes]."""

    def __init__(self, sizes: Sequence[int] = (64, 128, 128, 10)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class GPTBlock(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(d, dim=2)
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d)))
        return x + self.drop(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocabulary], with a tied output."""

    def __init__(
        self,
        dropout: float = 0.0,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        vocabulary: int = 65,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init)
        self.lm_head.weight = self.wte.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T]."""
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class UNet(nn.Module):
    """[B, 1, H, W] -> [B, 1, H, W]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(1, width), self._pair(width, 2 * width)
        self.middle = self._pair(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = self._pair(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1, self.out = self._pair(2 * width, width), nn.Conv2d(width, 1, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1, H, W]."""
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        h = self.up2(self.middle(F.max_pool2d(b, 2)))
        h = self.up1(self.join2(torch.cat([h, b], dim=1)))
        return self.out(self.join1(torch.cat([h, a], dim=1)))


class LSTM(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocabulary]."""

    def __init__(self, width: int = 64, vocabulary: int = 65) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T]."""
        return self.head(self.norm(self.lstm(self.embed(tokens))[0]))


def pixel_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of the pixels or numbers of each example [B]."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).mean(dim=1)
