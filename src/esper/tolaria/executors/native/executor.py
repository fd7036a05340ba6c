"""The native executor: every host is a list of instructions for compiled C++, and all hosts run in one call.

    train       each host runs forward and backward on its whole batch while its features stay in the processor's cache;
                another call clips gradients and steps the optimizers of all hosts and seeds
    evaluate    the forward pass of all distinct states of each host, a few examples at a time

Results are those of the streamed executor up to rounding, and a host gets the same bits alone as among others. Hosts
with a blueprint without a rule (`seed_rules.py`, `trial.py`) are run as in the streamed executor.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from esper.kasmina.hosts.cnn import CNNHost
from esper.leyline.errors import DataError
from esper.leyline.messages import SlotState
from esper.leyline.objective import Scores
from esper.tasks.datasets import SplitName
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.native.kernel_library import stride_of
from esper.tolaria.executors.native.machine import Machine, Workload
from esper.tolaria.executors.native.networks import Space
from esper.tolaria.executors.native.optimizer_step import OptimizerStep
from esper.tolaria.executors.native.structures import (
    Programs,
    population_spaces,
    structure_codes,
    training_spaces,
)
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import EvaluationSplit, TrainPass
from esper.tolaria.executors.running_seeds import begin_training, finish_training
from esper.tolaria.executors.scoring import SummedScores
from esper.tolaria.executors.streamed import executor as streamed
from esper.tolaria.prefixes import plan_prefixes

_EXAMPLES = 64
"""Examples that are measured at a time, so that the features of a host stay in a core's cache."""


@final
class NativeExecutor(NetworkExecutor):
    """N hosts on a CPU in float32.

    `refused` maps each blueprint that compiled C++ cannot run to the reason. PyTorch runs the hosts that grow it.

    Raises:
        ConfigError: there is no C++ compiler, it failed, or the host has no rule.
        DataError: a label of the train or validation split has no class.
    """

    def __init__(self, data: HostData) -> None:
        super().__init__(data)
        assert isinstance(data.host, CNNHost), "choice.native_problem refuses other hosts"
        self._classes = data.host.spec.classes
        for split in ("train", "val"):
            self._check_labels(split)
        self._programs = Programs(self.population, *data.host.image_size)
        self.refused = self._programs.refused
        self._machine = Machine(threads=torch.get_num_threads())
        self._optimizer = OptimizerStep(self.population, data.decay_mask, self._machine)

    def _check_labels(self, split: SplitName) -> None:
        (lowest, highest), classes = self.data.label_range(split), self._classes
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"the {split} split has labels from {lowest} to {highest}, but the host knows the classes 0 to "
                f"{classes - 1}; correct the data set, or the number of classes in the host of the task."
            )

    def _split_hosts(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hosts that compiled C++ runs, and those that PyTorch runs."""
        native = self._programs.can_run(codes)
        return np.flatnonzero(native), np.flatnonzero(~native)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        codes = structure_codes(data.structure, training=True)
        ours, others = self._split_hosts(codes)
        if not ours.size:
            return streamed.train_epoch(data, t, slots)
        hosts = p.host.begin(torch.arange(p.num_envs), [p.host.params.shape[1]] * p.num_envs)
        rows = begin_training(p, data.structure)
        alpha = slots.alpha.contiguous()
        spaces = training_spaces(p, alpha, hosts, rows).of(ours)
        work = Workload.of_each([self._programs.training(code.tobytes()) for code in codes[ours]])
        train_others = streamed.train_function(data, others.tolist(), hosts, rows, slots.alpha) if others.size else None
        totals = torch.zeros(len(ours), 2, dtype=torch.float64)

        def train(x_NB: Tensor, y_NB: Tensor) -> Scores:
            assert (x_NB.dtype, y_NB.dtype) == (torch.float32, torch.int64), "the compiled code reads these types"
            lanes = y_NB.shape[1]
            work.check_batch(lanes)
            x_NB, y_NB = x_NB.contiguous(), y_NB.contiguous()
            their_results = None if train_others is None else train_others(x_NB, y_NB)
            spaces.rows(Space.IMAGES, x_NB, ours)
            spaces.rows(Space.LABELS, y_NB, ours)
            spaces.rows(Space.TOTALS, totals.zero_())
            self._machine.run(work, spaces, lanes)
            results = Scores(totals[:, 0].clone(), totals[:, 1].clone(), torch.full_like(totals[:, 0], lanes))
            return results if their_results is None else Scores(*_merged(ours, results, others, their_results))

        passed = run_epoch(
            data.train_batches(t),
            data.objective,
            train=train,
            statistics=lambda: gradient_statistics(p, data.structure, rows, hosts.grad),
            step=self._optimizer.of(data.structure, hosts, rows),
        )
        p.host.finish(hosts)
        finish_training(p, rows)
        return passed

    def committed_accuracy(self, split: EvaluationSplit, slots: SlotState) -> Float[Tensor, " N"]:
        """Each host with its fossilized seeds alone; raises DataError where a label has no class."""
        if split == "test":  # the other splits were checked when the executor was built
            self._check_labels(split)
        return super().committed_accuracy(split, slots)

    def sum_scores(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> SummedScores:
        """See `NetworkExecutor`."""
        p, alpha = self.population, alpha.contiguous()
        codes = structure_codes(self.data.structure, training=False)
        ours, others = self._split_hosts(codes)
        if not ours.size:
            return streamed.sum_scores(self.data, others.tolist(), batches, alpha, sets, num_columns)
        plans = [plan_prefixes(sets[n], self.data.execution_order) for n in ours]
        programs = [
            self._programs.measuring(codes[n].tobytes(), plan.steps) for n, plan in zip(ours, plans, strict=True)
        ]
        work, spaces = Workload.of_each(programs), population_spaces(p, alpha).of(ours)
        totals = torch.zeros(len(ours), max(plan.num_states for plan in plans), 2, dtype=torch.float64)
        spaces.rows(Space.TOTALS, totals)
        count = 0
        for x, y in batches:
            work.check_batch(len(y))
            for some_x, some_y in zip(x.split(_EXAMPLES), y.split(_EXAMPLES), strict=True):
                some_x, some_y = _padded(some_x, some_y)
                spaces.share(Space.IMAGES, some_x)
                spaces.share(Space.LABELS, some_y)
                self._machine.run(work, spaces, len(some_y))
            count += len(y)
        states = np.zeros((len(ours), num_columns), dtype=np.int64)
        for row, plan in zip(states, plans, strict=True):
            row[: len(plan.state_of_coalition)] = plan.state_of_coalition
        index = torch.from_numpy(states)
        hits, losses = totals[..., 1].gather(1, index), totals[..., 0].gather(1, index[:, :1])[:, 0]
        valid = torch.arange(num_columns) < torch.tensor([[len(sets[n])] for n in ours])
        found = SummedScores(hits * valid, losses, torch.tensor(float(count), dtype=torch.float64))
        if others.size:
            theirs = streamed.sum_scores(self.data, others.tolist(), batches, alpha, sets, num_columns)
            score, loss = _merged(ours, found[:2], others, theirs[:2])
            found = found._replace(score=score, loss=loss)
        return found


def _padded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Examples up to a multiple of the lanes, which is fastest; the added ones have label -1 and are not counted."""
    missing = stride_of(len(y)) - len(y)
    if missing:
        x, y = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))), torch.cat((y, y.new_full((missing,), -1)))
    return x.contiguous(), y.contiguous()


def _merged(
    ours: np.ndarray, results: tuple[Tensor, ...], others: np.ndarray, theirs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The results of all hosts, in order."""
    order = torch.from_numpy(np.argsort(np.concatenate((ours, others))))
    return tuple(torch.cat((a, b))[order] for a, b in zip(results, theirs, strict=True))
