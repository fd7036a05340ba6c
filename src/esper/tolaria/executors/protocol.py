"""The interface between the engine and an executor, and the messages between the two.

The control plane (stages, alpha, rewards) is tensors on the device; the executor owns the large state (parameters,
optimizers, data). Once per step the engine reads the structure of the population and passes it to `apply_structure`,
which creates, clears, snapshots and restores seeds by host index before the next train pass.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.lifecycle import SeedStage
from esper.leyline.messages import SeedCosts, SlotState
from esper.leyline.tensor_dataclass import StateTree, tensor_dataclass
from esper.tolaria.coalitions import Coalitions

EvaluationSplit = Literal["val", "test"]


@tensor_dataclass
class GradientStatistics:
    """Of all slots [N, S], or of some seeds [R]; NaN (and False) where nothing was measured."""

    norm: Float[Tensor, "*seeds"]
    health: Float[Tensor, "*seeds"]
    vanishing: Bool[Tensor, "*seeds"]
    exploding: Bool[Tensor, "*seeds"]
    ratio: Float[Tensor, "*seeds"]


@tensor_dataclass
class TrainPass:
    """Outputs of a train pass. Gradient statistics are NaN where none were measured.

    `acc` (figure of merit, points) and `loss` are those of the train examples, measured while training.
    """

    acc: Float[Tensor, " N"]
    loss: Float[Tensor, " N"]
    grad_norm: Float[Tensor, "N S"]
    grad_health: Float[Tensor, "N S"]
    grad_vanishing: Bool[Tensor, "N S"]
    grad_exploding: Bool[Tensor, "N S"]
    grad_ratio: Float[Tensor, "N S"]


@tensor_dataclass
class ValidationPass:
    """Figure of merit (points, e.g. percent) of each coalition, and the loss of coalition 0, all active seeds.

    Columns of coalitions that a host does not have hold nothing of use.
    """

    accuracy: Float[Tensor, "N K"]
    loss: Float[Tensor, " N"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The structure of the population in host memory, from the one read of a step.

    All arrays are [N, S] unless stated. `germinated` and `released` happened in the step that ended, `panicked` [N]
    hosts were rolled back in it, of `snapshot` [N] hosts a snapshot is taken now, to which `keep` adds single seeds of
    other hosts. `stopped` [N] hosts are neither trained nor measured from now on. `sets` [N, K, S] are the coalitions
    that the next step measures, where `sets_valid` [N, K].
    """

    t: int
    stage: np.ndarray
    blueprint: np.ndarray
    algorithm: np.ndarray
    has_gate: np.ndarray
    alpha: np.ndarray
    alpha_mode: np.ndarray
    germinated: np.ndarray
    released: np.ndarray
    panicked: np.ndarray
    snapshot: np.ndarray
    keep: np.ndarray
    stopped: np.ndarray
    sets: np.ndarray
    sets_valid: np.ndarray


def empty_structure(num_envs: int, num_slots: int) -> Structure:
    """N hosts without seeds, before the first step."""
    no_seed, no_host = np.zeros((num_envs, num_slots), dtype=np.bool_), np.zeros(num_envs, dtype=np.bool_)
    zeros = np.zeros((num_envs, num_slots), dtype=np.int64)
    return Structure(
        t=0,
        stage=np.full_like(zeros, SeedStage.DORMANT),
        blueprint=np.full_like(zeros, -1),
        algorithm=zeros,
        has_gate=no_seed,
        alpha=zeros.astype(np.float32),
        alpha_mode=zeros,
        germinated=no_seed,
        released=no_seed,
        panicked=no_host,
        snapshot=no_host,
        keep=no_seed,
        stopped=no_host,
        sets=no_seed[:, None],
        sets_valid=~no_host[:, None],
    )


@runtime_checkable
class Executor(Protocol):
    """Trains and measures N hosts, and applies changes of their structure."""

    host_params: int

    @property
    def costs(self) -> SeedCosts:
        """Of seeds and gates."""

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots; a snapshot of them is taken."""

    def apply_structure(self, structure: Structure) -> None:
        """Apply to the parameters what the lifecycle decided in the step that ended."""

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over the batches of a step, but those that are stopped, whose numbers are not to be read."""

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of all hosts on the validation split; changes nothing."""

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """The same of one coalition, each host with its fossils alone; the test split is for the end of a run."""

    def state_dict(self) -> StateTree:
        """Everything needed to continue in the middle of an episode."""

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`."""
