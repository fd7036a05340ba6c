"""Generalized advantage estimation, discounted returns and advantage normalization; pure.

Shape legend: N = hosts, T = steps. Loops over time work on time-major copies, all hosts at once.

    row   r1  r2  r3 | r4  r5        `|` a truncated step: the next value is the stored bootstrap value and the trace
                                     is cut; after a terminal step the next value is 0

    row   r1  r2  --  r4             an invalid step only takes time: the next value of r2 is gamma * v4, and the trace
                                     decays by one more gamma

Running mean and variance of observations and returns are frozen during a rollout and updated after it; float64, D =
features of one row, R = rows.
"""

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.ranks import Ranks
from esper.leyline.tensor_dataclass import below, copy_into, tensor_dataclass, with_prefix
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES

CLIP = 10.0
VARIANCE_EPS = 1e-4
STD_FLOOR = 1e-4


@tensor_dataclass
class Moments:
    """Mean and population variance of the `count` valid rows of one rollout, float64."""

    count: Float[Tensor, ""]
    mean: Float[Tensor, "*D"]
    var: Float[Tensor, "*D"]


def masked_moments(rows: Float[Tensor, "*R_D"], valid: Bool[Tensor, "*R"], ranks: Ranks | None = None) -> Moments:
    """Moments over the leading axes (those of `valid`), summed in float64; with `ranks` over the hosts of all."""
    ranks = ranks or Ranks(len(valid))
    keep = valid.reshape(valid.shape + (1,) * (rows.dim() - valid.dim()))
    count = ranks.sum(valid.to(torch.float64), valid.dim())
    exact = rows.to(torch.float64).masked_fill(~keep, 0.0)
    mean = ranks.sum(exact, valid.dim()) / count.clamp_min(1.0)
    squares = (exact - mean).square().masked_fill(~keep, 0.0)
    return Moments(count=count, mean=mean, var=ranks.sum(squares, valid.dim()) / count.clamp_min(1.0))


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

    A rollout without valid rows, or with a non-finite one, changes nothing.
    """

    def __init__(self, momentum: float, shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        self.momentum = momentum
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.var = torch.ones(shape, dtype=torch.float64, device=device)
        self.started = torch.zeros((), dtype=torch.bool, device=device)
        self._freeze()

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


@final
class ObservationStatistics:
    """Running statistics of the features: of the host block, and of the block of a slot that has a seed.

    All slots share theirs, so that they serve any number of slots. That of an empty slot is not counted.
    """

    def __init__(self, momentum: float, device: torch.device | str = "cpu") -> None:
        self.host = RunningMeanVar(momentum, (len(HOST_FEATURES),), device)
        self.slot = RunningMeanVar(momentum, (len(SLOT_FEATURES),), device)

    def update(self, rows: Float[Tensor, "*R D"], valid: Bool[Tensor, "*R"], ranks: Ranks | None = None) -> None:
        """Update the statistics with the features of one rollout before normalization, of the hosts of all `ranks`."""
        host, slots = rows[..., : len(HOST_FEATURES)], rows[..., len(HOST_FEATURES) :]
        slots = slots.unflatten(-1, (-1, len(SLOT_FEATURES)))
        self.host.update(masked_moments(host, valid, ranks))
        self.slot.update(masked_moments(slots, valid[..., None] & (slots[..., 0] > 0.0), ranks))  # the occupied flag

    def of_slots(self, num_slots: int) -> Frozen:
        """Shift and spread of all columns of hosts with so many slots."""
        host, slot = self.host.frozen, self.slot.frozen
        return Frozen(
            shift=torch.cat((host.shift, slot.shift.repeat(num_slots))),
            spread=torch.cat((host.spread, slot.spread.repeat(num_slots))),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of both."""
        return with_prefix("host", self.host.state_dict()) | with_prefix("slot", self.slot.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        self.host.load_state_dict(below("host", state))
        self.slot.load_state_dict(below("slot", state))


ADVANTAGE_EPS = 1e-8


@tensor_dataclass
class NormalizedAdvantages:
    """Normalized advantages, and mean and deviation before; `floored`: the deviation was below the floor."""

    advantages: Float[Tensor, "N T"]
    mean: Float[Tensor, ""]
    std: Float[Tensor, ""]
    floored: Bool[Tensor, ""]


@torch.no_grad()
def compute_gae(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    bootstrap_values: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "N T"]:
    """Advantages `[N, T]` (Schulman et al., "High-dimensional continuous control using GAE", 2016, eq. 16).

        next_t  = 0 if terminal, b_t if truncated, else w_{t+1} (0 after the last column)
        delta_t = r_t + gamma * next_t - v_t
        A_t     = delta_t + gamma * lambda * T_{t+1}     the second term only where the step is neither

    w and T are v and A at valid steps; at invalid ones w_t = gamma * w_{t+1} and T_t = gamma * T_{t+1}. The advantage
    of an invalid step is 0 and its flags are ignored. The result has no gradient and rounds in the order of the
    formula: in float64 it equals a scalar loop bit for bit. It works in place, because allocation costs more than
    arithmetic.
    """
    discount, trace = values.new_full((), gamma), values.new_full((), gamma * gae_lambda)
    invalid_NT = ~valid
    next_NT = _scan_(values.masked_fill(invalid_NT, 0.0), invalid_NT * discount, backward=True)
    delta_NT = torch.empty_like(values, memory_format=torch.contiguous_format)
    delta_NT[:, :-1] = next_NT[:, 1:]
    delta_NT[:, -1:] = 0.0
    torch.where(truncated, bootstrap_values, delta_NT, out=delta_NT)
    delta_NT.masked_fill_(terminal, 0.0)
    delta_NT.mul_(discount).add_(rewards).sub_(values).masked_fill_(invalid_NT, 0.0)
    decay_NT = torch.where(valid, trace, discount).masked_fill_(valid & (terminal | truncated), 0.0)
    return _scan_(delta_NT, decay_NT, backward=True).masked_fill_(invalid_NT, 0.0)


def paired_rewards(rewards: Float[Tensor, "N T"], valid: Bool[Tensor, "N T"], group_size: int) -> Float[Tensor, "N T"]:
    """Rewards minus the mean reward of the copies of a host in the same step: the hosts n, n + N/group_size, ...

    Copies have equal data and weights, so what a host owes to these cancels, and what the controller did remains. The
    mean leaves the host itself out, so it does not depend on the host's actions, and the expected policy gradient stays
    the same (Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019). Invalid steps count as 0.
    `group_size` is at least 2.
    """
    counted_kDT = rewards.masked_fill(~valid, 0.0).view(group_size, -1, rewards.shape[1])
    others_kDT = (counted_kDT.sum(dim=0) - counted_kDT) / (group_size - 1)
    return rewards - others_kDT.flatten(0, 1)


def discounted_returns(
    rewards: Float[Tensor, "N T"],
    terminal: Bool[Tensor, "N T"],
    truncated: Bool[Tensor, "N T"],
    valid: Bool[Tensor, "N T"],
    gamma: float,
) -> Float[Tensor, "N T"]:
    """Accumulators forward in time, `G_t = r_t + gamma * G_{t-1}`, float64 `[N, T]`.

    `G_{t-1}` is 0 after a valid step that is terminal or truncated; r_t of an invalid step is 0.
    """
    decay_NT = torch.full_like(rewards, gamma, dtype=torch.float64)
    decay_NT[:, 1:].masked_fill_((valid & (terminal | truncated))[:, :-1], 0.0)
    return _scan_(rewards.to(torch.float64).masked_fill(~valid, 0.0), decay_NT, backward=False)


def normalize_advantages(
    advantages: Float[Tensor, "N T"], valid: Bool[Tensor, "N T"], std_floor: float, ranks: Ranks | None = None
) -> NormalizedAdvantages:
    """`(A - mean) / (max(std, floor) + 1e-8)` over the valid steps of all hosts; 0 at invalid ones."""
    moments = masked_moments(advantages, valid, ranks)
    std = moments.var.sqrt()
    scaled = (advantages.to(torch.float64) - moments.mean) / (std.clamp_min(std_floor) + ADVANTAGE_EPS)
    return NormalizedAdvantages(
        advantages=scaled.masked_fill(~valid, 0.0).to(advantages.dtype),
        mean=moments.mean,
        std=std,
        floored=std < std_floor,
    )


def _scan_(inputs_NT: Tensor, decay_NT: Tensor, *, backward: bool) -> Tensor:
    """`y_t = inputs_t + decay_t * y_{t-1}`, or y_{t+1} if `backward`; written over `inputs_NT`.

    A separate product and sum: a fused operation rounds once instead of twice, in some kernels only in part of a row.
    """
    inputs_TN = inputs_NT.t().contiguous()
    inputs, decays = inputs_TN.unbind(0), decay_NT.t().contiguous().unbind(0)
    order = range(len(inputs))
    carry, product = torch.zeros_like(inputs[0]), torch.empty_like(inputs[0])
    for t in reversed(order) if backward else order:
        torch.mul(decays[t], carry, out=product)
        carry = inputs[t].add_(product)
    return inputs_NT.copy_(inputs_TN.t())
