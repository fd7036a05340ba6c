"""The clients of an engine: policy and reward in one object, learning (`SimicClient`) or not (`ScriptedClient`).

    engine --(Observation)--> act --> store --> ... --> update       policy: features, network, heads, PPO
    engine --(RewardInputs)-> step                                   reward: forwarded to a RewardProtocol

The policy step is one decision of all hosts as a pure function of tensors. The step number is a tensor and the random
numbers are drawn before, so one compiled graph serves a run.

Shape legend: N = hosts, T = steps, D = features, S = slots, B = blueprints, L = recurrent layers, H = recurrent width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from esper.leyline.errors import ConfigError, is_own
from esper.leyline.lifecycle import NUM_HEADS, LifecycleOp
from esper.leyline.messages import (
    ActResult,
    EngineSpec,
    EpisodeReward,
    Hidden,
    HostState,
    KeptNetwork,
    Menu,
    Observation,
    PolicyProtocol,
    RewardInputs,
    RewardOutput,
    RewardProtocol,
    SlotState,
    StoredStep,
)
from esper.leyline.random import Stream, uniform
from esper.leyline.ranks import Ranks
from esper.leyline.tensor_dataclass import (
    StateTree,
    below,
    blank,
    check_same_shapes,
    named_tensors,
    replace,
    restored,
    tensor_dataclass,
    tree_map,
    with_prefix,
)
from esper.simic.advantages import Frozen, ObservationStatistics, RunningMeanVar, normalized
from esper.simic.ppo import PPOAgent, Read, initial_adam_state, run_ppo_updates
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards.reward import check_reward, checked_step
from esper.simic.rollout_buffer import TamiyoRolloutBuffer, Transition
from esper.tamiyo.features import feature_dim, features_of, observe
from esper.tamiyo.heads import forced, sample_heads
from esper.tamiyo.network import TamiyoNetwork


@tensor_dataclass
class PolicyInputs:
    """Inputs of a decision: `t` from 1, one uniform per head; `reset` marks hosts whose recurrent state is zeroed."""

    t: Int[Tensor, ""]
    slots: SlotState
    hosts: HostState
    legal: Bool[Tensor, "N 6 S"]
    uniforms: Float[Tensor, "N 8"]
    hidden: Hidden
    reset: Bool[Tensor, " N"]
    statistics: Frozen


@tensor_dataclass
class PolicyOutput:
    """The result for the engine, and two fields for the buffer."""

    act: ActResult
    blueprint_index: Int[Tensor, "N S"]
    forced: Bool[Tensor, " N"]


def without(reset: Bool[Tensor, " N"], hidden: Hidden) -> Hidden:
    """The recurrent state, which is finite, with zeros at the marked hosts."""
    keep_N1 = (~reset).to(torch.float32)[:, None]  # three times as fast as masked_fill
    return tree_map(lambda x: x * keep_N1, hidden)


POLICY_PARTS = "network.", "observations."
"""Names of the tensors that decide, within the state of a `SimicClient`."""
PolicyFunction = Callable[[PolicyInputs, bool], PolicyOutput]
"""`PolicyStep` or a compiled form of it; the second argument is `deterministic`."""


def blank_inputs(network: TamiyoNetwork, n: int, slots: int, device: torch.device) -> PolicyInputs:
    """Inputs of empty slots where only WAIT is legal, to compile with."""
    sizes = {"N": n, "S": slots, "L": network.num_layers, "H": network.state_width, "*D": feature_dim(slots)}
    inputs = blank(PolicyInputs, sizes, device)
    inputs.legal[:, LifecycleOp.WAIT] = True
    inputs.statistics.spread.fill_(1.0)
    return replace(inputs, t=inputs.t + 1)


@final
class PolicyStep(nn.Module):
    """The eager policy step, from which the other forms are made."""

    def __init__(self, network: TamiyoNetwork, selectable: Bool[Tensor, " B"], episode_length: int) -> None:
        super().__init__()
        self.network = network
        self.selectable = selectable
        self.episode_length = episode_length

    @torch.no_grad()
    def forward(self, inputs: PolicyInputs, deterministic: bool = False) -> PolicyOutput:
        """Observe, normalize with frozen statistics, one step of the network, sample all heads; nothing is read."""
        raw, blueprint_index = features_of(inputs.slots, inputs.hosts, inputs.t, self.episode_length)
        features = normalized(raw, inputs.statistics)
        out = self.network.step(features, blueprint_index, without(inputs.reset, inputs.hidden))
        heads = sample_heads(
            out.logits, inputs.legal, inputs.slots.has_gate, self.selectable, inputs.uniforms, deterministic
        )
        act = ActResult(**vars(heads), value=out.value, hidden=out.hidden, raw_features=raw, features=features)
        return PolicyOutput(act=act, blueprint_index=blueprint_index, forced=forced(inputs.legal))


def rollout_bytes(steps: int, num_slots: int, config: PPOConfig) -> int:
    """Memory of the rollout of one host: the buffer, the copy that an update works on, and its share of activations."""
    shape = (1, steps, feature_dim(num_slots), num_slots, num_slots * config.hidden_width, config.num_layers)
    rollout = TamiyoRolloutBuffer(*shape, device="meta", gae_lambda=config.gae_lambda).rollout
    per_slot = 4 * (_KEPT_OF_LAYER * config.hidden_width * (config.num_layers + 1) + 4 * config.feature_width)
    update = steps * num_slots * per_slot // config.num_minibatches
    return 2 * sum(field.nbytes for _, field in named_tensors(rollout)) + update


_KEPT_OF_LAYER = 16
"""Numbers that an update keeps for each unit of a recurrent layer, and of the heads: gates, states, gradients."""


def policy_network(menu: Menu, config: PPOConfig) -> TamiyoNetwork:
    """The network that a configuration asks for, with weights of zero."""
    sizes = {"feature_width": config.feature_width, "hidden_width": config.hidden_width}
    return TamiyoNetwork(menu, **sizes, num_layers=config.num_layers)


def policy_bytes(num_slots: int, config: PPOConfig) -> int:
    """Memory of a policy at the peak of an update, where it has most: weights and moments, old and new, and gradients.

    They exist by parameter, as one vector, and by block; at a width of 1,024 they take about 12 times the weights.
    """
    with torch.device("meta"):
        menu = Menu(places=torch.empty(num_slots, 8), seeds=torch.empty(num_slots, 1, 12))
        network = policy_network(menu, config)
    return 13 * sum(weight.nbytes for weight in network.parameters())


class _WithReward:
    """The reward of a client: every call goes to `reward`."""

    def __init__(self, reward: RewardProtocol[Any]) -> None:
        self.reward, self._is_own = reward, is_own(reward)
        if self._is_own:
            check_reward(reward)

    @property
    def terms(self) -> Sequence[str]:
        return self.reward.terms

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Any:  # noqa: ANN401
        return self.reward.initial_state(n, slots, steps, device)

    def step(self, inputs: RewardInputs, state: Any) -> tuple[RewardOutput, Any]:  # noqa: ANN401
        return checked_step(self.reward, inputs, state) if self._is_own else self.reward.step(inputs, state)

    def rollback_reward(self, state: Any) -> Tensor:  # noqa: ANN401
        return self.reward.rollback_reward(state)

    def reset_hosts(self, state: Any, mask: Tensor) -> Any:  # noqa: ANN401
        return self.reward.reset_hosts(state, mask)


@final
class SimicClient(_WithReward):
    """Policy and reward behind `ClientProtocol`; owns the network, its optimizer, the buffer and the statistics.

    `network` is that of `policy_network` for `spec` and the configuration, initialized. `read` brings the metrics of an
    update to the host, the only host read here. `total_updates` is the length of the run, for the schedules.
    `policy_form` makes the policy step eager or compiled. `ranks` share the hosts of a run, of which `spec` and the
    buffer have those of this one. Raises ConfigError where an `EpisodeReward` has no term `terminal`.
    """

    def __init__(
        self,
        network: TamiyoNetwork,
        reward: RewardProtocol[Any],
        ppo_config: PPOConfig,
        spec: EngineSpec,
        *,
        read: Read,
        device: torch.device | str,
        total_updates: int,
        policy_form: Callable[[PolicyStep], PolicyFunction] = lambda step: step,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(reward)
        self.spec, self.config = spec, ppo_config
        self.ranks = ranks or Ranks(spec.num_envs)
        self.device = torch.device(device)
        self._read = read
        self.agent = PPOAgent(
            network=network.to(self.device),
            optimizer=initial_adam_state(list(network.parameters())),
            observations=ObservationStatistics(ppo_config.observation_momentum, self.device),
            returns=RunningMeanVar(ppo_config.return_momentum, (), self.device),
            selectable=spec.selectable_mask().to(self.device),
            total_updates=total_updates,
        )
        self._clock_T = torch.arange(1, spec.episode_length + 1, device=self.device)
        shape_TN = (spec.episode_length, spec.num_envs)
        self._rolled_back_TN = torch.zeros(shape_TN, dtype=torch.bool, device=self.device)
        self._rollback_reward_TN = torch.zeros(shape_TN, device=self.device)
        self._episode_reward = reward if isinstance(reward, EpisodeReward) else None
        self._terminal_column = _terminal_column(reward) if self._episode_reward else None
        self._terminal_N = self._others_N = torch.zeros(spec.num_envs, device=self.device)
        self._decide = policy_form(PolicyStep(self.agent.network, self.agent.selectable, spec.episode_length))
        self._buffer = TamiyoRolloutBuffer(
            spec.num_envs,
            spec.episode_length,
            feature_dim(spec.num_slots),
            spec.num_slots,
            network.state_width,
            ppo_config.num_layers,
            device=self.device,
            gae_lambda=ppo_config.gae_lambda,
        )
        self.updates = 0
        self.begin_rollout(0, spec.host_ids())

    # The policy -------------------------------------------------------------------------------------------------------

    def initial_hidden(self, n: int) -> Hidden:
        """Zeros, each [L, n, H]."""
        return self.agent.network.initial_hidden(n, self.device)

    def begin_rollout(self, episode: int, hosts: Int[Tensor, " N"]) -> None:
        """Empty the buffer, zero the recurrent state, draw all random numbers of the episode."""
        self._buffer.reset()
        self._rolled_back_TN.zero_()
        self._carried = self.initial_hidden(self.spec.num_envs)
        self._reset_N = torch.zeros(self.spec.num_envs, dtype=torch.bool, device=self.device)
        self._statistics = self.agent.observations.of_slots(self.spec.num_slots)
        self._episode, self._hosts = episode, hosts.to(self.device)
        self._uniforms_TNh = policy_uniforms(self.spec.run_seed, self._hosts, episode, self.spec.episode_length)
        self._decision: tuple[int, PolicyOutput] | None = None  # of this step, until it is stored

    @property
    def hidden(self) -> Hidden:
        """The recurrent state before the next step, each [L, N, H]; undefined between `act` and `store`."""
        return without(self._reset_N, self._carried)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """See `PolicyStep`; nothing is read."""
        inputs = PolicyInputs(
            t=self._clock_T[obs.t - 1],
            slots=obs.slots,
            hosts=obs.hosts,
            legal=obs.legal,
            uniforms=self._uniforms_TNh[obs.t - 1],
            hidden=self._carried,
            reset=self._reset_N,
            statistics=self._statistics,
        )
        # rounding depends on the number of rows: with each block by itself, not on the number of ranks
        blocks = [self._decide(_of_block(inputs, block), deterministic) for block in self.ranks.own]
        decision = _joined_blocks(blocks)
        self._carried = decision.act.hidden
        self._decision = obs.t, decision
        return decision.act

    @torch.no_grad()
    def store(self, step: StoredStep) -> None:
        """Write column `step.t - 1`; hosts that were rolled back start their next step from a zero state."""
        assert self._decision is not None, "act() comes before store()"
        t, decision = self._decision
        assert t == step.t, "store() takes the step that act() just decided"
        row = Transition(
            states=step.act.features,
            raw_states=step.act.raw_features,
            actions=step.act.actions,
            log_probs=step.act.log_prob,
            values=step.act.value,
            blueprint_index=decision.blueprint_index,
            legal=step.obs.legal,
            has_gate=step.obs.has_gate,
            effective_op=step.effective_op,
            rewards=step.reward,
            bootstrap_values=step.bootstrap_value,
            terminal=step.terminal,
            truncated=step.truncated,
            valid=step.valid,
            reset=self._reset_N,
            forced=decision.forced,
        )
        self._buffer.put(step.t - 1, row)
        self._reset_N = ~step.valid

    def bootstrap(self, obs: Observation) -> Float[Tensor, " N"]:
        """Value of the state after the last step, given the recurrent state, which is not changed."""
        return compute_batched_bootstrap(self.agent, obs, self._carried, self.ranks.own)

    def rollback(self, mask: Bool[Tensor, " N"], reward: Float[Tensor, " N"]) -> None:
        """The last stored row of each masked host gets `reward` instead, see `buffer`."""
        if last := self._buffer.num_steps:
            self._rolled_back_TN[last - 1].copy_(mask)
            self._rollback_reward_TN[last - 1].copy_(reward)

    @property
    def buffer(self) -> TamiyoRolloutBuffer:
        """The rollout so far, with neutral invalid rows, and the rewards of rollbacks.

        A rollback ends the segment of its host, except under an `EpisodeReward`.
        """
        ends = self._episode_reward is None
        self._buffer.neutralize()
        self._buffer.roll_back(self._rolled_back_TN.t(), self._rollback_reward_TN.t(), ends=ends)
        self._rolled_back_TN.zero_()
        return self._buffer

    def finish(self, kept: KeptNetwork) -> None:
        """Add the final reward of an `EpisodeReward` to the last valid row of each host."""
        if self._episode_reward is not None:
            self.buffer.add_final_reward(self._episode_reward.final_reward(kept), self._terminal_N, self._others_N)

    def update(self) -> dict[str, float]:
        """One PPO update from the stored rollout; metrics by name, NaN where missing."""
        metrics = run_ppo_updates(
            self.agent,
            self.buffer,
            self.config,
            update_index=self.updates,
            run_seed=self.spec.run_seed,
            hidden=self._carried,  # also of hosts whose last row is invalid
            read=self._read,
            ranks=self.ranks,
        )
        self.updates += 1
        return metrics

    # The reward -------------------------------------------------------------------------------------------------------

    def step(self, inputs: RewardInputs, state: Any) -> tuple[RewardOutput, Any]:  # noqa: ANN401
        """Reward one step, and remember the terminal term and the sum of the others for `finish`."""
        output, state = super().step(inputs, state)
        if self._terminal_column is not None and inputs.epoch == inputs.max_epochs:
            self._terminal_N = output.breakdown[:, self._terminal_column]
            self._others_N = output.total - self._terminal_N
        return output, state

    # Persistence ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """Weights, optimizer, statistics and counters; inside an episode also its rows and the recurrent state."""
        agent = self.agent
        counters = (self.updates, agent.schedule_position, agent.failed_updates)
        state = {
            **self.policy(),
            **with_prefix("optimizer", dict(named_tensors(agent.optimizer))),
            **with_prefix("returns", agent.returns.state_dict()),
            "counters": torch.tensor(counters),
        }
        return {**state, **self._episode_state()} if self._buffer.num_steps else state

    def policy(self) -> StateTree:
        """What decides: the weights of the network and the statistics of the observations, for hosts of any menu."""
        weights = {name: x.detach().clone() for name, x in self.agent.network.state_dict().items()}
        return with_prefix("network", weights) | with_prefix("observations", self.agent.observations.state_dict())

    def load_policy(self, state: StateTree) -> None:
        """Restore what `policy` gave; raises CheckpointError where names or shapes differ."""
        check_same_shapes(state, self.policy(), "policy")
        self.agent.network.load_state_dict(below("network", state))
        self.agent.observations.load_state_dict(below("observations", state))

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        rollout = below("rollout", state)
        own = {name: x for name, x in self.state_dict().items() if not name.startswith("rollout.")}
        check_same_shapes(state, {**own, **self._episode_state()} if rollout else own, "policy")
        self.load_policy({name: x for name, x in state.items() if name.startswith(POLICY_PARTS)})
        self.agent.optimizer = restored(self.agent.optimizer, below("optimizer", state), "optimizer")
        self.agent.returns.load_state_dict(below("returns", state))
        self.updates, self.agent.schedule_position, self.agent.failed_updates = state["counters"].tolist()
        if rollout:
            self.begin_rollout(int(rollout["episode"]), rollout["hosts"])
            self._buffer.load_state_dict(below("buffer", rollout))
            self._carried = restored(self._carried, {name: rollout[name] for name in ("h", "c")}, "recurrent state")
            self._reset_N = rollout["reset"].to(self.device).clone()

    def _episode_state(self) -> StateTree:
        """State carried between the steps of an episode."""
        carried = {
            "episode": torch.tensor(self._episode),
            "hosts": self._hosts.clone(),
            **dict(named_tensors(self.hidden)),
            "reset": self._reset_N.clone(),
        }
        return with_prefix("rollout", {**carried, **with_prefix("buffer", self.buffer.state_dict())})


@torch.no_grad()
def compute_batched_bootstrap(
    agent: PPOAgent, obs: Observation, hidden: Hidden, blocks: Sequence[slice] = (slice(None),)
) -> Float[Tensor, " N"]:
    """Value of `obs` for all hosts, each of these blocks by itself; `hidden` is not modified."""
    raw, blueprint_index = observe(obs)
    features, step = normalized(raw, agent.observations.of_slots(obs.num_slots)), agent.network.step
    return torch.cat([step(features[b], blueprint_index[b], _rows(hidden, b)).value for b in blocks])


def _rows(hidden: Hidden, block: slice) -> Hidden:
    return tree_map(lambda x: x[:, block], hidden)


def _of_block(inputs: PolicyInputs, block: slice) -> PolicyInputs:
    if block == slice(0, len(inputs.reset)):
        return inputs
    hosts = {name: getattr(inputs, name)[block] for name in ("legal", "uniforms", "reset")}
    trees = {name: tree_map(lambda x: x[block], getattr(inputs, name)) for name in ("slots", "hosts")}
    return replace(inputs, hidden=_rows(inputs.hidden, block), **hosts, **trees)


def _joined_blocks(parts: Sequence[PolicyOutput]) -> PolicyOutput:
    first, *others = parts
    if not others:
        return first
    hidden = tree_map(lambda *x: torch.cat(x, dim=1), first.act.hidden, *(part.act.hidden for part in others))
    flat = [replace(part, act=replace(part.act, hidden=first.act.hidden)) for part in parts]
    joined = tree_map(lambda *x: torch.cat(x), *flat)
    return replace(joined, act=replace(joined.act, hidden=hidden))


def policy_uniforms(run_seed: int, hosts: Int[Tensor, " N"], episode: int, steps: int) -> Float[Tensor, "T N 8"]:
    """One uniform per step, host and head of an episode; a host's numbers do not depend on the other hosts."""
    t_T11 = torch.arange(1, steps + 1, device=hosts.device)[:, None, None]
    block_h = torch.arange(NUM_HEADS, device=hosts.device)
    return uniform(run_seed, Stream.POLICY_SAMPLING, hosts[None, :, None], episode=episode, t=t_T11, block=block_h)


def _terminal_column(reward: RewardProtocol[Any]) -> int:
    """Column of the term that `final_reward` replaces."""
    if "terminal" not in reward.terms:
        raise ConfigError(
            f"the reward has final_reward(), but no term 'terminal' among {list(reward.terms)}; name the "
            "reward of the last step 'terminal', or leave final_reward() out."
        )
    return list(reward.terms).index("terminal")


@final
class ScriptedClient(_WithReward):
    """Any policy and any reward behind `ClientProtocol`; every method is that of one of the two."""

    def __init__(self, policy: PolicyProtocol, reward: RewardProtocol[Any]) -> None:
        super().__init__(reward)
        self.policy = policy

    def initial_hidden(self, n: int) -> Hidden:
        """Zeros, each [L, n, H]."""
        return self.policy.initial_hidden(n)

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        """Start an episode."""
        self.policy.begin_rollout(episode, hosts)

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """Choose the actions of a step."""
        return self.policy.act(obs, deterministic=deterministic)

    def store(self, step: StoredStep) -> None:
        """Store one step."""
        self.policy.store(step)

    def bootstrap(self, obs: Observation) -> Tensor:
        """Value [N] of the state after the last step."""
        return self.policy.bootstrap(obs)

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        """The policy's answer to a rollback."""
        self.policy.rollback(mask, reward)

    def finish(self, kept: KeptNetwork) -> None:
        """Nothing: a script has no rollout to correct."""

    def update(self) -> Mapping[str, float]:
        """The policy's metrics."""
        return self.policy.update()

    def state_dict(self) -> StateTree:
        """The policy's state."""
        return self.policy.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        self.policy.load_state_dict(state)
