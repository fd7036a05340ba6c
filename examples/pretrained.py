"""Grow a network that is trained already, from its weights, where esper proposes. Twenty seconds.

python examples/pretrained.py
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
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 1, 8, 8]."""
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def main() -> None:
    """Train in plain PyTorch until nothing more is learned, then grow."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train, val, test = ((x[a:b], y[a:b]) for a, b in ((0, 1000), (1000, 1400), (1400, 1797)))
    torch.manual_seed(0)
    net = SmallNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(40):
        for batch in torch.randperm(len(train[0])).split(50):
            optimizer.zero_grad()
            F.cross_entropy(net(train[0][batch]), train[1][batch]).backward()
            optimizer.step()
    accuracy = 100 * float((net.eval()(test[0]).argmax(dim=1) == test[1]).float().mean())

    task = esper.Task(SmallNet, train=train, val=val, test=test, batch=50, weights=net.state_dict())  # or a file
    print(task)
    for controller in ("wait_only", "fixed_schedule_fill"):
        grown = esper.grow(task, method=controller, best_of=2)
        print(f"{controller}: {grown.num_params} parameters, {grown.unit} on the test images {grown.test_points:.1f}")
    print(f"before: {accuracy:.1f}")


if __name__ == "__main__":
    main()
