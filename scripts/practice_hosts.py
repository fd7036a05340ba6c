"""Five tasks as people have them: networks in plain PyTorch, data, and the recipe of their owner.

    host     network                                   data
    fashion  CNN with batch norm, 10,990 parameters    Fashion-MNIST
    cifar    CNN with batch norm, 19,546 parameters    CIFAR-10
    resnet8  ResNet-8 of 8 to 32 channels, 19,954      CIFAR-10
    gpt      GPT of four blocks, 208,320               tinyshakespeare, characters
    tabular  MLP with batch norm, 6,725                scikit-learn's make_classification

No code of esper is inside a network. A recipe is what `torch.optim` and a loop of ten lines offer; augmentation is left
out, because networks this small do not learn their training images by heart in so few epochs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch import Tensor, nn

from esper.tasks.datasets import Dataset, Inputs, cifar10, data_label, fashion_mnist, read_bytes
from esper.tasks.datasets.text import SHAKESPEARE

WIDER = 1.25
"""Factor of all widths of the wider network, which has about half as many parameters again."""


# -- networks ---------------------------------------------------------------------------------------------------------


def conv_bn_relu(inputs: int, outputs: int) -> nn.Sequential:
    """A 3x3 convolution with batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class CNN(nn.Module):
    """Three convolutions, pooling after two of them, the mean, and a linear layer."""

    def __init__(self, channels: tuple[int, int, int, int]) -> None:
        super().__init__()
        first, a, b, c = channels
        self.stage1, self.stage2, self.stage3 = conv_bn_relu(first, a), conv_bn_relu(a, b), conv_bn_relu(b, c)
        self.head = nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, C, H, W]."""
        x = F.max_pool2d(self.stage1(x), 2)
        x = F.max_pool2d(self.stage2(x), 2)
        return self.head(self.stage3(x).mean(dim=(2, 3)))


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet8(nn.Module):
    """A stem and three residual blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = conv_bn_relu(3, width)
        self.layer1 = Residual(width, width, 1)
        self.layer2 = Residual(width, 2 * width, 2)
        self.layer3 = Residual(2 * width, 4 * width, 2)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 3, 32, 32]."""
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean(dim=(2, 3)))


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and beside the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens and positions, four blocks, and the token table as output."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


class MLP(nn.Module):
    """Two hidden layers with batch norm."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden1 = nn.Sequential(nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU())
        self.hidden2 = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of features [B, F]."""
        return self.head(self.hidden2(self.hidden1(x)))


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples as they are stored: x [n, ...], and y [n] or, of tokens, [n, T]."""

    label: str
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    inputs: Inputs | None = None
    """Makes inputs of the network of a batch x."""

    def fewer(self, train: int, val: int) -> "Data":
        """The first examples of training and validation; they are in random order. The test split stays whole."""
        (x, y), (xv, yv) = self.train, self.val
        return replace(self, train=(x[:train], y[:train]), val=(xv[:val], yv[:val]))


def shuffled(x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Both in the order of one random permutation."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[order], y[order]


def images(load: Callable[[Path | None, int], Dataset], data_dir: Path | None, seed: int) -> Data:
    """A data set of images, split by the seed."""
    found = load(data_dir, seed)
    train, val = (shuffled(of.x, of.y, seed) for of in (found.train, found.val))
    test = found.test.x, found.test.y
    return Data(label=data_label(found.identity), train=train, val=val, test=test, inputs=found.inputs)


CONTEXT, STRIDE = 64, 32


def characters(data_dir: Path | None, seed: int) -> Data:
    """Windows of `CONTEXT` characters: 81 / 9 / 10 % of the text, those of training half overlapping."""
    (path,) = SHAKESPEARE.find(data_dir)
    known, tokens = np.unique(np.frombuffer(read_bytes(path), dtype=np.uint8), return_inverse=True)
    assert len(known) == VOCABULARY, f"{path} has {len(known)} characters"
    text = torch.from_numpy(tokens)

    def windows(part: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        found = part.unfold(0, CONTEXT + 1, stride)
        return shuffled(found[:, :-1].contiguous(), found[:, 1:].contiguous(), seed)

    first, second = len(text) * 81 // 100, len(text) * 9 // 10
    parts = ((text[:first], STRIDE), (text[first:second], CONTEXT), (text[second:], CONTEXT))
    train, val, test = (windows(part, stride) for part, stride in parts)
    return Data(label="tinyshakespeare", train=train, val=val, test=test)


VOCABULARY = 65
FEATURES, CLASSES = 30, 5
SIZES = 24_000, 4_000, 20_000


def table(data_dir: Path | None, seed: int) -> Data:
    """20 clusters of 12 informative features among 30, in five classes; two percent of the labels are random."""
    x, y = make_classification(
        n_samples=sum(SIZES), n_features=FEATURES, n_informative=12, n_redundant=8, n_classes=CLASSES,
        n_clusters_per_class=4, flip_y=0.02, random_state=0,
    )  # fmt: skip
    x = torch.from_numpy((x - x.mean(0)) / x.std(0)).float()
    y, (train, _, test) = torch.from_numpy(y).long(), SIZES
    seen_x, seen_y = shuffled(x[:-test], y[:-test], seed)
    return Data(
        label="make_classification",
        train=(seen_x[:train], seen_y[:train]),
        val=(seen_x[train:], seen_y[train:]),
        test=(x[-test:], y[-test:]),
    )


# -- hosts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network of somebody, and how it is trained."""

    name: str
    title: str
    net: Callable[[float], nn.Module]
    """A new network with all widths multiplied."""
    slots: tuple[str, ...]
    load: Callable[[Path | None, int], Data]
    """The data of a folder and a seed."""
    rates: tuple[float, float, float]
    """Learning rates that are tried; the middle one is what somebody takes who tries none."""
    examples: int
    """Of training."""
    epochs: float
    """Of one of three runs."""
    small: tuple[int, float]
    """The same two numbers of the small table."""
    batch: int = 128
    warmup: float = 0.0
    """Share of the steps in which the learning rate rises."""


def cnn(first: int, channels: tuple[int, int, int], width: float) -> CNN:
    """A CNN with multiplied channels."""
    a, b, c = (round(width * each) for each in channels)
    return CNN((first, a, b, c))


RATES = (3e-3, 1e-2, 3e-2)
STAGES = ("stage1", "stage2", "stage3")
HOSTS = (
    Host(
        name="fashion", title="a small CNN on Fashion-MNIST", net=partial(cnn, 1, (12, 24, 36)), slots=STAGES,
        load=partial(images, fashion_mnist.load), rates=RATES, examples=54_000, epochs=10, small=(8_000, 3),
    ),
    Host(
        name="cifar", title="a small CNN on CIFAR-10", net=partial(cnn, 3, (16, 32, 48)), slots=STAGES,
        load=partial(images, cifar10.load), rates=RATES, examples=45_000, epochs=6, small=(5_000, 3),
    ),
    Host(
        name="resnet8", title="a ResNet-8 on CIFAR-10", net=lambda width: ResNet8(round(8 * width)),
        slots=("layer1", "layer2", "layer3"), load=partial(images, cifar10.load), rates=RATES,
        examples=45_000, epochs=5, small=(5_000, 3),
    ),
    Host(
        name="gpt", title="a GPT on tinyshakespeare", net=lambda width: GPT(VOCABULARY, CONTEXT, round(64 * width)),
        slots=("blocks.1", "blocks.3"), load=characters, rates=(1e-3, 3e-3, 1e-2),
        examples=28_232, epochs=2, small=(4_000, 1), batch=32, warmup=0.1,
    ),
    Host(
        name="tabular", title="an MLP on a table", net=lambda width: MLP(FEATURES, round(64 * width), CLASSES),
        slots=("hidden1", "hidden2"), load=table, rates=RATES, examples=SIZES[0], epochs=30, small=(SIZES[0], 15),
    ),
)  # fmt: skip
