"""Data sets: checked, split, and resident on the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.random import Stream, seeded_generators, word_rows
from esper.leyline.structure import Structure, described

SplitName = Literal["train", "val", "test"]
LastBatch = Literal["merge", "drop", "keep"]
"""Of a last batch of training that is not full: one example joins the batch before it; it is left out; it stays."""
PlainValue = str | int | float | tuple["PlainValue", ...]
"""What an identity is made of: comparable, printable, the same in every process."""
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split as they are stored; x[i] belongs to y[i].

    Any dtype: e.g. x [45000, 3, 32, 32] uint8 with y [45000] classes, or x [n, T] tokens with y [n, T] next tokens.
    """

    x: Shaped[Tensor, "n ..."] = field(repr=False)
    y: Shaped[Tensor, "n ..."] = field(repr=False)
    _versions: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._found())

    def __reduce__(self) -> tuple[type["Split"], tuple[Tensor, Tensor]]:
        return Split, (self.x, self.y)  # in another process the tensors begin with version 0

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> "Split":
        """The same examples on `device`, contiguous; no copy where they are so already."""
        self.require_unchanged()
        return Split(self.x.to(device).contiguous(), self.y.to(device).contiguous())

    def require_unchanged(self) -> None:
        """Raise DataError if an operation in place has changed the examples since this split was made."""
        if self._found() != self._versions:
            raise DataError(
                "the examples of the task were changed in place (x.mul_(2), x += 1, x[0] = 0) after the task was made; "
                "give the task a copy (x.clone()), and let network, loss and metric work on copies of what they get."
            )

    def _found(self) -> tuple[int, ...]:
        return tuple(-1 if values.is_inference() else values._version for values in (self.x, self.y))


@runtime_checkable
class Inputs(Protocol):
    """How stored examples become inputs of a host, on the device: e.g. `Pixels`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs [..., *input] of stored examples [..., *stored]."""


def applied(function: Callable[[Any], Any], x: Any, name: str = "inputs") -> Any:  # noqa: ANN401 -- what users take
    """`function(x)`; raises DataError if it fails."""
    try:
        return function(x)
    except Exception as error:  # any error of the user's code
        raise DataError(f"{name}= fails on {described(x)}: {type(error).__name__}: {error}") from error


def inputs_of(inputs: Inputs | None, x: Tensor) -> Tensor:
    """`inputs` of a copy of stored examples, or these; raises DataError if it fails or gives something else."""
    if inputs is None:
        return x
    found = applied(inputs, x.clone())
    if not isinstance(found, Tensor) or found.shape[:1] != x.shape[:1]:
        kind = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DataError(f"inputs= gives {kind} for examples {list(x.shape)}; it must give an input for each of them.")
    return found


@runtime_checkable
class Augmentation(Protocol):
    """A random change of training examples with keyed draws: e.g. `CropAndFlip`."""

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n K"]:
        """Numbers of the changes of `count` examples of each host in a pass, from the stream AUGMENTATION."""

    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B K"]) -> Tensor:
        """Changed copies of stored examples [N, B, ...]."""


@final
@dataclass(frozen=True)
class RandomFunction:
    """`Augmentation` by a user's function of a batch [B, ...], in the structure `stored` (None for one tensor).

    It draws from the global generators, which are seeded for each host, step and batch.
    """

    function: Callable[[Any], Any]
    stored: Structure | None = None

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n 1"]:
        """A number per example, on the CPU; the first one of a batch is its seed."""
        return word_rows(run_seed, Stream.AUGMENTATION, hosts.to("cpu"), count, episode=episode, t=t)[..., None]

    @torch.no_grad()
    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B 1"]) -> Tensor:
        """See `Augmentation`; raises DataError if the function fails, or changes a shape or dtype."""
        changed = []
        for x_B, seed in zip(x, drawn[:, 0, 0].tolist(), strict=True):
            given = x_B.clone() if self.stored is None else self.stored.unpack(x_B.clone())
            with seeded_generators(seed, x.device):
                changed.append(applied(self._changed, given, "augmentation"))
        return torch.stack(changed)

    def _changed(self, given: Any) -> Tensor:  # noqa: ANN401 -- what the user's function takes
        expected = Structure.of(given, axes=0)
        found = self.function(given)
        if Structure.of(found, axes=0) != expected:
            raise ValueError(f"it gives {described(found)}; keep shapes and dtypes, and convert in inputs=")
        return found if self.stored is None else self.stored.pack(found)


@runtime_checkable
class Tokenizer(Protocol):
    """Turns texts into tokens 0 .. vocabulary - 1. Instances are plain data."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""

    @property
    def end(self) -> int:
        """The token that ends a text."""

    @property
    def identity(self) -> PlainValue:
        """What decides the tokens of a text."""

    def encode(self, texts: Iterable[bytes]) -> Iterator[Tokens]:
        """Tokens of each text, without the end."""

    def check(self, path: Path, content: bytes) -> None:
        """Raises DataError if the content of a file cannot be encoded."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Three splits and where they came from.

    Attributes:
        identity: everything that decides the content (source, files and their sizes, split, normalization). Two data
            sets are the same if and only if their identities are equal; caches and reports use it whole.
        train: what hosts are trained on. val: what gates, rewards and policies may see.
        test: touched once, at the end of a run. num_classes: labels are 0 .. num_classes - 1; 0 where they are no
            classes. inputs: applied to every batch; None if examples are stored as inputs.
        augmentation: applied to training batches before `inputs`; None for no change.
        class_names: of the labels in order; empty where they are not known. tokenizer: of a text; None for others.
            Both are for exported networks; no result depends on them.
    """

    identity: Mapping[str, PlainValue]
    train: Split
    val: Split
    test: Split
    num_classes: int = 0
    inputs: Inputs | None = None
    augmentation: Augmentation | None = None
    class_names: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    def split(self, name: SplitName) -> Split:
        """One of the three splits."""
        splits: dict[SplitName, Split] = {"train": self.train, "val": self.val, "test": self.test}
        return splits[name]

    def as_inputs(self, x: Tensor) -> Tensor:
        """Inputs of a host for some stored examples, which stay as they are: `inputs` may edit what it gets."""
        return inputs_of(self.inputs, x)

    def to(self, device: torch.device) -> "Dataset":
        """The same data set on `device`; call it once and share the result, so that the data lie there once."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


def data_label(identity: Mapping[str, object]) -> str:
    """What reports call a data set: its name, and which copy it is if it says so, e.g. "CIFAR-10 (JPEG q75)"."""
    return f"{identity['name']} ({identity['copy']})" if "copy" in identity else str(identity["name"])
