"""Tasks as users write them, that train in milliseconds."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import esper

SMALL: dict[str, Any] = {
    "executor": "streamed",
    "ppo.feature_width": 8,
    "ppo.hidden_width": 8,
    "ppo.update_epochs": 1,
    "lifecycle.min_blending_epochs": 1,
}
"""A policy of a few hundred weights, and no trial of other executors."""


class MyNet(nn.Module):
    """[B, 1, 6, 6] -> logits [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.stem(x)).mean(dim=(2, 3)))


class Zero(nn.Module):
    """[B, 6] -> zeros [B, 2], until it has learned something."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.out = nn.Linear(4, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)))


class Gain(nn.Module):
    """h times a weight; it looks at its features, which `torch.vmap` does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain if h.abs().max() < 1e6 else h


class Looking(nn.Module):
    """[B, 6] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), Gain())
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def images(n: int = 40, classes: int = 3, shape: tuple[int, ...] = (1, 6, 6)) -> tuple[Tensor, Tensor]:
    """Noise with a brightness that tells the class."""
    generator = torch.Generator().manual_seed(n)
    y = torch.arange(n) % classes
    return torch.randn(n, *shape, generator=generator) + y.view(-1, *[1] * len(shape)), y


def points(n: int = 40) -> tuple[Tensor, Tensor]:
    """[n, 6] and a linear function of it, [n, 2]."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 6, generator=generator)
    return x, x[:, :2] - 2.0 * x[:, 2:4]


def own_task(**changes: Any) -> esper.Task:
    """Ten steps on 40 images, with a seed that trains for one step."""
    settings = {"batch": 16, "episode_length": 10, "min_training_epochs": 1}
    parts = {"model": MyNet, "slots": ["stem", "layer2.1"], "train": images(), "val": images(30), "test": images(20)}
    return esper.Task(**{**parts, **settings, **changes})


def train(task: Any, folder: Path, rounds: int = 1, num_envs: int = 2, **settings: Any) -> "esper.api.run.Run":
    return esper.train(task, rounds, num_envs, out=folder / "run", progress=False, **{**SMALL, **settings})


def grow(task: Any, controller: Any = "fixed_schedule", **settings: Any) -> "esper.api.grow.Grown":
    return esper.grow(task, controller, progress=False, **{"executor": "streamed", **settings})
