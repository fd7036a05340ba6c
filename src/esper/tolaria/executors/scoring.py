"""Scores of hosts from the scores of their rows, the same for every executor.

A figure of merit that is not finite, because outputs or a metric of the user's are not, counts as 0 points, and the
loss of such a host is NaN: the governor rolls it back, and no choice of a best host takes it.

Shape legend: N = hosts, K = coalitions, R = rows.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float64
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.objective import Objective, Scores
from esper.tolaria.executors.protocol import ValidationPass


@final
class SummedScores(NamedTuple):
    """Sums over a host's examples: the score of each coalition, the loss of the first one, and the weight."""

    score: Float64[Tensor, "N K"]
    loss: Float64[Tensor, " N"]
    weight: Float64[Tensor, " N"]


@torch.no_grad()
def sums(scores: Sequence[Scores]) -> Scores:
    """[N] from the rows of N hosts, float64."""
    rows = torch.stack([of_rows for of_host in scores for of_rows in of_host])
    loss, score, weight = rows.sum(dim=1, dtype=torch.float64).view(len(scores), 3).unbind(dim=1)
    return Scores(loss, score, weight)


def measured(objective: Objective, sums: SummedScores) -> ValidationPass:
    """The figure of merit of every coalition, and the mean loss of the first one."""
    points = objective.points(sums.score, sums.weight[:, None]).float()
    loss = (sums.loss / sums.weight).float()
    return ValidationPass(accuracy=finite_points(points), loss=loss.where(points[:, 0].isfinite(), torch.nan))


def finite_points(points: Tensor) -> Tensor:
    """0 where a figure of merit is not finite."""
    return points.where(points.isfinite(), 0.0)


def mean_factor(weight: Tensor) -> Tensor:
    """1 / weight: the gradient of a mean with respect to the summed losses; finite where nothing counts."""
    return weight.clamp(min=1e-30).reciprocal_()


def check_scores(objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    """Try an objective on outputs [R, ...] and targets [R, ...].

    Raises:
        ConfigError: it cannot take them, its scores are not one finite number per row, its score alone differs, or its
            loss has no gradient.
    """
    name, shapes = type(objective).__name__, f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    try:
        scores = objective.scores(outputs.detach().requires_grad_(), targets)
    except ConfigError:
        raise  # says already which function of the user's is wrong
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ConfigError(
            f"objective {name} fails on {shapes} of type {targets.dtype} ({error}); the host, the targets of the data "
            "set and the objective must fit together."
        ) from error
    rows = (len(outputs),)
    for field, value in zip(Scores._fields, scores, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != rows or not value.is_floating_point():
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"objective {name} gives a {field} of {found} for {shapes}; expected one number per row, float32 "
                f"{rows}: sum over the axes of an example, and not over the batch (reduction='none')."
            )
        if not value.isfinite().all():
            raise ConfigError(
                f"the {field} of objective {name} is NaN or infinite for {shapes} of a new network; the outputs, and "
                "what the function returns, must be finite for every example."
            )
    with torch.no_grad():
        alone = objective.score(outputs, targets)
    if not torch.allclose(alone, scores.score, equal_nan=True):
        raise ConfigError(f"objective {name} gives other numbers in score() than as the score of scores().")
    if not scores.loss.requires_grad:
        raise ConfigError(
            f"the loss of objective {name} has no gradient; compute it from the outputs without detach or no_grad."
        )
