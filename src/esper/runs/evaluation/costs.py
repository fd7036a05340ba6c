"""What training and measuring hosts costs in FLOPs.

    training  = sum over steps: training examples * 3 * (host + its live seeds)
                (a backward pass counts as two forward passes, also through frozen layers)
    measuring = sum over steps: validation examples * sum over coalitions (host + the seeds that are on)

One forward pass is counted in floating-point operations, as everywhere (`kasmina.parameters.flops`). Executors that
share work between coalitions do less than `measuring`.

Shape legend: N = hosts, S = slots, K = coalitions, T = steps.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from esper.kasmina.parameters.flops import BACKWARD
from esper.leyline.architecture import Architecture, architecture_arrays
from esper.leyline.lifecycle import TRAINED, Algorithm, SeedStage
from esper.leyline.messages import EngineSpec, SeedCosts
from esper.runs.evaluation.results import TrainingCost
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.executors.choice import training_bounds
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats, StepReport


@final
class CostMeter:
    """Adds up the cost of episode 0; a step listener of the engine.

    Args:
        task: of the hosts. dataset: their data. spec: of the engine.
        costs: of seeds and gates, from the executor.
        architectures: the architecture that each host has from the first step, if any.
        measured_share: of the validation examples, in each step.

    Attributes:
        host: FLOPs of one example in a host alone. train: training examples of a step; val_N: validation examples.
    """

    def __init__(
        self,
        task: TaskSpec,
        dataset: Dataset,
        spec: EngineSpec,
        costs: SeedCosts,
        architectures: Sequence[Architecture] = (),
        measured_share: float = 1.0,
    ) -> None:
        self._spec = spec
        self._seed_params, self._seed_flops, self._gate_flops, host = host_read(
            costs.seed_params, costs.seed_flops, costs.gate_flops, costs.host_flops
        )
        self._columns, self.host = np.arange(spec.num_slots), float(host)
        self.train = training_bounds(task, dataset)[-1][1]
        self.val_N = np.full(spec.num_envs, len(dataset.val))
        if task.instances is not None:
            drawn = task.instances.draw(spec.run_seed, spec.host_ids(), 0, dataset)
            self.val_N = drawn.val.count.cpu().numpy()
        self.val_N = np.ceil(self.val_N * measured_share)
        self.training, self.measuring = list[np.ndarray](), list[np.ndarray]()  # of each step so far
        # which hosts take the next step, and what each slot adds to their forward passes
        self._runs = np.ones(spec.num_envs, dtype=np.bool_)
        self._seeds = np.zeros((spec.num_envs, spec.num_slots))
        if architectures:
            blueprint, algorithm = architecture_arrays(architectures, spec)
            self._seeds = self.of_seeds(blueprint >= 0, blueprint, algorithm == Algorithm.GATE)

    def of_seeds(self, present: np.ndarray, blueprint: np.ndarray, gated: np.ndarray) -> np.ndarray:
        """FLOPs that the seed in each slot [N, S], with its gate if it has one, adds to a forward pass of an example.

        Float64; 0 where none is `present`.
        """
        added = self._seed_flops[self._columns, np.maximum(blueprint, 0)] + gated * self._gate_flops
        found: np.ndarray = np.where(present, added, 0).astype(np.float64)
        return found

    def per_example(self, blueprint: np.ndarray) -> np.ndarray:
        """FLOPs of one example in hosts [N] with these seeds [N, S], without gates; -1 where there is none."""
        seeds: np.ndarray = self.of_seeds(blueprint >= 0, blueprint, np.zeros_like(blueprint)).sum(axis=1)
        return self.host + seeds

    def __call__(self, report: StepReport) -> None:
        """Add the step of the report, which ran the structure of the report before it."""
        self.training.append(self.of_structures / self._spec.episode_length * self._runs)
        on_NK = (report.measured_sets * self._seeds[:, None]).sum(axis=2)
        self.measuring.append(self.val_N * np.where(report.measured_valid, self.host + on_NK, 0.0).sum(axis=1))
        self._runs = ~report.stopped
        present = np.isin(report.stage, tuple(TRAINED))
        without_gate = self._seed_params[self._columns, np.maximum(report.blueprint, 0)]
        self._seeds = self.of_seeds(present, report.blueprint, report.params > without_gate)

    @property
    def of_structures(self) -> np.ndarray:
        """FLOPs [N] of training the hosts for an episode, with the structures that they have now."""
        per_example: np.ndarray = self.host + self._seeds.sum(axis=1)
        return self._spec.episode_length * (1 + BACKWARD) * self.train * per_example

    def cost(self, stats: RolloutStats) -> TrainingCost:
        """The cost of the finished episode and of the networks that it left."""
        kept = stats.stage == SeedStage.FOSSILIZED
        seeds = self.of_seeds(kept, stats.blueprint, stats.algorithm == Algorithm.GATE)
        return TrainingCost(self.host + seeds.sum(axis=1), np.stack(self.training), np.stack(self.measuring))
