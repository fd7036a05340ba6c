"""Grow a network, save it, and go on training the result in plain PyTorch, without esper. Twenty seconds.

python examples/fine_tune.py
"""

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper

FOLDER = Path("grown-digits")


class SmallNet(nn.Module):
    """Two convolutions with a pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 1, 8, 8]."""
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


def fine_tune(module: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """A few epochs of SGD with all parameters, those of the seeds included."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    module.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    module.eval()


def main() -> None:
    """Grow, save, load with the generated model.py alone, fine-tune."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train, test = (x[:1000], y[:1000]), (x[1400:], y[1400:])
    task = esper.Task(
        model=SmallNet, slots=["stem", "body"], train=train, val=(x[1000:1400], y[1000:1400]), test=test, batch=50
    )
    grown = esper.grow(task, method="fixed_schedule_fill", best_of=2)
    grown.save(FOLDER, overwrite=True)

    spec = importlib.util.spec_from_file_location("grown_model", FOLDER / "model.py")
    assert spec is not None
    assert spec.loader is not None
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    module = generated.load_model()  # from model.safetensors beside it

    def accuracy() -> float:
        with torch.no_grad():
            return 100 * float((module(test[0]).argmax(dim=1) == test[1]).float().mean())

    before = accuracy()
    fine_tune(module, *train, epochs=10)
    print(f"accuracy on the test images: {before:.1f} as grown, {accuracy():.1f} after fine-tuning")


if __name__ == "__main__":
    main()
