"""The engine: N hosts, one control step at a time, driven by whoever satisfies the client's protocols.

    step t   train -> measure -> guard (panic, rollback) -> ingest -> see -> decide -> act -> tick -> pay -> remember
             -> one read of the device, which brings the next step's structure and the numbers that are reported

Everything between two steps is a mask over hosts; there is no loop over hosts in this file.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.kasmina.guards import legal_ops
from esper.kasmina.ingest import ingest
from esper.kasmina.rollback import remember, rollback
from esper.leyline.actions import Head
from esper.leyline.messages import ActResult, Measurements, Observation, RewardInputs, StepRecord
from esper.leyline.protocols import ClientProtocol, EngineSpec, StateTree
from esper.leyline.record import record, replace
from esper.leyline.state_tree import below, record_tree, restored, with_prefix
from esper.tolaria import governor, reading
from esper.tolaria.coalitions import Coalitions, derive, enumerate_coalitions
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.protocol import Executor, TrainPass, ValidationPass
from esper.tolaria.read_counter import reads_so_far
from esper.tolaria.runtime import PendingRead, PhaseTimer
from esper.tolaria.state import (
    ParallelEnvState,
    RolloutCost,
    RolloutStats,
    StepReport,
    count_rollback,
    count_step,
    initial_state,
)

StepListener = Callable[[StepReport], None]


@record
class _Executed:
    """What became of the actions of one step."""

    ops: lifecycle.OpEffects
    ticks: lifecycle.TickEffects
    success: Tensor
    effective_op: Tensor


class VectorizedEngine:
    """Owns the population, the lifecycle state, the governor and the timers; knows no learner.

    Args:
        config: how many hosts, for how long, under which rules.
        executor: how they are run.
        spec: what controllers are told of this engine.
        on_step: called with the report of every step; must not raise into the loop.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, spec: EngineSpec, *, on_step: StepListener | None = None
    ) -> None:
        self.config, self.executor, self.spec = config, executor, spec
        self.on_step = on_step
        self.timer = PhaseTimer(spec.device, enabled=False)
        self.episode = -1
        self.t = 0
        self._state: ParallelEnvState | None = None
        self._coalitions: Coalitions | None = None
        self._subset_acc = torch.zeros(spec.num_envs, 0, device=spec.device)
        self._pending: PendingRead | None = None

    @property
    def state(self) -> ParallelEnvState:
        """The control plane; only after `reset`."""
        assert self._state is not None, "reset() comes before the first step"
        return self._state

    # -- an episode ---------------------------------------------------------------------------------------------

    def reset(self, client: ClientProtocol, episode: int) -> None:
        """N fresh hosts for episode number `episode`; the client forgets the last one."""
        spec = self.spec
        self.episode, self.t, self._pending = episode, 0, None
        self.executor.reset(episode)
        guards = governor.initial(spec.num_envs, spec.device, self.config.governor)
        carried = client.initial_state(spec.num_envs, spec.num_slots, spec.episode_length, spec.device)
        self._state = initial_state(
            spec.num_envs, spec.num_slots, self.executor.host_params, guards, carried, spec.device
        )
        self._coalitions = self._enumerate(self._state, 1)
        client.begin_rollout(episode, spec.host_ids())

    def rollout(
        self, client: ClientProtocol, *, should_stop: Callable[[], bool] = lambda: False
    ) -> RolloutStats | None:
        """Run the episode that `reset` began (or a checkpoint restored) to its end.

        Returns:
            Its statistics, or None where `should_stop` ended it early; it can be continued later.
        """
        began, reads, first = time.perf_counter(), reads_so_far(), self.t
        while self.t < self.spec.episode_length:
            self.step(client)
            if should_stop() and self.t < self.spec.episode_length:
                self.settle()
                return None
        self.settle()
        cost = RolloutCost(
            seconds=time.perf_counter() - began,
            steps=self.t - first,
            env_steps=(self.t - first) * self.spec.num_envs,
            reads=reads_so_far() - reads,
        )
        return reading.rollout_stats(self.episode, self.state, self._subset_acc, cost)

    def train(
        self,
        client: ClientProtocol,
        rounds: range,
        *,
        on_round: Callable[[RolloutStats, Mapping[str, float]], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Round after round: N fresh hosts for an episode, then one update of the client.

        An episode that `load_state_dict` restored is continued instead of begun anew.

        Returns:
            True when all rounds are done; False where `should_stop` ended the run after a step or a round.
        """
        for episode in rounds:
            if not (self.episode == episode and 0 < self.t < self.spec.episode_length):
                self.reset(client, episode)
            stats = self.rollout(client, should_stop=should_stop)
            if stats is None:
                return False
            on_round(stats, client.update())
            if should_stop() and episode != rounds[-1]:
                return False
        return True

    def step(self, client: ClientProtocol) -> None:
        """One control step of all hosts."""
        self.settle()
        self.t += 1
        state, coalitions = self.state, self._coalitions
        assert coalitions is not None
        with self.timer.span("train"):
            trained = self.executor.train_epoch(self.t, state.slots)
        with self.timer.span("measure"):
            validated = self.executor.evaluate(self.t, state.slots, coalitions)
        with self.timer.span("guard"):
            state, verdict, rolled_back = self._guard(state, validated.loss, client)
            seen = _measurements(trained, validated, coalitions)
            self._subset_acc = seen.subset_acc
        with self.timer.span("see"):
            state, obs = self._see(state, seen, ~verdict.panic)
        with self.timer.span("decide"):
            act = client.act(obs)
        with self.timer.span("act"):
            state, done = self._act(state, obs, act, verdict, rolled_back)
        with self.timer.span("pay"):
            state = self._pay_and_store(client, state, obs, act, done, seen, verdict)
        with self.timer.span("keep"):
            state, snapshot, keep = self._keep(state, verdict, done)
        self._state, self._coalitions = state, self._enumerate(state, self.t + 1)
        self._pending = reading.start(
            reading.Ended(
                state=state,
                coalitions=self._coalitions,
                act=act,
                ops=done.ops,
                ticks=done.ticks,
                effective_op=done.effective_op,
                verdict=verdict,
                rolled_back=rolled_back,
                snapshot=snapshot,
                keep=keep,
            )
        )

    def settle(self) -> None:
        """Wait for the read of the last step, operate on the parameters accordingly, and report the step."""
        if self._pending is None:
            return
        arrays, self._pending = self._pending.wait(), None
        with self.timer.span("settle"):
            self.executor.settle(reading.structure(self.t, arrays))
        if self.on_step is not None:
            self.on_step(reading.step_report(self.episode, self.t, arrays))

    def test(self) -> Tensor:
        """Test accuracy [N] (pp) of each host with its fossilized seeds; for the end of a run."""
        self.settle()
        return self.executor.test(self.state.slots)

    # -- the phases of a step -----------------------------------------------------------------------------------

    def _enumerate(self, state: ParallelEnvState, t: int) -> Coalitions:
        """The coalitions that step `t` will measure: the structure cannot change any more before it does."""
        rules = self.config.lifecycle
        return enumerate_coalitions(
            state.slots.stage,
            state.slots.alpha > 0.0,
            interaction_limit=rules.interaction_limit,
            fossils_as_players=rules.fossils_as_players,
            shapley=t == self.spec.episode_length,
            shapley_limit=rules.shapley_limit,
        )

    def _guard(
        self, state: ParallelEnvState, loss_N: Tensor, client: ClientProtocol
    ) -> tuple[ParallelEnvState, governor.GovernorVerdict, Tensor]:
        """Compare each host's loss with its own history; hosts in panic go back to their snapshot."""
        guards, verdict = governor.check(state.governor, loss_N, self.config.governor)
        panic = verdict.panic
        slots, hosts, rolled_back = rollback(state.slots, state.hosts, panic, state.memory)
        penalty = client.rollback_reward(state.reward)
        client.rollback(panic, penalty)
        tally = count_rollback(state.tally, panic, penalty)
        guards = governor.after_rollback(guards, panic)
        return replace(state, slots=slots, hosts=hosts, governor=guards, tally=tally), verdict, rolled_back

    def _see(
        self, state: ParallelEnvState, seen: Measurements, healthy_N: Tensor
    ) -> tuple[ParallelEnvState, Observation]:
        slots, hosts = ingest(state.slots, state.hosts, seen, self.t, healthy_N)
        state = replace(state, slots=slots, hosts=hosts)
        return state, self._observation(state)

    def _observation(self, state: ParallelEnvState) -> Observation:
        return Observation(
            t=self.t,
            episode_length=self.spec.episode_length,
            slots=state.slots,
            hosts=state.hosts,
            legal=legal_ops(state.slots, self.config.lifecycle),
        )

    def _act(
        self,
        state: ParallelEnvState,
        obs: Observation,
        act: ActResult,
        verdict: governor.GovernorVerdict,
        rolled_back_NS: Tensor,
    ) -> tuple[ParallelEnvState, _Executed]:
        rules, healthy = self.config.lifecycle, ~verdict.panic
        slots, hosts, ops = lifecycle.apply_ops(
            obs.slots, obs.hosts, act.actions, obs.legal, healthy, self.t, self.executor.costs, rules
        )
        slots, hosts, ticks = lifecycle.tick(slots, hosts, ops, rolled_back_NS, rules)
        hosts, success, effective = lifecycle.feedback(hosts, act.actions, ops, ticks, healthy)
        done = _Executed(ops=ops, ticks=ticks, success=success, effective_op=effective)
        return replace(state, slots=slots, hosts=hosts), done

    def _pay_and_store(
        self,
        client: ClientProtocol,
        state: ParallelEnvState,
        obs: Observation,
        act: ActResult,
        done: _Executed,
        seen: Measurements,
        verdict: governor.GovernorVerdict,
    ) -> ParallelEnvState:
        """Reward of the step from the state before the op; the transition goes to the client."""
        healthy, last = ~verdict.panic, self.t == self.spec.episode_length
        inputs = RewardInputs(
            epoch=self.t,
            max_epochs=self.spec.episode_length,
            slots=obs.slots,
            hosts=obs.hosts,
            interactions=seen.interactions,
            ops=act.actions[:, Head.OP],
            target=done.ops.target,
            success=done.success,
            auto_pruned=done.ticks.auto_pruned,
        )
        paid, carried = client.step(inputs, state.reward)
        carried = client.reset_hosts(carried, verdict.panic)
        truncate = last and self.config.time_limit == "truncate"
        never = torch.zeros_like(healthy)
        zeros = torch.zeros_like(paid.total)
        step = StepRecord(
            t=self.t,
            obs=obs,
            act=act,
            effective_op=done.effective_op,
            reward=paid.total,
            terminal=healthy if last and not truncate else never,
            truncated=healthy if truncate else never,
            bootstrap_value=client.bootstrap(self._observation(state)) * healthy if truncate else zeros,
            valid=healthy,
        )
        client.store(step)
        return replace(
            state, reward=carried, tally=count_step(state.tally, act.actions, done.effective_op, paid, healthy)
        )

    def _keep(
        self, state: ParallelEnvState, verdict: governor.GovernorVerdict, done: _Executed
    ) -> tuple[ParallelEnvState, Tensor, Tensor]:
        """Which hosts are kept as a snapshot now, and which new fossils join an older one."""
        fossilized = done.ops.fossilized
        any_fossil = fossilized.any(dim=1)
        snapshot = governor.snapshot_due(state.governor, verdict, self.t, any_fossil, self.config.governor)
        patch = governor.fossil_patch_due(state.governor, verdict, any_fossil)
        keep = fossilized & patch[:, None]
        memory = remember(state.memory, state.slots, snapshot[:, None] | keep)
        return replace(state, memory=memory), snapshot, keep

    # -- persistence --------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """The engine in the middle of an episode: control plane, executor, place in the episode."""
        self.settle()
        place = torch.tensor([self.episode, self.t])
        return {
            "place": place,
            **with_prefix("control", record_tree(self.state)),
            **with_prefix("executor", self.executor.state_dict()),
        }

    def load_state_dict(self, state: StateTree, client: ClientProtocol) -> None:
        """Continue where `state_dict` was taken; raises CheckpointError where names or shapes differ."""
        episode, t = (int(v) for v in state["place"])
        self.reset(client, episode)
        self._state = restored(self.state, below("control", state), "engine")
        self.executor.load_state_dict(below("executor", state))
        self.t, self._coalitions = t, self._enumerate(self._state, t + 1)
        self.executor.settle(reading.structure_now(t, self._state, self._coalitions))


def _measurements(trained: TrainPass, validated: ValidationPass, coalitions: Coalitions) -> Measurements:
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
