"""States and messages between the parts: dataclasses of tensors.

Shape legend: N = hosts, S = slots, D = features, M = reward terms, J = subsets, L = layers, H = width.
A float that was not measured is NaN, and the step of a measurement that was never made is -1. Percentages are points
(0-100). Integers are int64, as indexing needs.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

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
    """The state of each host as a whole."""

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
    restored before.
    """

    accuracy: Float[Tensor, " N"]
    loss: Float[Tensor, " N"]
    fossil_params: Int[Tensor, " N"]
    host_params: Int[Tensor, " N"]


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
