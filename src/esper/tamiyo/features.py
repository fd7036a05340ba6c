"""Features: an observation as numbers with declared ranges.

    features [N, 25 + 31 S]  =  host block [25] | slot 0 [31] | slot 1 [31] | ...       all zero for a DORMANT slot
    blueprint_index [N, S]      which blueprint a slot holds or held last; -1 for a DORMANT slot

Two tables name every column with its range and unit. All columns are encoded together: `clamp(raw / unit, low, high)`.
A missing value (NaN) becomes `low`, unless `_slot_columns` replaces it by 0.

Shape legend: N = hosts, S = slots, D = features.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esper.leyline.lifecycle import (
    NUM_OPS,
    NUM_STAGE_CLASSES,
    NUM_STAGE_VALUES,
    STAGE_CLASS,
    AlphaMode,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.messages import HostState, Observation, SlotState
from esper.leyline.tensor_dataclass import tensor_dataclass

HISTORY = 5
FRESHNESS_DECAY = 0.995
_LOG_UNIT = 7.0
_COUNTED = ({SeedStage.TRAINING}, {SeedStage.BLENDING}, {SeedStage.HOLDING, SeedStage.FOSSILIZED})


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One column.

    Attributes:
        low, high: range, both included; values outside are clamped.
        unit: divisor of the raw value. per_episode: the divisor is the length of the episode instead.
        group: what it tells, in words, which it shares with related columns.
    """

    name: str
    low: float
    high: float
    unit: float = 1.0
    per_episode: bool = False
    group: str = ""


def _share(name: str, unit: float = 1.0) -> Feature:
    return Feature(name=name, low=0.0, high=1.0, unit=unit)


def _steps(name: str) -> Feature:
    return Feature(name=name, low=0.0, high=1.0, per_episode=True)


def _signed(name: str, unit: float = 1.0) -> Feature:
    return Feature(name=name, low=-1.0, high=1.0, unit=unit)


def _group(name: str, *columns: Feature) -> tuple[Feature, ...]:
    return tuple(replace(column, group=name) for column in columns)


CLOCK, STAGE = "step of the episode", "stage of the seeds"
"""Groups of columns: the one that is the same for all hosts, and one that has columns in both blocks."""

HOST_FEATURES: tuple[Feature, ...] = (
    *_group(CLOCK, _steps("step")),
    *_group(
        "validation results",
        _signed("val_loss", _LOG_UNIT),
        _signed("val_acc", 100.0),
        *(_signed(f"val_loss_{HISTORY - 1 - i}_steps_ago", _LOG_UNIT) for i in range(HISTORY)),
        *(_signed(f"val_acc_{HISTORY - 1 - i}_steps_ago", 100.0) for i in range(HISTORY)),
    ),
    *_group(STAGE, *(_share(f"slots_in_{name}") for name in ("training", "blending", "holding_or_fossilized"))),
    *_group("last operation", _share("last_success"), *(_share(f"last_op_{op.name.lower()}") for op in LifecycleOp)),
    *_group("training results", _signed("train_loss", _LOG_UNIT), _signed("train_acc", 100.0)),
)
"""The host block, in order. Losses are `sign(x) ln(1 + |x|) / 7`, accuracies are shares."""

SLOT_FEATURES: tuple[Feature, ...] = (
    *_group(STAGE, _share("occupied"), *(_share(f"stage_{stage.name.lower()}") for stage in SeedStage)),
    *_group("blending of the seeds", _share("alpha")),
    *_group("contribution of the seeds", _signed("contribution", 10.0), _signed("contribution_velocity", 10.0)),
    *_group(
        "blending of the seeds",
        _share("tempo", 12.0),
        _share("alpha_target"),
        _share("alpha_mode", 2.0),
        _steps("alpha_total"),
        _steps("alpha_done"),
        _steps("time_to_target"),
        _signed("alpha_velocity"),
        _share("algorithm", 2.0),
    ),
    *_group("contribution of the seeds", _signed("interaction_sum", 10.0)),
    *_group(
        "gradients of the seeds",
        _share("grad_norm", _LOG_UNIT),
        _share("grad_health"),
        _share("grad_vanishing"),
        _share("grad_exploding"),
        _signed("grad_health_prev"),
    ),
    *_group("age of the seeds", _steps("epochs_in_stage")),
    *_group("contribution of the seeds", _signed("freshness")),
    *_group("age of the seeds", _steps("age")),
)
"""The block of one slot, in order; 1 to 10 are the stage. The gradient norm is `ln(1 + x) / 7`."""


def feature_dim(num_slots: int) -> int:
    """Width D of the features of `num_slots` slots."""
    return len(HOST_FEATURES) + len(SLOT_FEATURES) * num_slots


def observe(obs: Observation) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N S"]]:
    """Features and blueprint indices; finite for every state, measured or not."""
    return features_of(obs.slots, obs.hosts, obs.t, obs.episode_length)


def features_of(
    slots: SlotState, hosts: HostState, t: int | Int[Tensor, ""], episode_length: int
) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N S"]]:
    """`observe` from its parts; `t` is a tensor where one compiled graph serves all steps."""
    tables = _tables(episode_length, slots.stage.device)
    stage_NSC = tables.stage[slots.stage]
    stage_width = 1 + NUM_STAGE_CLASSES
    host_values = _host_columns(hosts, t, stage_NSC[..., stage_width:].mean(dim=1), tables.op)
    slot_values = torch.stack(_slot_columns(slots, t), dim=-1)  # promotes mixed dtypes
    host_NC = tables.host.scaled(torch.cat(host_values, dim=1))
    slot_NSC = tables.slot.scaled(torch.cat((stage_NSC[..., :stage_width], slot_values), dim=-1))
    slot_NSC = slot_NSC * stage_NSC[..., :1]  # the occupied flag
    columns_ND = torch.cat((host_NC, slot_NSC.flatten(1)), dim=1)
    return columns_ND, slots.blueprint.masked_fill(slots.stage == int(SeedStage.DORMANT), -1)


def symlog(x: Float[Tensor, "*R"]) -> Float[Tensor, "*R"]:
    """`sign(x) ln(1 + |x|)`: linear near zero, logarithmic far from it."""
    return x.abs().log1p().copysign(x)


def _host_columns(
    hosts: HostState, t: int | Tensor, counts_NC: Float[Tensor, "N 3"], op_table: Float[Tensor, "6 6"]
) -> tuple[Tensor, ...]:
    """The host block before scaling, in the order of `HOST_FEATURES`."""
    hosts_N = len(counts_NC)
    loss_NH = symlog(torch.cat((hosts.val_loss[:, None], hosts.loss_hist), dim=1))
    return (
        t.expand(hosts_N, 1) if isinstance(t, Tensor) else torch.full((hosts_N, 1), t, device=counts_NC.device),
        loss_NH[:, :1],
        hosts.val_acc[:, None],
        loss_NH[:, 1:],
        hosts.acc_hist,
        counts_NC,
        hosts.last_success[:, None],
        op_table[hosts.last_op],
        symlog(hosts.train_loss)[:, None],
        hosts.train_acc[:, None],
    )


def _slot_columns(slots: SlotState, t: int | Tensor) -> tuple[Tensor, ...]:
    """The slot block after the stage, before scaling, in the order of `SLOT_FEATURES`; each [N, S]."""
    ramping = (slots.alpha_total > 0) & (slots.alpha_mode != int(AlphaMode.HOLD))
    velocity = torch.where(ramping, (slots.alpha_target - slots.alpha_start) / slots.alpha_total, 0.0)
    grad_norm = slots.grad_norm.nan_to_num(nan=0.0, posinf=0.0)  # an infinite norm has the exploding flag
    has_grads = slots.grad_health >= 0.0  # False for NaN
    freshness = torch.where(slots.contribution_step < 0, math.nan, FRESHNESS_DECAY ** (t - slots.contribution_step))
    return (
        slots.alpha,
        slots.contribution.nan_to_num(nan=0.0),
        slots.contribution_velocity.nan_to_num(nan=0.0),
        slots.tempo,
        slots.alpha_target,
        slots.alpha_mode,
        slots.alpha_total,
        slots.alpha_done,
        slots.alpha_total - slots.alpha_done,
        velocity,
        slots.algorithm - 1,
        slots.interaction_sum.nan_to_num(nan=0.0),
        grad_norm.log1p(),
        slots.grad_health,
        slots.grad_vanishing & has_grads,
        slots.grad_exploding & has_grads,
        slots.grad_health_prev,
        slots.epochs_in_stage,
        freshness,
        slots.age,
    )


@tensor_dataclass
class _Scale:
    """Unit and range of the columns of a block."""

    unit: Float[Tensor, " C"]
    low: Float[Tensor, " C"]
    high: Float[Tensor, " C"]

    def scaled(self, raw: Float[Tensor, "*R C"]) -> Float[Tensor, "*R C"]:
        """`clamp(raw / unit, low, high)`, NaN as `low`. Writes into `raw`."""
        raw.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        return raw.div_(self.unit).clamp_(self.low, self.high)


@tensor_dataclass
class _Tables:
    """Constants on a device; rows of `stage` are the occupied flag, the stage, and three counts of the host."""

    host: _Scale
    slot: _Scale
    stage: Float[Tensor, "11 C"]
    op: Float[Tensor, "6 6"]


@lru_cache(maxsize=64)
def _tables(episode_length: int, device: torch.device) -> _Tables:
    stage_rows = [
        [
            value != SeedStage.DORMANT,
            *(STAGE_CLASS[value] == index for index in range(NUM_STAGE_CLASSES)),
            *(value in counted for counted in _COUNTED),
        ]
        for value in range(NUM_STAGE_VALUES)
    ]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def scale(block: tuple[Feature, ...]) -> _Scale:
        return _Scale(
            unit=column([float(episode_length) if f.per_episode else f.unit for f in block]),
            low=column([f.low for f in block]),
            high=column([f.high for f in block]),
        )

    return _Tables(
        host=scale(HOST_FEATURES),
        slot=scale(SLOT_FEATURES),
        stage=torch.tensor(stage_rows, dtype=torch.float32, device=device),
        op=torch.eye(NUM_OPS, device=device),
    )
