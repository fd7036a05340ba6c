"""Hosts that are networks: their data, the base class of their executors, the loop of a train pass, and scores.

A figure of merit that is not finite, because outputs or a metric of the user's are not, counts as 0 points, and the
loss of such a host is NaN: the governor rolls it back, and no choice of a best host takes it.

Shape legend: N = hosts, K = coalitions, R = rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.optimizers import host_decay_mask, schedule_factor
from esper.kasmina.parameters.population import Population, channels_last, runs_channels_last
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import SeedStage
from esper.leyline.messages import Objective, Scores, SeedCosts, SlotState
from esper.leyline.tensor_dataclass import StateTree, below, check_same_shapes, with_prefix
from esper.tasks.datasets import Dataset, LastBatch, SplitName
from esper.tasks.instances import InstanceDistribution, Instances
from esper.tasks.losses import of_measuring, of_split
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import Coalitions, PrefixPlan, plan_prefixes
from esper.tolaria.engine_config import LossScaler
from esper.tolaria.executors.protocol import (
    EvaluationSplit,
    GradientStatistics,
    Structure,
    TrainPass,
    ValidationPass,
    empty_structure,
)

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
        schedule: control steps after which the schedule of the learning rates begins, and with which it ends.
        instances: what makes hosts differ; None for equal ones.
        lr_factors: [N] multiply the learning rates of each host and its seeds; None for 1.
        measured_share: of the validation examples, in each step.

    The step in which each host (0) and the seed in each of its slots was born decides its learning rate.

    Attributes:
        objective: that of training. objectives: those of measuring by split, because R² depends on its targets.
        structure: of the last `apply_structure`. episode: of the last `reset`.
        execution_order: slots in the order in which the network runs them.
        decay_mask: [P] elements of a host that decoupled weight decay applies to.
        measured_batches: the validation examples on which a step measures.

    Raises:
        ConfigError: the schedule of the learning rates does not fit the episode.
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
        schedule: tuple[int, int],
        batches_per_step: int | None = None,
        last_batch: LastBatch = "merge",
        instances: InstanceDistribution | None = None,
        lr_factors: Float[Tensor, " N"] | None = None,
        measured_share: float = 1.0,
    ) -> None:
        self._begin, end = schedule
        self._length = end - self._begin
        population.optimizer_spec.require_length(self._length)
        self.population, self.dataset, self.scaler = population, dataset, scaler
        self.batch_train, self.batch_val = batch_train, batch_val
        p = population
        self._batches = partial(SharedBatchIterator, dataset, p.num_envs, run_seed=p.run_seed, device=p.device)
        self._train = self._batches(batch_train, "train", batches_per_step=batches_per_step, last_batch=last_batch)
        self._val = self._batches(batch_val, "val")
        self._measured_share, self.measured_batches = measured_share, self._val
        if measured_share < 1.0:
            # instances name rows of the whole split
            some = dataset if instances is not None else replace(dataset, val=dataset.val.part(measured_share))
            self.measured_batches = SharedBatchIterator(some, p.num_envs, batch_val, "val", p.run_seed, p.device)
        self.objective = of_split(objective, self._train.data.y)
        self._measured_by = of_measuring(objective)
        self.objectives: dict[SplitName, Objective] = {"val": of_split(self._measured_by, self._val.data.y)}
        self.column = {point.slot_id: s for s, point in enumerate(population.points)}
        self.execution_order = tuple(self.column[slot_id] for slot_id in population.host_module.execution_order())
        layout = population.host_kind.start.parameters
        self.decay_mask = host_decay_mask(population.optimizer_spec, layout.matrix_mask.to(population.device))
        fits = p.host_module.any_layout and p.device.type == "cpu"
        self._channels_last = fits and runs_channels_last(p.host_kind, examples(dataset, 2)[0])
        self.episode = 0
        self.structure = empty_structure(population.num_envs, population.num_slots)
        self._born = np.zeros((population.num_envs, 1 + population.num_slots), dtype=np.int64)
        self._given_factors = None if lr_factors is None else lr_factors.to(population.device)
        self._distribution = instances
        self._instances: Instances | None = None

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self.episode = episode
        self.population.reset(episode)
        self.scaler.reset()
        self.structure = empty_structure(self.population.num_envs, self.population.num_slots)
        self._born[:] = 0
        self._draw_instances()

    def _draw_instances(self) -> None:
        """Give each host what makes it differ in this episode."""
        if self._distribution is None:
            return
        p = self.population
        drawn = self._distribution.draw(p.run_seed, p.host_ids, self.episode, self.dataset)
        self._instances = drawn
        self._train.choose(drawn.train)
        self._val.choose(drawn.val)
        if self.measured_batches is not self._val:
            self.measured_batches.choose(drawn.val.part(self._measured_share))

    def apply_structure(self, structure: Structure) -> None:
        """Restore, clear, draw and snapshot rows as the lifecycle decided in the step that ended."""
        p = self.population
        p.restore(structure.panicked, structure.stage)
        p.release(structure.released)
        p.germinate(structure.germinated, structure.blueprint, structure.has_gate, self.episode, structure.t)
        p.snapshot_hosts(structure.snapshot)
        p.snapshot_seeds(structure.keep)
        self._born[:, 1:][structure.germinated] = structure.t
        self.structure = structure

    def laid_out(self, x: Tensor) -> Tensor:
        """Inputs as the layers of a host are fastest: on a CPU the images of a user's network lie channels-last."""
        return channels_last(x) if self._channels_last else x

    def lr_factors(self, t: int) -> Float[Tensor, "N C"] | None:
        """What multiplies the learning rates in step `t`, [N, 1 + S] (a host, then its slots); None for 1.

        The product of the schedule, of the host's instance, and of what this engine was given; 0 for stopped hosts.
        """
        p = self.population
        of_instances = None if self._instances is None else self._instances.lr_factor
        runs = None
        if self.structure.stopped.any():  # of executors that step the weights of all hosts together
            runs = torch.from_numpy(~self.structure.stopped).to(p.device, non_blocking=True).float()
        of_hosts = [factors for factors in (of_instances, self._given_factors, runs) if factors is not None]
        if not p.optimizer_spec.is_scheduled and not of_hosts:
            return None
        of_birth = [
            schedule_factor(p.optimizer_spec, t - self._begin, self._length, born=max(0, born - self._begin))
            for born in range(t)
        ]
        scheduled = torch.tensor(of_birth, dtype=torch.float32)[torch.from_numpy(self._born)]
        return reduce(lambda found, own: found * own[:, None], of_hosts, scheduled.to(p.device, non_blocking=True))

    def train_batches(self, t: int) -> SharedBatchIterator:
        """The train split in each host's order of step `t`."""
        self.population.moment.episode, self.population.moment.t = self.episode, t
        self._train.begin(t, self.episode, self.population.host_ids)
        return self._train

    def evaluation(self, split: EvaluationSplit) -> SharedBatchIterator:
        """The validation split, or the test split at the end of a run."""
        if split == "val":
            return self._val
        batches = self._batches(self.batch_val, "test")
        self.objectives["test"] = of_split(self._measured_by, batches.data.y)
        if self._instances is not None:
            batches.choose(self._instances.test)
        return batches

    @property
    def host(self) -> Host:
        """The module of the hosts; its weights are not those of any host."""
        return self.population.host_module

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

    def state_dict(self) -> StateTree:
        """The population, the loss scales and the episode."""
        return {
            **with_prefix("population", self.population.state_dict()),
            "loss_scale": self.scaler.scale,
            "good_steps": self.scaler.good_steps,
            "episode": torch.tensor(self.episode),
            "born": torch.from_numpy(self._born),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names or shapes differ."""
        check_same_shapes(state, self.state_dict(), "executor")
        self.population.load_state_dict(below("population", state))
        self.scaler.scale.copy_(state["loss_scale"])
        self.scaler.good_steps.copy_(state["good_steps"])
        self.episode = int(state["episode"])
        self._born[:] = state["born"].numpy()
        self._draw_instances()


def examples(dataset: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Inputs of a host [count, ...] and targets of the first training examples, repeated where there are fewer.

    On the CPU, for the trials before a run. Raises DataError if there are none.
    """
    split = dataset.split("train")
    index = torch.arange(count, device=split.x.device) % len(split)
    return dataset.as_inputs(split.x[index]).to(_CPU), split.y[index].to(_CPU)


@final
class SummedScores(NamedTuple):
    """Sums over a host's examples: the score of each coalition, the loss of the first one, and the weight.

    Of a host without coalitions they are not to be read.
    """

    score: Float64[Tensor, "N K"]
    loss: Float64[Tensor, " N"]
    weight: Float64[Tensor, " N"]


@torch.no_grad()
def sums(scores: Sequence[Scores], hosts: Int[Tensor, " g"], num_envs: int) -> Scores:
    """[N] from the rows of some hosts by number, float64; 0 for the others."""
    found = torch.zeros(num_envs, 3, dtype=torch.float64, device=hosts.device)
    if scores:
        rows = torch.stack([of_rows for of_host in scores for of_rows in of_host])
        found[hosts] = rows.sum(dim=1, dtype=torch.float64).view(len(scores), 3)
    return Scores(*found.unbind(dim=1))


def measured(objective: Objective, sums: SummedScores) -> ValidationPass:
    """The figure of merit of every coalition, and the mean loss of the first one."""
    points = objective.points(sums.score, sums.weight[:, None]).float()
    loss = (sums.loss / sums.weight).float()
    return ValidationPass(accuracy=finite_points(points), loss=loss.where(points[:, 0].isfinite(), torch.nan))


def finite_points(points: Tensor) -> Tensor:
    """0 where a figure of merit is not finite."""
    return points.where(points.isfinite(), 0.0)


def mean_factor(weight: Tensor) -> Tensor:
    """1 / weight: the gradient of a mean with respect to the summed losses; finite where nothing counts."""
    return weight.clamp(min=1e-30).reciprocal_()


def check_scores(objective: Objective, outputs: Tensor, targets: Tensor) -> None:
    """Try an objective on outputs [R, ...] and targets [R, ...].

    Raises:
        ConfigError: it cannot take them, its scores are not one finite number per row, its score alone differs, or its
            loss has no gradient.
    """
    name, shapes = type(objective).__name__, f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    try:
        scores = objective.scores(outputs.detach().requires_grad_(), targets)
    except ConfigError:
        raise  # says already which function of the user's is wrong
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ConfigError(
            f"objective {name} fails on {shapes} of type {targets.dtype} ({error}); the host, the targets of the data "
            "set and the objective must fit together."
        ) from error
    rows = (len(outputs),)
    for field, value in zip(Scores._fields, scores, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != rows or not value.is_floating_point():
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"objective {name} gives a {field} of {found} for {shapes}; expected one number per row, float32 "
                f"{rows}: sum over the axes of an example, and not over the batch (reduction='none')."
            )
        if not value.isfinite().all():
            raise ConfigError(
                f"the {field} of objective {name} is NaN or infinite for {shapes} of a new network; the outputs, and "
                "what the function returns, must be finite for every example."
            )
    with torch.no_grad():
        alone = objective.score(outputs, targets)
    if not torch.allclose(alone, scores.score, equal_nan=True):
        raise ConfigError(f"objective {name} gives other numbers in score() than as the score of scores().")
    if not scores.loss.requires_grad:
        raise ConfigError(
            f"the loss of objective {name} has no gradient; compute it from the outputs without detach or no_grad."
        )


class NetworkExecutor(ABC):
    """Hosts that are networks: `data` resets, saves and restores them; a subclass implements training and measuring."""

    def __init__(self, data: HostData) -> None:
        self.data, self.population = data, data.population
        self.host_params = self.population.host_params
        self.refused: dict[str, str] = {}
        """Blueprints whose hosts this executor leaves to PyTorch, with the reason."""

    @cached_property
    def costs(self) -> SeedCosts:
        """Of seeds and gates; counted when they are asked for."""
        return self.population.costs(self.data.dataset.sample(), self.data.batch_train)

    def working_bytes(self) -> int:
        """Memory that training and measuring need at once; 0 if they need what PyTorch needs."""
        return 0

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
    @torch.no_grad()
    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples; the rest of a row is not to be read."""
        data, num_columns = self.data, coalitions.sets.shape[1]
        sums = self.sum_scores(data.measured_batches, slots.alpha, data.coalition_sets(), num_columns)
        return measured(data.objective, sums)

    @torch.no_grad()
    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """Each host with its fossilized seeds alone."""
        fossils = [row[None] for row in self.data.structure.stage == SeedStage.FOSSILIZED]
        sums = self.sum_scores(self.data.evaluation(split), slots.alpha, fossils, 1)
        return measured(self.data.objective, sums)

    @final
    def apply_structure(self, structure: Structure) -> None:
        """Restore, clear, draw and snapshot rows as the lifecycle decided."""
        self.data.apply_structure(structure)


def train_pass(objective: Objective, total: Scores, gradients: GradientStatistics) -> TrainPass:
    """The results of a pass from scores [N] that are summed over it in float64."""
    return TrainPass(
        acc=finite_points(objective.points(total.score, total.weight).float()),
        loss=(total.loss / total.weight).float(),
        **{f"grad_{name}": value for name, value in vars(gradients).items()},
    )
