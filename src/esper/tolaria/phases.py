"""The phases of a control step after the passes over the data, each a function from state to state.

    observe    check the losses (panic, rollback), write measurements into the state, work out what is legal
               (the controller decides)
    execute    ops, tick, feedback
               (the client computes the reward and stores the transition)
    end_step   tally, snapshots, outputs for the host

A host that is stopped takes part in none of them: its rows are as invalid as those of a step with a rollback.

All work is masked over hosts, and parameters follow later, in `apply_structure`. The three functions are pure and take
whatever changes from step to step as a tensor, so that each can be compiled as a whole.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules import lifecycle
from esper.kasmina.rules.conditions import legal_ops
from esper.kasmina.rules.lifecycle import remember, rollback, training_cost
from esper.kasmina.rules.slot_fields import ingest
from esper.leyline.lifecycle import NUM_OPS, Head, LifecycleOp
from esper.leyline.messages import (
    ActResult,
    ClientProtocol,
    Measurements,
    Observation,
    RewardInputs,
    RewardOutput,
    SeedCosts,
    StoredStep,
)
from esper.leyline.tensor_dataclass import blank, numbers, replace, tensor_dataclass
from esper.tolaria import governor
from esper.tolaria.coalitions import Coalitions, derive
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.protocol import TrainPass, ValidationPass
from esper.tolaria.governor import GovernorVerdict
from esper.tolaria.state import Decision, ParallelEnvState, Stacks, count_rollback, count_step, step_outputs


@tensor_dataclass
class ObserveVerdict:
    """The governor's verdict and what followed.

    Hosts that were neither stopped nor rolled back are `healthy`; `rolled_back` are the slots that a rollback pruned;
    `num_coalitions` were measured.
    """

    governor: GovernorVerdict
    healthy: Bool[Tensor, " N"]
    rolled_back: Bool[Tensor, "N S"]
    num_coalitions: Int[Tensor, " N"]


@tensor_dataclass
class ObserveOutput:
    """The state after the measurements, the verdict, and which ops are legal."""

    state: ParallelEnvState
    verdict: ObserveVerdict
    legal: Bool[Tensor, "N 6 S"]


@tensor_dataclass
class ExecuteOutput:
    """The state after the ops and the tick, and the effect of the actions."""

    state: ParallelEnvState
    ops: lifecycle.OpEffects
    ticks: lifecycle.TickEffects
    success: Bool[Tensor, " N"]
    effective_op: Int[Tensor, " N"]


def observe(
    state: ParallelEnvState,
    trained: TrainPass,
    validated: ValidationPass,
    coalitions: Coalitions,
    penalty: Float[Tensor, " N"],
    t: Int[Tensor, ""],
    *,
    costs: SeedCosts,
    config: EngineConfig,
) -> tuple[ObserveOutput, Measurements]:
    """Roll back hosts in panic to their snapshot; write the measurements of the others into the state.

    `penalty` replaces the last reward of a host that is rolled back. The measurements are a second output because
    their shapes differ in the last step of an episode.
    """
    runs = ~state.stopped
    guards, judged = governor.check(state.governor, validated.loss, config.governor)
    judged = replace(judged, panic=judged.panic & runs, reason=judged.reason * runs)
    panic, healthy = judged.panic, runs & ~judged.panic
    compute = state.hosts.compute + training_cost(state.slots, costs) * runs  # spent, also where it is rolled back
    slots, hosts, rolled_back = rollback(state.slots, state.hosts, panic, state.memory)
    gradients = {name: value for name, value in vars(trained).items() if name.startswith("grad_")}
    measured = Measurements(
        train_acc=trained.acc,
        train_loss=trained.loss,
        val_loss=validated.loss,
        **gradients,
        **vars(derive(coalitions, validated.accuracy)),
    )
    slots, hosts = ingest(slots, hosts, measured, t, healthy)
    state = replace(
        state,
        slots=slots,
        hosts=replace(hosts, compute=compute),
        governor=governor.after_rollback(guards, panic),
        tally=count_rollback(state.tally, panic, penalty),
    )
    verdict = ObserveVerdict(
        governor=judged, healthy=healthy, rolled_back=rolled_back, num_coalitions=coalitions.valid.sum(dim=1)
    )
    legal = legal_ops(slots, config.lifecycle) & (runs[:, None] | waits(runs.device))[..., None]
    return ObserveOutput(state=state, verdict=verdict, legal=legal), measured


def waits(device: torch.device) -> Bool[Tensor, " O"]:
    """Which operation is WAIT."""
    return numbers(NUM_OPS, device) == LifecycleOp.WAIT


def observation(state: ParallelEnvState, legal: Bool[Tensor, "N 6 S"], t: int, config: EngineConfig) -> Observation:
    """What a controller sees in step `t`."""
    return Observation(t=t, episode_length=config.episode_length, slots=state.slots, hosts=state.hosts, legal=legal)


def execute(
    observed: ObserveOutput,
    actions: Int[Tensor, "N 8"],
    t: Int[Tensor, ""],
    *,
    costs: SeedCosts,
    config: EngineConfig,
) -> ExecuteOutput:
    """Ops, tick and feedback; hosts that are not healthy execute nothing, but their clocks advance too."""
    rules, before, verdict = config.lifecycle, observed.state, observed.verdict
    slots, hosts, ops = lifecycle.apply_ops(
        before.slots, before.hosts, actions, observed.legal, verdict.healthy, t, costs, rules
    )
    slots, hosts, ticks = lifecycle.tick(slots, hosts, ops, verdict.rolled_back, rules)
    hosts, success, effective = lifecycle.feedback(hosts, actions, ops, ticks, verdict.healthy)
    state = replace(before, slots=slots, hosts=hosts)
    return ExecuteOutput(state=state, ops=ops, ticks=ticks, success=success, effective_op=effective)


def reward_and_store(
    client: ClientProtocol,
    carried: Any,  # noqa: ANN401 -- the client's own reward state
    obs: Observation,
    act: ActResult,
    healthy: Bool[Tensor, " N"],
    measured: Measurements,
    executed: ExecuteOutput,
    config: EngineConfig,
) -> tuple[RewardOutput, Any]:
    """Reward of the step, from the state before the op; the client stores the transition."""
    inputs = RewardInputs(
        epoch=obs.t,
        max_epochs=config.episode_length,
        slots=obs.slots,
        hosts=obs.hosts,
        interactions=measured.interactions,
        ops=act.actions[:, Head.OP],
        target=executed.ops.target,
        success=executed.success,
        auto_pruned=torch.zeros_like(executed.ops.target),  # the tick removes what a PRUNE asked for, and no other seed
    )
    reward, carried = client.step(inputs, carried)
    carried = client.reset_hosts(carried, ~healthy)
    last, truncates = obs.t == config.episode_length, config.time_limit == "truncate"
    never, bootstrap = torch.zeros_like(healthy), torch.zeros_like(reward.total)
    if last and truncates:
        after = observation(executed.state, legal_ops(executed.state.slots, config.lifecycle), obs.t, config)
        bootstrap = torch.where(healthy, client.bootstrap(after), bootstrap)
    client.store(
        StoredStep(
            t=obs.t,
            obs=obs,
            act=act,
            effective_op=executed.effective_op,
            reward=reward.total,
            terminal=healthy if last and not truncates else never,
            truncated=healthy if last and truncates else never,
            bootstrap_value=bootstrap,
            valid=healthy,
        )
    )
    return reward, carried


def end_step(
    verdict: ObserveVerdict,
    executed: ExecuteOutput,
    decision: Decision,
    reward: RewardOutput,
    t: Int[Tensor, ""],
    *,
    costs: SeedCosts,
    config: EngineConfig,
) -> tuple[ParallelEnvState, Stacks]:
    """Count the step, stop hosts that cannot pay another one, choose the snapshots, gather the outputs for the host.

    A snapshot is of a whole host; `keep` adds new fossils of hosts with strikes to the older snapshot alone.
    """
    fossilized = executed.ops.fossilized
    snapshot, patch = governor.snapshots_due(
        executed.state.governor, verdict.healthy, t, fossilized.any(dim=1), config.governor
    )
    keep = fossilized & patch[:, None]
    stopped = executed.state.stopped
    if config.compute_budget is not None:
        due = executed.state.hosts.compute + training_cost(executed.state.slots, costs)
        stopped = stopped | (due > config.compute_budget * config.episode_length)
    state = replace(
        executed.state,
        stopped=stopped,
        memory=remember(executed.state.memory, executed.state.slots, snapshot[:, None] | keep),
        tally=count_step(executed.state.tally, decision.actions, executed.effective_op, reward, verdict.healthy),
    )
    outputs = step_outputs(
        state,
        decision,
        reward,
        executed.ops,
        executed.ticks,
        verdict.governor,
        valid=verdict.healthy,
        compute=state.hosts.relative_compute(t, config.episode_length),
        num_coalitions=verdict.num_coalitions,
        effective_op=executed.effective_op,
        rolled_back=verdict.rolled_back,
        snapshot=snapshot,
        keep=keep,
    )
    return state, outputs


def warm_up(
    observe: Callable[..., tuple[ObserveOutput, Measurements]],
    execute: Callable[..., ExecuteOutput],
    end_step: Callable[..., object],
    state: ParallelEnvState,
    coalitions: Iterable[Coalitions],
    num_terms: int,
) -> None:
    """Call each phase on blank inputs, once for each shape of `coalitions`, so that all is compiled before a step.

    `state` is any state of the engine without the reward's own; the reward has `num_terms`.

    Raises:
        ConfigError: a phase cannot be compiled.
    """
    device, (n, slots) = state.slots.stage.device, state.slots.stage.shape
    sizes, t = {"N": n, "S": slots, "M": num_terms}, torch.ones((), dtype=torch.int64, device=device)
    trained, penalty = blank(TrainPass, sizes, device), torch.zeros(n, device=device)
    for some in coalitions:
        validated = blank(ValidationPass, sizes | {"K": some.sets.shape[1]}, device)
        observed, _ = observe(state, trained, validated, some, penalty, t)
    decision = blank(Decision, sizes, device)
    executed = execute(observed, decision.actions, t)
    end_step(observed.verdict, executed, decision, blank(RewardOutput, sizes, device), t)
