"""The packed read of a control step: which tensors leave the device, and what the host makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from dataclasses import replace as data_replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.lifecycle import OpEffects, TickEffects
from esper.leyline.actions import Head
from esper.leyline.messages import ActResult, KeptNetwork, RewardOutput
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import Structure, empty_structure
from esper.tolaria.governor import GovernorVerdict
from esper.tolaria.runtime import Arrays, PendingRead, host_read, start_read
from esper.tolaria.state import ParallelEnvState, RolloutCost, RolloutStats, StepReport

_STACKS = (
    ("stage", "blueprint", "algorithm", "alpha_mode", "serial", "params", "gate", "failed_checks"),
    ("has_gate", "germinated", "released", "keep", "rolled_back", "gate_passed"),
    ("alpha", "contribution", "gate_score"),
    ("val_acc", "val_loss", "train_acc", "train_loss", "committed_acc", "reward", "value", "op_log_prob"),
    ("effective_op", "panic_reason", "panic_strikes", "host_params", "num_coalitions"),
    ("panicked", "snapshot", "row_marked"),
)
"""Tensors of one dtype and shape are stacked: the first three stacks are [..., N, S], the others [..., N]. The first
one ends with the six rows of the transitions: from, to and cause, by the op and by the tick."""
_OTHERS = 9
"""Number of arrays after the stacks that belong to a report."""


@tensor_dataclass
class Decision:
    """The part of a controller's answer that is reported."""

    actions: Int[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    op_log_prob: Float[Tensor, " N"]
    op_prob: Float[Tensor, "N 6"]
    constrained: Bool[Tensor, "N 8"]


def decision_of(act: ActResult) -> Decision:
    """The reported part of `act`."""
    same = {name: getattr(act, name) for name in ("actions", "value", "op_prob", "constrained")}
    return Decision(op_log_prob=act.log_prob[:, Head.OP], **same)


@tensor_dataclass
class FinishedStep:
    """Everything of a finished step that is reported."""

    state: ParallelEnvState
    num_coalitions: Int[Tensor, " N"]
    decision: Decision
    reward: RewardOutput
    ops: OpEffects
    ticks: TickEffects
    effective_op: Int[Tensor, " N"]
    verdict: GovernorVerdict
    rolled_back: Bool[Tensor, "N S"]
    snapshot: Bool[Tensor, " N"]
    keep: Bool[Tensor, "N S"]


def with_coalitions(
    outputs: Sequence[Tensor], coalitions: Coalitions, accuracy: Float[Tensor, "N K"]
) -> tuple[Tensor, ...]:
    """The outputs of a step and the coalitions that it measured."""
    return (*outputs, coalitions.sets, coalitions.valid, accuracy)


def start(outputs: Sequence[Tensor], coalitions: Coalitions) -> PendingRead:
    """Begin the read of the step that just ended; `coalitions` are those of the next one."""
    return start_read(*outputs, coalitions.sets, coalitions.valid)


def step_outputs(finished: FinishedStep) -> tuple[Tensor, ...]:
    """Structure, events and numbers of a step: the stacks, then the decision, losses, and the terms of the reward."""
    state, ops, ticks, verdict = finished.state, finished.ops, finished.ticks, finished.verdict
    slots, hosts, tally, readings = state.slots, state.hosts, state.tally, ticks.readings
    values = {
        **{name: getattr(slots, name) for name in (*_STACKS[0][:6], "has_gate", "alpha", "contribution")},
        **{name: getattr(hosts, name) for name in ("val_acc", "val_loss", "train_acc", "train_loss", "committed_acc")},
        "gate": readings.gate,
        "failed_checks": readings.failed_checks,
        "germinated": ops.germinated,
        "released": ops.released | ticks.released | finished.rolled_back,
        "keep": finished.keep,
        "rolled_back": finished.rolled_back,
        "gate_passed": readings.passed,
        "gate_score": readings.score,
        "reward": tally.last_reward,
        "value": finished.decision.value,
        "op_log_prob": finished.decision.op_log_prob,
        "effective_op": finished.effective_op,
        "panic_reason": verdict.reason,
        "panic_strikes": verdict.strikes,
        "host_params": hosts.host_params,
        "num_coalitions": finished.num_coalitions,
        "panicked": verdict.panic,
        "snapshot": finished.snapshot,
        "row_marked": tally.replaced,
    }
    rows = [[values[name] for name in names] for names in _STACKS]
    rows[0] += [*vars(ops.transitions).values(), *vars(ticks.transitions).values()]
    return (
        *(torch.stack(stack) for stack in rows),
        finished.decision.actions,
        finished.decision.op_prob,
        finished.decision.constrained,
        torch.cat((verdict.loss[:, None], verdict.thresholds), dim=1),
        finished.reward.breakdown,
        finished.reward.flags,
    )


def _by_name(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of `with_coalitions` under the names of `Structure` and `StepReport`."""
    *stacks, actions, op_prob, constrained, losses, breakdown, flags, sets, sets_valid, accuracy = arrays
    named = {name: row for names, stack in zip(_STACKS, stacks, strict=True) for name, row in zip(names, stack)}  # noqa: B905 -- the transitions follow the names
    return named | {
        "op_moves": stacks[0][-6:-3],
        "tick_moves": stacks[0][-3:],
        "actions": actions,
        "op_prob": op_prob,
        "constrained": constrained,
        "panic_loss": losses[:, 0],
        "panic_thresholds": losses[:, 1:],
        "breakdown": breakdown,
        "flags": flags,
        "measured_sets": sets,
        "measured_valid": sets_valid,
        "measured_acc": accuracy,
    }


def _fields_of(kind: type[Structure | StepReport], named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {field.name: named[field.name] for field in fields(kind) if field.name in named}


def structure(t: int, arrays: Arrays) -> Structure:
    """What the executor must know for the next step."""
    *outputs, sets, sets_valid = arrays
    return Structure(t=t, sets=sets, sets_valid=sets_valid, **_fields_of(Structure, _by_name(outputs)))


def structure_now(t: int, state: ParallelEnvState, coalitions: Coalitions) -> Structure:
    """The structure after step `t` with no change to apply, read at once; for a restored engine."""
    slots = state.slots
    ints = (slots.stage, slots.blueprint, slots.algorithm, slots.alpha_mode)
    read = host_read(torch.stack(ints), slots.has_gate, slots.alpha, coalitions.sets, coalitions.valid)
    (stage, blueprint, algorithm, alpha_mode), has_gate, alpha, sets, sets_valid = read
    return data_replace(
        empty_structure(*stage.shape),
        t=t,
        stage=stage,
        blueprint=blueprint,
        algorithm=algorithm,
        alpha_mode=alpha_mode,
        has_gate=has_gate,
        alpha=alpha,
        sets=sets,
        sets_valid=sets_valid,
    )


def step_report(episode: int, t: int, arrays: Sequence[np.ndarray]) -> StepReport:
    """The report of step `t` from the arrays of `with_coalitions`, which may be followed by others."""
    # listeners get read-only views: the executor keeps working on the same arrays
    views = [array.view() for array in arrays[: len(_STACKS) + _OTHERS]]
    for view in views:
        view.setflags(write=False)
    return StepReport(episode=episode, t=t, **_fields_of(StepReport, _by_name(views)))


def rollout_stats(
    episode: int,
    state: ParallelEnvState,
    kept: KeptNetwork,
    subset_acc: Float[Tensor, "N J"],
    cost: RolloutCost,
    instance: Mapping[str, np.ndarray],
) -> RolloutStats:
    """The statistics of an episode: the one read of a round."""
    slots, hosts, tally = state.slots, state.hosts, state.tally
    returns, (val_acc, committed_acc, committed_loss), counts, others, ops, flags, end, alpha, subsets = host_read(
        tally.returns,
        torch.stack((hosts.val_acc, kept.accuracy, kept.loss)),
        torch.stack((hosts.n_fossilized, hosts.n_contributing, hosts.n_germinated, hosts.n_pruned)),
        torch.stack((tally.rollbacks, tally.refused, kept.fossil_params, kept.host_params)),
        tally.ops,
        tally.flags,
        torch.stack((slots.stage, slots.blueprint, slots.algorithm)),
        slots.alpha,
        subset_acc,
    )
    return RolloutStats(
        episode=episode,
        returns=returns,
        val_acc=val_acc,
        committed_acc=committed_acc,
        committed_loss=committed_loss,
        **dict(zip(("fossilized", "contributing", "germinated", "pruned"), counts, strict=True)),
        **dict(zip(("rollbacks", "refused", "fossil_params", "host_params"), others, strict=True)),
        ops=ops,
        **dict(zip(("stage", "blueprint", "algorithm"), end, strict=True)),
        flags=flags,
        alpha=alpha,
        subset_acc=subsets,
        cost=cost,
        instance=instance,
    )
