"""Base classes of executors whose hosts are networks."""

from abc import ABC, abstractmethod
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.executors.scoring import SummedScores, measured


class HostOwner:
    """What executors of networks share: the hosts, which `data` resets, saves and restores."""

    def __init__(self, data: HostData) -> None:
        self.data, self.population = data, data.population
        self.costs = self.population.costs()
        self.host_params = self.population.host_params
        self.refused: dict[str, str] = {}
        """Blueprints whose hosts this executor leaves to PyTorch, with the reason."""

    @final
    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self.data.reset(episode)

    @final
    def state_dict(self) -> StateTree:
        """The hosts."""
        return self.data.state_dict()

    @final
    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`."""
        self.data.load_state_dict(state)


class NetworkExecutor(HostOwner, ABC):
    """An executor that reads the structure; a subclass implements training and measuring."""

    @abstractmethod
    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over the batches of a step, in its own order."""

    @abstractmethod
    def sum_scores(
        self, batches: SharedBatchIterator, alpha: Float[Tensor, "N S"], sets: list[np.ndarray], num_columns: int
    ) -> SummedScores:
        """Scores of each host's coalitions, summed over the examples.

        Args:
            batches: the examples.
            alpha: blend weights, on the device.
            sets: coalitions [K_n, S] of each host; a host with fewer than `num_columns` gets zeros for the rest.
            num_columns: K.
        """

    @final
    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples."""
        return self.measure(slots.alpha, coalitions.sets.shape[1])

    @final
    @torch.no_grad()
    def measure(self, alpha: Float[Tensor, "N S"], num_columns: int) -> ValidationPass:
        """The coalitions of the structure, in `num_columns` columns; the rest of a row is not to be read."""
        sums = self.sum_scores(self.data.evaluation("val"), alpha, self.data.coalition_sets(), num_columns)
        return measured(self.data.objective, sums)

    @torch.no_grad()
    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """Each host with its fossilized seeds alone."""
        sums = self.sum_scores(self.data.evaluation(split), slots.alpha, self.data.committed_sets(), 1)
        return measured(self.data.objective, sums)

    @final
    def apply_structure(self, structure: Structure) -> None:
        """Restore, clear, draw and snapshot rows as the lifecycle decided."""
        self.data.apply_structure(structure)
