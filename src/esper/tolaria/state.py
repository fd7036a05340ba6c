"""The state of N hosts besides their parameters, and the reports of a step and of an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.rollback import FossilMemory, memory_of
from esper.kasmina.rules.slot_fields import empty_slots, new_hosts
from esper.leyline.actions import NUM_OPS, Head
from esper.leyline.messages import HostState, RewardOutput, SlotState
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import replace, tensor_dataclass
from esper.tolaria.governor import GovernorState


@tensor_dataclass
class Tally:
    """Sums over the steps of an episode, on the device until the episode is reported.

    `last_reward` is the reward of the last valid step of the segment (NaN: none). A rollback replaces it; `replaced`
    marks hosts where it did in this step. `flags` counts steps by flag of the reward.
    """

    returns: Float[Tensor, " N"]
    last_reward: Float[Tensor, " N"]
    ops: Int[Tensor, "N O"]
    refused: Int[Tensor, " N"]
    rollbacks: Int[Tensor, " N"]
    flags: Int[Tensor, "N 2"]
    replaced: Bool[Tensor, " N"]


@tensor_dataclass
class ParallelEnvState:
    """The control plane of N hosts after `t` steps; the executor owns the parameters."""

    slots: SlotState
    hosts: HostState
    governor: GovernorState
    memory: FossilMemory
    reward: Any
    tally: Tally


def initial_state(
    num_envs: int,
    num_slots: int,
    host_params: int,
    governor: GovernorState,
    reward: Any,  # noqa: ANN401 -- the client's own reward state
    device: torch.device,
) -> ParallelEnvState:
    """N fresh hosts with empty slots."""
    slots = empty_slots(num_envs, num_slots, device)
    zeros = torch.zeros(num_envs, dtype=torch.int64, device=device)
    tally = Tally(
        returns=torch.zeros(num_envs, dtype=torch.float64, device=device),
        last_reward=torch.full((num_envs,), torch.nan, device=device),
        ops=torch.zeros(num_envs, NUM_OPS, dtype=torch.int64, device=device),
        refused=zeros,
        rollbacks=zeros,
        flags=torch.zeros(num_envs, 2, dtype=torch.int64, device=device),
        replaced=torch.zeros(num_envs, dtype=torch.bool, device=device),
    )
    return ParallelEnvState(
        slots=slots,
        hosts=new_hosts(num_envs, host_params, device),
        governor=governor,
        memory=memory_of(slots),
        reward=reward,
        tally=tally,
    )


def count_rollback(tally: Tally, panic: Bool[Tensor, " N"], penalty: Float[Tensor, " N"]) -> Tally:
    """Replace the last valid reward of each host in `panic` by its `penalty`; hosts without one stay as they are."""
    had_row = panic & ~torch.isnan(tally.last_reward)
    return replace(
        tally,
        returns=tally.returns + torch.where(had_row, penalty - tally.last_reward, 0.0),
        last_reward=tally.last_reward.masked_fill(panic, torch.nan),
        rollbacks=tally.rollbacks + panic,
        replaced=had_row,
    )


def count_step(
    tally: Tally,
    actions: Int[Tensor, "N 8"],
    effective_op: Int[Tensor, " N"],
    reward: RewardOutput,
    valid: Bool[Tensor, " N"],
) -> Tally:
    """Add one step of the valid hosts."""
    valid_N1 = valid[:, None]
    return replace(
        tally,
        returns=tally.returns + torch.where(valid, reward.total, 0.0),
        last_reward=torch.where(valid, reward.total, tally.last_reward),
        ops=tally.ops + (valid_N1 & (effective_op[:, None] == _op_numbers(effective_op.device))),
        refused=tally.refused + (valid & (effective_op != actions[:, Head.OP])),
        flags=tally.flags + (valid_N1 & reward.flags),
    )


@lru_cache(maxsize=16)
def _op_numbers(device: torch.device) -> Tensor:
    return torch.arange(NUM_OPS, device=device)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step as read by the host: read-only numpy arrays, [N] or [N, S] unless stated.

    `actions` is [N, 8]; `op_moves`, `tick_moves` are [3, N, S]: from, to, cause; `gate` is the number of the gate that
    a seed was checked at, 0 if none; `rolled_back` marks seeds that a rollback pruned, `row_marked` [N] hosts whose
    last reward it replaced. `params` are those of each seed, `host_params` [N] of the host. `breakdown` [N, M] and
    `flags` [N, 2] are the reward's; `op_log_prob` is that of the op alone, `op_prob` [N, 6] are the probabilities of
    all, and `constrained` [N, 8] marks heads whose mask left out values. `measured_sets` [N, K, S] are the coalitions
    that were measured, where `measured_valid` [N, K], and `measured_acc` [N, K] their accuracies.
    """

    episode: int
    t: int
    stage: np.ndarray
    serial: np.ndarray
    blueprint: np.ndarray
    alpha: np.ndarray
    contribution: np.ndarray
    val_acc: np.ndarray
    val_loss: np.ndarray
    train_acc: np.ndarray
    train_loss: np.ndarray
    committed_acc: np.ndarray
    params: np.ndarray
    host_params: np.ndarray
    num_coalitions: np.ndarray
    reward: np.ndarray
    breakdown: np.ndarray
    flags: np.ndarray
    value: np.ndarray
    op_log_prob: np.ndarray
    op_prob: np.ndarray
    constrained: np.ndarray
    measured_sets: np.ndarray
    measured_valid: np.ndarray
    measured_acc: np.ndarray
    actions: np.ndarray
    effective_op: np.ndarray
    panic_reason: np.ndarray
    panic_loss: np.ndarray
    panic_strikes: np.ndarray
    panic_thresholds: np.ndarray
    op_moves: np.ndarray
    tick_moves: np.ndarray
    gate: np.ndarray
    gate_passed: np.ndarray
    gate_score: np.ndarray
    failed_checks: np.ndarray
    rolled_back: np.ndarray
    row_marked: np.ndarray

    @property
    def total_params(self) -> np.ndarray:
        """Parameters of host and all seeds after the step [N]."""
        total: np.ndarray = self.host_params + self.params.sum(axis=1)
        return total

    @property
    def committed_params(self) -> np.ndarray:
        """Parameters [N] of the fossils in `committed_acc`, which is measured before the op of this step."""
        _, to, cause = self.op_moves
        new = (cause != 0) & (to == SeedStage.FOSSILIZED)
        measured: np.ndarray = (self.params * ((self.stage == SeedStage.FOSSILIZED) & ~new)).sum(axis=1)
        return measured


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """The cost of an episode in this process: wall time, control steps, hosts x steps, host reads."""

    seconds: float
    steps: int
    env_steps: int
    reads: int


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """The results of an episode of N hosts; arrays [N] unless stated.

    Attributes:
        returns: undiscounted sum of rewards.
        val_acc: live accuracy (pp), with all seeds as they stood in the last step; NaN for a host rolled back in it.
        committed_acc, committed_loss: validation accuracy (pp) and mean loss of the final network of every host
            (`KeptNetwork`); `fossil_params`, `host_params`, `fossilized` and `growth` describe the same network.
        ops: effective ops [N, 6]. refused: sampled ops without effect.
        flags: steps with each flag of the reward [N, 2].
        stage, blueprint, algorithm, alpha: the slots at the end [N, S].
        subset_acc: accuracy of every subset of the live seeds [N, J] (J = 0 where not measured).
        instance: properties of each host's instance by name; empty where hosts are equal.
    """

    episode: int
    returns: np.ndarray
    val_acc: np.ndarray
    committed_acc: np.ndarray
    committed_loss: np.ndarray
    fossil_params: np.ndarray
    host_params: np.ndarray
    fossilized: np.ndarray
    contributing: np.ndarray
    germinated: np.ndarray
    pruned: np.ndarray
    rollbacks: np.ndarray
    ops: np.ndarray
    refused: np.ndarray
    flags: np.ndarray
    stage: np.ndarray
    blueprint: np.ndarray
    algorithm: np.ndarray
    alpha: np.ndarray
    subset_acc: np.ndarray
    cost: RolloutCost
    instance: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def growth(self) -> np.ndarray:
        """(host + fossilized parameters) / host parameters."""
        ratio: np.ndarray = 1.0 + self.fossil_params / np.maximum(self.host_params, 1)
        return ratio
