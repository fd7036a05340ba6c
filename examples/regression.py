"""A regression task: a small MLP, mean squared error, and R² as the figure of merit. Ten seconds.

python examples/regression.py
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import esper


def mlp() -> nn.Module:
    """Ten numbers of a patient to the progress of the disease."""
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def main() -> None:
    """Grow behind the second layer of the MLP by a fixed rule, without a trained controller."""
    numbers, progress = load_diabetes(return_X_y=True)
    x = torch.tensor(numbers, dtype=torch.float32)
    x = (x - x.mean(dim=0)) / x.std(dim=0)
    y = torch.tensor(progress, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val, test = order[:260], order[260:350], order[350:]
    task = esper.Task(
        name="diabetes",
        model=mlp,
        slots=["3"],
        train=(x[train], y[train]),
        val=(x[val], y[val]),
        test=(x[test], y[test]),
        batch=20,
        episode_length=25,
    )
    for controller in ("wait_only", "heuristic"):
        grown = esper.grow(task, method=controller, best_of=4)
        print(f"{controller}: {grown.num_params:,} parameters, {grown.unit} {grown.test_points:.1f} on the test split")
        print(grown.timeline)


if __name__ == "__main__":
    main()
