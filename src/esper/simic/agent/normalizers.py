"""Running mean and variance of observations and returns: frozen during a rollout, updated after it.

Shape legend: D = features of one row, R = rows. Statistics are float64 and stay on the device.
"""

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import copy_into, tensor_dataclass

CLIP = 10.0
VARIANCE_EPS = 1e-4
STD_FLOOR = 1e-4


@tensor_dataclass
class Moments:
    """Mean and population variance of the `count` valid rows of one rollout, float64."""

    count: Float[Tensor, ""]
    mean: Float[Tensor, "*D"]
    var: Float[Tensor, "*D"]


def masked_moments(rows: Float[Tensor, "*R_D"], valid: Bool[Tensor, "*R"]) -> Moments:
    """Moments over the leading axes (those of `valid`), summed in float64."""
    leading = tuple(range(valid.dim()))
    keep = valid.reshape(valid.shape + (1,) * (rows.dim() - valid.dim()))
    count = valid.sum(dtype=torch.float64)
    exact = rows.to(torch.float64).masked_fill(~keep, 0.0)
    mean = exact.sum(dim=leading) / count.clamp_min(1.0)
    var = (exact - mean).square().masked_fill(~keep, 0.0).sum(dim=leading) / count.clamp_min(1.0)
    return Moments(count=count, mean=mean, var=var)


@tensor_dataclass
class Frozen:
    """Shift and spread during a rollout: `(x - shift) / spread`."""

    shift: Float[Tensor, "*D"]
    spread: Float[Tensor, "*D"]


def normalized(rows: Float[Tensor, "*R_D"], by: Frozen) -> Float[Tensor, "*R_D"]:
    """`clip((x - shift) / spread, +-10)`."""
    return (rows - by.shift).div_(by.spread).clamp_(-CLIP, CLIP)


@final
class RunningMeanVar:
    """Exponentially weighted mean and variance of rollouts.

    The first rollout is copied; a later one with mean b and variance s2 gives, with the old mean on the right,

        mean <- m * mean + (1 - m) * b
        var  <- m * var + (1 - m) * s2 + m * (1 - m) * (b - mean)**2

    A rollout without valid rows, or with a non-finite one, changes nothing. Raises ConfigError for a momentum outside
    [0, 1).
    """

    def __init__(self, momentum: float, shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum is {momentum}; a running mean needs a value in [0, 1).")
        self.momentum = momentum
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.var = torch.ones(shape, dtype=torch.float64, device=device)
        self.started = torch.zeros((), dtype=torch.bool, device=device)
        self._freeze()

    def normalize(self, rows: Float[Tensor, "*R_D"]) -> Float[Tensor, "*R_D"]:
        """`clip((x - mean) / sqrt(var + 1e-4), +-10)`; before the first update `clip(x, +-10)`."""
        return normalized(rows, self.frozen)

    def scale_with(self, batch: Moments) -> Float[Tensor, "*D"]:
        """Standard deviation to divide by, at least 1e-4; before the first update that of `batch`."""
        return torch.where(self.started, self.var, batch.var).sqrt().clamp_min(STD_FLOOR)

    def update(self, batch: Moments) -> None:
        """Update the statistics with one rollout."""
        m, delta = self.momentum, batch.mean - self.mean
        moved_mean = m * self.mean + (1 - m) * batch.mean
        moved_var = m * self.var + (1 - m) * batch.var + m * (1 - m) * delta.square()
        usable = (batch.count > 0) & (batch.mean.isfinite() & batch.var.isfinite()).all()
        self.mean = torch.where(usable, torch.where(self.started, moved_mean, batch.mean), self.mean)
        self.var = torch.where(usable, torch.where(self.started, moved_var, batch.var), self.var)
        self.started = self.started | usable
        self._freeze()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of mean, var and started."""
        return {"mean": self.mean.clone(), "var": self.var.clone(), "started": self.started.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        copy_into({"mean": self.mean, "var": self.var, "started": self.started}, state, "running statistics")
        self._freeze()

    def _freeze(self) -> None:
        """Compute the float32 shift and spread of `normalize`."""
        std = (self.var + VARIANCE_EPS).sqrt()
        self.frozen = Frozen(
            shift=torch.where(self.started, self.mean, 0.0).to(torch.float32),
            spread=torch.where(self.started, std, 1.0).to(torch.float32),
        )


def scale_rewards(rewards: Float[Tensor, "N T"], scale: Float[Tensor, ""]) -> Float[Tensor, "N T"]:
    """`r / scale` for all rows; no shift and no clip, so that returns keep their order."""
    return (rewards / scale).to(rewards.dtype)
