"""Data sets: checked, split, and resident on the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

SplitName = Literal["train", "val", "test"]
PlainValue = str | int | float | tuple["PlainValue", ...]
"""What an identity is made of: comparable, printable, the same in every process."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split, normalized; x[i] belongs to y[i], e.g. x [1077, 1, 8, 8] and y [1077] with values 0..9."""

    x: Float[Tensor, "n ..."]
    y: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> "Split":
        """The same examples on `device`; no copy where they are there already."""
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Three splits and where they came from.

    Attributes:
        identity: everything that decides the content (source, files and their sizes, split, normalization). Two data
            sets are the same if and only if their identities are equal; caches and reports use it whole.
        train: what hosts are trained on. val: what gates, rewards and policies may see.
        test: touched once, at the end of a run. num_classes: labels are 0 .. num_classes - 1.
    """

    identity: Mapping[str, PlainValue]
    train: Split
    val: Split
    test: Split
    num_classes: int

    def split(self, name: SplitName) -> Split:
        """One of the three splits."""
        splits: dict[SplitName, Split] = {"train": self.train, "val": self.val, "test": self.test}
        return splits[name]

    def to(self, device: torch.device) -> "Dataset":
        """The same data set on `device`; call it once and share the result, so that the data lie there once."""
        return Dataset(
            identity=self.identity,
            train=self.train.to(device),
            val=self.val.to(device),
            test=self.test.to(device),
            num_classes=self.num_classes,
        )
