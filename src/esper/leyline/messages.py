"""States, messages and interfaces between the parts.

engine  --(Observation)-->  PolicyProtocol  --(ActResult)-->   engine
engine  --(RewardInputs)->  RewardProtocol  --(RewardOutput)-> engine
run     --(records)------>  Sink

What a host is trained for and judged by is an `Objective`:

    loss      what training lowers, in nats or squared units
    points    the figure of merit: accuracy in percent, or another number on that scale; contributions, gates, rewards
              and the governor use it

Both are sums over what counts (examples, or tokens that are not padding), divided by how many count. So they can be
added up over batches, and a padded token changes nothing.

Shape legend: N = hosts, S = slots, D = features, M = reward terms, J = subsets, L = layers, H = width.
A float that was not measured is NaN, and the step of a measurement that was never made is -1. Percentages are points
(0-100). Integers are int64, as indexing needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS, HostFamily, head_sizes
from esper.leyline.tensor_dataclass import StateTree as StateTree
from esper.leyline.tensor_dataclass import tensor_dataclass


@tensor_dataclass
class SlotState:
    """The slots of N hosts; one row = one host.

    stage   host 0 | DORMANT  TRAINING  BLENDING
            host 1 | DORMANT  DORMANT   DORMANT
    alpha   host 0 |   0.0      0.0       0.4         blend weight of a seed

    `slot_fields.EMPTY` holds the empty value of each field. `contribution` and the fields after it are measurements.
    """

    stage: Int[Tensor, "N S"]
    prev_stage: Int[Tensor, "N S"]
    epochs_in_stage: Int[Tensor, "N S"]
    prev_epochs: Int[Tensor, "N S"]
    age: Int[Tensor, "N S"]
    serial: Int[Tensor, "N S"]
    blueprint: Int[Tensor, "N S"]
    algorithm: Int[Tensor, "N S"]
    has_gate: Bool[Tensor, "N S"]
    tempo: Int[Tensor, "N S"]
    germ_curve: Int[Tensor, "N S"]
    params: Int[Tensor, "N S"]
    alpha: Float[Tensor, "N S"]
    alpha_start: Float[Tensor, "N S"]
    alpha_target: Float[Tensor, "N S"]
    alpha_mode: Int[Tensor, "N S"]
    alpha_curve: Int[Tensor, "N S"]
    alpha_steepness: Float[Tensor, "N S"]
    alpha_total: Int[Tensor, "N S"]
    alpha_done: Int[Tensor, "N S"]
    acc_at_germination: Float[Tensor, "N S"]
    acc_at_stage_start: Float[Tensor, "N S"]
    acc_at_blending_start: Float[Tensor, "N S"]
    contribution: Float[Tensor, "N S"]
    contribution_step: Int[Tensor, "N S"]
    contribution_velocity: Float[Tensor, "N S"]
    interaction_sum: Float[Tensor, "N S"]
    boost_received: Float[Tensor, "N S"]
    grad_norm: Float[Tensor, "N S"]
    grad_health: Float[Tensor, "N S"]
    grad_vanishing: Bool[Tensor, "N S"]
    grad_exploding: Bool[Tensor, "N S"]
    grad_health_prev: Float[Tensor, "N S"]
    grad_ratio_ema: Float[Tensor, "N S"]


@tensor_dataclass
class HostState:
    """The state of each host as a whole.

    `compute` are the FLOPs of its training so far, in steps of a host without seeds.
    """

    val_acc: Float[Tensor, " N"]
    val_loss: Float[Tensor, " N"]
    train_acc: Float[Tensor, " N"]
    train_loss: Float[Tensor, " N"]
    prev_val_acc: Float[Tensor, " N"]
    prev_val_loss: Float[Tensor, " N"]
    acc_hist: Float[Tensor, "N 5"]
    loss_hist: Float[Tensor, "N 5"]
    committed_acc: Float[Tensor, " N"]
    cf_total: Float[Tensor, " N"]
    host_params: Int[Tensor, " N"]
    compute: Float[Tensor, " N"]
    last_op: Int[Tensor, " N"]
    last_success: Bool[Tensor, " N"]
    n_germinated: Int[Tensor, " N"]
    n_pruned: Int[Tensor, " N"]
    n_fossilized: Int[Tensor, " N"]
    n_contributing: Int[Tensor, " N"]
    best_acc: Float[Tensor, " N"]
    plateau_count: Int[Tensor, " N"]
    stable_count: Int[Tensor, " N"]
    stabilized: Bool[Tensor, " N"]
    segment: Int[Tensor, " N"]

    def relative_compute(self, t: int | Int[Tensor, ""], episode_length: int | Int[Tensor, ""]) -> Float[Tensor, " N"]:
        """FLOPs of training over those of the host alone, if nothing but the host is trained after step `t`."""
        return (self.compute + (episode_length - t)) / episode_length


@tensor_dataclass
class Measurements:
    """Results of one train pass and one validation pass; NaN = not measured in this step.

    `interactions[n, i, j]` is I_ij of the slots i and j. `subset_acc[n, j]` is the accuracy of the j-th subset of the
    live seeds (bit r of j = the r-th live slot); it is filled in the last step only, for Shapley reports.
    """

    train_acc: Float[Tensor, " N"]
    train_loss: Float[Tensor, " N"]
    val_acc: Float[Tensor, " N"]
    val_loss: Float[Tensor, " N"]
    committed_acc: Float[Tensor, " N"]
    cf_total: Float[Tensor, " N"]
    contribution: Float[Tensor, "N S"]
    interactions: Float[Tensor, "N S S"]
    grad_norm: Float[Tensor, "N S"]
    grad_health: Float[Tensor, "N S"]
    grad_vanishing: Bool[Tensor, "N S"]
    grad_exploding: Bool[Tensor, "N S"]
    grad_ratio: Float[Tensor, "N S"]
    subset_acc: Float[Tensor, "N J"]


@tensor_dataclass
class Observation:
    """The input of a controller in step `t`: the states after ingest, and the legal operations."""

    t: int
    episode_length: int
    slots: SlotState
    hosts: HostState
    legal: Bool[Tensor, "N 6 S"]

    @property
    def has_gate(self) -> Bool[Tensor, "N S"]:
        """Slots with a gate network, which masks depend on besides `legal`."""
        return self.slots.has_gate

    @property
    def num_envs(self) -> int:
        """N."""
        return self.legal.shape[0]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.legal.shape[2]


@tensor_dataclass
class Hidden:
    """Recurrent state of a controller; width 0 for controllers without memory."""

    h: Float[Tensor, "L N H"]
    c: Float[Tensor, "L N H"]


@tensor_dataclass
class ActResult:
    """A controller's output for all hosts, e.g. actions=[[1, 1, 2, 1, 2, 0, 0, 1], ...] (order of `HEADS`).

    `op_prob` are the probabilities of the operations before one was drawn, NaN for controllers that have none, and
    `constrained` marks the heads whose mask left out values of the operation, False for these controllers.
    `features` are the normalized input of the policy, `raw_features` the same before normalization; both have width 0
    for controllers that do not learn.
    """

    actions: Int[Tensor, "N 8"]
    log_prob: Float[Tensor, "N 8"]
    op_prob: Float[Tensor, "N 6"]
    constrained: Bool[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    hidden: Hidden
    raw_features: Float[Tensor, "N D"]
    features: Float[Tensor, "N D"]


@tensor_dataclass
class Transitions:
    """At most one transition per slot; `cause` is 0 where there was none."""

    from_stage: Int[Tensor, "N S"]
    to_stage: Int[Tensor, "N S"]
    cause: Int[Tensor, "N S"]


@tensor_dataclass
class SeedCosts:
    """What each blueprint and a gate cost by slot, and which blueprints may be chosen.

    `seed_flops`, `gate_flops` and `host_flops` are floating-point operations of a forward pass of one example.
    `kinds` describes what the network of a blueprint is made of, see `kasmina.blueprints.description`.
    """

    seed_params: Int[Tensor, "S P"]
    gate_params: Int[Tensor, " S"]
    seed_flops: Int[Tensor, "S P"]
    gate_flops: Int[Tensor, " S"]
    host_flops: Int[Tensor, ""]
    selectable: Bool[Tensor, " P"]
    kinds: Float[Tensor, "S P K"]


@tensor_dataclass
class Menu:
    """What a controller can choose from, by measured numbers of about 0 to 1 instead of names.

    `places` describes the slots, `seeds` each blueprint in each slot (`kasmina.blueprints.description`).
    """

    places: Float[Tensor, "S _"]
    seeds: Float[Tensor, "S B _"]


@tensor_dataclass
class GateReadings:
    """Result of the gate that each slot asked: `gate` 1, 2, 3 or 5, or 0 for none."""

    gate: Int[Tensor, "N S"]
    passed: Bool[Tensor, "N S"]
    score: Float[Tensor, "N S"]
    failed_checks: Int[Tensor, "N S"]


@tensor_dataclass
class RewardInputs:
    """The input of a reward in one step: the state *before* the op, and the result of the op.

    `target` is the slot of the op, `success` whether it took effect (WAIT always does), `auto_pruned` the number of
    seeds that this step's tick removed without a PRUNE request.
    """

    epoch: int | Int[Tensor, ""]
    max_epochs: int | Int[Tensor, ""]
    slots: SlotState
    hosts: HostState
    interactions: Float[Tensor, "N S S"]
    ops: Int[Tensor, " N"]
    target: Int[Tensor, " N"]
    success: Bool[Tensor, " N"]
    auto_pruned: Int[Tensor, " N"]


@tensor_dataclass
class RewardOutput:
    """The reward of one step; `total` is the sum of `breakdown` over its terms (`RewardProtocol.terms`)."""

    total: Float[Tensor, " N"]
    breakdown: Float[Tensor, "N M"]
    flags: Bool[Tensor, "N 2"]


@tensor_dataclass
class KeptNetwork:
    """The result of an episode: each host with its fossilized seeds only, measured after the last step.

    `accuracy` (pp) and `loss` are those of the validation split. Hosts that were rolled back in the last step are
    restored before. `compute` are the FLOPs of its training, over those of a host that is trained without seeds.
    """

    accuracy: Float[Tensor, " N"]
    loss: Float[Tensor, " N"]
    fossil_params: Int[Tensor, " N"]
    host_params: Int[Tensor, " N"]
    compute: Float[Tensor, " N"]


@tensor_dataclass
class StoredStep:
    """One control step as the learner stores it; `t` counts from 1.

    `effective_op` is the sampled op where it took effect and WAIT elsewhere. `valid` is False for hosts that were
    rolled back in this step: they executed nothing, and the row is not used in training.
    """

    t: int
    obs: Observation
    act: ActResult
    effective_op: Int[Tensor, " N"]
    reward: Float[Tensor, " N"]
    terminal: Bool[Tensor, " N"]
    truncated: Bool[Tensor, " N"]
    bootstrap_value: Float[Tensor, " N"]
    valid: Bool[Tensor, " N"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The properties of an engine that a controller depends on.

    Attributes:
        run_seed: key of every random draw of the run.
        num_envs: N, hosts in this process. host_offset: global number of the first of them.
        slot_ids: the enabled slots in action order, e.g. ("r0c0", "r0c1", "r1c0").
        episode_length: E, control steps per episode.
        family: family of the host.
        num_blueprints: size of the blueprint head. selectable: indices a controller may choose.
        min_training_epochs: M of the task. auto_gates: whether the tick asks G1, G2, G3 without an ADVANCE.
        menu: the slots and blueprints by what they are; a learned policy needs it.
    """

    run_seed: int
    num_envs: int
    slot_ids: tuple[str, ...]
    episode_length: int
    family: HostFamily
    selectable: tuple[int, ...]
    num_blueprints: int = NUM_BUILTIN_BLUEPRINTS
    min_training_epochs: int = 10
    auto_gates: tuple[bool, bool, bool] = (True, True, True)
    blueprint_names: tuple[str, ...] = ()
    host_offset: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    menu: Menu | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.slot_ids)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Number of values of each of the eight heads."""
        return head_sizes(self.num_slots, self.num_blueprints)

    def selectable_mask(self) -> Bool[Tensor, " B"]:
        """Whether a controller may choose each blueprint."""
        return torch.isin(torch.arange(self.num_blueprints), torch.tensor(self.selectable)).to(self.device)

    def host_ids(self) -> Tensor:
        """Global host numbers, int64 [N]."""
        return torch.arange(self.host_offset, self.host_offset + self.num_envs, device=self.device)


def host_numbers(
    num_envs: int, host_offset: int, distinct_hosts: int | None, device: torch.device | None = None
) -> Tensor:
    """[N]: the number that keys the random draws of each host.

    With D distinct hosts the hosts n, n + D, n + 2D, ... are copies: they get the same data, weights and seeds, and
    differ only in what the controller does.
    """
    numbers = torch.arange(host_offset, host_offset + num_envs, device=device)
    return numbers if distinct_hosts is None else numbers % distinct_hosts


@runtime_checkable
class PolicyProtocol(Protocol):
    """A controller: learned, scripted or random. Every call is for all N hosts."""

    def initial_hidden(self, n: int) -> Hidden:
        """Zeros, each [L, n, H]."""

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        """Start an episode. `hosts` [N] are global host numbers, `episode` counts rounds from 0."""

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """Choose the actions of step `obs.t` and advance the recurrent state."""

    def store(self, step: StoredStep) -> None:
        """Store one step and reset the recurrent state of hosts with `valid` False. Does not read the device."""

    def bootstrap(self, obs: Observation) -> Tensor:
        """Value [N] of the state after the last step; the recurrent state is used, but not changed."""

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        """Replace the reward of the last stored row of each masked host, which is rolled back, by `reward` [N]."""

    def update(self) -> Mapping[str, float]:
        """Train on the stored rollout and return metrics by name; empty for scripted controllers."""

    def state_dict(self) -> StateTree:
        """The state that a checkpoint needs."""

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names or shapes differ."""


RewardState = TypeVar("RewardState")


@runtime_checkable
class RewardProtocol(Protocol, Generic[RewardState]):
    """The reward of a step, as a pure function of its inputs and a state that is passed in and returned."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the columns of `RewardOutput.breakdown`."""

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """The state at the start of an episode."""

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """The reward of one step, and the new state."""

    def rollback_reward(self, state: RewardState) -> Tensor:
        """[N]: the reward that replaces that of a host's last row when the host is rolled back."""

    def reset_hosts(self, state: RewardState, mask: Tensor) -> RewardState:
        """The state with the masked hosts as at the start of an episode."""


@runtime_checkable
class EpisodeReward(RewardProtocol[RewardState], Protocol):
    """A reward that depends on the result of an episode.

    With such a reward the learner treats a rollback as a step within the episode, otherwise as the end of an episode.
    So `rollback_reward` is what the last row keeps, and `reset_hosts` gives the state from which the next row goes on.
    """

    def final_reward(self, kept: KeptNetwork) -> Tensor:
        """[N]: the term `terminal` of the last step, replaced once the result of the episode is known."""


@runtime_checkable
class ClientProtocol(PolicyProtocol, RewardProtocol[Any], Protocol):
    """A controller and a reward in one object, which drives an engine."""

    def finish(self, kept: KeptNetwork) -> None:
        """Take the result of the episode; called once, after the last step and before `update`."""


@runtime_checkable
class Sink(Protocol):
    """A receiver of the records of a run; an error in a sink does not stop the run."""

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take one record of plain values."""


@runtime_checkable
class ClosingSink(Sink, Protocol):
    """A sink that is closed after the run."""

    def close(self) -> None:
        """Write what is left, and release what is open."""


class Scores(NamedTuple):
    """Of each row of a batch, float32: summed loss, summed score, and how many examples or tokens count."""

    loss: Float[Tensor, " R"]
    score: Float[Tensor, " R"]
    weight: Float[Tensor, " R"]


@runtime_checkable
class Objective(Protocol):
    """A loss and a figure of merit. Instances are plain data, equal if they compute the same."""

    @property
    def unit(self) -> str:
        """Name of the figure of merit, e.g. "accuracy"."""

    @property
    def blind_loss(self) -> float:
        """Mean loss of the best constant answer; a host that stays above it has learned nothing."""

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Scores of outputs [R, ...] for targets [R, ...], differentiable in `outputs`.

        A row never affects another, and the weight follows from the targets alone.
        """

    def score(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, " R"]:
        """The score of each row as in `scores`, without the loss: enough for most coalitions, and cheaper."""

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """The figure of merit of summed scores and weights, element by element."""
