"""The hosts that executors run: parameters, data, precision and structure."""

from functools import partial
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.optimizers import host_decay_mask
from esper.kasmina.parameters.population import Population
from esper.leyline.checkpoint_tree import below, check_same_shapes, with_prefix
from esper.leyline.errors import DataError
from esper.leyline.objective import Objective
from esper.leyline.protocols import StateTree
from esper.leyline.stages import SeedStage
from esper.tasks.datasets import Dataset, LastBatch, SplitName
from esper.tasks.instances import InstanceDistribution, Instances
from esper.tasks.losses import of_split
from esper.tolaria.amp import LossScaler
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, empty_structure
from esper.tolaria.prefixes import PrefixPlan, plan_prefixes

_CPU = torch.device("cpu")
_MAX_FLOATS, _MAX_FLOATS_ON_CPU = 2**24, 2**21
"""Most floats of one activation that is measured at once, unless a single example has more. On a CPU they should fit
its caches (8 MiB)."""


@final
class HostData:
    """Owns N hosts and their data; executors only run them.

    Args:
        population: the hosts and their seeds.
        dataset: on the device already.
        objective: what the hosts are trained for.
        batch_train, batch_val: examples per batch and host.
        batches_per_step: of training; None for the whole split. last_batch: of the whole split in training.
        scaler: precision of training.
        instances: what makes hosts differ; None for equal ones.

    Attributes:
        objective: that of training. objectives: the same by split, because R² depends on the split's targets.
        structure: of the last `apply_structure`. episode: of the last `reset`.
        execution_order: slots in the order in which the network runs them.
        decay_mask: [P] elements of a host that decoupled weight decay applies to.
        lr_factor: [N] of the learning rates in this episode; None for 1.
    """

    def __init__(
        self,
        population: Population,
        dataset: Dataset,
        objective: Objective,
        *,
        batch_train: int,
        batch_val: int,
        scaler: LossScaler,
        batches_per_step: int | None = None,
        last_batch: LastBatch = "merge",
        instances: InstanceDistribution | None = None,
    ) -> None:
        self.population, self.dataset, self.scaler = population, dataset, scaler
        self.batch_train, self.batch_val = batch_train, batch_val
        p = population
        self._batches = partial(SharedBatchIterator, dataset, p.num_envs, run_seed=p.run_seed, device=p.device)
        self._train = self._batches(batch_train, "train", batches_per_step=batches_per_step, last_batch=last_batch)
        self._val = self._batches(batch_val, "val")
        self.objective, of_val = (of_split(objective, batches.data.y) for batches in (self._train, self._val))
        self.objectives: dict[SplitName, Objective] = {"train": self.objective, "val": of_val}
        self.column = {point.slot_id: s for s, point in enumerate(population.points)}
        self.execution_order = tuple(self.column[slot_id] for slot_id in population.host_module.execution_order())
        layout = population.host_kind.template.parameters
        self.decay_mask = host_decay_mask(population.optimizer_spec, layout.matrix_mask.to(population.device))
        self.episode = 0
        self.structure = empty_structure(population.num_envs, population.num_slots)
        self.lr_factor: Float[Tensor, " N"] | None = None
        self._distribution = instances
        self._instances: Instances | None = None

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self.episode = episode
        self.population.reset(episode)
        self.scaler.reset()
        self.structure = empty_structure(self.population.num_envs, self.population.num_slots)
        self._draw_instances()

    def _draw_instances(self) -> None:
        """Give each host what makes it differ in this episode."""
        if self._distribution is None:
            return
        p = self.population
        drawn = self._distribution.draw(p.run_seed, p.host_ids, self.episode, self.dataset)
        self._instances, self.lr_factor = drawn, drawn.lr_factor
        self._train.choose(drawn.train)
        self._val.choose(drawn.val)

    def apply_structure(self, structure: Structure) -> None:
        """Restore, clear, draw and snapshot rows as the lifecycle decided in the step that ended."""
        p = self.population
        p.restore(structure.panicked, structure.stage)
        p.release(structure.released)
        p.germinate(structure.germinated, structure.blueprint, structure.has_gate, self.episode, structure.t)
        p.snapshot_hosts(structure.snapshot)
        p.snapshot_seeds(structure.keep)
        self.structure = structure

    def train_batches(self, t: int) -> SharedBatchIterator:
        """The train split in each host's order of step `t`."""
        self.population.moment.episode, self.population.moment.t = self.episode, t
        self._train.begin(t, self.episode, self.population.host_ids)
        return self._train

    def evaluation(self, split: EvaluationSplit) -> SharedBatchIterator:
        """The validation split, or the test split at the end of a run."""
        if split == "val":
            return self._val
        batches = self._batches(self.batch_val, "test", run_finished=True)
        self.objectives["test"] = of_split(self.objective, batches.data.y)
        if self._instances is not None:
            batches.choose(self._instances.test)
        return batches

    @property
    def host(self) -> Host:
        """The module of the hosts; its weights are not those of any host."""
        return self.population.host_module

    def label_range(self, *splits: SplitName) -> tuple[int, int]:
        """The lowest and the highest label of these splits."""
        labels = torch.cat([self.dataset.split(split).y.reshape(-1) for split in splits])
        return int(labels.min()), int(labels.max())

    @property
    def largest_batch_bytes(self) -> int:
        """Bytes of the largest activation of a training batch of one host."""
        return 4 * self.batch_train * self.host.largest_activation

    def examples_at_once(self, copies: int) -> int:
        """Most examples in one forward pass without gradients of `copies` rows per example (states, hosts)."""
        most = _MAX_FLOATS_ON_CPU if self.population.device.type == "cpu" else _MAX_FLOATS
        return max(1, most // (self.host.largest_activation * copies))

    def plan(self, sets: Bool[np.ndarray, "K S"]) -> PrefixPlan:
        """How the coalitions of one host are measured."""
        return plan_prefixes(sets, self.execution_order, shared=self.host.shares_prefixes)

    def coalition_sets(self) -> list[np.ndarray]:
        """The coalitions [K_n, S] of each host in the structure."""
        return [rows[valid] for rows, valid in zip(self.structure.sets, self.structure.sets_valid, strict=True)]

    def committed_sets(self) -> list[np.ndarray]:
        """One coalition [1, S] of each host: its fossilized seeds."""
        return [row[None] for row in self.structure.stage == SeedStage.FOSSILIZED]

    def state_dict(self) -> StateTree:
        """The population, the loss scales and the episode."""
        return {
            **with_prefix("population", self.population.state_dict()),
            "loss_scale": self.scaler.scale,
            "good_steps": self.scaler.good_steps,
            "episode": torch.tensor(self.episode),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names or shapes differ."""
        check_same_shapes(state, self.state_dict(), "executor")
        self.population.load_state_dict(below("population", state))
        self.scaler.scale.copy_(state["loss_scale"])
        self.scaler.good_steps.copy_(state["good_steps"])
        self.episode = int(state["episode"])
        self._draw_instances()


def examples(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Inputs of a host [count, ...] and targets of the first training examples, repeated where there are fewer.

    On the CPU, for the trials before a run. Raises DataError if there are none.
    """
    split = dataset.train
    if not len(split):
        raise DataError(f"the train split of {dataset.identity.get('name')} is empty; expected examples.")
    index = torch.arange(count, device=split.x.device) % len(split)
    return dataset.as_inputs(split.x[index]).to(_CPU), split.y[index].to(_CPU)
