"""Data sets: checked, split, and resident on the device; where their files lie, and stratified splits."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from esper.leyline.errors import DataError, in_words, option, refusing
from esper.leyline.files import open_to_read
from esper.leyline.random import Stream, permutation, seeded_generators, word_rows
from esper.leyline.structure import Structure, described

SplitName = Literal["train", "val", "test"]
LastBatch = Literal["merge", "drop", "keep"]
"""Of a last batch of training that is not full: one example joins the batch before it; it is left out; it stays."""
PlainValue = str | int | float | tuple["PlainValue", ...]
"""What an identity is made of: comparable, printable, the same in every process."""

Inputs = Callable[[Tensor], Tensor]
"""How stored examples [..., *stored] become inputs [..., *input] of a host, on the device: e.g. `Pixels`."""
FEW = 50
"""Validation examples below which one of them changes the figure of merit by more than 2 %."""
_REPEATED = 0.05
"""Share of the examples of a split that are in train as well above which this is said."""
_KEYED = 64
"""Numbers of an example, at equal distances, by which it is found in another split."""
_COMPARED = 65_536
"""Numbers of a split that are compared to see whether it was changed."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split as they are stored; x[i] belongs to y[i].

    Any dtype: e.g. x [45000, 3, 32, 32] uint8 with y [45000] classes, or x [n, T] tokens with y [n, T] next tokens.
    """

    x: Shaped[Tensor, "n ..."] = field(repr=False)
    y: Shaped[Tensor, "n ..."] = field(repr=False)
    _versions: tuple[int | bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._found())

    def __reduce__(self) -> tuple[type["Split"], tuple[Tensor, Tensor]]:
        return Split, (self.x, self.y)  # in another process the tensors begin with version 0

    def __len__(self) -> int:
        return len(self.y)

    @property
    def answers(self) -> int:
        """Single answers that are measured: of texts the tokens, else the examples."""
        return len(self) if self.y.is_floating_point() else self.y.numel()

    def to(self, device: torch.device) -> "Split":
        """The same examples on `device`, contiguous; no copy where they are so already."""
        self.require_unchanged()
        return Split(self.x.to(device).contiguous(), self.y.to(device).contiguous())

    def part(self, share: float) -> "Split":
        """A share of the examples, rounded up, evenly spaced among them."""
        return self.spaced(math.ceil(len(self) * share))

    def spaced(self, count: int) -> "Split":
        """So many of the examples, at equal distances from the first on."""
        place = torch.arange(count, device=self.y.device) * len(self) // count
        return Split(self.x[place], self.y[place])

    def require_unchanged(self) -> None:
        """Raise DataError if the examples were changed in place since this split was made.

        PyTorch counts its own operations; of arrays that share the memory some examples are compared.
        """
        if self._found() != self._versions:
            raise DataError(
                "the examples of the task were changed in place (x.mul_(2), x += 1, x[0] = 0) after the task was made; "
                "give the task a copy (x.clone() or x.copy()), and let network, loss and metric work on copies of what "
                "they get."
            )

    def _found(self) -> tuple[int | bytes, ...]:
        both = self.x, self.y
        versions = [-1 if values.is_inference() else values._version for values in both]
        return *versions, *(_some(values) for values in both if values.device.type == "cpu")


def _some(values: Tensor) -> bytes:
    """Examples at equal distances, as bytes."""
    count = max(1, _COMPARED * len(values) // max(values.numel(), 1))
    some = values.detach()[:: max(1, len(values) // count)].flatten().contiguous()
    return hashlib.sha1(some.view(torch.uint8).numpy().data, usedforsecurity=False).digest()


def applied(function: Callable[[Any], Any], x: Any, name: str = "inputs") -> Any:  # noqa: ANN401 -- what users take
    """`function(x)`; raises DataError if it fails."""
    try:
        return function(x)
    except Exception as error:  # any error of the user's code
        raise DataError(f"{name}= fails on {described(x)}: {in_words(error)}") from error


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

    It draws from the global generators, which are seeded for each host, step and batch. Where `targets` is given, the
    function takes and gives these too, so that a crop moves a mask with its picture.
    """

    function: Callable[..., Any]
    stored: Structure | None = None
    targets: "Targets | None" = None

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n 1"]:
        """A number per example, on the CPU; the first one of a batch is its seed."""
        return word_rows(run_seed, Stream.AUGMENTATION, hosts.to("cpu"), count, episode=episode, t=t)[..., None]

    @torch.no_grad()
    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B 1"]) -> Tensor:
        """See `Augmentation`; raises DataError if the function fails, or changes a shape or dtype."""
        assert self.targets is None, "they would stay as they are"
        return torch.stack([self._changed((x_B,), seed)[0] for x_B, seed in zip(x, _seeds(drawn), strict=True)])

    @torch.no_grad()
    def of_pairs(self, x: Tensor, y: Tensor, drawn: Int[Tensor, "N B 1"]) -> tuple[Tensor, Tensor]:
        """Examples and their targets [N, B, ...], changed together; DataError as `__call__`, and for new labels."""
        assert self.targets is not None, "the function does not take them"
        pairs = [self._changed(pair, seed) for *pair, seed in zip(x, y, _seeds(drawn), strict=True)]
        x, y = (torch.stack(of) for of in zip(*pairs, strict=True))
        self.targets.check(y)
        return x, y

    def _changed(self, parts: Sequence[Tensor], seed: int) -> list[Tensor]:
        """The inputs of a batch, or inputs and targets, as the function changes them."""
        structures = self.stored, self.targets and self.targets.structure
        pairs = list(zip((part.clone() for part in parts), structures, strict=False))
        given = [part if structure is None else structure.unpack(part) for part, structure in pairs]
        with seeded_generators(seed, parts[0].device):
            found = applied(self._of_same_structure, tuple(given) if len(given) > 1 else given[0], "augmentation")
        changed = found if len(given) > 1 else (found,)
        return [
            of if structure is None else structure.pack(of) for of, (_, structure) in zip(changed, pairs, strict=True)
        ]

    def _of_same_structure(self, given: Any) -> Any:  # noqa: ANN401 -- what the user's function takes
        expected = Structure.of(given, axes=0)
        found = self.function(given) if self.targets is None else self.function(*given)
        if Structure.of(found, axes=0) != expected:
            raise ValueError(f"it gives {described(found)}; keep shapes and dtypes, and convert in inputs=")
        return found


def augmented(augmentation: Augmentation, x: Tensor, y: Tensor, drawn: Int[Tensor, "N B K"]) -> tuple[Tensor, Tensor]:
    """Examples and their targets [N, B, ...], changed by what was drawn for them."""
    if isinstance(augmentation, RandomFunction) and augmentation.targets is not None:
        return augmentation.of_pairs(x, y, drawn)
    return augmentation(x, drawn), y


def _seeds(drawn: Int[Tensor, "N B 1"]) -> list[int]:
    """Of the batch of each host."""
    seeds: list[int] = drawn[:, 0, 0].tolist()
    return seeds


@final
@dataclass(frozen=True)
class Targets:
    """Targets that an augmentation may change: their structure (None for one tensor), and the labels that there are."""

    structure: Structure | None
    least: int | None = None
    most: int | None = None

    def check(self, y: Tensor) -> None:
        """Raise DataError for a label that no example has."""
        if self.least is not None and self.most is not None and bool(((y < self.least) | (y > self.most)).any()):
            raise DataError(
                f"augmentation= gives targets from {int(y.min())} to {int(y.max())}, but those of the examples are "
                f"{self.least} to {self.most}; fill what it moves in with one of these."
            )


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
        class_names: of the labels in order; empty where they are not known. tokenizer: of a text (`text.Tokenizer`);
            None for others. Both are for exported networks; no result depends on them.
    """

    identity: Mapping[str, PlainValue]
    train: Split
    val: Split
    test: Split
    num_classes: int = 0
    inputs: Inputs | None = None
    augmentation: Augmentation | None = None
    class_names: tuple[str, ...] = ()
    tokenizer: object = None

    def split(self, name: SplitName) -> Split:
        """One of the three splits; raises DataError if it is empty."""
        found = {"train": self.train, "val": self.val, "test": self.test}[name]
        if not len(found):
            raise DataError(f"the {name} split of {self.identity.get('name')} is empty; expected examples.")
        return found

    def as_inputs(self, x: Tensor) -> Tensor:
        """Inputs of a host for some stored examples, which stay as they are: `inputs` may edit what it gets."""
        return inputs_of(self.inputs, x)

    def sample(self, count: int = 8) -> Tensor:
        """Inputs of a host [count, ...] from all over the training examples, on the CPU."""
        split = self.split("train")
        rows = (2 * torch.arange(count, device=split.x.device) + 1) * len(split) // (2 * count)
        return self.as_inputs(split.x[rows]).to("cpu")

    def to(self, device: torch.device) -> "Dataset":
        """The same data set on `device`; call it once and share the result, so that the data lie there once."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


def cautions(dataset: Dataset) -> Iterator[str]:
    """A note for each reason why figures on the validation examples say little."""
    val = dataset.val
    if val.answers < FEW:
        yield (
            f"note: measurements are coarse, because val has {len(val)} example{'s' * (len(val) != 1)}; give at least "
            f"{FEW}, or more of train"
        )
    trained, measured = (set(split.y.unique().tolist()) for split in (dataset.train, val))
    if dataset.num_classes and (missing := sorted(trained - measured)):
        some = f"{', '.join(map(str, missing[:5]))}{', ...' * (len(missing) > 5)}"
        yield (
            f"note: measurements are coarse, because {len(missing)} of the classes of train ({some}) are not in val; "
            "give a val that has all of them, or none, so that a part of each is split off"
        )
    for name, split in (("val", val), ("test", dataset.test)):
        if dataset.num_classes and (unknown := sorted({*split.y.unique().tolist()} - trained)):
            yield f"note: class {unknown[0]} of {name} is not in train, so it cannot be learned; give examples of it"
    seen = set(_keys(dataset.train))
    for name, split in (("val", val), ("test", dataset.test)):
        if len(split) and (same := sum(key in seen for key in _keys(split))) > _REPEATED * len(split):
            yield (
                f"note: {same:,} of the {len(split):,} examples of {name} are in train as well, so figures on them may "
                "show what was learned by heart; give others if you can"
            )


def _keys(split: Split) -> Iterator[int]:
    """Of each example a number that is the same for equal inputs, and as good as never for others."""
    flat = split.x.flatten(1) if split.x.dim() > 1 else split.x[:, None]
    count = min(flat.shape[1], _KEYED)
    some = flat[:, torch.arange(count, device=flat.device) * flat.shape[1] // max(count, 1)].detach().cpu()
    return (hash(example.tobytes()) for example in some.contiguous().view(torch.uint8).numpy())


def data_label(identity: Mapping[str, object]) -> str:
    """What reports call a data set: its name, and which copy it is if it says so, e.g. "CIFAR-10 (JPEG q75)"."""
    return f"{identity['name']} ({identity['copy']})" if "copy" in identity else str(identity["name"])


# -- files of a data set -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of one data set.

    Attributes:
        name: name of the data set.
        alternatives: complete sets of files, each as paths below the data folder; the first one that exists is read.
        or_gz: whether FILE.gz may take the place of FILE.
    """

    name: str
    alternatives: tuple[tuple[str, ...], ...]
    or_gz: bool = False

    def find(self, data_dir: Path | None) -> tuple[Path, ...]:
        """The files of one alternative, in its order.

        Raises:
            DataError: no folder is named, it does not exist, or a file is missing in it.
        """
        if data_dir is None:
            raise DataError(
                f"{self.name} is read from files but no folder was named; name the one that holds them with "
                f"{option('data_dir')}, data_dir in a configuration file, or the environment variable ESPER_DATA."
            )
        if not data_dir.is_dir():
            raise DataError(f"{data_dir}: there is no such folder; name the one that holds {self.expected}.")
        candidates = [tuple(self._existing(data_dir / name) for name in names) for names in self.alternatives]
        best = max(candidates, key=lambda files: sum(path.is_file() for path in files))
        missing = [str(path) for path in best if not path.is_file()]
        if missing:
            raise DataError(
                f"{data_dir}: found no {', no '.join(missing)}; expected {self.expected}; put it there or name another "
                "folder."
            )
        return best

    def folder(self, data_dir: Path | None) -> Path | None:
        """The folder in which `find` finds the first file, or None."""
        try:
            return self.find(data_dir)[0].parent
        except DataError:
            return None

    @property
    def expected(self) -> str:
        """The files in words, e.g. "text/a.txt or a.txt", "a, b (or .gz) in the data folder or its folder c"."""
        if len(self.alternatives[0]) == 1:
            return " or ".join(name for (name,) in self.alternatives)
        names = ", ".join(PurePath(name).name for name in self.alternatives[0])
        folders = [str(PurePath(first).parent) for first, *_ in self.alternatives]
        inner = " or ".join(folder for folder in folders if folder != ".")
        return f"{names}{' (or .gz)' * self.or_gz} in the data folder or its folder {inner}"

    def _existing(self, path: Path) -> Path:
        compressed = path.with_name(f"{path.name}.gz")
        return compressed if self.or_gz and compressed.is_file() and not path.is_file() else path


def in_folders(names: tuple[str, ...], *folders: str) -> tuple[tuple[str, ...], ...]:
    """Alternatives of the same files in any of the folders."""
    return tuple(tuple(str(PurePath(folder) / name) for name in names) for folder in folders)


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises DataError if it cannot be read."""
    way = "name another file or check permissions"
    with refusing(DataError, f"{path}: cannot be read", way), open_to_read(path) as file:
        content = file.read()
    return content


# -- stratified splits -------------------------------------------------------------------------------------------------


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers that add up to `total` in proportion to `weights` (Hamilton's method).

    Each gets the floor of its exact share; what is left goes to the largest fractions, the earlier one on ties.
    Integer arithmetic, so that shares do not depend on rounding: share_i = total * w_i / sum(w).
    """
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    fractions = [total * weight % whole for weight in weights]
    by_fraction = sorted(range(len(weights)), key=lambda i: (-fractions[i], i))
    for i in by_fraction[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def stratified_split(
    labels: Int[Tensor, " n"], sizes: Sequence[int], num_classes: int, run_seed: int
) -> tuple[Int[Tensor, " _"], ...]:
    """Indices of `len(sizes)` disjoint parts and, as the last part, of the rest; each ascending.

    The examples of a class are dealt in the order of one random permutation, which depends on the run seed alone:
    all hosts and episodes of a run share the split.

    Args:
        labels: class of each example, 0 .. num_classes - 1.
        sizes: examples of each part; every class gives its largest-remainder share of what is left.
        num_classes: number of classes.
        run_seed: key of the permutation.

    Raises:
        DataError: the parts would leave no example over.
    """
    if sum(sizes) >= len(labels):
        raise DataError(
            f"{len(labels)} examples cannot be split into parts of {', '.join(map(str, sizes))} with a rest; "
            "give more of them, or val and test."
        )
    order = permutation(run_seed, Stream.SPLIT, torch.zeros(1, dtype=torch.int64), len(labels))[0]
    order = order.to(labels.device)
    left = [order[labels[order] == c] for c in range(num_classes)]
    parts = []
    for size in sizes:
        shares = largest_remainder(size, [len(indices) for indices in left])
        parts.append(torch.cat([indices[:share] for indices, share in zip(left, shares, strict=True)]))
        left = [indices[share:] for indices, share in zip(left, shares, strict=True)]
    parts.append(torch.cat(left))
    return tuple(part.sort().values for part in parts)
