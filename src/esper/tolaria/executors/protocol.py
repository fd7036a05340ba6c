"""What every way of running N hosts must offer the engine, and the messages between the two.

The control plane (stages, alpha, rewards) lives on the device as masks; the executor owns the heavy state (parameters,
optimizers, data). Once per step the engine reads the structure of the population and hands it over
(`apply_structure`): seeds are born, cleared, kept and restored there, by host index, before the next train pass. An executor of a static graph
needs no structure: it is handed the masks as they are (`apply_changes`), and nothing is read between steps.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from esper.kasmina.rules.lifecycle import SeedCosts
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tolaria.coalitions import Coalitions

EvaluationSplit = Literal["val", "test"]


@tensor_dataclass
class TrainPass:
    """What one train pass told. Gradient statistics are NaN where none were taken.

    `acc` and `loss` are over the train examples of the pass, measured while training.
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
    """Accuracy (pp) of each coalition, and the loss of the network as it stands (coalition 0)."""

    accuracy: Float[Tensor, "N K"]
    loss: Float[Tensor, " N"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The population's structure as the host knows it: what the one read of a step brings.

    All arrays are [N, S] unless stated. `germinated` and `released` happened in the step that ended, `panicked` [N]
    hosts were rolled back in it, `snapshot` [N] hosts are to be kept now, `keep` marks single seeds that join an
    existing snapshot. `sets` [N, K, S] are the coalitions that the next step measures, where `sets_valid` [N, K].
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
    sets: np.ndarray
    sets_valid: np.ndarray


@tensor_dataclass
class Changes:
    """What happened in step `t`, as masks on the device; the names are those of `Structure`.

    A host germinates at most one seed in a step.
    """

    t: int
    germinated: Bool[Tensor, "N S"]
    released: Bool[Tensor, "N S"]
    panicked: Bool[Tensor, " N"]
    snapshot: Bool[Tensor, " N"]
    keep: Bool[Tensor, "N S"]


def empty_structure(num_envs: int, num_slots: int) -> Structure:
    """N hosts without seeds, before the first step."""
    nothing, nobody = np.zeros((num_envs, num_slots), dtype=np.bool_), np.zeros(num_envs, dtype=np.bool_)
    zeros = np.zeros((num_envs, num_slots), dtype=np.int64)
    return Structure(
        t=0,
        stage=np.full_like(zeros, SeedStage.DORMANT),
        blueprint=np.full_like(zeros, -1),
        algorithm=zeros,
        has_gate=nothing,
        alpha=zeros.astype(np.float32),
        alpha_mode=zeros,
        germinated=nothing,
        released=nothing,
        panicked=nobody,
        snapshot=nobody,
        keep=nothing,
        sets=nothing[:, None],
        sets_valid=~nobody[:, None],
    )


@runtime_checkable
class Executor(Protocol):
    """N hosts that can be trained, measured and operated on."""

    costs: SeedCosts
    host_params: int

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots; a snapshot of them is taken."""
        ...

    def apply_structure(self, structure: Structure) -> None:
        """Carry out on parameters what the lifecycle decided in the step that ended."""
        ...

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train epoch."""
        ...

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of all hosts on the validation split; changes nothing."""
        ...

    def committed_accuracy(self, split: EvaluationSplit, slots: SlotState) -> Float[Tensor, " N"]:
        """Accuracy (pp) of each host with its fossilized seeds alone; the test split is for the end of a run."""
        ...

    def state_dict(self) -> StateTree:
        """Everything needed to go on in the middle of an episode."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        ...


@runtime_checkable
class StaticGraph(Executor, Protocol):
    """An executor that runs whatever could grow and selects by masks, so that the host need not know the structure."""

    def apply_changes(self, changes: Changes, slots: SlotState) -> None:
        """`apply_structure` without a read: `slots` is the state after the step that ended."""
        ...
