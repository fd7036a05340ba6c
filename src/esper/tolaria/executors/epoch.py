"""The loop of a train pass over the data, the same for every executor."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.gradients import GradientStatistics
from esper.tolaria.executors.protocol import TrainPass


def run_epoch(
    batches: SharedBatchIterator,
    num_envs: int,
    device: torch.device,
    *,
    train: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    statistics: Callable[[], GradientStatistics],
    step: Callable[[], None],
) -> TrainPass:
    """Train all hosts on every batch.

    Args:
        batches: x [N, B, ...] and y [N, B].
        num_envs: N.
        device: of the sums.
        train: forward and backward of a batch; leaves unscaled gradients in place and returns loss and hits [N].
        statistics: of those gradients; called in the last batch, before its step.
        step: clip the gradients and step the optimizers.
    """
    loss_sum = torch.zeros(num_envs, device=device)
    correct = torch.zeros(num_envs, dtype=torch.int64, device=device)
    count, last = 0, len(batches) - 1
    for i, (x_NB, y_NB) in enumerate(batches):
        losses, hits = train(x_NB, y_NB)
        if i == last:
            gradients = statistics()
        step()
        loss_sum += losses * y_NB.shape[1]
        correct += hits
        count += y_NB.shape[1]
    return TrainPass(
        acc=100.0 * correct / count,  # in this order, all correct gives exactly 100
        loss=loss_sum / count,
        **{f"grad_{name}": value for name, value in vars(gradients).items()},
    )
