"""The engine: N hosts, one control step at a time, driven by a client (policy and reward) through `ClientProtocol`.

    step t   apply_structure -> train -> measure -> observe -> decide -> execute -> reward -> end_step
             -> one host read: the structure that the next step applies, and the numbers of the report

All work is masked over hosts; this file has no loop over hosts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as data_replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.rules.lifecycle import memory_of, with_fossils
from esper.kasmina.rules.slot_fields import require_known_values
from esper.leyline.architecture import Architecture, architecture_arrays
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.lifecycle import SeedStage
from esper.leyline.messages import ActResult, ClientProtocol, EngineSpec, KeptNetwork, Measurements, Observation
from esper.leyline.tensor_dataclass import StateTree, below, named_tensors, replace, restored, rows_of, with_prefix
from esper.tolaria import governor, phases
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.runtime import PendingRead, PhaseTimer, host_read, reads_so_far, start_read
from esper.tolaria.state import (
    Decision,
    ParallelEnvState,
    RolloutCost,
    RolloutStats,
    StepReport,
    initial_state,
    rollout_stats,
    step_report,
    structure_now,
    structure_read,
    unstacked,
)

StepListener = Callable[[StepReport], None]
Phase = Callable[..., Any]
"""A function of `phases` that has its configuration, eager or compiled."""
Properties = Callable[[int], Mapping[str, np.ndarray]]
"""Episode -> what is recorded of the instance of each host [N], by name."""


@dataclass(frozen=True, kw_only=True)
class OpenStep:
    """A control step between `observe` and `execute`, when the controller decides.

    `obs` is what it sees. Where a host is rolled back in this step (`panic`), its last reward is replaced by that of
    `penalty` [N], and what is decided for it is not executed. `accuracy` [N, K] is that of all coalitions.
    """

    obs: Observation
    penalty: Tensor
    observed: phases.ObserveOutput
    measured: Measurements
    accuracy: Tensor

    @property
    def panic(self) -> Tensor:
        """Hosts [N] that are rolled back in this step."""
        return self.observed.verdict.governor.panic

    @property
    def healthy(self) -> Tensor:
        """Hosts [N] that execute what is decided: neither rolled back nor stopped."""
        return self.observed.verdict.healthy


class VectorizedEngine:
    """Owns the executor, the lifecycle state, the governor and the timers.

    Args:
        config: number of hosts, episode length, rules.
        executor: runs the hosts.
        spec: the description of this engine for controllers.
        on_step: the first of `listeners`, which get the report of each step in order, when `apply_structure` has read
            it. Their exceptions are raised after the structure was applied, so that the engine can continue.
        properties: of the instances in a task whose hosts differ. They are recorded; no client sees them.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        spec: EngineSpec,
        *,
        on_step: StepListener | None = None,
        properties: Properties | None = None,
    ) -> None:
        self.config, self.executor, self.spec = config, executor, spec
        self.listeners: list[StepListener] = [] if on_step is None else [on_step]
        self._properties: Properties = properties or (lambda episode: {})
        self.architectures: Sequence[Architecture] = ()
        """Structure that each host has from the first step of every episode."""
        self.timer = PhaseTimer(spec.device, enabled=False)
        self.episode = -1
        self.t = 0
        self._ended = False
        self._state: ParallelEnvState | None = None
        self._coalitions: Coalitions | None = None
        self._subset_acc = torch.zeros(spec.num_envs, 0, device=spec.device)
        self._pending: tuple[Sequence[Sequence[str]], PendingRead] | None = None
        self._observe: Phase = partial(phases.observe, costs=executor.costs, config=config)
        self._execute: Phase = partial(phases.execute, costs=executor.costs, config=config)
        self._end_step: Phase = partial(phases.end_step, costs=executor.costs, config=config)
        self._warmed_up = True
        self._clock = torch.arange(config.episode_length + 1, device=spec.device)

    @property
    def state(self) -> ParallelEnvState:
        """The control plane; `reset` makes it."""
        assert self._state is not None, "reset() comes before the first step"
        return self._state

    # -- an episode ---------------------------------------------------------------------------------------------

    def reset(self, client: ClientProtocol, episode: int, done: int = 0) -> None:
        """Begin episode number `episode` with N fresh hosts, in the engine and in the client, after `done` steps."""
        spec = self.spec
        self.episode, self.t, self._ended, self._pending = episode, done, False, None
        self.warm_up(len(client.terms))
        self.executor.reset(episode)
        self._state = self._fresh(client.initial_state(spec.num_envs, spec.num_slots, spec.episode_length, spec.device))
        self._coalitions = self._enumerate(self._state, done + 1)
        client.begin_rollout(episode, spec.host_ids())
        if self.architectures:
            self.add_fossils(self.architectures)

    def compile_phases(self, compiled: Callable[[Phase], Phase]) -> None:
        """Take the compiled forms of the phases, which `warm_up` calls first."""
        self._observe, self._execute, self._end_step = map(compiled, (self._observe, self._execute, self._end_step))
        self._warmed_up = False

    def warm_up(self, num_terms: int) -> None:
        """Compile the phases once, for a reward of `num_terms` terms; `reset` calls this. May raise ConfigError."""
        if not self._warmed_up:
            fresh = self._fresh(None)
            several = [self._enumerate(fresh, t) for t in (1, self.spec.episode_length)]
            phases.warm_up(self._observe, self._execute, self._end_step, fresh, several, num_terms)
            self._warmed_up = True

    def _fresh(self, carried: Any) -> ParallelEnvState:  # noqa: ANN401 -- the client's own reward state
        spec = self.spec
        guards = governor.initial(spec.num_envs, spec.device, self.config.governor)
        return initial_state(spec.num_envs, spec.num_slots, self.executor.host_params, guards, carried, spec.device)

    def add_fossils(self, grown: Sequence[Architecture]) -> None:
        """Give each host permanent seeds with fresh weights in empty slots; between two steps.

        Raises:
            ConfigError: they do not fit the hosts, or a slot has a seed already.
        """
        self.apply_structure()
        kinds = architecture_arrays(grown, self.spec)
        blueprint, algorithm = (torch.from_numpy(kind).to(self.spec.device) for kind in kinds)
        (stage,) = host_read(self.state.slots.stage)
        if ((kinds[0] >= 0) & (stage != SeedStage.DORMANT)).any():
            raise ConfigError("an architecture names a slot that has a seed already; name empty slots.")
        slots, hosts = with_fossils(self.state.slots, self.state.hosts, blueprint, algorithm, self.executor.costs)
        self._state = replace(self.state, slots=slots, hosts=hosts, memory=memory_of(slots))
        self._coalitions = self._enumerate(self._state, self.t + 1)
        now = structure_now(self.t, self._state, self._coalitions)
        all_hosts = np.ones(self.spec.num_envs, dtype=np.bool_)
        self.executor.apply_structure(data_replace(now, germinated=kinds[0] >= 0, snapshot=all_hosts))

    def rollout(
        self, client: ClientProtocol, *, should_stop: Callable[[], bool] = lambda: False
    ) -> RolloutStats | None:
        """Run the current episode to its end.

        Returns:
            Its statistics, or None if `should_stop` interrupted it; a later call continues it.
        """
        began, reads, first = time.perf_counter(), reads_so_far(), self.t
        while self.t < self.spec.episode_length:
            self.step(client)
            if should_stop() and self.t < self.spec.episode_length:
                self.apply_structure()
                return None
        final, steps = self.kept_network(), self.t - first
        client.finish(final)
        seconds, reads = time.perf_counter() - began, reads_so_far() - reads
        cost = RolloutCost(seconds=seconds, steps=steps, env_steps=steps * self.spec.num_envs, reads=reads)
        return self._statistics(final, cost)

    def train(
        self,
        client: ClientProtocol,
        rounds: range,
        *,
        on_round: Callable[[RolloutStats, Mapping[str, float]], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run one episode of N fresh hosts and one update of the client per round.

        An unfinished episode that `load_state_dict` restored is continued.

        Returns:
            False if `should_stop` ended the run after a step or a round, else True.
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
        step = self.observe(client)
        with self.timer.span("decide"):
            act = client.act(step.obs)
        self.execute(client, step, act)

    def observe(self, client: ClientProtocol) -> OpenStep:
        """The first half of a control step, up to what a controller sees; `execute` is the other half.

        Whoever decides outside of a client calls both in turn, and nothing else of the engine between them.
        """
        self.apply_structure()
        assert not self.is_over, "the episode is over; reset() begins the next one"
        self.t += 1
        t, state, coalitions = self.t, self.state, self._coalitions
        assert coalitions is not None
        with self.timer.span("train"):
            trained = self.executor.train_epoch(t, state.slots)
        with self.timer.span("measure"):
            validated = self.executor.evaluate(t, state.slots, coalitions)
        with self.timer.span("observe"):
            penalty = client.rollback_reward(state.reward)
            before = replace(state, reward=None)
            observed, measured = self._observe(before, trained, validated, coalitions, penalty, self._clock[t])
            client.rollback(observed.verdict.governor.panic, penalty)
            self._subset_acc = measured.subset_acc
            obs = phases.observation(observed.state, observed.legal, t, self.config)
        return OpenStep(obs=obs, penalty=penalty, observed=observed, measured=measured, accuracy=validated.accuracy)

    def execute(self, client: ClientProtocol, step: OpenStep, act: ActResult) -> None:
        """The second half of a control step: execute what was decided about `step`, reward it, and start its read."""
        t, coalitions, verdict = step.obs.t, self._coalitions, step.observed.verdict
        assert t == self.t, "execute() takes the step that observe() has just opened"
        assert coalitions is not None
        now, earned = self._clock[t], self.state.reward
        with self.timer.span("execute"):
            executed = self._execute(step.observed, act.actions, now)
        with self.timer.span("reward"):
            reward, carried = phases.reward_and_store(
                client, earned, step.obs, act, verdict.healthy, step.measured, executed, self.config
            )
        with self.timer.span("end_step"):
            decision = Decision(actions=act.actions, value=act.value, op_prob=act.op_prob, constrained=act.constrained)
            state, outputs = self._end_step(verdict, executed, decision, reward, now)
        self._state = replace(state, reward=carried)
        self._coalitions = self._enumerate(self._state, t + 1)
        others = {
            "measured_sets": coalitions.sets, "measured_valid": coalitions.valid, "measured_acc": step.accuracy,
            "sets": self._coalitions.sets, "sets_valid": self._coalitions.valid,
        }  # fmt: skip
        stacks = {**outputs, **{(name,): x[None] for name, x in others.items()}}
        self._pending = tuple(stacks), start_read(*stacks.values())

    def apply_structure(self) -> None:
        """Wait for the read of the last step, apply its structure to the parameters, and report the step."""
        if self._pending is None:
            return
        (names, read), self._pending = self._pending, None
        arrays = unstacked(names, read.wait())
        with self.timer.span("apply_structure"):
            self.executor.apply_structure(structure_read(self.t, arrays))
        if self.listeners:
            report = step_report(self.episode, self.t, arrays)
            for listen in self.listeners:
                listen(report)

    @property
    def is_over(self) -> bool:
        """Whether the episode has no further step."""
        return self._ended or self.t == self.spec.episode_length

    def end_episode(self) -> None:
        """End the episode after the steps that it has had; the test split may be read then."""
        self._ended = True

    def outcome(self) -> RolloutStats:
        """The statistics of an episode that was ended early, or that a checkpoint restored."""
        return self._statistics(self.kept_network(), RolloutCost(seconds=0.0, steps=0, env_steps=0, reads=0))

    def _statistics(self, final: KeptNetwork, cost: RolloutCost) -> RolloutStats:
        return rollout_stats(self.episode, self.state, final, self._subset_acc, cost, self._properties(self.episode))

    def kept_network(self) -> KeptNetwork:
        """The network that the episode leaves of each host, measured after the last structure was applied."""
        self.apply_structure()
        slots = self.state.slots
        fossils = slots.stage == SeedStage.FOSSILIZED
        with self.timer.span("measure"):
            measured = self.executor.committed("val", slots)
        return KeptNetwork(
            accuracy=measured.accuracy[:, 0],
            loss=measured.loss,
            fossil_params=(slots.params * fossils).sum(dim=1),
            host_params=self.state.hosts.host_params,
            compute=self.state.hosts.relative_compute(self.spec.episode_length, self.spec.episode_length),
        )

    def test(self) -> Tensor:
        """Test accuracy [N] (pp) of the final network of each host.

        Raises:
            ConfigError: the episode is not over; the test split must not influence it.
        """
        if not self.is_over:
            raise ConfigError(
                f"the test split was asked for after step {self.t} of {self.spec.episode_length}; it may be read after "
                "the last step of an episode only. Use the validation split before."
            )
        self.apply_structure()
        return self.executor.committed("test", self.state.slots).accuracy[:, 0]

    def _enumerate(self, state: ParallelEnvState, t: int) -> Coalitions:
        """The coalitions that step `t` will measure."""
        rules = self.config.lifecycle
        found = enumerate_coalitions(
            state.slots.stage,
            state.slots.alpha > 0.0,
            interaction_limit=rules.interaction_limit,
            fossils_as_players=rules.fossils_as_players,
            shapley=t == self.spec.episode_length,
            shapley_limit=rules.shapley_limit,
        )
        return replace(found, valid=found.valid & ~state.stopped[:, None])

    # -- persistence --------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """Copies of the control plane, the state of the executor, and the place in the episode."""
        # clones: the executor keeps writing into its memory, and loading starts with a reset
        return {"place": self._place(), **{name: value.clone() for name, value in self._state_of_hosts().items()}}

    def state_of(self, hosts: Sequence[int]) -> StateTree:
        """The part of `state_dict` of the hosts in these rows, also repeated, which an engine of as many can load."""
        return {"place": self._place(), **rows_of(self._state_of_hosts(), self.spec.num_envs, hosts, "engine")}

    def _place(self) -> Tensor:
        return torch.tensor([self.episode, self.t])

    def _state_of_hosts(self) -> StateTree:
        """The memory of the engine itself, not copies."""
        self.apply_structure()
        control, executor = dict(named_tensors(self.state)), self.executor.state_dict()
        return {**with_prefix("control", control), **with_prefix("executor", executor)}

    def load_state_dict(self, state: StateTree, client: ClientProtocol) -> None:
        """Continue where `state_dict` was taken. This resets `client`, so restore the client afterwards.

        Raises:
            CheckpointError: names or shapes differ from those of this engine, or a slot has a value that none has.
        """
        if "place" not in state:
            raise CheckpointError(
                "the state of the engine has no 'place' (episode and step); load a checkpoint taken inside an episode, "
                "or restart the round."
            )
        episode, t = (int(v) for v in state["place"])
        self.reset(client, episode)
        self._state = restored(self.state, below("control", state), "engine")
        require_known_values(self._state.slots, self.spec.num_blueprints)
        self.executor.load_state_dict(below("executor", state))
        self.t, self._coalitions = t, self._enumerate(self._state, t + 1)
        self.executor.apply_structure(structure_now(t, self._state, self._coalitions))
