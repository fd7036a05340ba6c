"""`metric="balanced accuracy"`: the mean of the accuracies of the classes, on each split by its own classes."""

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn

import esper
from esper.leyline.errors import ConfigError
from esper.tasks.losses import BalancedAccuracy, points_of_guessing

CLASSES = 3


def split(n: int, shares: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    y = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=generator)
    return torch.randn(n, 6, generator=generator) + y[:, None] * torch.tensor([1.0, 0, 0, 0, 0, 0.5]), y


TRAIN, VAL, TEST = split(320, (0.8, 0.15, 0.05)), split(200, (0.7, 0.2, 0.1)), split(150, (0.3, 0.3, 0.4))


def task(**given: object) -> esper.Task:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    data = {"train": TRAIN, "val": VAL, "test": TEST, "batch": 32, "lr": 1e-2, "metric": "balanced accuracy"}
    return esper.Task(net, ["0"], **(data | given))


EACH = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 8.0]), reduction="none")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return EACH(outputs, targets)


@pytest.mark.parametrize("executor", ["streamed", "fused", "native"])
@pytest.mark.parametrize("loss", [None, weighted], ids=["cross-entropy", "weighted"])
def test_points_are_those_of_scikit_learn_on_each_split(executor, loss):
    grown = esper.grow(task(loss=loss), "plain", steps=6, executor=executor, progress=False)
    for found, (x, y) in ((grown.points, VAL), (grown.test_points, TEST)):
        answers = grown.module(x).argmax(dim=1)
        assert found == pytest.approx(100.0 * balanced_accuracy_score(y, answers), abs=1e-3)
    assert grown.unit == "balanced accuracy"


def test_each_step_of_a_growth_is_measured_on_all_examples_because_few_have_other_shares():
    x, y = VAL
    y = torch.where(torch.arange(len(y)) % 10 == 0, 0, y.clamp(min=1))  # every tenth example is of the class of most
    grown = esper.grow(task(val=(x, y)), "plain", steps=20, progress=False)
    points = [point for entry in grown.leaderboard.entries for point in entry.val]
    assert max(points) <= 100.0 + 1e-3


def test_a_class_counts_by_the_inverse_of_its_share():
    y = torch.tensor([0, 0, 0, 2])
    points = BalancedAccuracy().of_split(y)(torch.eye(3)[torch.tensor([0, 0, 1, 2])], y)
    assert points.tolist() == pytest.approx([200 / 3, 200 / 3, 0.0, 200.0])  # (2/3 + 1) / 2 in the mean
    assert float(points.mean()) == pytest.approx(100.0 * (2 / 3 + 1.0) / 2)


def test_one_answer_for_all_examples_has_the_share_of_a_class():
    assert points_of_guessing(task().spec.objective, VAL[1]) == pytest.approx(100.0 / 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"train": (TRAIN[0], TRAIN[0][:, :3])},
            "balanced accuracy is for outputs .* targets are \\[3\\] of torch.float32",
        ),
        ({"metric": "f1"}, "metric is 'f1'; it must be"),
        (
            {
                "train": (TRAIN[0], {"y": TRAIN[1]}),
                "loss": lambda o, y: nn.functional.cross_entropy(o, y["y"], reduction="none"),
            },
            "one tensor of outputs and one of targets",
        ),
    ],
    ids=["numbers", "another name", "a dictionary"],
)
def test_what_has_no_classes_is_refused(given, said):
    without = {"val": None, "test": None}
    with pytest.raises(ConfigError, match=said):
        task(**without, **given)
