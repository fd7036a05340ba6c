"""Batches from a data set that is resident on the device.

    train        x [N, B, ...], y [N, B]    each host in its own order, keyed by (host, episode, t)
    validation   x [B, ...],    y [B]       the same examples for all hosts, in a fixed order
    test         as validation              at the end of a run only

N = hosts, B = batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.errors import ConfigError, DataError
from esper.leyline.random import Stream, permutation
from esper.tasks.datasets import Dataset, SplitName


class Batch(NamedTuple):
    """Examples and their labels."""

    x: Tensor
    y: Tensor


class SharedBatchIterator:
    """Passes over one split for N hosts at once.

    Args:
        dataset: share `dataset.to(device)` between iterators, so that there is one copy on the device.
        num_envs: N.
        batch_size: examples per host and batch; the last batch of a pass may be shorter.
        split: "train", "val" or "test".
        run_seed: key of the training order.
        device: device of the batches.
        run_finished: must be True for the test split, which must not influence a run.

    Raises:
        ConfigError: a batch size below 1, or the test split before the end.
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
        run_finished: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"the batch size of the {split} split is {batch_size}; it must be at least 1.")
        if split == "test" and not run_finished:
            raise ConfigError("the test split may be read at the end of a run only; use the validation split before.")
        self.split = dataset.split(split).to(device)
        if len(self.split) == 0:
            raise DataError(f"the {split} split of {dataset.identity.get('name')} is empty; expected examples.")
        self._num_envs, self.batch_size, self._run_seed = num_envs, batch_size, run_seed
        self._shuffles = split == "train"
        self._order: Tensor | None = None

    @property
    def order(self) -> Int[Tensor, "N n"]:
        """The examples of this training pass, for each host in the order in which it takes them."""
        assert self._order is not None, "begin() comes before a training pass"
        return self._order

    def begin(self, t: int, episode: int, hosts: Int[Tensor, " N"]) -> None:
        """Draw the order of the pass of step t; `hosts` are global numbers."""
        assert hosts.shape == (self._num_envs,)
        if self._shuffles:
            self._order = permutation(self._run_seed, Stream.TRAIN_ORDER, hosts, len(self.split), episode=episode, t=t)

    def __len__(self) -> int:
        """Batches per pass."""
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of one pass: new memory for training, else views of the resident data."""
        assert self._order is not None or not self._shuffles, "begin() comes before a training pass"
        for start in range(0, len(self.split), self.batch_size):
            stop = start + self.batch_size
            if self._order is None:
                yield Batch(self.split.x[start:stop], self.split.y[start:stop])
            else:
                yield self._gather(self._order[:, start:stop])

    def _gather(self, index_NB: Tensor) -> Batch:
        flat = index_NB.reshape(-1)
        x = self.split.x.index_select(0, flat).view(*index_NB.shape, *self.split.x.shape[1:])
        y = self.split.y.index_select(0, flat).view(index_NB.shape)
        return Batch(x, y)
