"""A residual network of your own, without a change to it: seeds grow behind two of its stages. A minute.

python examples/resnet8.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, as in torchvision."""

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
    """A stem and three blocks, with few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layer1 = Block(4, 4, 1)
        self.layer2 = Block(4, 8, 2)
        self.layer3 = Block(8, 16, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 1, 8, 8]."""
        features = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(features.mean(dim=(2, 3)))


def main() -> None:
    """Train a controller, then let it grow one network."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    task = esper.Task(
        name="resnet8_digits",
        model=ResNet8,
        slots=["layer1", "layer2"],
        train=(x[:1000], y[:1000]),
        val=(x[1000:1400], y[1000:1400]),
        test=(x[1400:], y[1400:]),
        batch=100,
        episode_length=20,
    )
    run = esper.train(task, rounds=2, num_envs=4)
    grown = esper.grow(task, method=run, best_of=4)
    print(grown.timeline)
    print(f"{grown.num_params:,} parameters, {grown.unit} on test images {grown.test_points:.1f}")
    grown.save("grown-resnet8", overwrite=True)
    logits = grown.module(x[:5])  # a plain nn.Module
    print("predicted", logits.argmax(dim=1).tolist(), "labels", y[:5].tolist())


if __name__ == "__main__":
    main()
