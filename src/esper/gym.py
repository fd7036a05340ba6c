"""Esper as environments of Gymnasium, for learners that are not esper's own.

import esper.gym
env = esper.gym.make_vec("null", num_envs=64)            or gymnasium.make_vec("esper/null-v0", num_envs=64)
obs, info = env.reset(seed=0)
obs, reward, terminated, truncated, info = env.step(actions)

docs/gym.md says what observations, actions and masks are. Needs gymnasium: `pip install 'esper-growth[gym]'`.

`GrowingHosts` are N hosts as a vector environment; whoever calls `step` is the controller.

    reset    reset, observe                              the first half of a control step of the engine
    step     execute, observe                            the second half, and the first one of the next step
    ... the last one of an episode: execute, and the network that is kept is measured
    step     reset, observe                              AutoresetMode.NEXT_STEP: these actions are ignored

So the reward of a step is complete when `step` returns it: also where the host is rolled back next, and at the end.

    observation  [31 S + 25 + B S]  features of `tamiyo.features`, then which blueprint each slot holds, as one-hots
    action       [8]                the heads of `leyline.lifecycle.HEADS`, in their order

Shape legend: N = hosts, S = slots, B = blueprints, D = width of an observation, V = values of all heads, concatenated.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, final

try:
    import gymnasium
    from gymnasium.error import ClosedEnvironmentError, InvalidAction, ResetNeeded
    from gymnasium.spaces import Box, MultiDiscrete
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "esper.gym needs gymnasium, which is not installed; pip install 'esper-growth[gym]'.", name=error.name
    ) from None

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.api import checked
from esper.api.run import AnyTask, given, in_process, spec_of
from esper.kasmina.rules.conditions import resolve_target_slot
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, HEAD_NAMES, Head, LifecycleOp
from esper.leyline.messages import EngineSpec, EpisodeReward, HostState, Observation, RewardProtocol, SlotState
from esper.leyline.random import MAX_EPISODES
from esper.runs.assembly.assemble import device_of, engine_of
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import ScriptedClient
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, features_of
from esper.tamiyo.heads import available_masks, choices_given_op, layout_of, relevance, tables_of
from esper.tamiyo.schedules import NoMemory, ScriptedPolicy, Stateless
from esper.tasks.registry import task_names
from esper.tolaria.build import load_dataset
from esper.tolaria.engine import OpenStep, VectorizedEngine
from esper.tolaria.phases import waits
from esper.tolaria.runtime import host_read
from esper.tolaria.state import StepReport

Info = dict[str, Any]


@final
class _Outside(Stateless):
    """A script that plays what `actions` [N, 8] holds."""

    actions: Int[Tensor, "N 8"]

    def decide(self, obs: Observation, memory: NoMemory) -> Tensor:
        del obs, memory
        return self.actions


@final
class GrowingHosts(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """N hosts of one task that start and end an episode together; `make_vec` makes it.

    Arrays are new in every call. Entries of `info`, each with a mask `_name` [N] as in all of Gymnasium:

        action_mask   [N, V]     the values of each head that some legal action has, V = sum of `nvec`
        legal         [N, 6, S]  the legal pairs of operation and slot, which the factored mask cannot say
        illegal       [N]        the last action was illegal, and WAIT was executed
        rolled_back   [N]        the loss of the host was bad: it is restored, and its next action is not executed

    and, with the last step of an episode,

        kept_points   [N]        figure of merit of the host with its fossilized seeds, on the validation split
        kept_params   [N]        parameters of this network
        final_reward  [N]        what it was rewarded with, where the reward is of the whole episode

    Args:
        build: run seed -> an engine.
        reward: what the hosts of an engine are rewarded by.
        seed: run seed until `reset` gives another one.
    """

    _legal: Bool[Tensor, "N 6 S"]
    """What is legal in the open step; WAIT alone where nothing would be executed."""
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # type: ignore[misc]

    def __init__(
        self, build: Callable[[int], VectorizedEngine], reward: Callable[[EngineSpec], RewardProtocol[Any]], seed: int
    ) -> None:
        self._build, self._script = build, _Outside()
        self._use(build(seed))
        spec = self._engine.spec
        self._reward = reward(spec)
        self._client = ScriptedClient(ScriptedPolicy(self._script, spec), self._reward)
        self._selectable = spec.selectable_mask()
        self.num_envs = spec.num_envs
        self.single_observation_space, self.single_action_space = observation_space(spec), action_space(spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _use(self, engine: VectorizedEngine) -> None:
        self._engine = engine
        self._episode, self._began = 0, False
        self._step: OpenStep | None = None  # None after the last step of an episode
        self._report: StepReport | None = None
        engine.listeners.append(self._keep)

    def _keep(self, report: StepReport) -> None:
        self._report = report

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Info]:
        """Begin an episode of all hosts: the first one of `seed`, or the next one of the seed before.

        Another seed than before builds the engine anew. `options` are refused, because there are none.
        """
        self._require_open()
        if options:
            raise ConfigError(f"options are {sorted(options)}; this environment has none, leave them out.")
        if seed is not None:
            seed = seed.item() if isinstance(seed, np.generic) else seed
            if seed != self._engine.spec.run_seed or isinstance(seed, bool):
                self._use(self._build(seed))
            self._episode = 0
        super().reset(seed=seed)
        return self._begin()

    def _begin(self) -> tuple[np.ndarray, Info]:
        if self._episode == MAX_EPISODES:
            raise ConfigError(f"this seed has had its {MAX_EPISODES:,} episodes; go on with reset(seed=...).")
        self._began = False  # until the first step is observed
        self._engine.reset(self._client, self._episode)
        self._episode += 1
        self._step = self._engine.observe(self._client)
        self._began = True
        obs, info, _ = self._look(torch.zeros_like(self._step.panic))
        return obs, _with_masks(info)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Execute `actions` [N, 8] and train each host for one control step more.

        Raises:
            InvalidAction: of another shape or kind, or outside of the action space. The mask may be disregarded.
            ResetNeeded, ClosedEnvironmentError: there is no episode.
        """
        self._require_open()
        if not self._began:
            raise ResetNeeded("no episode has begun; call reset() before step().")
        chosen = self._checked(actions)
        engine, client, step = self._engine, self._client, self._step
        if step is None:
            obs, info = self._begin()
            never = np.zeros(self.num_envs, dtype=np.bool_)
            return obs, np.zeros(self.num_envs, dtype=np.float32), never, never.copy(), info
        device = engine.spec.device
        self._script.actions, illegal = legal_actions(
            chosen.to(device), self._legal, step.obs.has_gate, self._selectable
        )
        self._began = False  # until this step is complete
        engine.execute(client, step, client.act(step.obs))
        over = engine.is_over
        self._step = None if over else engine.observe(client)
        kept = self._kept() if over else {}
        self._began = True
        obs, info, penalty = self._look(illegal)
        assert self._report is not None
        valid = self._report.decided
        reward = np.where(valid, self._report.reward, np.float32(0.0))
        rolled_back = info["rolled_back"] & valid
        reward[rolled_back] = penalty[rolled_back]
        if "final_reward" in kept:
            reward = self._with_final(reward, kept["final_reward"])
        cut = engine.config.time_limit == "truncate"
        terminated, truncated = (np.full(self.num_envs, over and which) for which in (not cut, cut))
        if not isinstance(self._reward, EpisodeReward):  # under one, a rollback is a step within the episode
            terminated |= rolled_back
        return obs, reward, terminated, truncated, _with_masks(info | kept)

    def render(self) -> None:
        """Nothing: hosts are not drawn."""

    def _look(self, illegal: Bool[Tensor, " N"]) -> tuple[np.ndarray, Info, np.ndarray]:
        """Observation and info of the open step, or after the last one; and the last reward of who is rolled back."""
        engine, step = self._engine, self._step
        state, spec = engine.state, engine.spec
        only_waits = waits(spec.device)[:, None].expand(spec.num_envs, -1, spec.num_slots)
        if step is None:
            slots, hosts, self._legal = state.slots, state.hosts, only_waits
            panic, penalty = torch.zeros_like(illegal), torch.zeros(spec.num_envs, device=spec.device)
        else:
            slots, hosts, panic, penalty = step.obs.slots, step.obs.hosts, step.panic, step.penalty
            self._legal = step.obs.legal & (only_waits | step.healthy[:, None, None])
        seen = observation_of(slots, hosts, engine.t, spec.episode_length, spec.num_blueprints)
        mask = action_mask(self._legal, slots.has_gate, self._selectable)
        infos = {"action_mask": mask, "legal": self._legal, "illegal": illegal, "rolled_back": panic}
        obs, cost, *arrays = host_read(seen, penalty, *infos.values())
        return obs, dict(zip(infos, arrays, strict=True)), cost

    def _kept(self) -> Info:
        kept = self._engine.kept_network()
        found = {"kept_points": kept.accuracy, "kept_params": kept.host_params + kept.fossil_params}
        if isinstance(self._reward, EpisodeReward):
            found["final_reward"] = self._reward.final_reward(kept)
        return dict(zip(found, host_read(*found.values()), strict=True))

    def _with_final(self, reward: np.ndarray, final: np.ndarray) -> np.ndarray:
        """The rewards of the last step, whose term `terminal` is replaced.

        A host that has no last step, because it was stopped or rolled back, gets the final reward now as well.
        """
        assert self._report is not None
        column = list(self._reward.terms).index("terminal")
        terms = self._report.breakdown
        others = np.delete(terms, column, axis=1).sum(axis=1)
        whole: np.ndarray = np.where(self._report.decided, reward + (final - terms[:, column]), others + final)
        return whole

    def _checked(self, actions: np.ndarray) -> Int[Tensor, "N 8"]:
        """The actions as a tensor, each inside of the action space."""
        found = np.asarray(actions)
        wanted = (self.num_envs, len(HEAD_NAMES))
        if found.shape != wanted or not np.issubdtype(found.dtype, np.integer):
            raise InvalidAction(
                f"actions have the shape {found.shape} and the type {found.dtype}; they must be integers of the shape "
                f"{wanted}: a row for each host, with the values of {', '.join(HEAD_NAMES)}."
            )
        sizes = self._engine.spec.head_sizes
        outside = (found < 0) | (found >= np.array(sizes))
        if outside.any():
            host, head = (int(index) for index in np.argwhere(outside)[0])
            raise InvalidAction(
                f"the action of host {host} has {HEAD_NAMES[head]} = {found[host, head]}; it must be in 0 to "
                f"{sizes[head] - 1}. info['action_mask'] says what is legal."
            )
        return torch.from_numpy(found.astype(np.int64))

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the environment is closed; make another one with esper.gym.make_vec.")

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ANN401 -- as in the base class
        """Let the engine go, and with it its processes."""
        del kwargs, self._engine
        self._step = None


def _with_masks(info: Info) -> Info:
    """Each entry with the mask of the hosts that have it, which are all."""
    return info | {f"_{name}": np.ones(len(values), dtype=np.bool_) for name, values in info.items()}


# -- spaces and masks -------------------------------------------------------------------------------------------------


def observation_space(spec: EngineSpec) -> Box:
    """Of one host: the range of each feature, float32 [D]."""
    columns = (*HOST_FEATURES, *SLOT_FEATURES * spec.num_slots)
    kinds = spec.num_slots * spec.num_blueprints
    low, high = [column.low for column in columns] + kinds * [0.0], [column.high for column in columns] + kinds * [1.0]
    return Box(np.array(low, dtype=np.float32), np.array(high, dtype=np.float32), dtype=np.float32)


def action_space(spec: EngineSpec) -> MultiDiscrete:
    """Of one host: the number of values of each of the eight heads."""
    return MultiDiscrete(np.array(spec.head_sizes))


def observation_of(
    slots: SlotState, hosts: HostState, t: int, episode_length: int, num_blueprints: int
) -> Float[Tensor, "N D"]:
    """What a learner sees of each host."""
    features, blueprint = features_of(slots, hosts, t, episode_length)
    held = F.one_hot(blueprint + 1, num_blueprints + 1)[..., 1:]  # -1 is an empty slot
    return torch.cat((features, held.flatten(1)), dim=1)


def action_mask(
    legal: Bool[Tensor, "N 6 S"], has_gate: Bool[Tensor, "N S"], selectable: Bool[Tensor, " B"]
) -> Bool[Tensor, "N V"]:
    """The values of each head that some legal action has, heads side by side; at least one of each head.

    A head that no legal operation reads has its canonical value alone.
    """
    tables = tables_of(legal, selectable)
    mask = available_masks(choices_given_op(legal, selectable), legal, has_gate, tables)
    layout = layout_of(tables.sizes, legal.device)
    empty = (layout.member @ mask) == 0.0
    canonical = (layout.first + _canonical(legal.device)[:, None]).flatten()
    mask.index_add_(0, canonical, empty.to(mask.dtype))
    return mask.t() > 0.0


def legal_actions(
    actions: Int[Tensor, "N 8"],
    legal: Bool[Tensor, "N 6 S"],
    has_gate: Bool[Tensor, "N S"],
    selectable: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "N 8"], Bool[Tensor, " N"]]:
    """The actions that are executed, and where one was illegal, which is WAIT then.

    Heads that the operation does not read get their canonical value.
    """
    op, canonical = actions[:, Head.OP], _canonical(actions.device)
    _, allowed = resolve_target_slot(actions, legal, has_gate)
    allowed = allowed & (selectable[actions[:, Head.BLUEPRINT]] | (op != LifecycleOp.GERMINATE))
    taken = torch.where(relevance(op) & allowed[:, None], actions, canonical)
    taken[:, Head.OP] = op * allowed  # WAIT is 0
    return taken, ~allowed


@lru_cache(maxsize=8)
def _canonical(device: torch.device) -> Int[Tensor, " 8"]:
    return torch.tensor(CANONICAL_ACTION, device=device)


_OF_A_RUN = ("rounds", "schedule_rounds", "ppo", "policy", "architecture", "checkpoint_every", "sinks")
"""Settings of a learner or of its records, which an environment does not have."""


@checked
def make_vec(
    task: AnyTask,
    num_envs: int = 8,
    *,
    reward: str | None = None,
    seed: int = 0,
    episode_length: int | None = None,
    device: str | None = None,
    render_mode: str | None = None,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> GrowingHosts:
    """A vector environment of Gymnasium whose environments are the hosts of a task.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        num_envs: hosts, which train in parallel.
        reward: name of a reward, built in or registered ("objective").
        seed: of the hosts, until `reset` gives another one.
        episode_length: control steps of an episode, set by the task if not given.
        device: "auto", "cpu", "cuda" or "cuda:N".
        render_mode: None; hosts are not drawn.
        settings: any key of the configuration of a run that is not about its learner, such as time_limit="truncate" or
            **{"lifecycle.min_prune_age": 3}.

    Raises:
        ConfigError, RegistryError, DataError: what is wrong, and how to continue.
    """
    if render_mode is not None:
        raise ConfigError(f"render_mode is {render_mode!r}, but hosts are not drawn; leave it out.")
    for name in settings:
        if name.partition(".")[0] in _OF_A_RUN:
            raise ConfigError(f"{name} is a setting of a run, which an environment does not have; leave it out.")
    spec = spec_of(task)
    values = given(settings, num_envs=num_envs, reward=reward, seed=seed, episode_length=episode_length, device=device)
    values["task"] = task if isinstance(task, str) else spec.name
    own = None if isinstance(task, str) else spec
    with in_process(own):
        config = resolve(values)
        where, hosts = device_of(config), config.task_spec()

    def build(seed: int) -> VectorizedEngine:
        with in_process(own):
            engine_config = replace(config, seed=seed).engine(num_envs=num_envs)  # as a setting it has its own name
            dataset = load_dataset(hosts, seed, where, config.data_path())
            return engine_of(config, dataset, where, engine_config=engine_config, task=hosts)

    return GrowingHosts(build, lambda engine: reward_of(config, engine), config.seed)


def _no_single(task: str, **_: object) -> gymnasium.Env[Any, Any]:
    raise ConfigError(f'hosts are trained together; use gymnasium.make_vec("esper/{task}-v0", num_envs=1).')


for _name in task_names():
    gymnasium.register(
        f"esper/{_name}-v0",
        entry_point="esper.gym:_no_single",
        vector_entry_point="esper.gym:make_vec",
        kwargs={"task": _name},
    )
