"""Batches from a data set that is resident on the device.

    train        x [N, B, ...], y [N, B, ...]    each host in its own order, augmented
    validation   x [B, ...],    y [B, ...]       the same examples for all hosts, in a fixed order
    test         as validation                   at the end of a run only

In a task whose hosts differ each host has examples of its own (`choose`), so that validation and test batches are
x [N, B, ...] and y [N, B] too; a host with fewer examples than the others has rows that do not count.

A step of training takes the whole split, or `batches_per_step` batches of it. Then the stream of a host is its
permutations one after another, and a step continues where the last one ended:

    6 examples, batches of 2, 2 batches per step      pass 1: d a f c b e | pass 2: b f a e d c
    step                                                     1       2          3

N = hosts, B = batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.random import MAX_EPISODE_LENGTH, Stream, permutation, word_rows
from esper.tasks.datasets import Dataset, LastBatch, SplitName, augmented
from esper.tasks.instances import HostExamples


class Batch(NamedTuple):
    """Inputs of the hosts and their targets."""

    x: Tensor
    y: Tensor


class SharedBatchIterator:
    """Passes over one split for N hosts at once.

    Args:
        dataset: share `dataset.to(device)` between iterators, so that there is one copy on the device.
        num_envs: N.
        batch_size: examples per host and batch; the last batch of a whole split may differ.
        split: "train", "val" or "test".
        run_seed: key of the training order.
        device: device of the batches.
        batches_per_step: of training; None for the whole split. last_batch: of training on the whole split.

    Attributes:
        data: the examples as they are stored.
        order: indices of the examples [N, n] of the step that has begun, -1 where there is none. drawn: numbers of
            their augmentation [N, n, K], None without one.
        targets: [N, n] in the same order, None where they are those of the data.
        chosen: the examples of each host, None where all hosts have the same.

    Raises:
        ConfigError: a batch size below 1, or no batch of training.
        DataError: the split is empty.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_envs: int,
        batch_size: int,
        split: SplitName,
        run_seed: int,
        device: torch.device,
        *,
        batches_per_step: int | None = None,
        last_batch: LastBatch = "merge",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"the batch size of the {split} split is {batch_size}; it must be at least 1.")
        self.data = dataset.split(split).to(device)
        self.split: SplitName = split
        self._num_envs, self.batch_size, self._run_seed = num_envs, batch_size, run_seed
        self._shuffles = split == "train"
        self._as_inputs, self._augmentation = dataset.as_inputs, dataset.augmentation if self._shuffles else None
        whole = not self._shuffles or batches_per_step is None
        self._last: LastBatch = last_batch if self._shuffles else "keep"
        self._per_step = len(self.data) if whole else batch_size * (batches_per_step or 1)
        self._count = batch_bounds(self._per_step, batch_size, self._last)[-1][1]  # without examples that are left out
        self.order: Int[Tensor, "N n"] | None = None
        self.targets: Int[Tensor, "N n"] | None = None
        self.drawn: Int[Tensor, "N n K"] | None = None
        self.chosen: HostExamples | None = None
        self._orders = dict[int, Int[Tensor, "N n"]]()  # of the passes of the last step
        self._orders_of: tuple[int, Tensor] | None = None

    def choose(self, chosen: HostExamples) -> None:
        """Give each host its own examples of the split, from now on."""
        self.chosen, self._smallest = chosen, int(chosen.count.min())
        if not self._shuffles:
            self.order, self.targets, self._count = chosen.index, chosen.target, chosen.index.shape[1]

    def begin(self, t: int, episode: int, hosts: Int[Tensor, " N"]) -> None:
        """Draw the order and the augmentation of step t (from 1 on); `hosts` are global numbers.

        Raises:
            ConfigError: so many passes over the split in one episode that their random streams would overlap.
        """
        assert hosts.shape == (self._num_envs,)
        if not self._shuffles:
            return
        if self._augmentation is not None:
            self.drawn = self._augmentation.draw(self._run_seed, hosts, episode, t, self._count)
        if self.chosen is not None:
            self.order, self.targets = self._own_order(self.chosen, t, episode, hosts)
            return
        size, seed = len(self.data), self._run_seed
        first = (t - 1) * self._per_step
        last = first + self._count
        passes = range(first // size + 1, (last - 1) // size + 2)
        check_passes(passes[-1], t, size)
        # a pass over many examples takes longer to order than a step of few batches to train on them
        if self._orders_of is None or self._orders_of[0] != episode or self._orders_of[1] is not hosts:
            self._orders, self._orders_of = {}, (episode, hosts)
        for number in passes:
            if number not in self._orders:
                drawn = permutation(seed, Stream.TRAIN_ORDER, hosts, size, episode=episode, t=number)
                self._orders[number] = drawn
        self._orders = {number: self._orders[number] for number in passes}
        orders = list(self._orders.values())
        skipped = first - (passes[0] - 1) * size
        ordered = orders[0] if len(orders) == 1 else torch.cat(orders, dim=1)
        self.order = ordered[:, skipped : skipped + self._count]

    def _own_order(
        self, chosen: HostExamples, t: int, episode: int, hosts: Int[Tensor, " N"]
    ) -> tuple[Int[Tensor, "N n"], Int[Tensor, "N n"]]:
        """Examples and targets of step t: the stream of a host goes through permutations of its own examples."""
        most, size_N1 = chosen.index.shape[1], chosen.count[:, None]
        place_Nn = torch.arange((t - 1) * self._count, t * self._count, device=hosts.device)
        first_N1 = (t - 1) * self._count // size_N1
        number_Nn = place_Nn // size_N1 - first_N1
        there = torch.arange(most, device=hosts.device) < size_N1
        passes = 2 + (self._count - 1) // self._smallest
        check_passes(t * self._count // self._smallest + 1, t, self._smallest)
        orders = []
        for number in range(passes):
            key = word_rows(
                self._run_seed, Stream.TRAIN_ORDER, hosts, most, episode=episode, t=first_N1[:, 0] + number + 1
            )
            orders.append(key.masked_fill(~there, 2**32).argsort(dim=1, stable=True))
        chosen_Nn = torch.cat(orders, dim=1).gather(1, number_Nn * most + place_Nn % size_N1)
        return chosen.index.gather(1, chosen_Nn), chosen.target.gather(1, chosen_Nn)

    def __len__(self) -> int:
        """Batches per step of training, or per pass."""
        return len(self.bounds)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first example of each batch, and the one after its last."""
        return batch_bounds(self._count, self.batch_size, self._last)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of one step or pass; raises DataError if examples were changed in place."""
        assert self.order is not None or not self._shuffles, "begin() comes before a training step"
        self.data.require_unchanged()
        for start, stop in self.bounds:
            if self.order is None:
                yield Batch(self._as_inputs(self.data.x[start:stop]), self.data.y[start:stop])
            else:
                yield self._gather(self.order, slice(start, stop))
        self.data.require_unchanged()

    def _gather(self, order: Int[Tensor, "N n"], some: slice) -> Batch:
        index_NB = order[:, some].clamp(min=0)  # what does not count has a target that says so
        x, y = (
            of.index_select(0, index_NB.reshape(-1)).view(*index_NB.shape, *of.shape[1:])
            for of in (self.data.x, self.data.y)
        )
        if self.targets is not None:
            y = self.targets[:, some]
        if self.drawn is not None and self._augmentation is not None:
            x, y = augmented(self._augmentation, x, y, self.drawn[:, some])
        # [N * B, ...], because a function of the user's is given batches [B, ...] elsewhere too
        return Batch(self._as_inputs(x.flatten(0, 1)).unflatten(0, index_NB.shape), y)


def batch_bounds(count: int, size: int, last: LastBatch) -> list[tuple[int, int]]:
    """Where batches of `size` begin and end in `count` examples; raises ConfigError if all of them are left out."""
    starts = list(range(0, count, size))
    if last == "merge" and size > 1 and len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    elif last == "drop" and count % size:
        if count < size:
            raise ConfigError(
                f"last_batch is 'drop', and {count} training examples do not fill a batch of {size}, so nothing would "
                "be trained on; lower the batch size, or choose 'merge' or 'keep'."
            )
        count = starts.pop()
    return list(zip(starts, [*starts[1:], count], strict=True))


def check_passes(number: int, t: int, size: int) -> None:
    """Raise ConfigError where so many passes over a split would reuse random numbers."""
    if number > MAX_EPISODE_LENGTH:
        raise ConfigError(
            f"step {t} reaches pass {number} over the {size} training examples; an episode can make "
            f"{MAX_EPISODE_LENGTH}. Lower batches_per_step, the batch size or the episode length."
        )
