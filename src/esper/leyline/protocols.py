"""The contracts between the parts. Whoever satisfies one can take the place of ours.

engine  --(Observation)-->  PolicyProtocol  --(ActResult)-->  engine
engine  --(RewardInputs)->  RewardProtocol  --(RewardOutput)-> engine
engine  --(records)------>  Sink                              reads, never answers
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.actions import NUM_BUILTIN_BLUEPRINTS, head_sizes
from esper.leyline.messages import (
    ActResult,
    Hidden,
    KeptNetwork,
    Observation,
    RewardInputs,
    RewardOutput,
    StoredStep,
)
from esper.leyline.stages import HostFamily

StateTree = dict[str, Tensor]
"""A flat tree of tensors with dotted names: what checkpoints store."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What a controller must know of the engine it will drive.

    Attributes:
        run_seed: key of every random draw of the run.
        num_envs: N, hosts in this process. host_offset: global number of the first of them.
        slot_ids: the enabled slots in action order, e.g. ("r0c0", "r0c1", "r1c0").
        episode_length: E, control steps per episode.
        topology: family of the host.
        num_blueprints: size of the blueprint head. selectable: indices a controller may choose.
        min_training_epochs: M of the task. auto_gates: whether G1, G2, G3 open without an ADVANCE.
    """

    run_seed: int
    num_envs: int
    slot_ids: tuple[str, ...]
    episode_length: int
    family: HostFamily
    selectable: tuple[int, ...]
    num_blueprints: int = NUM_BUILTIN_BLUEPRINTS
    min_training_epochs: int = 10
    auto_gates: tuple[bool, bool, bool] = (True, True, True)
    blueprint_names: tuple[str, ...] = ()
    host_offset: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.slot_ids)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Number of values of each of the eight heads."""
        return head_sizes(self.num_slots, self.num_blueprints)

    def host_ids(self) -> Tensor:
        """Global host numbers, int64 [N]."""
        return torch.arange(self.host_offset, self.host_offset + self.num_envs, device=self.device)


@runtime_checkable
class PolicyProtocol(Protocol):
    """Any controller: learned, scripted, random. All calls are for all N hosts at once."""

    def initial_hidden(self, n: int) -> Hidden:
        """Zeros, each [L, n, H]."""
        ...

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        """Forget the last episode. `hosts` [N] are global host numbers, `episode` counts rounds from 0."""
        ...

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """Decide for all hosts in step `obs.t`; carries the recurrent state forward."""
        ...

    def store(self, step: StoredStep) -> None:
        """Remember one step; the recurrent state of hosts with `valid` False becomes zero. No host read."""
        ...

    def bootstrap(self, obs: Observation) -> Tensor:
        """Value [N] of the state after the last step, with the carried recurrent state, which stays as it is."""
        ...

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        """The last stored row of each masked host is paid `reward` [N] instead: the host is rolled back now."""
        ...

    def update(self) -> Mapping[str, float]:
        """Learn from the stored rollout; metrics by name. Scripted controllers return an empty mapping."""
        ...

    def state_dict(self) -> StateTree:
        """Everything that must survive a restart."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        ...


RewardState = TypeVar("RewardState")


@runtime_checkable
class RewardProtocol(Protocol, Generic[RewardState]):
    """What a step is worth. Pure: what must be remembered is in the state that is handed in and out."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the columns of `RewardOutput.breakdown`."""
        ...

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """Carried state at the start of an episode."""
        ...

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """Pay one step."""
        ...

    def rollback_reward(self, state: RewardState) -> Tensor:
        """[N]: what the last row of a host is paid instead when the host is rolled back now."""
        ...

    def reset_hosts(self, state: RewardState, mask: Tensor) -> RewardState:
        """Carried state with the masked hosts as at the start of an episode."""
        ...


@runtime_checkable
class EpisodeReward(RewardProtocol[RewardState], Protocol):
    """A reward that pays for what an episode leaves.

    To the learner a rollback interrupts such an episode; with any other reward it ends it, and another one begins.
    """

    def final_reward(self, kept: KeptNetwork) -> Tensor:
        """[N]: what takes the place of the term `terminal` of the last step, in which not all was known."""
        ...


@runtime_checkable
class ClientProtocol(PolicyProtocol, RewardProtocol[Any], Protocol):
    """What drives an engine: a controller and a reward in one object."""

    def finish(self, kept: KeptNetwork) -> None:
        """The episode is over, and this is what it left; called once, after the last step and before `update`."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Where records of a run go. A sink never answers and a failing sink never stops a run."""

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take one record, made of plain values that were read already."""
        ...
