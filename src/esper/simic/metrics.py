"""Metrics of an update, declared in one table, each with the reducer that makes one number of its rows.

A row is a vector of all M metrics, NaN where missing. Rows come from minibatches, epochs and the update as a whole:

    minibatch 0 | policy_loss  grad_norm   nan              weight of a mean: another metric of the same row
    minibatch 1 | policy_loss  grad_norm   nan
    epoch 0     | nan          nan         approx_kl        reduced    | mean      mean       last
    update      | nan          nan         nan

Rows are reduced on the device and read once. A metric that is missing in all rows is NaN, not 0.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.lifecycle import HEAD_NAMES


class Reducer(IntEnum):
    """How the rows of one update are reduced."""

    MEAN = 0
    MAX = 1
    SUM = 2
    LAST = 3
    ANY = 4


class Metric(NamedTuple):
    """One metric; `weight` names the metric that weights the rows of a mean (equal weights if empty)."""

    name: str
    reducer: Reducer
    weight: str = ""


def _metrics(reducer: Reducer, *names: str, weight: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(name, reducer, weight) for name in names)


ENTROPIES = (*HEAD_NAMES, "parameters")
"""What has an entropy: each head, and all but op together, what an operation is done with."""

METRICS: tuple[Metric, ...] = (
    *_metrics(Reducer.SUM, "evaluated_steps", "finite_minibatches", "nonfinite_minibatches", "optimizer_steps"),
    *_metrics(
        Reducer.MEAN,
        *("policy_loss", "value_loss", "entropy_loss", "floor_loss", "total_loss", "clip_fraction"),
        weight="evaluated_steps",
    ),
    *_metrics(Reducer.MEAN, "grad_norm"),
    *_metrics(Reducer.MAX, "epochs_done"),
    *_metrics(Reducer.SUM, *(f"steps_{name}" for name in ENTROPIES)),
    *(Metric(f"entropy_{name}", Reducer.MEAN, f"steps_{name}") for name in ENTROPIES),
    *_metrics(Reducer.LAST, "approx_kl", "lr", "ent_coef", "vf_coef", "floor_scale", "inverse_temperature"),
    *_metrics(Reducer.LAST, "forced_share", "explained_variance", "value_mean", "value_std"),
    *_metrics(Reducer.LAST, "return_mean", "return_std", "return_scale", "advantage_mean", "advantage_std"),
    *_metrics(Reducer.LAST, "stored_log_prob_error", "hidden_rms", "hidden_max", "cell_rms", "cell_max"),
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


Read = Callable[[Tensor], list[float]]
"""Reads one vector to the host; the only host read of an update."""


def reduce_metrics(rows: Float[Tensor, "B M"]) -> Float[Tensor, " M"]:
    """One number per metric from the rows of an update in the order of time; no host read."""
    reducer, weight = _constants(rows.device)
    present = ~rows.isnan()
    known = present.any(dim=0)
    weights = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).index_select(1, weight)
    weights = torch.where(present, weights, 0.0).nan_to_num()
    mean = (torch.where(weights > 0, rows, 0.0) * weights).sum(0) / weights.sum(0)
    order = torch.arange(1, rows.shape[0] + 1, device=rows.device)[:, None]
    last = rows.gather(0, (present * order).argmax(dim=0, keepdim=True))[0]
    by_reducer = torch.stack(
        (
            mean,
            torch.where(present, rows, -torch.inf).amax(0),
            rows.nansum(0),
            last,
            (present & (rows != 0)).any(0).to(rows.dtype),
        )
    )
    reduced = by_reducer.gather(0, reducer[None])[0]
    return torch.where(known, reduced, torch.nan)


def aggregate_ppo_metrics(rows: Sequence[Float[Tensor, " M"]], read: Read = Tensor.tolist) -> dict[str, float]:
    """Metrics by name from the rows of an update; calls `read` once."""
    return dict(zip(METRIC_NAMES, read(reduce_metrics(torch.stack(list(rows)))), strict=True))


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Reducers and weights as index tensors; an unweighted metric has the extra column of ones as its weight."""
    weights = [METRIC_NAMES.index(m.weight) if m.weight else len(METRICS) for m in METRICS]
    return torch.tensor([int(m.reducer) for m in METRICS], device=device), torch.tensor(weights, device=device)
