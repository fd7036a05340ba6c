"""The native executor: every host is a list of instructions for compiled C++, and all hosts run in one call.

    train       each host passes over all its batches, forward, backward and optimizer step, while its weights and
                features stay in the cache of a core; threads take the next host when they have finished one
    evaluate    the forward pass of all distinct states of each host, a few examples at a time

Results are those of the streamed executor up to rounding, and a host gets the same bits alone as among others. Hosts
with a blueprint without a rule are run as in the streamed executor.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CNNHost
from esper.leyline.errors import DataError
from esper.leyline.messages import SlotState
from esper.leyline.objective import Scores
from esper.tasks.datasets import Inputs, SplitName
from esper.tasks.datasets.images import CropAndFlip
from esper.tasks.losses import Classification
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import plan_prefixes
from esper.tolaria.executors import streamed
from esper.tolaria.executors.native.machine import Examples, Machine, Spaces, Workload, working_numbers
from esper.tolaria.executors.native.networks import (
    Programs,
    Space,
    population_spaces,
    structure_codes,
    training_spaces,
)
from esper.tolaria.executors.network import HostData, NetworkExecutor, SummedScores, train_pass
from esper.tolaria.executors.protocol import EvaluationSplit, TrainPass, ValidationPass
from esper.tolaria.executors.training import begin_hosts, begin_training, finish_training, gradient_statistics

_EXAMPLES = 64
"""Examples that are measured at a time, so that the features of a host stay in a core's cache."""


@final
class NativeExecutor(NetworkExecutor):
    """N hosts on a CPU in float32.

    `threads` share the hosts; results do not depend on their number. `refused` maps each blueprint that compiled C++
    cannot run to the reason. PyTorch runs the hosts that grow it.

    Raises:
        ConfigError: there is no C++ compiler, it failed, or the host has no rule.
        DataError: a label of the train or validation split has no class.
    """

    def __init__(self, data: HostData, *, threads: int = 1) -> None:
        super().__init__(data)
        assert isinstance(data.host, CNNHost), "choice.native_problem refuses other hosts"
        assert isinstance(data.objective, Classification), "choice.native_problem refuses other objectives"
        self._classes = data.host.spec.classes
        for split in ("train", "val"):
            self._check_labels(split)
        self._programs = Programs(self.population, *data.host.image_size, data.objective.label_smoothing)
        self.refused = self._programs.refused
        self._machine = Machine(threads=threads)
        inputs, augmentation = data.dataset.inputs, data.dataset.augmentation
        self._table = None if inputs is None else _values_of_bytes(inputs, data.host.spec.in_channels)
        self._border = augmentation.padding if isinstance(augmentation, CropAndFlip) else 0
        self._decay = data.decay_mask.to(torch.float32)

    def working_bytes(self) -> int:
        """Working memory of a thread that trains and measures host 0; 0 if PyTorch runs it."""
        codes = [structure_codes(self.data.structure, training=training)[:1] for training in (True, False)]
        if not self._programs.can_run(codes[0]).all():
            return 0
        steps = plan_prefixes(self.data.coalition_sets()[0], self.data.execution_order).steps
        training = self._programs.training(codes[0].tobytes())
        measuring = self._programs.measuring(codes[1].tobytes(), steps)
        numbers, sizes = (
            self.data.dataset.train.x[0].numel(),
            ((training, self.data.batch_train), (measuring, _EXAMPLES)),
        )
        return 4 * max(sum(working_numbers([program], lanes, numbers).values()) for program, lanes in sizes)

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
        hosts, rows = begin_hosts(p), begin_training(p, data.structure)
        alpha, batches = slots.alpha.contiguous(), data.train_batches(t)
        lr_factors = data.lr_factors(t)
        lr_factors = torch.ones(p.num_envs, 1 + p.num_slots) if lr_factors is None else lr_factors.contiguous()
        spaces = training_spaces(p, alpha, hosts, rows, self._decay, lr_factors)
        totals = torch.zeros(p.num_envs, 2, dtype=torch.float64)
        if others.size:  # first, because it clears the gradients of all hosts
            train = streamed.train_function(data, others.tolist(), hosts, rows, alpha)
            work = Workload.of_each([self._programs.step(code.tobytes()) for code in codes[others]])
            totals[others] = self._train_in_pytorch(batches, train, work, spaces.of(others))
        spaces.rows(Space.TOTALS, totals)
        work = Workload.of_each([self._programs.training(code.tobytes()) for code in codes[ours]])
        assert batches.order is not None
        chosen, stored = torch.from_numpy(ours), batches.data
        labels = stored.y if batches.targets is None else batches.targets[chosen]
        for some, size in _of_equal_size(batches.bounds):
            order = batches.order[chosen, some].contiguous()
            moves = None if batches.drawn is None else batches.drawn[chosen, some].contiguous()
            of = labels if batches.targets is None else labels[:, some].contiguous()
            examples = Examples(stored.x, of, order, size, table=self._table, moves=moves, border=self._border)
            self._machine.run_batches(work, spaces.of(ours), examples)
        count = torch.full((p.num_envs,), float(batches.order.shape[1]), dtype=torch.float64)
        outputs = train_pass(
            data.objective,
            Scores(totals[:, 0], totals[:, 1], count),
            gradient_statistics(p, data.structure, rows, hosts.grad),
        )
        p.host.finish(hosts)
        finish_training(p, rows)
        return outputs

    def _train_in_pytorch(
        self, batches: SharedBatchIterator, train: streamed.TrainBatch, step: Workload, spaces: Spaces
    ) -> Tensor:
        """Train the other hosts; the summed losses and the correct answers of each, [H, 2]."""
        totals = torch.zeros(len(spaces.begin), 2, dtype=torch.float64)
        for x_NB, y_NB in batches:
            scores = train(x_NB, y_NB)
            self._machine.run(step, spaces, 1)
            totals += torch.stack((scores.loss, scores.score), dim=1)
        return totals

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """Each host with its fossilized seeds alone; raises DataError where a label has no class."""
        if split == "test":  # the other splits were checked when the executor was built
            self._check_labels(split)
        return super().committed(split, slots)

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
        spaces, stored = population_spaces(p, alpha).of(ours), batches.data
        totals = torch.zeros(len(ours), max(plan.num_states for plan in plans), 2, dtype=torch.float64)
        spaces.rows(Space.TOTALS, totals)
        labels, order, weight = stored.y, None, torch.full((p.num_envs,), float(len(stored)), dtype=torch.float64)
        if batches.chosen is not None:
            own = torch.from_numpy(ours)
            labels, order, weight = batches.chosen.target[own], batches.chosen.index[own], batches.chosen.count.double()
        examples = Examples(stored.x, labels, order, _EXAMPLES, padded=True, table=self._table)
        self._machine.run_batches(Workload.of_each(programs), spaces, examples)
        states = np.zeros((len(ours), num_columns), dtype=np.int64)
        for row, plan in zip(states, plans, strict=True):
            row[: len(plan.state_of_coalition)] = plan.state_of_coalition
        index = torch.from_numpy(states)
        hits, losses = totals[..., 1].gather(1, index), totals[..., 0].gather(1, index[:, :1])[:, 0]
        valid = torch.arange(num_columns) < torch.tensor([[len(sets[n])] for n in ours])
        found = SummedScores(hits * valid, losses, weight)
        if others.size:
            theirs = streamed.sum_scores(self.data, others.tolist(), batches, alpha, sets, num_columns)
            score, loss = _merged(ours, found[:2], others, theirs[:2])
            found = found._replace(score=score, loss=loss)
        return found


def _values_of_bytes(inputs: Inputs, channels: int) -> Tensor:
    """[C, 256]: the inputs that the bytes of each channel become."""
    return inputs(torch.arange(256, dtype=torch.uint8).expand(channels, 256)[..., None])[..., 0].contiguous()


def _merged(
    ours: np.ndarray, results: tuple[Tensor, ...], others: np.ndarray, theirs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The results of all hosts, in order."""
    order = torch.from_numpy(np.argsort(np.concatenate((ours, others))))
    return tuple(torch.cat((a, b))[order] for a, b in zip(results, theirs, strict=True))


def _of_equal_size(bounds: list[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """The examples that compiled C++ runs in batches of one size: all, or all but a larger last batch."""
    (begin, end), size = bounds[-1], bounds[0][1]
    if end - begin > size:
        yield slice(0, begin), size
        yield slice(begin, end), end - begin
    else:
        yield slice(0, end), size
