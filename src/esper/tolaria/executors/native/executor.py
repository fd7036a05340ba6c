"""The native executor: every host a list of instructions for compiled C++, all hosts in one call.

    train       each host runs its whole batch, forward and backward, while its features stay in the processor's cache;
                then one clip and optimizer step for all hosts and seeds, in another call
    evaluate    the same way forward for all distinct states of each host, a few examples at a time

It gives what the streamed executor gives, up to rounding, and like it gives each host the bits it would have alone. A
host with a blueprint that has no rule (`seed_rules.py`), or whose rule disagrees with PyTorch (`trial.py`), is
run as in the streamed executor.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.messages import SlotState
from esper.tasks.datasets import SplitName
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.native.library import stride_of
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
from esper.tolaria.executors.streamed import executor as streamed
from esper.tolaria.prefixes import PrefixPlan, plan_prefixes

_EXAMPLES = 64
"""Examples of a measuring pass at a time, so that the features of a host stay in a core's cache."""


@final
class NativeExecutor(NetworkExecutor):
    """N hosts on a CPU in float32.

    Raises:
        ConfigError: there is no C++ compiler, or it failed, or the host has no rule.
        DataError: a label of the train or validation split has no class.
    """

    def __init__(self, data: HostData) -> None:
        super().__init__(data)
        for split in ("train", "val"):
            self._check_labels(split)
        self._programs = Programs(self.population, *data.image_size)
        self.refused = self._programs.refused
        """Why not, by the name of the blueprint, of those whose hosts are run by PyTorch."""
        self._machine = Machine(threads=torch.get_num_threads())
        self._optimizer_step = OptimizerStep(self.population, data.decay_mask, self._machine)

    def _check_labels(self, split: SplitName) -> None:
        (lowest, highest), classes = self.data.label_range(split), self.population.host_module.spec.classes
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"the {split} split has labels from {lowest} to {highest}, but the host knows the classes 0 to "
                f"{classes - 1}; correct the data set, or the number of classes in the host of the task."
            )

    def _shared_out(self, what: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hosts that are run here, and those that are not."""
        own = self._programs.can_run(what)
        return np.flatnonzero(own), np.flatnonzero(~own)

    # -- training ---------------------------------------------------------------------------------------------------

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        what = structure_codes(data.structure, training=True)
        here, others = self._shared_out(what)
        if not here.size:
            return streamed.train_epoch(data, t, slots)
        hosts = p.host.begin(torch.arange(p.num_envs), [p.host.params.shape[1]] * p.num_envs)
        rows = begin_training(p, data.structure)
        alpha = slots.alpha.contiguous()
        spaces = training_spaces(p, alpha, hosts, rows).of(here)
        work = Workload.of_each([self._programs.training(w) for w in what[here]])
        train_others = streamed.train_function(data, others.tolist(), hosts, rows, slots.alpha) if others.size else None
        totals = torch.zeros(len(here), 2, dtype=torch.float64)

        def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
            assert (x_NB.dtype, y_NB.dtype) == (torch.float32, torch.int64), "what the compiled code reads"
            lanes = y_NB.shape[1]
            work.check_batch(lanes)
            x_NB, y_NB = x_NB.contiguous(), y_NB.contiguous()
            theirs = None if train_others is None else train_others(x_NB, y_NB)
            spaces.rows(Space.IMAGES, x_NB, here)
            spaces.rows(Space.LABELS, y_NB, here)
            spaces.rows(Space.TOTALS, totals.zero_())
            self._machine.run(work, spaces, lanes)
            ours = (totals[:, 0] / lanes).float(), totals[:, 1].long()
            return ours if theirs is None else _merged(here, ours, others, theirs)

        passed = run_epoch(
            data.train_batches(t),
            p.num_envs,
            p.device,
            train=train,
            statistics=lambda: gradient_statistics(p, data.structure, rows, hosts.grad),
            step=self._optimizer_step.of(data.structure, hosts, rows),
        )
        p.host.finish(hosts)
        finish_training(p, rows)
        return passed

    # -- measuring --------------------------------------------------------------------------------------------------

    def committed_accuracy(self, split: EvaluationSplit, slots: SlotState) -> Float[Tensor, " N"]:
        """Each host with its fossilized seeds alone; raises DataError where a label has no class."""
        if split == "test":  # the other splits were checked when the executor was built
            self._check_labels(split)
        return super().committed_accuracy(split, slots)

    def count_correct(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `NetworkExecutor`."""
        p = self.population
        alpha = alpha.contiguous()
        what = structure_codes(self.data.structure, training=False)
        here, others = self._shared_out(what)
        if not here.size:
            return streamed.count_correct(self.data, others.tolist(), batches, alpha, sets, num_columns)
        plans = [plan_prefixes(rows, self.data.execution_order) for rows in sets]
        work = Workload.of_each([self._programs.measuring(what[n], plans[n]) for n in here])
        spaces = population_spaces(p, alpha).of(here)
        totals = torch.zeros(len(here), max(plan.num_states for plan in plans), 2, dtype=torch.float64)
        spaces.rows(Space.TOTALS, totals)
        count = 0
        for x, y in batches:
            work.check_batch(len(y))
            for some_x, some_y in zip(x.split(_EXAMPLES), y.split(_EXAMPLES), strict=True):
                some_x, some_y = _filled_up(some_x, some_y)
                spaces.share(Space.IMAGES, some_x)
                spaces.share(Space.LABELS, some_y)
                self._machine.run(work, spaces, len(some_y))
            count += len(y)
        states = torch.from_numpy(_states([plans[n] for n in here], num_columns))
        hits, losses = totals[..., 1].gather(1, states), totals[..., 0].gather(1, states[:, :1])[:, 0]
        valid = torch.arange(num_columns) < torch.tensor([[len(sets[n])] for n in here])
        found = (hits * valid).long(), losses
        if others.size:
            *theirs, _ = streamed.count_correct(self.data, others.tolist(), batches, alpha, sets, num_columns)
            found = _merged(here, found, others, (theirs[0], theirs[1]))
        return *found, count


def _filled_up(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Black images without a label, until rows of lanes are full: the machine is fastest so, and never counts them."""
    missing = stride_of(len(y)) - len(y)
    if missing:
        x, y = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))), torch.cat((y, y.new_full((missing,), -1)))
    return x.contiguous(), y.contiguous()


def _states(plans: list[PrefixPlan], num_columns: int) -> np.ndarray:
    """[H, K]: the final state of each coalition."""
    states = np.zeros((len(plans), num_columns), dtype=np.int64)
    for row, plan in zip(states, plans, strict=True):
        row[: len(plan.state_of_coalition)] = plan.state_of_coalition
    return states


def _merged(
    here: np.ndarray, ours: tuple[Tensor, Tensor], others: np.ndarray, theirs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows of all hosts, in order."""
    order = torch.from_numpy(np.argsort(np.concatenate((here, others))))
    first, second = (torch.cat((a, b.to(a.dtype)))[order] for a, b in zip(ours, theirs, strict=True))
    return first, second
