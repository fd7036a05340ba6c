"""Keep what a network has learned: its layers are frozen, a new head is trained, seeds grow beside them. Half a minute.

python examples/frozen_backbone.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper


class SmallNet(nn.Module):
    """Two convolutions with a pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 5] of images [B, 1, 8, 8]."""
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def main() -> None:
    """Train on the digits 0 to 4, then grow on the digits 5 to 9."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    backbone, old = SmallNet(), y < 5
    optimizer = torch.optim.Adam(backbone.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(backbone(x[old]), y[old]).backward()
        optimizer.step()

    def model() -> SmallNet:
        net = SmallNet()
        net.stem.load_state_dict(backbone.stem.state_dict())
        net.body.load_state_dict(backbone.body.state_dict())
        net.stem.requires_grad_(False)
        net.body.requires_grad_(False)
        return net

    task = esper.Task(model=model, slots=["stem", "body"], train=(x[~old], y[~old] - 5), batch=50, name="digits5to9")
    grown = esper.grow(task, method="fixed_schedule_fill", best_of=2)
    print(grown)
    print(f"{grown.unit} on test images {grown.test_points:.1f}")
    kept = grown.module.get_parameter("network.stem.0.weight")
    print("the first layer is", "as it was" if torch.equal(kept, backbone.stem[0].weight) else "another one")


if __name__ == "__main__":
    main()
