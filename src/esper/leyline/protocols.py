"""Interfaces between the parts, which users can implement.

engine  --(Observation)-->  PolicyProtocol  --(ActResult)-->   engine
engine  --(RewardInputs)->  RewardProtocol  --(RewardOutput)-> engine
run     --(records)------>  Sink
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.actions import NUM_BUILTIN_BLUEPRINTS, head_sizes
from esper.leyline.checkpoint_tree import StateTree as StateTree
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


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The properties of an engine that a controller depends on.

    Attributes:
        run_seed: key of every random draw of the run.
        num_envs: N, hosts in this process. host_offset: global number of the first of them.
        slot_ids: the enabled slots in action order, e.g. ("r0c0", "r0c1", "r1c0").
        episode_length: E, control steps per episode.
        family: family of the host.
        num_blueprints: size of the blueprint head. selectable: indices a controller may choose.
        min_training_epochs: M of the task. auto_gates: whether the tick asks G1, G2, G3 without an ADVANCE.
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


def host_numbers(
    num_envs: int, host_offset: int, distinct_hosts: int | None, device: torch.device | None = None
) -> Tensor:
    """[N]: the number that keys the random draws of each host.

    With D distinct hosts the hosts n, n + D, n + 2D, ... are copies: they get the same data, weights and seeds, and
    differ only in what the controller does.
    """
    numbers = torch.arange(host_offset, host_offset + num_envs, device=device)
    return numbers if distinct_hosts is None else numbers % distinct_hosts


@runtime_checkable
class PolicyProtocol(Protocol):
    """A controller: learned, scripted or random. Every call is for all N hosts."""

    def initial_hidden(self, n: int) -> Hidden:
        """Zeros, each [L, n, H]."""
        ...

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        """Start an episode. `hosts` [N] are global host numbers, `episode` counts rounds from 0."""
        ...

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """Choose the actions of step `obs.t` and advance the recurrent state."""
        ...

    def store(self, step: StoredStep) -> None:
        """Store one step and reset the recurrent state of hosts with `valid` False. Does not read the device."""
        ...

    def bootstrap(self, obs: Observation) -> Tensor:
        """Value [N] of the state after the last step; the recurrent state is used, but not changed."""
        ...

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        """Replace the reward of the last stored row of each masked host, which is rolled back, by `reward` [N]."""
        ...

    def update(self) -> Mapping[str, float]:
        """Train on the stored rollout and return metrics by name; empty for scripted controllers."""
        ...

    def state_dict(self) -> StateTree:
        """The state that a checkpoint needs."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names or shapes differ."""
        ...


RewardState = TypeVar("RewardState")


@runtime_checkable
class RewardProtocol(Protocol, Generic[RewardState]):
    """The reward of a step, as a pure function of its inputs and a state that is passed in and returned."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the columns of `RewardOutput.breakdown`."""
        ...

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """The state at the start of an episode."""
        ...

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """The reward of one step, and the new state."""
        ...

    def rollback_reward(self, state: RewardState) -> Tensor:
        """[N]: the reward that replaces that of a host's last row when the host is rolled back."""
        ...

    def reset_hosts(self, state: RewardState, mask: Tensor) -> RewardState:
        """The state with the masked hosts as at the start of an episode."""
        ...


@runtime_checkable
class EpisodeReward(RewardProtocol[RewardState], Protocol):
    """A reward that depends on the result of an episode.

    With such a reward the learner treats a rollback as a step within the episode, otherwise as the end of an episode.
    So `rollback_reward` is what the last row keeps, and `reset_hosts` gives the state from which the next row goes on.
    """

    def final_reward(self, kept: KeptNetwork) -> Tensor:
        """[N]: the term `terminal` of the last step, replaced once the result of the episode is known."""
        ...


@runtime_checkable
class ClientProtocol(PolicyProtocol, RewardProtocol[Any], Protocol):
    """A controller and a reward in one object, which drives an engine."""

    def finish(self, kept: KeptNetwork) -> None:
        """Take the result of the episode; called once, after the last step and before `update`."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A receiver of the records of a run; an error in a sink does not stop the run."""

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take one record of plain values."""
        ...


@runtime_checkable
class ClosingSink(Sink, Protocol):
    """A sink that is closed after the run."""

    def close(self) -> None:
        """Write what is left, and release what is open."""
        ...
