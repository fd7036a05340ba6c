"""Metrics of an update, declared in one table, each with the reducer that `aggregation` applies to its rows.

A row is a vector of all M metrics, NaN where missing. Rows come from minibatches, epochs and the update as a whole:

    minibatch 0 | policy_loss  grad_norm   nan              weight of a mean: another metric of the same row
    minibatch 1 | policy_loss  grad_norm   nan
    epoch 0     | nan          nan         approx_kl        reduced    | mean      mean       last
    update      | nan          nan         nan

A metric that is missing in all rows is NaN, not 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES


class Reducer(IntEnum):
    """How the rows of one update are reduced."""

    MEAN = 0
    MAX = 1
    MIN = 2
    SUM = 3
    LAST = 4
    ANY = 5


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric; `weight` names the metric that weights the rows of a mean (equal weights if empty)."""

    name: str
    reducer: Reducer
    weight: str = ""


def _metrics(reducer: Reducer, *names: str, weight: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(name=name, reducer=reducer, weight=weight) for name in names)


METRICS: tuple[Metric, ...] = (
    *_metrics(Reducer.SUM, "evaluated_steps", "finite_minibatches", "nonfinite_minibatches", "optimizer_steps"),
    *_metrics(
        Reducer.MEAN,
        *("policy_loss", "value_loss", "entropy_loss", "floor_loss", "total_loss", "clip_fraction"),
        weight="evaluated_steps",
    ),
    *_metrics(Reducer.MEAN, "grad_norm"),
    *_metrics(Reducer.MAX, "ratio_max", "epochs_done"),
    *_metrics(Reducer.MIN, "ratio_min"),
    *_metrics(Reducer.SUM, *(f"steps_{head}" for head in HEAD_NAMES)),
    *(Metric(name=f"entropy_{head}", reducer=Reducer.MEAN, weight=f"steps_{head}") for head in HEAD_NAMES),
    *_metrics(Reducer.LAST, "approx_kl", "lr", "ent_coef", "vf_coef", "floor_scale", "inverse_temperature"),
    *_metrics(Reducer.LAST, "forced_share", "explained_variance", "value_mean", "value_std"),
    *_metrics(Reducer.LAST, "return_mean", "return_std", "return_scale", "advantage_mean", "advantage_std"),
    *_metrics(Reducer.LAST, "hidden_rms", "hidden_max", "cell_rms", "cell_max"),
    *_metrics(Reducer.ANY, "advantage_std_floored", "stopped_early", "actions_outside_mask", "nonfinite_logits"),
)
"""All metrics, in the order of a row."""

METRIC_NAMES = tuple(metric.name for metric in METRICS)


def metric_row(values: Mapping[str, Tensor]) -> Float[Tensor, " M"]:
    """One row from scalars by name, NaN for other metrics; KeyError for undeclared names."""
    undeclared = values.keys() - set(METRIC_NAMES)
    if undeclared:
        raise KeyError(f"{sorted(undeclared)} are not declared; add them to METRICS.")
    missing = _missing(next(iter(values.values())).device)
    return torch.stack([values.get(name, missing).detach().to(torch.float64) for name in METRIC_NAMES])


@lru_cache
def _missing(device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=device)
