"""The one packed read of a control step: what goes in, and what comes out on the host.

Where the structure stays on the device, steps are packed and read later, together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.lifecycle import OpEffects, TickEffects
from esper.leyline.actions import Head
from esper.leyline.messages import ActResult, KeptNetwork, RewardOutput
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.governor import GovernorVerdict
from esper.tolaria.runtime import Arrays, Packed, PendingRead, host_read, read_packed, start_read
from esper.tolaria.state import ParallelEnvState, RolloutCost, RolloutStats, StepReport


@tensor_dataclass
class Decision:
    """What the host is told of a decision."""

    actions: Int[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    op_log_prob: Float[Tensor, " N"]


def decision_of(act: ActResult) -> Decision:
    """The part of a controller's answer that the host is told."""
    return Decision(actions=act.actions, value=act.value, op_log_prob=act.log_prob[:, Head.OP])


@tensor_dataclass
class FinishedStep:
    """Everything of a step that finished from which the host is told something."""

    state: ParallelEnvState
    num_coalitions: Int[Tensor, " N"]
    decision: Decision
    paid: RewardOutput
    ops: OpEffects
    ticks: TickEffects
    effective_op: Int[Tensor, " N"]
    verdict: GovernorVerdict
    rolled_back: Bool[Tensor, "N S"]
    snapshot: Bool[Tensor, " N"]
    keep: Bool[Tensor, "N S"]


def start(outputs: Sequence[Tensor], coalitions: Coalitions) -> PendingRead:
    """Begin the read of the step that just finished; `coalitions` are those of the next one."""
    return start_read(*outputs, coalitions.sets, coalitions.valid)


def step_outputs(finished: FinishedStep) -> tuple[Tensor, ...]:
    """Structure, events and numbers of a step. Tensors of one type and shape travel stacked."""
    state, ops, ticks, verdict = finished.state, finished.ops, finished.ticks, finished.verdict
    slots, hosts, readings = state.slots, state.hosts, ticks.readings
    slot_ints = (
        slots.stage,
        slots.blueprint,
        slots.algorithm,
        slots.alpha_mode,
        slots.serial,
        slots.params,
        *vars(ops.transitions).values(),
        *vars(ticks.transitions).values(),
        readings.gate,
        readings.failed_checks,
    )
    slot_bools = (
        slots.has_gate,
        ops.germinated,
        ops.released | ticks.released | finished.rolled_back,
        finished.keep,
        finished.rolled_back,
        readings.passed,
    )
    host_floats = (
        hosts.val_acc,
        hosts.val_loss,
        hosts.train_loss,
        hosts.committed_acc,
        state.tally.last_reward,
        finished.decision.value,
        finished.decision.op_log_prob,
    )
    return (
        torch.stack(slot_ints),
        torch.stack(slot_bools),
        torch.stack((slots.alpha, slots.contribution, readings.score)),
        torch.stack(host_floats),
        torch.stack(
            (finished.effective_op, verdict.reason, verdict.strikes, hosts.host_params, finished.num_coalitions)
        ),
        torch.stack((verdict.panic, finished.snapshot, state.tally.replaced)),
        finished.decision.actions,
        torch.cat((verdict.loss[:, None], verdict.thresholds), dim=1),
        finished.paid.breakdown,
        finished.paid.flags,
    )


def structure(t: int, arrays: Arrays) -> Structure:
    """What the executor must know for the next step."""
    ints, bools, floats, _, _, marks, *_, sets, sets_valid = arrays
    return Structure(
        t=t,
        stage=ints[0],
        blueprint=ints[1],
        algorithm=ints[2],
        alpha_mode=ints[3],
        has_gate=bools[0],
        alpha=floats[0],
        germinated=bools[1],
        released=bools[2],
        keep=bools[3],
        panicked=marks[0],
        snapshot=marks[1],
        sets=sets,
        sets_valid=sets_valid,
    )


def structure_now(t: int, state: ParallelEnvState, coalitions: Coalitions) -> Structure:
    """The structure after step `t` without anything to be carried out, read at once; for a restored engine."""
    slots = state.slots
    ints = (slots.stage, slots.blueprint, slots.algorithm, slots.alpha_mode)
    read = host_read(torch.stack(ints), slots.has_gate, slots.alpha, coalitions.sets, coalitions.valid)
    (stage, blueprint, algorithm, alpha_mode), has_gate, alpha, sets, sets_valid = read
    nothing, nobody = np.zeros_like(has_gate), np.zeros(len(has_gate), dtype=np.bool_)
    return Structure(
        t=t,
        stage=stage,
        blueprint=blueprint,
        algorithm=algorithm,
        alpha_mode=alpha_mode,
        has_gate=has_gate,
        alpha=alpha,
        germinated=nothing,
        released=nothing,
        keep=nothing,
        panicked=nobody,
        snapshot=nobody,
        sets=sets,
        sets_valid=sets_valid,
    )


def step_report(episode: int, t: int, arrays: Arrays) -> StepReport:
    """What listeners are told of the step."""
    # the executor goes on working with the structure that was read, and no listener can reach it through its report
    only_read = [_only_read(array) for array in arrays[:10]]
    ints, bools, floats, host_floats, host_ints, marks, actions, thresholds, breakdown, flags = only_read
    return StepReport(
        episode=episode,
        t=t,
        stage=ints[0],
        serial=ints[4],
        blueprint=ints[1],
        alpha=floats[0],
        contribution=floats[1],
        val_acc=host_floats[0],
        val_loss=host_floats[1],
        train_loss=host_floats[2],
        committed_acc=host_floats[3],
        reward=host_floats[4],
        value=host_floats[5],
        op_log_prob=host_floats[6],
        breakdown=breakdown,
        flags=flags,
        params=ints[5],
        host_params=host_ints[3],
        num_coalitions=host_ints[4],
        row_marked=marks[2],
        actions=actions,
        effective_op=host_ints[0],
        panic_reason=host_ints[1],
        panic_strikes=host_ints[2],
        panic_loss=thresholds[:, 0],
        panic_thresholds=thresholds[:, 1:],
        op_moves=ints[6:9],
        tick_moves=ints[9:12],
        gate=ints[12],
        gate_passed=bools[5],
        gate_score=floats[2],
        failed_checks=ints[13],
        rolled_back=bools[4],
    )


def _only_read(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def step_reports(episode: int, packs: list[tuple[int, Packed]]) -> list[StepReport]:
    """What listeners are told of several steps, by one read; `packs` are steps with what they told, packed."""
    read = read_packed([packed for _, packed in packs])
    return [step_report(episode, t, arrays) for (t, _), arrays in zip(packs, read, strict=True)]


def rollout_stats(
    episode: int, state: ParallelEnvState, kept: KeptNetwork, subset_acc: Float[Tensor, "N J"], cost: RolloutCost
) -> RolloutStats:
    """Read the tally of an episode and what it left: the one read of a round."""
    slots, hosts, tally = state.slots, state.hosts, state.tally
    read = host_read(
        tally.returns,
        torch.stack((hosts.val_acc, kept.accuracy)),
        torch.stack((hosts.n_fossilized, hosts.n_contributing, hosts.n_germinated, hosts.n_pruned)),
        torch.stack((tally.rollbacks, tally.refused, kept.fossil_params, kept.host_params)),
        tally.ops,
        tally.flags,
        torch.stack((slots.stage, slots.blueprint, slots.algorithm)),
        slots.alpha,
        subset_acc,
    )
    returns, floats, counts, others, ops, flags, end, alpha, subsets = read
    return RolloutStats(
        episode=episode,
        returns=returns,
        val_acc=floats[0],
        committed_acc=floats[1],
        fossil_params=others[2],
        host_params=others[3],
        fossilized=counts[0],
        contributing=counts[1],
        germinated=counts[2],
        pruned=counts[3],
        rollbacks=others[0],
        refused=others[1],
        ops=ops,
        stage=end[0],
        blueprint=end[1],
        algorithm=end[2],
        flags=flags,
        alpha=alpha,
        subset_acc=subsets,
        cost=cost,
    )
