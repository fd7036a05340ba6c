"""The loop of a train pass over the data, the same for every executor."""

from collections.abc import Callable

from torch import Tensor

from esper.leyline.objective import Objective, Scores
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.gradients import GradientStatistics
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.scoring import finite_points


def run_epoch(
    batches: SharedBatchIterator,
    objective: Objective,
    *,
    train: Callable[[Tensor, Tensor], Scores],
    statistics: Callable[[], GradientStatistics],
    step: Callable[[], None],
) -> TrainPass:
    """Train all hosts on every batch.

    Args:
        batches: x [N, B, ...] and y [N, B, ...].
        objective: gives the figure of merit.
        train: forward and backward of a batch; leaves unscaled gradients in place and returns scores [N], summed over
            the batch in float64.
        statistics: of those gradients; called in the last batch, before its step.
        step: clip the gradients and step the optimizers.
    """
    last, total = len(batches) - 1, None
    for i, (x_NB, y_NB) in enumerate(batches):
        scores = train(x_NB, y_NB)
        if i == last:
            gradients = statistics()
        step()
        total = scores if total is None else Scores(*(a + b for a, b in zip(total, scores, strict=True)))
    assert total is not None, "a split has at least one batch"
    return train_pass(objective, total, gradients)


def train_pass(objective: Objective, total: Scores, gradients: GradientStatistics) -> TrainPass:
    """The results of a pass from scores [N] that are summed over it in float64."""
    return TrainPass(
        acc=finite_points(objective.points(total.score, total.weight).float()),
        loss=(total.loss / total.weight).float(),
        **{f"grad_{name}": value for name, value in vars(gradients).items()},
    )
