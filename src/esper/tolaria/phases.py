"""The phases of a control step after the passes over the data, each a function from state to state.

    see     judge the losses (panic, rollback), measurements into state, what is legal
            (the controller decides)
    act     ops, tick, feedback
            (the reward pays, the controller stores)
    close   tally, what is kept as a snapshot, what the host is told

Everything is a mask over hosts. None of them knows the executor: parameters follow when the step is settled. The three
named here are pure functions of trees of tensors, and nothing that changes from step to step is a plain number, so that
each can be compiled as a whole, see `control_plane.py`.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules import lifecycle
from esper.kasmina.rules.guards import legal_ops
from esper.kasmina.rules.ingest import ingest
from esper.kasmina.rules.rollback import remember, rollback
from esper.leyline.actions import Head
from esper.leyline.messages import ActResult, Measurements, Observation, RewardInputs, RewardOutput, StoredStep
from esper.leyline.protocols import ClientProtocol
from esper.leyline.tensor_dataclass import replace, tensor_dataclass
from esper.tolaria import governor, reading
from esper.tolaria.coalitions import Coalitions, derive
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.protocol import Changes, TrainPass, ValidationPass
from esper.tolaria.governor import GovernorVerdict
from esper.tolaria.reading import Decision
from esper.tolaria.state import ParallelEnvState, count_rollback, count_step


@tensor_dataclass
class ObserveOutput:
    """After the measurements: the state that is shown, who went back, what is legal.

    `rolled_back` are the slots that a rollback pruned; a host that went back is not `healthy` in this step.
    `num_coalitions` were measured in it.
    """

    state: ParallelEnvState
    verdict: GovernorVerdict
    healthy: Bool[Tensor, " N"]
    rolled_back: Bool[Tensor, "N S"]
    num_coalitions: Int[Tensor, " N"]
    legal: Bool[Tensor, "N 6 S"]

    @property
    def judged(self) -> "ObserveVerdict":
        """What the end of the step needs of it, which is not the state."""
        return ObserveVerdict(
            verdict=self.verdict,
            healthy=self.healthy,
            rolled_back=self.rolled_back,
            num_coalitions=self.num_coalitions,
        )


@tensor_dataclass
class ObserveVerdict:
    """Who went back, and how much was measured: as in `ObserveOutput`."""

    verdict: GovernorVerdict
    healthy: Bool[Tensor, " N"]
    rolled_back: Bool[Tensor, "N S"]
    num_coalitions: Int[Tensor, " N"]


@tensor_dataclass
class ExecuteOutput:
    """After the ops: the state, and what became of the actions."""

    state: ParallelEnvState
    ops: lifecycle.OpEffects
    ticks: lifecycle.TickEffects
    success: Bool[Tensor, " N"]
    effective_op: Int[Tensor, " N"]


@tensor_dataclass
class EndStepOutput:
    """After the step: the state, what joins the snapshots, what the host is told.

    `snapshot` are whole hosts [N], `keep` single new fossils [N, S] of hosts under suspicion; `told` are the tensors of
    `reading.told`.
    """

    state: ParallelEnvState
    snapshot: Bool[Tensor, " N"]
    keep: Bool[Tensor, "N S"]
    outputs: tuple[Tensor, ...]


def measurements(trained: TrainPass, validated: ValidationPass, coalitions: Coalitions) -> Measurements:
    """What the two passes of a step told, under one name each."""
    told = derive(coalitions, validated.accuracy)
    return Measurements(
        train_acc=trained.acc,
        train_loss=trained.loss,
        val_acc=told.val_acc,
        val_loss=validated.loss,
        committed_acc=told.committed_acc,
        cf_total=told.cf_total,
        contribution=told.contribution,
        interactions=told.interactions,
        grad_norm=trained.grad_norm,
        grad_health=trained.grad_health,
        grad_vanishing=trained.grad_vanishing,
        grad_exploding=trained.grad_exploding,
        grad_ratio=trained.grad_ratio,
        subset_acc=told.subset_acc,
    )


def observe(
    state: ParallelEnvState,
    trained: TrainPass,
    validated: ValidationPass,
    coalitions: Coalitions,
    penalty: Float[Tensor, " N"],
    t: Int[Tensor, ""],
    *,
    config: EngineConfig,
) -> tuple[ObserveOutput, Measurements]:
    """Judge each host's loss by its own history; hosts in panic go back to their snapshot, the others are told.

    `penalty` is what the last row of a host is paid if the host goes back now. Measurements are returned apart, because
    they have another form in the last step of an episode.
    """
    guards, verdict = governor.check(state.governor, validated.loss, config.governor)
    panic, healthy = verdict.panic, ~verdict.panic
    slots, hosts, rolled_back = rollback(state.slots, state.hosts, panic, state.memory)
    measured = measurements(trained, validated, coalitions)
    slots, hosts = ingest(slots, hosts, measured, t, healthy)
    state = replace(
        state,
        slots=slots,
        hosts=hosts,
        governor=governor.after_rollback(guards, panic),
        tally=count_rollback(state.tally, panic, penalty),
    )
    seen = ObserveOutput(
        state=state,
        verdict=verdict,
        healthy=healthy,
        rolled_back=rolled_back,
        num_coalitions=coalitions.valid.sum(dim=1),
        legal=legal_ops(slots, config.lifecycle),
    )
    return seen, measured


def observation(state: ParallelEnvState, legal: Bool[Tensor, "N 6 S"], t: int, config: EngineConfig) -> Observation:
    """What a controller may look at in step `t`."""
    return Observation(t=t, episode_length=config.episode_length, slots=state.slots, hosts=state.hosts, legal=legal)


def execute(
    seen: ObserveOutput,
    actions: Int[Tensor, "N 8"],
    t: Int[Tensor, ""],
    *,
    costs: lifecycle.SeedCosts,
    config: EngineConfig,
) -> ExecuteOutput:
    """Ops, tick and feedback; hosts that are not healthy execute nothing, but time passes for them too."""
    rules, before = config.lifecycle, seen.state
    slots, hosts, ops = lifecycle.apply_ops(
        before.slots, before.hosts, actions, seen.legal, seen.healthy, t, costs, rules
    )
    slots, hosts, ticks = lifecycle.tick(slots, hosts, ops, seen.rolled_back, rules)
    hosts, success, effective = lifecycle.feedback(hosts, actions, ops, ticks, seen.healthy)
    state = replace(before, slots=slots, hosts=hosts)
    return ExecuteOutput(state=state, ops=ops, ticks=ticks, success=success, effective_op=effective)


def reward_and_store(
    client: ClientProtocol,
    carried: Any,  # noqa: ANN401 -- whatever the client's reward carries
    obs: Observation,
    decided: ActResult,
    seen: ObserveOutput,
    measured: Measurements,
    done: ExecuteOutput,
    config: EngineConfig,
) -> tuple[RewardOutput, Any]:
    """Reward of the step from the state before the op; the transition goes to the client."""
    healthy = seen.healthy
    inputs = RewardInputs(
        epoch=obs.t,
        max_epochs=config.episode_length,
        slots=obs.slots,
        hosts=obs.hosts,
        interactions=measured.interactions,
        ops=decided.actions[:, Head.OP],
        target=done.ops.target,
        success=done.success,
        auto_pruned=done.ticks.auto_pruned,
    )
    paid, carried = client.step(inputs, carried)
    carried = client.reset_hosts(carried, ~healthy)
    last, truncates = obs.t == config.episode_length, config.time_limit == "truncate"
    never, nothing = torch.zeros_like(healthy), torch.zeros_like(paid.total)
    bootstrap = nothing
    if last and truncates:
        after = observation(done.state, legal_ops(done.state.slots, config.lifecycle), obs.t, config)
        bootstrap = torch.where(healthy, client.bootstrap(after), nothing)
    client.store(
        StoredStep(
            t=obs.t,
            obs=obs,
            act=decided,
            effective_op=done.effective_op,
            reward=paid.total,
            terminal=healthy if last and not truncates else never,
            truncated=healthy if last and truncates else never,
            bootstrap_value=bootstrap,
            valid=healthy,
        )
    )
    return paid, carried


def end_step(
    seen: ObserveVerdict,
    done: ExecuteOutput,
    decision: Decision,
    paid: RewardOutput,
    t: Int[Tensor, ""],
    *,
    config: EngineConfig,
) -> EndStepOutput:
    """Count the step, choose who is kept as a snapshot now, alone or as a new fossil, and gather what is told."""
    guards, verdict, fossilized = done.state.governor, seen.verdict, done.ops.fossilized
    any_fossil = fossilized.any(dim=1)
    snapshot = governor.snapshot_due(guards, verdict, t, any_fossil, config.governor)
    keep = fossilized & governor.fossil_patch_due(guards, verdict, any_fossil)[:, None]
    state = replace(
        done.state,
        memory=remember(done.state.memory, done.state.slots, snapshot[:, None] | keep),
        tally=count_step(done.state.tally, decision.actions, done.effective_op, paid, seen.healthy),
    )
    finished = reading.FinishedStep(
        state=state,
        num_coalitions=seen.num_coalitions,
        decision=decision,
        paid=paid,
        ops=done.ops,
        ticks=done.ticks,
        effective_op=done.effective_op,
        verdict=verdict,
        rolled_back=seen.rolled_back,
        snapshot=snapshot,
        keep=keep,
    )
    return EndStepOutput(state=state, snapshot=snapshot, keep=keep, outputs=reading.step_outputs(finished))


def changes(t: int, seen: ObserveOutput, done: ExecuteOutput, closed: EndStepOutput) -> Changes:
    """What the executor must do after step `t`, as masks on the device; nothing is read."""
    return Changes(
        t=t,
        germinated=done.ops.germinated,
        released=done.ops.released | done.ticks.released | seen.rolled_back,
        panicked=seen.verdict.panic,
        snapshot=closed.snapshot,
        keep=closed.keep,
    )
