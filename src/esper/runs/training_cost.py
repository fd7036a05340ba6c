"""What a host costs to train and to measure, in floating-point operations, counted from the reports of its steps.

    training  = sum over steps: training examples * 3 * (host + its live seeds)
                (a backward pass counts as two forward passes, also through frozen layers)
    measuring = sum over steps: validation examples * sum over coalitions (host + the seeds that are on)

One forward pass is counted as in exported networks: matrix products and convolutions, a multiply-add as two. Executors
that share work between coalitions do less than `measuring`. N = hosts, S = slots, K = coalitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from esper.export.grown import GrownSeed
from esper.export.network import flops
from esper.export.plain_hosts import plain
from esper.kasmina.hosts.host import Host, HostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.manifest import GrowthManifest, planting_of
from esper.leyline.messages import EngineSpec
from esper.leyline.stages import Algorithm, SeedStage
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.batches import training_bounds
from esper.tolaria.state import RolloutStats, StepReport

BACKWARD = 2
"""Forward passes that one backward pass counts as."""
_TRAINED = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs of each host [N], float64: of one example in the kept network, of its training, of its measurements."""

    per_example: np.ndarray
    training: np.ndarray
    measuring: np.ndarray


@final
class ForwardFlops:
    """FLOPs of one forward pass of one example: of the host, and of what a seed adds to it.

    Args:
        host: architecture of the host.
        spec: of the engine.
        example: an input [1, ...] of the host.
    """

    def __init__(self, host: HostSpec, spec: EngineSpec, example: Tensor) -> None:
        self._spec, self._example = spec, example
        module = deterministic_build(lambda: host.build(spec.slot_ids, example))
        assert isinstance(module, Host), f"{type(module).__name__} is no host"
        self._module = module
        self._added = np.full((spec.num_slots, spec.num_blueprints, 2), np.nan)  # filled when a seed is first met
        self.host = flops(plain(module, []).module, module, example)

    def of_seeds(self, present: np.ndarray, blueprint: np.ndarray, gated: np.ndarray) -> np.ndarray:
        """What the seed in each slot [N, S] adds, with its gate if it has one, float64; 0 where none is `present`."""
        hosts, slots = np.nonzero(present)
        kinds = slots, blueprint[hosts, slots], gated[hosts, slots].astype(np.int64)
        for s, b, gate in sorted({*zip(*(kind.tolist() for kind in kinds), strict=True)}):
            if np.isnan(self._added[s, b, gate]):
                self._added[s, b, gate] = self._of_seed(s, b, Algorithm.GATE if gate else Algorithm.ADD)
        found = np.zeros(present.shape)
        found[hosts, slots] = self._added[kinds]
        return found

    def _of_seed(self, slot: int, blueprint: int, algorithm: Algorithm) -> int:
        seed = GrownSeed(self._spec.slot_ids[slot], self._spec.blueprint_names[blueprint], algorithm.name)
        return flops(plain(self._module, [seed]).module, self._module, self._example) - self.host


@final
class CostMeter:
    """Adds up the cost of episode 0; a step listener of the engine.

    Args:
        task: of the hosts. dataset: their data. spec: of the engine.
        seed_params: parameters of each blueprint by slot [S, P], from the executor.
        planted: structure that each host has from the first step, if any.
    """

    def __init__(
        self,
        task: TaskSpec,
        dataset: Dataset,
        spec: EngineSpec,
        seed_params: np.ndarray,
        planted: Sequence[GrowthManifest] = (),
    ) -> None:
        assert task.host is not None, f"task {task.name!r} has no networks"
        self._forward = ForwardFlops(task.host, spec, dataset.as_inputs(dataset.train.x[:1].to("cpu")))
        self._seed_params = seed_params
        self._train = training_bounds(task, dataset)[-1][1]
        self._val_N = np.full(spec.num_envs, len(dataset.val))
        if task.instances is not None:
            drawn = task.instances.draw(spec.run_seed, spec.host_ids(), 0, dataset)
            self._val_N = drawn.val.count.cpu().numpy()
        self.training, self.measuring = np.zeros(spec.num_envs), np.zeros(spec.num_envs)
        # what each slot adds to the forward passes of the next step
        self._seeds = np.zeros((spec.num_envs, spec.num_slots))
        if planted:
            blueprint, algorithm = planting_of(planted, spec)
            self._seeds = self._forward.of_seeds(blueprint >= 0, blueprint, algorithm == Algorithm.GATE)

    def __call__(self, report: StepReport) -> None:
        """Add the step of the report, which ran the structure of the report before it."""
        self.training += (1 + BACKWARD) * self._train * (self._forward.host + self._seeds.sum(axis=1))
        on_NK = (report.measured_sets * self._seeds[:, None]).sum(axis=2)
        self.measuring += self._val_N * np.where(report.measured_valid, self._forward.host + on_NK, 0.0).sum(axis=1)
        present = np.isin(report.stage, _TRAINED)
        without_gate = self._seed_params[np.arange(present.shape[1]), np.maximum(report.blueprint, 0)]
        self._seeds = self._forward.of_seeds(present, report.blueprint, report.params > without_gate)

    def cost(self, stats: RolloutStats) -> TrainingCost:
        """The cost of the finished episode and of the networks that it left."""
        kept = stats.stage == SeedStage.FOSSILIZED
        seeds = self._forward.of_seeds(kept, stats.blueprint, stats.algorithm == Algorithm.GATE)
        return TrainingCost(self._forward.host + seeds.sum(axis=1), self.training, self.measuring)
