"""Reduces the rows of metrics of an update to one number each, on the device, and reads them once.

The reducer of a metric stands beside it in `metrics.METRICS`. What is missing in all rows stays missing (NaN).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.telemetry.metrics import METRIC_NAMES, METRICS

Read = Callable[[Tensor], list[float]]
"""Reads one vector to the host; the only host read of an update."""


def reduce_metrics(rows: Float[Tensor, "B M"]) -> Float[Tensor, " M"]:
    """One number per metric from the rows of an update in the order of time; no host read."""
    constants = _constants(rows.device)
    present = ~rows.isnan()
    known = present.any(dim=0)
    weights = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).index_select(1, constants.weight)
    weights = torch.where(present, weights, 0.0).nan_to_num()
    mean = (torch.where(weights > 0, rows, 0.0) * weights).sum(0) / weights.sum(0)
    order = torch.arange(1, rows.shape[0] + 1, device=rows.device)[:, None]
    last = rows.gather(0, (present * order).argmax(dim=0, keepdim=True))[0]
    by_reducer = torch.stack(
        (
            mean,
            torch.where(present, rows, -torch.inf).amax(0),
            torch.where(present, rows, torch.inf).amin(0),
            rows.nansum(0),
            last,
            (present & (rows != 0)).any(0).to(rows.dtype),
        )
    )
    reduced = by_reducer.gather(0, constants.reducer[None])[0]
    return torch.where(known, reduced, torch.nan)


def aggregate_ppo_metrics(rows: Sequence[Float[Tensor, " M"]], read: Read = Tensor.tolist) -> dict[str, float]:
    """Metrics by name from the rows of an update; calls `read` once."""
    return dict(zip(METRIC_NAMES, read(reduce_metrics(torch.stack(list(rows)))), strict=True))


@tensor_dataclass
class _Table:
    reducer: Tensor
    weight: Tensor


@lru_cache
def _constants(device: torch.device) -> _Table:
    """The table as index tensors; an unweighted metric has the extra column of ones as its weight."""
    weights = [METRIC_NAMES.index(m.weight) if m.weight else len(METRICS) for m in METRICS]
    return _Table(
        reducer=torch.tensor([int(m.reducer) for m in METRICS], device=device),
        weight=torch.tensor(weights, device=device),
    )
