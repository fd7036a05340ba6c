"""Data of your own: any map-style data set of PyTorch, here two spirals that are made on the fly. Ten seconds.

python examples/own_data.py
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import esper


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on two spirals, with noise."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._angle = 3 * math.pi * torch.rand(size, generator=generator).sqrt()
        self._noise = 0.1 * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self._angle)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        label, angle = i % 2, self._angle[i]
        place = angle + math.pi * label
        return torch.stack((place.cos(), place.sin())) * angle / 5 + self._noise[i], label


class Points(nn.Module):
    """A network of 16 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2] -> logits [B, 2]."""
        return self.out(self.hidden(x))


def main() -> None:
    """Compare the network as it is with one that grew."""
    task = esper.Task(
        name="spirals",
        model=Points,
        slots=["hidden"],
        train=Spirals(1000, 0),
        val=Spirals(400, 1),
        test=Spirals(400, 2),
        batch=50,
        episode_length=30,
    )
    for controller in ("wait_only", "fixed_schedule_fill"):
        grown = esper.grow(task, method=controller, best_of=4)
        print(f"{controller}: {grown.num_params} parameters, {grown.unit} {grown.test_points:.1f} on the test split")


if __name__ == "__main__":
    main()
