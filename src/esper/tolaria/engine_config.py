"""Settings of the engine, and the precision of host training.

Only fp16 needs loss scaling (Micikevicius et al. 2018). Each host has its own scale: a gradient that is not finite
skips the step of that host and halves its scale; 2,000 finite steps in a row double it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Literal, final

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.errors import ConfigError
from esper.leyline.random import MAX_EPISODE_LENGTH, MAX_SLOTS
from esper.leyline.settings import AtLeast0, AtLeast1, Count, Positive, check_fields
from esper.tolaria.governor import GovernorConfig

_MAX_HOSTS = 2**32
"""The number of a host is one word of the counter of its random draws."""

AmpMode = Literal["off", "auto", "bf16", "fp16"]
ExecutorChoice = Literal["auto", "native", "fused", "streamed"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How N hosts are run for an episode. The config of a built engine names the choice that "auto" made.

    Attributes:
        run_seed: key of every random draw.
        num_envs: N, hosts of this process. host_offset: global number of the first of them.
        distinct_hosts: how many hosts differ, others are their copies (`leyline.messages.host_numbers`); None: all.
        episode_length: E, control steps per episode. schedule_begin: steps after which the schedule of the learning
            rates begins, to end with the episode.
        slots: enabled slots in action order.
        compute_budget: FLOPs of training that a host may spend in an episode, over those of a host without seeds; None:
            no limit. A host is stopped before the step that it cannot pay, but never before its first.
        time_limit: the last step is bootstrapped ("truncate") or a true end ("terminate").
        executor: "streamed" runs the hosts one after another, bit for bit as if each were alone; "fused" all at once,
            equal up to rounding; "native" by compiled C++ on a CPU, shared by the threads of its cores, equal up to
            rounding; "auto" chooses, see `executors.choice`.
        amp: precision of host training: "off" float32, "bf16", "fp16" with dynamic loss scaling, "auto" bf16 on a GPU
            that supports it.
    """

    run_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    num_envs: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    episode_length: Annotated[int, Field(ge=1, le=MAX_EPISODE_LENGTH)] = 40
    schedule_begin: AtLeast0 = 0
    slots: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_SLOTS)] = ()
    compute_budget: Positive | None = None
    time_limit: Literal["truncate", "terminate"] = "truncate"
    executor: ExecutorChoice = "streamed"
    amp: AmpMode = "off"
    host_offset: Count = 0
    distinct_hosts: AtLeast1 | None = None
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.slots)) != len(self.slots):
            raise ConfigError(f"slots {', '.join(self.slots)}: each slot may be named once.")
        if not 0 <= self.host_offset <= _MAX_HOSTS - self.num_envs:
            raise ConfigError(
                f"host_offset is {self.host_offset} with {self.num_envs} hosts; global host numbers lie between 0 and "
                f"{_MAX_HOSTS - 1}."
            )


_GROWTH_INTERVAL = 2000
_START, _MAX = 2.0**14, 2.0**16


def chosen_amp(mode: AmpMode, device: torch.device) -> AmpMode:
    """Resolve "auto": "bf16" on a GPU that supports it, else "off"."""
    if mode != "auto":
        return mode
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "off"


def amp_dtype(mode: AmpMode, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of `mode` on this device; None for float32."""
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen_amp(mode, device)]


@final
class LossScaler:
    """One loss scale per host, float32 [N]; idle unless the dtype is fp16."""

    def __init__(self, dtype: torch.dtype | None, num_envs: int, device: torch.device) -> None:
        self.dtype, self.device_type = dtype, device.type
        self.enabled = dtype is torch.float16
        self.scale = torch.empty(num_envs, device=device)
        self.good_steps = torch.empty(num_envs, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """The scales of fresh hosts."""
        self.scale.fill_(_START if self.enabled else 1.0)
        self.good_steps.zero_()

    def autocast(self) -> AbstractContextManager[object]:
        """The context of host and seed forward passes."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def update(self, finite: Bool[Tensor, " N"]) -> None:
        """Adapt the scales after a step; `finite` marks hosts with finite gradients."""
        good = torch.where(finite, self.good_steps + 1, 0)
        grown = good >= _GROWTH_INTERVAL
        factor: Float[Tensor, " N"] = torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(min=1.0, max=_MAX)
        self.good_steps.copy_(torch.where(grown, 0, good))
