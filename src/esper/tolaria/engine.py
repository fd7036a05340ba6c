"""The engine: N hosts, one control step at a time, driven by whoever satisfies the client's protocols.

    step t   train -> measure -> guard (panic, rollback) -> ingest -> see -> decide -> act -> tick -> pay -> remember
             -> one read of the device, which brings the next step's structure and the numbers that are reported

An executor of a static graph needs no structure on the host. Then nothing is read between steps: what is reported
stays on the device until somebody settles the engine, at the end of the episode or before.

Everything between two steps is a mask over hosts; there is no loop over hosts in this file.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as data_replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.rules.planting import planted
from esper.kasmina.rules.rollback import memory_of
from esper.kasmina.rules.slot_fields import require_known_stages
from esper.leyline.checkpoint_tree import below, restored, tensors_by_name, with_prefix
from esper.leyline.errors import CheckpointError
from esper.leyline.manifest import GrowthManifest, planting_of
from esper.leyline.messages import KeptNetwork
from esper.leyline.protocols import ClientProtocol, EngineSpec, StateTree
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import replace
from esper.tolaria import governor, phases, reading
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.config import EngineConfig
from esper.tolaria.control_plane import ControlPlane, PhaseForm, eager
from esper.tolaria.executors.protocol import Executor, StaticGraph
from esper.tolaria.read_counter import reads_so_far
from esper.tolaria.runtime import Packed, PendingRead, PhaseTimer
from esper.tolaria.state import ParallelEnvState, RolloutCost, RolloutStats, StepReport, initial_state

StepListener = Callable[[StepReport], None]


class VectorizedEngine:
    """Owns the population, the lifecycle state, the governor and the timers; knows no learner.

    Args:
        config: how many hosts, for how long, under which rules.
        executor: how they are run.
        spec: what controllers are told of this engine.
        on_step: called with the report of each step, when the next one begins; with a static graph when the episode
            ends or the engine is settled, with the reports of all steps since, in order. It changes nothing; an
            exception of it surfaces from `step`, `apply_structure` or `rollout` after the structure was applied, so that the
            engine could go on.
        form: makes the form of the pure phases of a step; see `warm_up`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        spec: EngineSpec,
        *,
        on_step: StepListener | None = None,
        form: PhaseForm = eager,
    ) -> None:
        self.config, self.executor, self.spec = config, executor, spec
        self.on_step = on_step
        self.timer = PhaseTimer(spec.device, enabled=False)
        self.episode = -1
        self.t = 0
        self._state: ParallelEnvState | None = None
        self._coalitions: Coalitions | None = None
        self._subset_acc = torch.zeros(spec.num_envs, 0, device=spec.device)
        self._by_mask = executor if isinstance(executor, StaticGraph) else None
        self._pending: PendingRead | None = None
        self._unread: list[tuple[int, Packed]] = []
        self._reports: deque[StepReport] = deque()
        self._plane = ControlPlane(config, executor.costs, form)
        self._warmed_up = form is eager
        self._clock = torch.arange(config.episode_length + 1, device=spec.device)

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
        self._unread.clear()
        self._reports.clear()
        self.warm_up(len(client.terms))
        self.executor.reset(episode)
        carried = client.initial_state(spec.num_envs, spec.num_slots, spec.episode_length, spec.device)
        self._state = self._fresh(carried)
        self._coalitions = self._enumerate(self._state, 1)
        client.begin_rollout(episode, spec.host_ids())

    def warm_up(self, num_terms: int) -> None:
        """Compile what is to be compiled, once; the first `reset` does it otherwise. `num_terms` are the reward's.

        Raises:
            ConfigError: something cannot be compiled.
        """
        if not self._warmed_up:
            fresh = self._fresh(None)
            several = [self._enumerate(fresh, t) for t in (1, self.spec.episode_length)]
            self._plane.warm_up(fresh, several, num_terms)
            self._warmed_up = True

    def _fresh(self, carried: Any) -> ParallelEnvState:  # noqa: ANN401 -- whatever the client's reward carries
        spec = self.spec
        guards = governor.initial(spec.num_envs, spec.device, self.config.governor)
        return initial_state(spec.num_envs, spec.num_slots, self.executor.host_params, guards, carried, spec.device)

    def plant(self, grown: Sequence[GrowthManifest]) -> None:
        """Between `reset` and the first step: each host has its structure from the start, with fresh weights.

        Raises:
            ConfigError: the structures do not fit the hosts.
        """
        assert self.t == 0, "seeds are planted before the first step"
        kinds = planting_of(grown, self.spec)
        blueprint, algorithm = (torch.from_numpy(kind).to(self.spec.device) for kind in kinds)
        slots, hosts = planted(self.state.slots, self.state.hosts, blueprint, algorithm, self.executor.costs)
        self._state = replace(self.state, slots=slots, hosts=hosts, memory=memory_of(slots))
        self._coalitions = self._enumerate(self._state, 1)
        now = reading.structure_now(0, self._state, self._coalitions)
        everyone = np.ones(self.spec.num_envs, dtype=np.bool_)
        self.executor.apply_structure(data_replace(now, germinated=kinds[0] >= 0, snapshot=everyone))

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
                self.apply_structure()
                return None
        kept = self.kept_network()
        client.finish(kept)
        cost = RolloutCost(
            seconds=time.perf_counter() - began,
            steps=self.t - first,
            env_steps=(self.t - first) * self.spec.num_envs,
            reads=reads_so_far() - reads,
        )
        return reading.rollout_stats(self.episode, self.state, kept, self._subset_acc, cost)

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
        if self._by_mask is None:
            self.apply_structure()
        assert self.t < self.spec.episode_length, "the episode is over; reset() begins the next one"
        self.t += 1
        t, config, state, coalitions = self.t, self.config, self.state, self._coalitions
        now = self._clock[t]
        assert coalitions is not None
        with self.timer.span("train"):
            trained = self.executor.train_epoch(t, state.slots)
        with self.timer.span("measure"):
            validated = self.executor.evaluate(t, state.slots, coalitions)
        with self.timer.span("observe"):
            penalty = client.rollback_reward(state.reward)
            seen, measured = self._plane.observe(
                replace(state, reward=None), trained, validated, coalitions, penalty, now
            )
            client.rollback(seen.verdict.panic, penalty)
            self._subset_acc = measured.subset_acc
            obs = phases.observation(seen.state, seen.legal, t, config)
        with self.timer.span("decide"):
            decided = client.act(obs)
        with self.timer.span("execute"):
            done = self._plane.execute(seen, decided.actions, now)
        with self.timer.span("reward"):
            paid, carried = phases.reward_and_store(client, state.reward, obs, decided, seen, measured, done, config)
        with self.timer.span("end_step"):
            closed = self._plane.end_step(seen.judged, done, reading.decision_of(decided), paid, now)
        self._state = replace(closed.state, reward=carried)
        self._coalitions = self._enumerate(self._state, t + 1)
        if self._by_mask is None:
            self._pending = reading.start(closed.outputs, self._coalitions)
            return
        with self.timer.span("apply_structure"):
            self._by_mask.apply_changes(phases.changes(t, seen, done, closed), self._state.slots)
        if self.on_step is not None:
            self._unread.append((t, Packed(*closed.outputs)))

    def apply_structure(self) -> None:
        """Wait for the read of the last step, operate on the parameters accordingly, and report the step.

        With a static graph one read brings the reports of all steps since the last call.
        """
        if self._pending is not None:
            arrays, self._pending = self._pending.wait(), None
            with self.timer.span("apply_structure"):
                self.executor.apply_structure(reading.structure(self.t, arrays))
            if self.on_step is not None:
                self._reports.append(reading.step_report(self.episode, self.t, arrays))
        if self._unread:
            unread, self._unread = self._unread, []
            self._reports.extend(reading.step_reports(self.episode, unread))
        while self._reports:
            report = self._reports.popleft()
            if self.on_step is not None:
                self.on_step(report)

    def outcome(self) -> RolloutStats:
        """The statistics of an episode that a checkpoint restored at its end."""
        cost = RolloutCost(seconds=0.0, steps=0, env_steps=0, reads=0)
        return reading.rollout_stats(self.episode, self.state, self.kept_network(), self._subset_acc, cost)

    def kept_network(self) -> KeptNetwork:
        """What the episode leaves of each host, measured once all that the last step decided is carried out."""
        self.apply_structure()
        slots = self.state.slots
        fossils = slots.stage == SeedStage.FOSSILIZED
        with self.timer.span("measure"):
            accuracy = self.executor.committed_accuracy("val", slots)
        return KeptNetwork(
            accuracy=accuracy,
            fossil_params=(slots.params * fossils).sum(dim=1),
            host_params=self.state.hosts.host_params,
        )

    def test(self) -> Tensor:
        """Test accuracy [N] (pp) of the network that is kept of each host; for the end of a run."""
        self.apply_structure()
        return self.executor.committed_accuracy("test", self.state.slots)

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

    # -- persistence --------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """The engine in the middle of an episode: control plane, executor, place in the episode; all copies."""
        self.apply_structure()
        tree = {
            "place": torch.tensor([self.episode, self.t]),
            **with_prefix("control", tensors_by_name(self.state)),
            **with_prefix("executor", self.executor.state_dict()),
        }
        # whoever owns the memory goes on writing into it, and loading begins with a reset
        return {name: value.clone() for name, value in tree.items()}

    def load_state_dict(self, state: StateTree, client: ClientProtocol) -> None:
        """Continue where `state_dict` was taken; `client` begins the episode anew and is restored after this.

        Raises:
            CheckpointError: names or shapes differ from those of this engine, or a slot is in a stage that cannot be.
        """
        if "place" not in state:
            raise CheckpointError(
                "the state of the engine misses 'place', the step it was taken in; load a checkpoint taken inside "
                "an episode, or start the round anew."
            )
        episode, t = (int(v) for v in state["place"])
        self.reset(client, episode)
        self._state = restored(self.state, below("control", state), "engine")
        require_known_stages(self._state.slots)
        self.executor.load_state_dict(below("executor", state))
        self.t, self._coalitions = t, self._enumerate(self._state, t + 1)
        if self._by_mask is None:
            self.executor.apply_structure(reading.structure_now(t, self._state, self._coalitions))
