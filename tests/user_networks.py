"""Networks as users write them, without a thought of esper."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut, with the in-place operations that are common in such code."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet8(nn.Module):
    """[B, 3, H, W] -> logits [B, 10]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Block(width, width, 1)
        self.layer2 = Block(width, 2 * width, 2)
        self.layer3 = Block(2 * width, 4 * width, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, 10)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(self.pool(h).view(x.shape[0], -1))


class MLP(nn.Module):
    """[B, 6] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.5))
        self.out = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Encoder(nn.Module):
    """Tokens [B, 7] -> logits [B, 3]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(tokens)).mean(dim=1))


class Skip(nn.Module):
    """A convolution whose input comes back behind it: x -> a -> a + b(a) -> mean -> head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        return self.head(F.adaptive_avg_pool2d(a + self.b(a), 1).flatten(1))


class Tied(nn.Module):
    """Tokens [B, T] -> logits [B, T, 5] with the table of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


BACKBONE: dict[str, Tensor] = {}
"""Trained weights of `Backbone`."""


class Tagger(nn.Module):
    """[B, T, 4] -> [B, T, 3]; each position gets the mean of all positions, or of those so far."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.into = nn.Linear(4, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        mean = h.mean(dim=1, keepdim=True) if self.both else h.cumsum(dim=1) / h.shape[1]
        return self.out(h + mean)


class Backbone(nn.Module):
    """A frozen stem with running statistics, a frozen layer, a partly frozen one, and a trained head."""

    def __init__(self, *, loads: bool = True, still: bool = False, head: bool = True) -> None:
        super().__init__()
        self.still = still
        self.r0c0 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.r1c0 = nn.Conv2d(4, 4, 3, padding=1)
        self.r0c1 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 3)
        if loads:
            self.load_state_dict(BACKBONE)
        for layer in (self.r0c0, self.r1c0) if head else (self,):
            layer.requires_grad_(False)
        if head:
            self.r0c1.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        if self.still:
            self.r0c0.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.r0c1(F.relu(self.r1c0(self.r0c0(x)))))
        return self.head(h.mean(dim=(2, 3)))


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(7)
    BACKBONE.update(Backbone(loads=False).state_dict())


class Squeeze(nn.Module):
    """A convolution over time whose channels are weighted by their means."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 3, stride, 1)
        self.norm, self.weights = nn.BatchNorm1d(outputs), nn.Linear(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x)))
        return h * torch.sigmoid(self.weights(h.mean(2)))[:, :, None]


class Sensors(nn.Module):
    """Windows of several sensors [B, C, T] -> logits [B, 3]: features [B, C, T], then [B, T, D]."""

    def __init__(self, sensors: int = 2) -> None:
        super().__init__()
        self.r0c0 = Squeeze(sensors, 4, 1)
        self.r1c0 = nn.Conv1d(4, 4, 3, padding=1)
        self.r0c1 = Squeeze(4, 8, 2)
        self.tokens = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c1(F.relu(self.r1c0(self.r0c0(x.flatten(2)))))
        return self.head(torch.tanh(self.tokens(h.transpose(1, 2))).mean(1))


class Padded(nn.Module):
    """Tokens [B, T], of which 0 is padding -> logits [B, 2], by an encoder that PyTorch runs on nested tensors."""

    def __init__(self, *, pools_padding: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 2)
        self.pools_padding = pools_padding

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.embed(x), src_key_padding_mask=x == 0)
        return self.head(h.mean(1) if self.pools_padding else h[:, 0])
