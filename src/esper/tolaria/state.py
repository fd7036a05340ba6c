"""Everything the engine remembers of N hosts besides their parameters, and the report of one step."""

from dataclasses import dataclass
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
    """Sums over the steps of an episode, kept on the device until its report.

    `last_reward` is what the last valid step of the segment paid (NaN: none): a rollback replaces it, and `replaced`
    says whether it did in this step. `flags` counts steps by mark of the reward.
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
    """The control plane of N hosts after `t` steps; parameters live in the executor."""

    slots: SlotState
    hosts: HostState
    governor: GovernorState
    memory: FossilMemory
    reward: Any
    tally: Tally


def initial_tally(num_envs: int, device: torch.device) -> Tally:
    """Nothing has happened yet."""
    zeros = torch.zeros(num_envs, dtype=torch.int64, device=device)
    return Tally(
        returns=torch.zeros(num_envs, dtype=torch.float64, device=device),
        last_reward=torch.full((num_envs,), torch.nan, device=device),
        ops=torch.zeros(num_envs, NUM_OPS, dtype=torch.int64, device=device),
        refused=zeros,
        rollbacks=zeros,
        flags=torch.zeros(num_envs, 2, dtype=torch.int64, device=device),
        replaced=torch.zeros(num_envs, dtype=torch.bool, device=device),
    )


def initial_state(
    num_envs: int,
    num_slots: int,
    host_params: int,
    governor: GovernorState,
    reward: Any,  # noqa: ANN401 -- whatever the client's reward carries
    device: torch.device,
) -> ParallelEnvState:
    """N fresh hosts with empty slots."""
    slots = empty_slots(num_envs, num_slots, device)
    return ParallelEnvState(
        slots=slots,
        hosts=new_hosts(num_envs, host_params, device),
        governor=governor,
        memory=memory_of(slots),
        reward=reward,
        tally=initial_tally(num_envs, device),
    )


def count_rollback(tally: Tally, panic: Bool[Tensor, " N"], reward: Float[Tensor, " N"]) -> Tally:
    """The last valid reward of each masked host is replaced; a host without one loses nothing."""
    had_row = panic & ~torch.isnan(tally.last_reward)
    change = torch.where(had_row, reward - tally.last_reward, 0.0)
    return replace(
        tally,
        returns=tally.returns + change,
        last_reward=torch.where(panic, torch.nan, tally.last_reward),
        rollbacks=tally.rollbacks + panic,
        replaced=had_row,
    )


def count_step(
    tally: Tally,
    actions: Int[Tensor, "N 8"],
    effective_op: Int[Tensor, " N"],
    paid: RewardOutput,
    valid: Bool[Tensor, " N"],
) -> Tally:
    """Add one step of the valid hosts."""
    one_hot = effective_op[:, None] == torch.arange(NUM_OPS, device=effective_op.device)
    reward = torch.where(valid, paid.total, 0.0)
    return replace(
        tally,
        returns=tally.returns + reward,
        last_reward=torch.where(valid, paid.total, tally.last_reward),
        ops=tally.ops + (one_hot & valid[:, None]),
        refused=tally.refused + (valid & (effective_op != actions[:, Head.OP])),
        flags=tally.flags + (paid.flags & valid[:, None]),
    )


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the one read of a step brought to the host, as numpy arrays that nobody can write.

    [N] or [N, S] unless stated; `actions` is [N, 8]; `op_moves`, `tick_moves` are [3, N, S]: from, to, cause; `gate` is
    the number of the one that a seed asked, 0 if none; `rolled_back` marks seeds that a rollback pruned, `row_marked`
    [N] hosts whose last row it changed. `params` are those of each seed, `host_params` [N] of the host.
    `breakdown` [N, M] and `flags` [N, 2] are the reward's; `op_log_prob` is that of the op alone.
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
        """Parameters [N] of the fossils that `committed_acc` is measured with: without those of this step."""
        _, to, cause = self.op_moves
        new = (cause != 0) & (to == SeedStage.FOSSILIZED)
        measured: np.ndarray = (self.params * ((self.stage == SeedStage.FOSSILIZED) & ~new)).sum(axis=1)
        return measured


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """What an episode took in this process: wall time, control steps, hosts x steps, reads of the device."""

    seconds: float
    steps: int
    env_steps: int
    reads: int


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What an episode of N hosts came to; arrays [N] unless stated.

    Attributes:
        returns: undiscounted sum of rewards.
        val_acc: live accuracy (pp), with all seeds as they stood in the last step; NaN for a host rolled back in it.
        committed_acc: validation accuracy (pp) of the network that is kept, `KeptNetwork`, of every host;
            `fossil_params`, `host_params`, `fossilized` and `growth` are of the same network.
        ops: effective ops [N, 6]. refused: sampled ops without effect.
        flags: steps with each mark of the reward [N, 2].
        stage, blueprint, algorithm, alpha: the slots at the end [N, S].
        subset_acc: accuracy of every subset of the live seeds [N, J] (J = 0 where not measured).
    """

    episode: int
    returns: np.ndarray
    val_acc: np.ndarray
    committed_acc: np.ndarray
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

    @property
    def growth(self) -> np.ndarray:
        """(host + fossilized parameters) / host parameters."""
        ratio: np.ndarray = 1.0 + self.fossil_params / np.maximum(self.host_params, 1)
        return ratio
