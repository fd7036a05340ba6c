"""The native executor: every host is a list of instructions for compiled C++, and all hosts run in one call.

    train       each host passes over all its batches, forward, backward and optimizer step, while its weights and
                features stay in the cache of a core; threads take the next host when they have finished one
    evaluate    the forward pass of all distinct states of each host, a few examples at a time

Losses without rules are computed by PyTorch between the two halves of a program; batches that C++ cannot make
itself come from PyTorch. Results are those of the streamed executor up to rounding, and a host gets the same bits alone
as among others. Hosts with a blueprint without a rule are run as in the streamed executor.
"""

from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.messages import Scores, SlotState
from esper.tasks.datasets import Inputs, Split, SplitName
from esper.tasks.datasets.images import CropAndFlip, Pixels
from esper.tasks.losses import PADDING
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors import streamed
from esper.tolaria.executors.native.losses import CrossEntropy, Loss, TracedLoss, loss_of
from esper.tolaria.executors.native.machine import Examples, Machine, Spaces, Workload, working_numbers
from esper.tolaria.executors.native.networks import (
    NOTHING,
    NUM_FIELDS,
    Networks,
    population_spaces,
    structure_codes,
    training_spaces,
)
from esper.tolaria.executors.native.program import Space
from esper.tolaria.executors.native.sequences import pass_keys
from esper.tolaria.executors.native.trace import NoRuleError
from esper.tolaria.executors.network import HostData, NetworkExecutor, SummedScores, examples, mean_factor, train_pass
from esper.tolaria.executors.protocol import EvaluationSplit, TrainPass, ValidationPass
from esper.tolaria.executors.training import begin_hosts, begin_training, finish_training, gradient_statistics

_EXAMPLES = 64
"""Examples that are measured at a time, so that the features of a host stay in a core's cache."""
_CONVERTED = 2**26
"""Most numbers of a split that are stored in another type."""


class Stored(NamedTuple):
    """Inputs and labels of a split: float32, or bytes with a table; `Loss.stored`. `given`: both before conversion."""

    x: Tensor
    y: Tensor
    given: Split


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
        example, _ = examples(data.dataset, 2)
        self._networks = Networks(self.population, example)
        self._losses: dict[SplitName, Loss | None] = {}
        for split in ("train", "val"):
            self._check_labels(split)
        self.refused = self._networks.refused
        self._machine = Machine(threads=threads)
        self._decay = data.decay_mask.to(torch.float32)
        inputs, augmentation = data.dataset.inputs, data.dataset.augmentation
        self._table = None
        if type(inputs) is Pixels and data.dataset.train.x.dtype is torch.uint8:
            self._table = _values_of_bytes(inputs, example.shape[1])
        self._border = augmentation.padding if isinstance(augmentation, CropAndFlip) else 0
        self._stored: dict[tuple[int, int, int], Stored] = {}

    def intensity(self) -> float:
        """Multiplications for each number that is read or written, in training a host without seeds."""
        nothing = np.full((self.population.num_slots, NUM_FIELDS), NOTHING, dtype=np.int64)
        program = self._networks.training(nothing.tobytes(), self._loss("train"))
        return program.products / program.moved

    def working_bytes(self) -> int:
        """Working memory of a thread that trains and measures host 0; 0 if PyTorch runs it."""
        codes = [structure_codes(self.data.structure, training=training)[:1] for training in (True, False)]
        if not self._networks.can_run(codes[0]).all():
            return 0
        sets = self.data.coalition_sets()[0]
        training = self._networks.training(codes[0].tobytes(), self._loss("train"))
        measuring, _ = self._networks.measuring(codes[1].tobytes(), sets.tobytes(), len(sets), self._loss("val"))
        numbers = self.data.dataset.train.x[0].numel()
        sizes = (training, self.data.batch_train), (measuring, _EXAMPLES)
        return 4 * max(sum(working_numbers([program], lanes, numbers).values()) for program, lanes in sizes)

    def _loss(self, split: SplitName) -> Loss | None:
        """What programs compute of a split; None where PyTorch does, and from the pass on in which it has changed."""
        if split not in self._losses:
            objective = self.data.objective if split == "train" else self.data.objectives[split]
            try:
                self._losses[split] = loss_of(objective, self._networks.outputs, self.data.dataset.split(split).y)
            except NoRuleError:
                self._losses[split] = None
        loss = self._losses[split]
        if isinstance(loss, TracedLoss) and not loss.holds():
            loss = self._losses[split] = None
        return loss

    def _check_labels(self, split: SplitName) -> None:
        if not isinstance(self._loss("train"), CrossEntropy):
            return
        labels, classes = self.data.dataset.split(split).y, self._networks.outputs[-1]
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < PADDING or highest >= classes:
            raise DataError(
                f"the {split} split has labels from {lowest} to {highest}, but the host knows the classes 0 to "
                f"{classes - 1}; correct the data set, or the number of classes in the host of the task."
            )

    def _split_hosts(self, codes: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the hosts that run [N] those that compiled C++ runs, and those that PyTorch runs."""
        native = self._networks.can_run(codes)
        return np.flatnonzero(native & runs), np.flatnonzero(~native & runs)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        codes = structure_codes(data.structure, training=True)
        ours, others = self._split_hosts(codes, ~data.structure.stopped)
        if not ours.size:
            return streamed.train_epoch(data, t, slots)
        hosts, rows = begin_hosts(p), begin_training(p, data.structure)
        alpha, batches = slots.alpha.contiguous(), data.train_batches(t)
        lr_factors = data.lr_factors(t)
        lr_factors = torch.ones(p.num_envs, 1 + p.num_slots) if lr_factors is None else lr_factors.contiguous()
        loss = self._loss("train")
        work = Workload.of_each([self._networks.training(code.tobytes(), loss) for code in codes[ours]])
        constants = self._networks.constants.tensor()
        spaces = training_spaces(p, alpha, constants, hosts, rows, self._decay, lr_factors)
        totals = torch.zeros(p.num_envs, 3, dtype=torch.float64)
        spaces.rows(Space.TOTALS, totals)
        if others.size:  # first, because it clears the gradients of all hosts
            train = streamed.train_function(data, others.tolist(), hosts, rows, alpha)
            step = Workload.of_each([self._networks.step(code.tobytes()) for code in codes[others]])
            for x_NB, y_NB in batches:
                totals += torch.stack(train(x_NB, y_NB), dim=1)
                self._machine.run(step, spaces.of(others), batch=1)
        stored, keys = self._as_stored(batches, loss), self._keys(work, ours, len(batches))
        if keys is not None:
            spaces.rows(Space.KEYS, keys, hosts=ours)
        each = 0 if keys is None else keys.shape[1] // len(batches)
        if stored is None or loss is None:
            self._train_on_batches(batches, work, spaces.of(ours), totals, ours, each, loss)
        else:
            chosen = torch.from_numpy(ours)
            labels = stored.y if batches.targets is None else loss.stored(batches.targets[chosen])
            assert batches.order is not None
            for first, (some, size) in enumerate(_of_equal_size(batches.bounds)):
                order = batches.order[chosen, some].contiguous()
                moves = None if batches.drawn is None else batches.drawn[chosen, some].contiguous()
                own = batches.targets is not None
                of = labels[:, some].contiguous() if own else labels
                given = Examples(
                    stored.x, of, order, size, table=self._table, moves=moves, border=self._border, own_labels=own,
                    keys_each=each, first=first * (len(batches) - 1),
                )  # fmt: skip
                self._machine.run_batches(work, spaces.of(ours), given)
        outputs = train_pass(
            data.objective, Scores(*totals.unbind(dim=1)), gradient_statistics(p, data.structure, rows, hosts.grad)
        )
        p.host.finish(hosts)
        finish_training(p, rows)
        return outputs

    def _keys(self, work: Workload, ours: np.ndarray, batches: int) -> Tensor | None:
        """The keys of all masks of dropout in a pass [H, K]; None without dropout."""
        most = max(len(program.masks) for program in work.programs)
        if not most:
            return None
        p = self.population
        found = torch.zeros(len(ours), batches * most, dtype=torch.int64)
        for program in work.programs:
            some = np.flatnonzero([own is program for own in work.of_hosts])
            found[some] = pass_keys(p.moment, p.host_ids[torch.from_numpy(ours[some])], program.masks, batches, most)
        return found

    def _as_stored(self, batches: SharedBatchIterator, loss: Loss | None) -> Stored | None:
        """The examples of a split as C++ reads them; None where PyTorch makes the batches."""
        data, dataset = batches.data, self.data.dataset
        data.require_unchanged()  # integers are stored as floats
        known = type(dataset.augmentation) in (type(None), CropAndFlip) and (dataset.inputs is None) == (
            self._table is None
        )
        large = data.y.is_floating_point() and data.y.numel() > _CONVERTED
        if loss is None or not known or large or not data.x.is_contiguous():
            return None
        key = data.x.data_ptr(), data.y.data_ptr(), len(data)  # splits may share inputs; a step may measure a part
        if key not in self._stored:
            x, y = data.x, loss.stored(data.y)
            if self._table is None and x.dtype is not torch.float32:
                if x.is_floating_point() or x.numel() > _CONVERTED:
                    return None
                x = x.float()
            self._stored[key] = Stored(x, y, data)
        return self._stored[key]

    def _train_on_batches(
        self, batches: SharedBatchIterator, work: Workload, spaces: Spaces, totals: Tensor, ours: np.ndarray, keys: int,
        loss: Loss | None,
    ) -> None:  # fmt: skip
        """Train on batches that PyTorch makes; it computes the loss, too, if there is none here."""
        chosen = torch.from_numpy(ours)
        for number, (x_NB, y_NB) in enumerate(batches):
            x, y = (of[chosen].contiguous() for of in (x_NB.float(), y_NB))
            spaces.rows(Space.INPUTS, x)
            sizes = {"batch": x.shape[1], "numbers": x[0, 0].numel(), "first": number, "keys_each": keys}
            if loss is not None:
                y = loss.stored(y)
                spaces.rows(Space.LABELS, y)
                self._machine.run(work, spaces, **sizes, labels_each=y[0, 0].numel())
                continue
            for k, n in enumerate(ours.tolist()):
                self._train_by_pytorch_loss(work.part(k), spaces.of(np.array([k])), sizes, y[k], totals[n])

    def _train_by_pytorch_loss(
        self, work: Workload, spaces: Spaces, sizes: dict[str, int], y: Tensor, totals: Tensor
    ) -> None:
        """A host on a batch: outputs, their loss and its gradient in PyTorch, and the rest of the program."""
        outputs = torch.empty(sizes["batch"], *self._networks.outputs)
        spaces.rows(Space.OUTPUTS, outputs[None])
        sizes = sizes | {"outputs_each": outputs[0].numel()}
        self._machine.run(work.begun(), spaces, **sizes)
        scores = self.data.objective.scores(outputs.requires_grad_(), y)
        loss = scores.loss * mean_factor(scores.weight.sum())
        (grads,) = torch.autograd.grad(loss.sum(), outputs)
        spaces.rows(Space.OUT_GRADS, grads[None].contiguous())
        self._machine.run(work.rest(), spaces, **sizes, goes_on=True)
        totals += torch.stack([of.detach().sum(dtype=torch.float64) for of in scores])

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
        ours, others = self._split_hosts(codes, np.array([len(rows) > 0 for rows in sets]))
        found = streamed.sum_scores(self.data, others.tolist(), batches, alpha, sets, num_columns)
        if not ours.size:
            return found
        loss = self._loss(batches.split)
        measured = [self._networks.measuring(codes[n].tobytes(), sets[n].tobytes(), len(sets[n]), loss) for n in ours]
        work = Workload.of_each([program for program, _ in measured])
        most = max(max(states) for _, states in measured) + 1
        constants = self._networks.constants.tensor()
        spaces = population_spaces(p, alpha, constants).of(ours)
        totals = torch.zeros(len(ours), most, 3, dtype=torch.float64)
        spaces.rows(Space.TOTALS, totals)
        stored = self._as_stored(batches, loss)
        if stored is None or loss is None:
            distinct = [max(states) + 1 for _, states in measured]
            self._measure_batches(batches, work, spaces, totals, ours, distinct, loss)
        else:
            own, labels, order = torch.from_numpy(ours), stored.y, None
            if batches.chosen is not None:
                labels, order = loss.stored(batches.chosen.target[own]), batches.chosen.index[own]
            given = Examples(
                stored.x, labels, order, _EXAMPLES, padded=loss.pads, table=self._table, own_labels=order is not None
            )
            self._machine.run_batches(work, spaces, given)
        states = np.zeros((len(ours), num_columns), dtype=np.int64)
        for row, (_, of_coalition) in zip(states, measured, strict=True):
            row[: len(of_coalition)] = of_coalition
        index, own = torch.from_numpy(states), torch.from_numpy(ours)
        valid = torch.arange(num_columns) < torch.tensor([[len(sets[n])] for n in ours])
        found.score[own] = totals[..., 1].gather(1, index) * valid
        found.loss[own], found.weight[own] = (totals[..., k].gather(1, index[:, :1])[:, 0] for k in (0, 2))
        return found

    def _measure_batches(
        self, batches: SharedBatchIterator, work: Workload, spaces: Spaces, totals: Tensor, ours: np.ndarray,
        distinct: list[int], loss: Loss | None,
    ) -> None:  # fmt: skip
        """Measure the distinct states of each host on batches that PyTorch makes.

        It computes the scores, too, if there is no loss here.
        """
        objective, chosen = self.data.objectives[batches.split], torch.from_numpy(ours)
        for x, y in batches:
            each = batches.chosen is not None
            x = x.float()[chosen].contiguous() if each else x.float().expand(1, *x.shape).contiguous()
            y = y[chosen] if each else y.expand(1, *y.shape)
            place = spaces.rows if each else spaces.share
            place(Space.INPUTS, x)
            sizes = {"batch": x.shape[1], "numbers": x[0, 0].numel()}
            if loss is not None:
                y = loss.stored(y)
                place(Space.LABELS, y)
                self._machine.run(work, spaces, **sizes, labels_each=y[0, 0].numel())
                continue
            for k, states in enumerate(distinct):
                outputs = torch.empty(1, x.shape[1], states, *self._networks.outputs)
                own = spaces.of(np.array([k]))
                own.rows(Space.OUTPUTS, outputs)
                self._machine.run(work.part(k), own, **sizes, outputs_each=outputs[0, 0].numel())
                for state in range(states):
                    scores = objective.scores(outputs[0, :, state], y[k if each else 0])
                    totals[k, state] += torch.stack([of.sum(dtype=torch.float64) for of in scores])


def _values_of_bytes(inputs: Inputs, channels: int) -> Tensor:
    """[C, 256]: the inputs that the bytes of each channel become."""
    return inputs(torch.arange(256, dtype=torch.uint8).expand(channels, 256)[..., None])[..., 0].contiguous()


def _of_equal_size(bounds: list[tuple[int, int]]) -> Iterator[tuple[slice, int]]:
    """The examples that compiled C++ runs in batches of one size: all, or all but a larger last batch."""
    (begin, end), size = bounds[-1], bounds[0][1]
    if end - begin > size:
        yield slice(0, begin), size
        yield slice(begin, end), end - begin
    else:
        yield slice(0, end), size
