"""The state of N hosts besides their parameters, the one read of a step, and the reports of steps and episodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from dataclasses import replace as data_replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.lifecycle import FossilMemory, OpEffects, TickEffects, memory_of
from esper.kasmina.rules.slot_fields import empty_slots, new_hosts
from esper.leyline.lifecycle import NUM_OPS, Head, SeedStage
from esper.leyline.messages import HostState, KeptNetwork, RewardOutput, SlotState
from esper.leyline.tensor_dataclass import blank, numbers, replace, tensor_dataclass
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import Structure, empty_structure
from esper.tolaria.governor import GovernorState, GovernorVerdict
from esper.tolaria.runtime import host_read


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
    """The control plane of N hosts after `t` steps; the executor owns the parameters.

    `stopped` hosts have no further step: what they have grown is kept as it is.
    """

    slots: SlotState
    hosts: HostState
    governor: GovernorState
    memory: FossilMemory
    reward: Any
    tally: Tally
    stopped: Bool[Tensor, " N"]


def initial_state(
    num_envs: int,
    num_slots: int,
    host_params: int,
    governor: GovernorState,
    reward: Any,  # noqa: ANN401 -- the client's own reward state
    device: torch.device,
) -> ParallelEnvState:
    """N fresh hosts with empty slots."""
    slots, tally = empty_slots(num_envs, num_slots, device), blank(Tally, {"N": num_envs, "O": NUM_OPS}, device)
    missing = torch.full((num_envs,), torch.nan, device=device)
    return ParallelEnvState(
        slots=slots,
        hosts=new_hosts(num_envs, host_params, device),
        governor=governor,
        memory=memory_of(slots),
        reward=reward,
        tally=replace(tally, returns=tally.returns.double(), last_reward=missing),
        stopped=torch.zeros(num_envs, dtype=torch.bool, device=device),
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
        ops=tally.ops + (valid_N1 & (effective_op[:, None] == numbers(NUM_OPS, effective_op.device))),
        refused=tally.refused + (valid & (effective_op != actions[:, Head.OP])),
        flags=tally.flags + (valid_N1 & reward.flags),
    )


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step as read by the host: read-only numpy arrays, [N] or [N, S] unless stated.

    `actions` is [N, 8]; `op_moves`, `tick_moves` are [3, N, S]: from, to, cause; `gate` is the number of the gate
    that a seed was checked at, 0 if none; `rolled_back` marks seeds that a rollback pruned, `row_marked` [N] hosts
    whose last reward it replaced. `compute` [N] is relative (`HostState.relative_compute`). `params` are those of
    each seed, `host_params` [N] of the host. `breakdown` [N, M] and `flags` [N, 2] are the reward's, `op_prob` [N,
    6] the probabilities of all ops, and `constrained` [N, 8] marks heads whose mask left out values.
    `measured_sets` [N, K, S] are the coalitions that were measured, where `measured_valid` [N, K], and
    `measured_acc` [N, K] their accuracies. `stopped` [N] hosts have no further step.

    A host that was stopped before this step has decided nothing in it, as one that was rolled back: its reward is NaN.
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
    compute: np.ndarray
    params: np.ndarray
    host_params: np.ndarray
    num_coalitions: np.ndarray
    reward: np.ndarray
    breakdown: np.ndarray
    flags: np.ndarray
    value: np.ndarray
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
    stopped: np.ndarray

    @property
    def decided(self) -> np.ndarray:
        """Hosts [N] whose row of this step is valid."""
        decided: np.ndarray = ~np.isnan(self.reward)
        return decided

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
        compute: FLOPs of training over those of training the host alone.
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
    compute: np.ndarray
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


def stats_of_all(parts: Sequence[RolloutStats]) -> RolloutStats:
    """The statistics of the hosts of all ranks, at the cost of the first one for all steps."""
    first = parts[0]
    if len(parts) == 1:
        return first
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name, value in vars(first).items()
        if isinstance(value, np.ndarray)
    }
    instance = {name: np.concatenate([part.instance[name] for part in parts]) for name in first.instance}
    cost = data_replace(first.cost, env_steps=sum(part.cost.env_steps for part in parts))
    return data_replace(first, **arrays, instance=instance, cost=cost)


Stacks = dict[tuple[str, ...], Tensor]
"""Tensors of one dtype and shape, stacked, by their names."""


@tensor_dataclass
class Decision:
    """The part of a controller's answer (`ActResult`) that is reported."""

    actions: Int[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    op_prob: Float[Tensor, "N 6"]
    constrained: Bool[Tensor, "N 8"]


def step_outputs(
    state: ParallelEnvState,
    decision: Decision,
    reward: RewardOutput,
    ops: OpEffects,
    ticks: TickEffects,
    verdict: GovernorVerdict,
    *,
    valid: Bool[Tensor, " N"],
    rolled_back: Bool[Tensor, "N S"],
    **others: Tensor,
) -> Stacks:
    """Structure, events and numbers of a step by their names in `Structure` and `StepReport`, as `others` have them."""
    slots, hosts, tally, readings = state.slots, state.hosts, state.tally, ticks.readings
    of_slots = ("stage", "blueprint", "algorithm", "alpha_mode", "serial", "params", "has_gate", "alpha")
    of_hosts = ("val_acc", "val_loss", "train_acc", "train_loss", "committed_acc", "host_params")
    values = {
        **{name: getattr(slots, name) for name in of_slots},
        **{name: getattr(hosts, name) for name in of_hosts},
        **vars(decision),
        **{f"panic_{name}": getattr(verdict, name) for name in ("reason", "loss", "strikes", "thresholds")},
        **others,
        "contribution": slots.contribution,
        "gate": readings.gate,
        "failed_checks": readings.failed_checks,
        "germinated": ops.germinated,
        "released": ops.released | ticks.released | rolled_back,
        "rolled_back": rolled_back,
        "gate_passed": readings.passed,
        "gate_score": readings.score,
        "reward": tally.last_reward.where(valid, torch.nan),
        "breakdown": reward.breakdown,
        "flags": reward.flags,
        "op_moves": torch.stack([*vars(ops.transitions).values()]),
        "tick_moves": torch.stack([*vars(ticks.transitions).values()]),
        "panicked": verdict.panic,
        "row_marked": tally.replaced,
        "stopped": state.stopped,
    }
    return _stacked(values)


def _stacked(values: Mapping[str, Tensor]) -> Stacks:
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, value in values.items():
        alike.setdefault((value.shape, value.dtype), []).append(name)
    return {
        tuple(names): torch.stack([values[name] for name in names]) if len(names) > 1 else values[names[0]][None]
        for names in alike.values()
    }


def unstacked(names: Iterable[Sequence[str]], arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """What was read of stacks, by name."""
    return {name: row for of, stack in zip(names, arrays, strict=True) for name, row in zip(of, stack, strict=True)}


def structure_read(t: int, arrays: Mapping[str, np.ndarray]) -> Structure:
    """What the executor must know for the next step."""
    return Structure(t=t, **{field.name: arrays[field.name] for field in fields(Structure) if field.name in arrays})


def structure_now(t: int, state: ParallelEnvState, coalitions: Coalitions) -> Structure:
    """The structure after step `t` with no change to apply, read at once; for a restored engine."""
    of_slots = ("stage", "blueprint", "algorithm", "alpha_mode", "has_gate", "alpha")
    named = {name: getattr(state.slots, name) for name in of_slots}
    named |= {"stopped": state.stopped, "sets": coalitions.sets, "sets_valid": coalitions.valid}
    arrays = dict(zip(named, host_read(*named.values()), strict=True))
    return data_replace(empty_structure(*arrays["stage"].shape), t=t, **arrays)


def step_report(episode: int, t: int, arrays: Mapping[str, np.ndarray]) -> StepReport:
    """The report of step `t` from the arrays of its read."""
    # listeners get read-only views: the executor keeps working on the same arrays
    views = {field.name: arrays[field.name].view() for field in fields(StepReport) if field.name in arrays}
    for view in views.values():
        view.setflags(write=False)
    return StepReport(episode=episode, t=t, **views)


def rollout_stats(
    episode: int,
    state: ParallelEnvState,
    kept: KeptNetwork,
    subset_acc: Float[Tensor, "N J"],
    cost: RolloutCost,
    instance: Mapping[str, np.ndarray],
) -> RolloutStats:
    """The statistics of an episode: the one read of a round."""
    stacks = _stacked({
        **{name: getattr(state.tally, name) for name in ("returns", "rollbacks", "refused", "ops", "flags")},
        **{name: getattr(state.hosts, f"n_{name}") for name in ("fossilized", "contributing", "germinated", "pruned")},
        **{name: getattr(state.slots, name) for name in ("stage", "blueprint", "algorithm", "alpha")},
        **{name: getattr(kept, name) for name in ("fossil_params", "host_params", "compute")},
        "val_acc": state.hosts.val_acc, "committed_acc": kept.accuracy, "committed_loss": kept.loss,
        "subset_acc": subset_acc,
    })  # fmt: skip
    arrays = unstacked(stacks, host_read(*stacks.values()))
    return RolloutStats(episode=episode, **arrays, cost=cost, instance=instance)
