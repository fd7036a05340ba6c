"""Settings of the engine."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from esper.kasmina.rules.lifecycle_config import LifecycleConfig
from esper.leyline.errors import ConfigError
from esper.leyline.random import MAX_EPISODE_LENGTH, MAX_SLOTS
from esper.tolaria.amp import AmpMode
from esper.tolaria.governor import GovernorConfig

_MAX_HOSTS = 2**32
"""The number of a host is one word of the counter of its random draws."""

ExecutorChoice = Literal["auto", "native", "fused", "streamed"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "time_limit": ("truncate", "terminate"),
    "executor": get_args(ExecutorChoice),
    "amp": get_args(AmpMode),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How N hosts are run for an episode. The config of a built engine names the choice that "auto" made.

    Attributes:
        run_seed: key of every random draw.
        num_envs: N. host_offset: global number of the first host of this process.
        distinct_hosts: how many hosts differ, others are their copies (`leyline.protocols.host_numbers`); None: all.
        episode_length: E, control steps per episode.
        slots: enabled slots in action order.
        time_limit: the last step is bootstrapped ("truncate") or a true end ("terminate").
        executor: "streamed" runs the hosts one after another, bit for bit as if each were alone; "fused" all at once,
            equal up to rounding; "native" by compiled C++ on a CPU, one after another, equal up to rounding; "auto"
            chooses, see `executors.choice`.
        workers: how many share the hosts of a CPU: threads where all hosts run natively, else processes, this one
            included. Scripted hosts and hosts on a GPU stay in one process.
        amp: precision of host training: "off" float32, "bf16", "fp16" with dynamic loss scaling, "auto" bf16 on a GPU
            that supports it.
    """

    run_seed: int = 0
    num_envs: int = 16
    episode_length: int = 40
    slots: tuple[str, ...] = ()
    time_limit: Literal["truncate", "terminate"] = "truncate"
    executor: ExecutorChoice = "streamed"
    amp: AmpMode = "off"
    host_offset: int = 0
    distinct_hosts: int | None = None
    workers: int = 1
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ConfigError(f"num_envs is {self.num_envs}; at least 1 host is needed.")
        if not 1 <= self.episode_length <= MAX_EPISODE_LENGTH:
            raise ConfigError(
                f"episode_length is {self.episode_length}; it must lie between 1 and {MAX_EPISODE_LENGTH} steps."
            )
        if not 1 <= len(self.slots) <= MAX_SLOTS:
            raise ConfigError(f"{len(self.slots)} slots are enabled; between 1 and {MAX_SLOTS} are possible.")
        if len(set(self.slots)) != len(self.slots):
            raise ConfigError(f"slots {', '.join(self.slots)}: each slot may be named once.")
        if not 0 <= self.host_offset <= _MAX_HOSTS - self.num_envs:
            raise ConfigError(
                f"host_offset is {self.host_offset} with {self.num_envs} hosts; global host numbers lie between 0 and "
                f"{_MAX_HOSTS - 1}."
            )
        if self.distinct_hosts is not None and self.distinct_hosts < 1:
            raise ConfigError(f"distinct_hosts is {self.distinct_hosts}; at least 1 host must differ from the others.")
        if not 0 <= self.run_seed < 2**63:
            raise ConfigError(f"seed is {self.run_seed}; it must be a whole number from 0 to 2^63 - 1.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                *others, last = map(repr, choices)
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {', '.join(others)} or {last}.")
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; use 1 for this process alone.")
