"""Small networks, each with one thing that networks of others have and that is easily got wrong."""

import random
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from published.data import images, vectors
from published.entry import Published


class Style(nn.Module):
    """InstanceNorm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        )
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.amax((2, 3)))


class SimilarNames(nn.Module):
    """Slots `layer_1` and `layer.1`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_1 = nn.Sequential(nn.Linear(6, 12), nn.GELU())
        self.layer = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 12), nn.GELU()))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.layer_1(x)))


class AttentionNames(nn.Module):
    """Slots `keys`, `values` and `items`, which are names of methods of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.keys, self.values = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.items(x))
        weight = torch.softmax(self.keys(h), dim=-1)
        return self.out(weight * self.values(h) + h)


class InPlaceBehindSlot(nn.Module):
    """ReLU(inplace=True) right behind a slot, and an in-place addition behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.conv2, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.conv1(x))
        y = self.conv2(h)
        y += h
        return self.fc(self.act(y).mean((2, 3)))


class Perceptron(nn.Module):
    """Nothing peculiar; factories below make it so."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.fc2(F.relu(self.fc1(x))))))


def compiled() -> nn.Module:
    """As people give it who compile their networks."""
    return torch.compile(Perceptron())


def weight_normed() -> nn.Module:
    """The old weight_norm, with hooks."""
    network = Perceptron()
    network.fc1 = nn.utils.weight_norm(network.fc1)
    network.fc2 = nn.utils.weight_norm(network.fc2)
    return network


def parametrized() -> nn.Module:
    """The new weight_norm, a parametrization."""
    network = Perceptron()
    nn.utils.parametrizations.weight_norm(network.fc1)
    nn.utils.parametrizations.weight_norm(network.fc2)
    return network


class Discriminator(nn.Module):
    """Spectral norm with its vectors in buffers, which move in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.utils.spectral_norm(nn.Conv2d(3, 8, 3, stride=2, padding=1))
        self.conv2 = nn.utils.spectral_norm(nn.Conv2d(8, 16, 3, stride=2, padding=1))
        self.act, self.fc = nn.LeakyReLU(0.2, inplace=True), nn.Linear(16 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(x))))
        return self.fc(x.view(x.size(0), -1))


class Checkpointed(nn.Module):
    """Activations of the blocks are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2)])
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class Lazy(nn.Module):
    """Layers that learn their shapes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d()
        self.fc1, self.fc2 = nn.LazyLinear(16), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class WithoutGradients(nn.Module):
    """Calls a layer that should learn within no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = F.relu(self.features(x))
        return self.head(h)


class LayerDrop(nn.Module):
    """Skips blocks by Python's own random numbers, as wav2vec 2.0 and fairseq do."""

    def __init__(self, layerdrop: float = 0.3) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.stem, self.out = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or random.random() >= self.layerdrop:
                x = x + block(x)
        return self.out(x)


class FineTuned(nn.Module):
    """A frozen backbone with BatchNorm, whose statistics move, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.neck, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.neck(F.relu(self.backbone(x)))))
        return self.fc(x.mean((2, 3)))


class RareBranch(nn.Module):
    """Its initialization takes one of two branches at random."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 3)
        if torch.rand(()) < 0.4:
            nn.init.orthogonal_(self.fc1.weight)
        else:
            nn.init.xavier_normal_(self.fc1.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class SelfNormalizing(nn.Module):
    """SELU and AlphaDropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.SELU(inplace=True), nn.AlphaDropout(0.1), nn.Linear(16, 16))
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.selu(self.body(x)))


NETWORKS = [
    Published(name="instance norm", style="style transfer", model=Style, slots=["norm1", "conv2"], data=images,
              shows="InstanceNorm with running statistics beside BatchNorm"),
    Published(name="layer_1 and layer.1", style="tutorials", model=SimilarNames, slots=["layer_1", "layer.1"],
              data=vectors, shows="names of slots that are equal but for a dot"),
    Published(name="keys, values, items", style="attention by hand", model=AttentionNames,
              slots=["items", "keys", "values"], data=vectors, shows="slots with names of methods of dictionaries"),
    Published(name="in-place behind slots", style="torchvision", model=InPlaceBehindSlot, slots=["conv1", "conv2"],
              data=images, shows="ReLU(inplace=True) and `+=` right behind a slot"),
    Published(name="compiled", style="torch.compile", model=compiled, slots=["fc1", "fc2"], data=vectors,
              shows="torch.compile(Net())"),
    Published(name="weight_norm, old", style="WaveNet, vocoders", model=weight_normed, slots=["fc1", "fc2"],
              data=vectors, shows="nn.utils.weight_norm with hooks"),
    Published(name="weight_norm, new", style="vocoders", model=parametrized, slots=["fc1", "fc2"], data=vectors,
              shows="parametrizations"),
    Published(name="spectral_norm", style="SNGAN", model=Discriminator, slots=["conv1", "conv2"], data=images,
              shows="vectors in buffers that move in training, in-place LeakyReLU behind slots"),
    Published(name="checkpointing", style="large transformers", model=Checkpointed, slots=["stem"], data=vectors,
              shows="blocks behind the slot run again in the backward pass"),
    Published(name="checkpointing, slot inside", style="large transformers", model=Checkpointed,
              slots=["stem", "blocks.0"], data=vectors, refused="activation checkpointing",
              shows="a slot whose block runs again in the backward pass"),
    Published(name="lazy layers", style="tutorials", model=Lazy, slots=["conv", "bn"], data=images,
              shows="LazyConv2d, LazyBatchNorm2d, LazyLinear"),
    Published(name="no_grad", style="fine-tuning", model=WithoutGradients, slots=["features"], data=vectors,
              refused="no_grad", shows="a layer that should learn is called within no_grad"),
    Published(name="random.random()", style="fairseq's LayerDrop", model=LayerDrop, slots=["stem"], data=vectors,
              random=True, shows="Python's random numbers decide which blocks run"),
    Published(name="frozen backbone", style="fine-tuning", model=FineTuned, slots=["backbone", "neck"], data=images,
              shows="partly frozen, with BatchNorm in both parts"),
    Published(name="rare branch", style="research code", model=RareBranch, slots=["fc1"], data=vectors,
              shows="`if torch.rand(()) < 0.4:` in the initialization"),
    Published(name="AlphaDropout", style="SNN", model=SelfNormalizing, slots=["body"], data=vectors, random=True,
              shows="SELU in place, AlphaDropout"),
    Published(name="partial with arguments", style="configurations", model=partial(Perceptron, dropout=0.2),
              slots=["fc1", "drop"], data=vectors, random=True, shows="functools.partial of a class"),
]  # fmt: skip
