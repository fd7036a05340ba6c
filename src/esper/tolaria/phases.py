"""The phases of a control step after the passes over the data, each a function from state to state.

    guard -> see -> (the controller decides) -> act -> pay -> keep          the engine calls them in this order

Everything is a mask over hosts. None of them knows the executor: parameters follow when the step is settled.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.kasmina import lifecycle
from esper.kasmina.guards import legal_ops
from esper.kasmina.ingest import ingest
from esper.kasmina.rollback import remember, rollback
from esper.leyline.actions import Head
from esper.leyline.messages import ActResult, Measurements, Observation, RewardInputs, RewardOutput, StepRecord
from esper.leyline.protocols import ClientProtocol
from esper.leyline.record import record, replace
from esper.tolaria import governor
from esper.tolaria.coalitions import Coalitions, derive
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.protocol import TrainPass, ValidationPass
from esper.tolaria.governor import GovernorVerdict
from esper.tolaria.state import ParallelEnvState, count_rollback, count_step


@record
class Executed:
    """What became of the actions of one step."""

    ops: lifecycle.OpEffects
    ticks: lifecycle.TickEffects
    success: Bool[Tensor, " N"]
    effective_op: Tensor


@record
class Kept:
    """What joins the snapshots: whole hosts [N], and single new fossils [N, S] of hosts under suspicion."""

    hosts: Bool[Tensor, " N"]
    fossils: Bool[Tensor, "N S"]


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


def guard(
    state: ParallelEnvState, loss: Float[Tensor, " N"], client: ClientProtocol, config: EngineConfig
) -> tuple[ParallelEnvState, GovernorVerdict, Bool[Tensor, "N S"]]:
    """Compare each host's loss with its own history; hosts in panic go back to their snapshot.

    Returns:
        State, verdict, and the slots that a rollback pruned.
    """
    guards, verdict = governor.check(state.governor, loss, config.governor)
    panic = verdict.panic
    slots, hosts, rolled_back = rollback(state.slots, state.hosts, panic, state.memory)
    penalty = client.rollback_reward(state.reward)
    client.rollback(panic, penalty)
    tally = count_rollback(state.tally, panic, penalty)
    guards = governor.after_rollback(guards, panic)
    return replace(state, slots=slots, hosts=hosts, governor=guards, tally=tally), verdict, rolled_back


def see(
    state: ParallelEnvState, seen: Measurements, healthy: Bool[Tensor, " N"], t: int, config: EngineConfig
) -> tuple[ParallelEnvState, Observation]:
    """The measurements enter the state of healthy hosts, and the controller is shown all hosts."""
    slots, hosts = ingest(state.slots, state.hosts, seen, t, healthy)
    state = replace(state, slots=slots, hosts=hosts)
    return state, observation(state, t, config)


def observation(state: ParallelEnvState, t: int, config: EngineConfig) -> Observation:
    """What a controller may look at."""
    return Observation(
        t=t,
        episode_length=config.episode_length,
        slots=state.slots,
        hosts=state.hosts,
        legal=legal_ops(state.slots, config.lifecycle),
    )


def act(
    state: ParallelEnvState,
    obs: Observation,
    decided: ActResult,
    healthy: Bool[Tensor, " N"],
    rolled_back: Bool[Tensor, "N S"],
    costs: lifecycle.SeedCosts,
    config: EngineConfig,
) -> tuple[ParallelEnvState, Executed]:
    """Ops, tick and feedback; hosts that are not healthy execute nothing, but time passes for them too."""
    rules, actions = config.lifecycle, decided.actions
    slots, hosts, ops = lifecycle.apply_ops(obs.slots, obs.hosts, actions, obs.legal, healthy, obs.t, costs, rules)
    slots, hosts, ticks = lifecycle.tick(slots, hosts, ops, rolled_back, rules)
    hosts, success, effective = lifecycle.feedback(hosts, actions, ops, ticks, healthy)
    done = Executed(ops=ops, ticks=ticks, success=success, effective_op=effective)
    return replace(state, slots=slots, hosts=hosts), done


def pay_and_store(
    client: ClientProtocol,
    state: ParallelEnvState,
    obs: Observation,
    decided: ActResult,
    done: Executed,
    seen: Measurements,
    healthy: Bool[Tensor, " N"],
    config: EngineConfig,
) -> tuple[ParallelEnvState, RewardOutput]:
    """Reward of the step from the state before the op; the transition goes to the client."""
    inputs = RewardInputs(
        epoch=obs.t,
        max_epochs=config.episode_length,
        slots=obs.slots,
        hosts=obs.hosts,
        interactions=seen.interactions,
        ops=decided.actions[:, Head.OP],
        target=done.ops.target,
        success=done.success,
        auto_pruned=done.ticks.auto_pruned,
    )
    paid, carried = client.step(inputs, state.reward)
    carried = client.reset_hosts(carried, ~healthy)
    last, truncates = obs.t == config.episode_length, config.time_limit == "truncate"
    never, nothing = torch.zeros_like(healthy), torch.zeros_like(paid.total)
    bootstrap = nothing
    if last and truncates:
        bootstrap = torch.where(healthy, client.bootstrap(observation(state, obs.t, config)), nothing)
    client.store(
        StepRecord(
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
    tally = count_step(state.tally, decided.actions, done.effective_op, paid, healthy)
    return replace(state, reward=carried, tally=tally), paid


def keep(
    state: ParallelEnvState, verdict: GovernorVerdict, done: Executed, t: int, config: EngineConfig
) -> tuple[ParallelEnvState, Kept]:
    """Which hosts are kept as a snapshot now, and which new fossils join an older one."""
    fossilized = done.ops.fossilized
    any_fossil = fossilized.any(dim=1)
    hosts = governor.snapshot_due(state.governor, verdict, t, any_fossil, config.governor)
    fossils = fossilized & governor.fossil_patch_due(state.governor, verdict, any_fossil)[:, None]
    memory = remember(state.memory, state.slots, hosts[:, None] | fossils)
    return replace(state, memory=memory), Kept(hosts=hosts, fossils=fossils)
