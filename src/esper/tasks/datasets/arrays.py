"""A data set from the user's own tensors, arrays or map-style `torch.utils.data.Dataset`.

x   float64, float16 -> float32      uint8 stays (give `inputs`, e.g. Pixels)      other integers -> int64 (tokens)
y   Classification   classes [n]     NextToken   tokens [n, T], -1 is padding      else      float32 or int64 [n, ...]

x and y may be tuples or dictionaries of such tensors, which are stored packed (`esper.leyline.structure`).
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, is_dataclass
from inspect import signature
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from esper.leyline.errors import DataError, in_words
from esper.leyline.messages import Objective
from esper.leyline.random import seeded_generators
from esper.leyline.structure import Form, Structure, flatten, unflatten
from esper.tasks.datasets import (
    Augmentation,
    Dataset,
    Inputs,
    PlainValue,
    RandomFunction,
    Split,
    Targets,
    stratified_split,
)
from esper.tasks.losses import PADDING, Classification, MeanSquaredError, NextToken, WithMetric


@runtime_checkable
class MapStyle(Sized, Protocol):
    """Examples by index, like a map-style `torch.utils.data.Dataset`: pairs (x, y) of tensors, arrays or numbers.

    Also (a, b, y) for x = (a, b), and dictionaries, whose "labels" or "label" is y.
    """

    def __getitem__(self, index: int, /) -> Any:  # noqa: ANN401 -- whatever the user's data set gives; checked here
        """The example at an index."""


Examples = tuple[Any, Any] | Mapping[str, Any] | MapStyle | DataLoader[Any]
"""(x [n, ...], y [n, ...]), a dictionary of arrays with "labels", a map-style data set, which is read once, or a
`DataLoader` of one."""
_TARGETS = ("labels", "label")
_READ_AGAIN = 64
"""Examples of a data set that are read twice, to see whether they differ."""


class Stored(NamedTuple):
    """Inputs and targets of one split as they are stored, and their structures (None for one tensor)."""

    x: Tensor
    y: Tensor
    x_structure: Structure | None
    y_structure: Structure | None


@final
@dataclass(frozen=True)
class StructuredInputs:
    """`Inputs` around the user's `function`, which takes and gives several tensors.

    `stored`, `given`: structures of an example as it is stored and as the network takes it, None for one tensor.
    """

    function: Callable[[Any], Any]
    stored: Structure | None
    given: Structure | None

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs as a network takes them, packed."""
        found = self.function(x if self.stored is None else self.stored.unpack(x))
        packed: Tensor = found if self.given is None else self.given.pack(found)
        return packed


@final
@dataclass(frozen=True)
class StructuredAugmentation:
    """`Augmentation` around the user's `function`, which takes and gives the structure of a stored example."""

    function: Augmentation
    stored: Structure

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n K"]:
        """See `Augmentation`."""
        return self.function.draw(run_seed, hosts, episode, t, count)

    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B K"]) -> Tensor:
        """See `Augmentation`."""
        return self.stored.pack(self.function(self.stored.unpack(x), drawn))


def augmentation_of(
    given: Augmentation | Callable[..., Any] | None, stored: Structure | None, targets: Structure | None, y: Tensor
) -> Augmentation | None:
    """The augmentation of examples and targets y [n, ...] that are stored in these structures (None for one tensor).

    A function of two arguments gets inputs and targets.
    """
    if given is None or isinstance(given, Augmentation):
        return given if given is None or stored is None else StructuredAugmentation(given, stored)
    if not _takes_two(given):
        return RandomFunction(given, stored)
    labels = () if y.is_floating_point() or targets is not None else (int(y.min()), int(y.max()))
    return RandomFunction(given, stored, Targets(targets, *labels))


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments."""
    try:
        found = signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    except ValueError:  # a built-in one
        return False
    needed = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(needed) == 2


def from_arrays(
    name: str,
    train: Examples | Stored,
    val: Examples | Stored | None,
    test: Examples | Stored | None,
    *,
    objective: Objective,
    inputs: Inputs | None = None,
    augmentation: Augmentation | Callable[..., Any] | None = None,
    class_names: Sequence[str] = (),
    run_seed: int,
) -> Dataset:
    """The data set of the user's examples.

    Tensors and arrays of the right type are shared, not copied: leave them unchanged afterwards.
    Where `test` or `val` is None, a tenth of the training examples (or of what is left of them) is split off at random,
    stratified by class where there are classes. Give them where examples depend on each other, as in a time series.

    Args:
        name: its name.
        train: training examples, as they are given or as `stored` gives them.
        val: validation examples, or None.
        test: test examples, or None.
        objective: decides what targets may be.
        inputs: applied to every batch on the device.
        augmentation: applied to training batches before `inputs`; a function of two arguments to their targets too.
        class_names: of the labels in order, or nothing.
        run_seed: key of the split.

    Raises:
        DataError: what is wrong, with the split, the field and the index of the first bad example.
    """
    given = {
        part: of if isinstance(of, Stored) else stored(f"{name}.{part}", of, inputs)
        for part, of in (("train", train), ("val", val), ("test", test))
        if of is not None
    }
    splits = {part: Split(of.x, _targets(f"{name}.{part}.y", of.y, objective)) for part, of in given.items()}
    for place in ((part, field) for part in splits for field in ("x", "y")):
        found, expected = (getattr(splits[part], place[1]) for part in (place[0], "train"))
        if (found.shape[1:], found.dtype) != (expected.shape[1:], expected.dtype):
            raise DataError(
                f"{name}.{'.'.join(place)} has examples {list(found.shape[1:])} of {found.dtype}, but those of train "
                f"are {list(expected.shape[1:])} of {expected.dtype}; make them equal."
            )
    identity: dict[str, PlainValue] = {"name": name, "source": "arrays"}
    identity |= {f"sha256_{part}": _digest(split) for part, split in splits.items()}
    if missing := [part for part in ("test", "val") if part not in splits]:
        splits |= _split_off(splits["train"], missing, objective, run_seed)
        identity["split_seed"] = run_seed
    identity["sizes"] = tuple(len(splits[part]) for part in ("train", "val", "test"))
    function = inputs.function if isinstance(inputs, StructuredInputs) else inputs
    identity |= {"inputs": _words(function), "augmentation": _words(augmentation)}
    structures = given["train"].x_structure, given["train"].y_structure
    if structures != (None, None):
        identity["structure"] = "{}, {}".format(*structures)
    _check_names(name, class_names, objective)
    return Dataset(
        identity=identity,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        num_classes=objective.num_classes if isinstance(objective, Classification) else 0,
        inputs=inputs,
        augmentation=augmentation_of(augmentation, *structures, splits["train"].y),
        class_names=tuple(class_names),
    )


def _check_names(name: str, names: Sequence[str], objective: Objective) -> None:
    if not names:
        return
    losses = objective.objective if isinstance(objective, WithMetric) else objective
    if not isinstance(losses, Classification):
        raise DataError(f"{name}: {len(names)} class names are given, but its targets are not classes; leave them out.")
    count = losses.num_classes
    if len(names) != count or len(set(names)) != count or not all(isinstance(one, str) for one in names):
        raise DataError(f"{name}: the class names are {list(names)}, expected {count} different texts, in order.")


def stored(place: str, examples: object, inputs: Inputs | None) -> Stored:
    """Inputs as they are stored and targets as they are given, on the CPU; `place` names them in messages.

    Raises:
        DataError: they are not examples; targets are not compared with an objective yet.
    """
    if isinstance(examples, Mapping):
        pair: tuple[Any, ...] = _pair(place, examples)
    else:
        pair = examples if isinstance(examples, tuple) else _stacked(place, examples)
    if len(pair) != 2:
        raise DataError(
            f"{place} has {len(pair)} part{'s' * (len(pair) != 1)}, expected inputs and targets: (x, y); several "
            "inputs are one part: ((a, b), y)."
        )
    x, y = (_tree(f"{place}.{field}", value, _tensor) for field, value in zip("xy", pair, strict=True))
    parts, targets = flatten(x)[0], flatten(y)[0]
    lists = any(isinstance(part, list) and not _is_numbers(part) for part in pair)
    out = " A list of arrays is several inputs; join one array per example with np.stack or torch.stack." * lists
    if any(values.dim() == 0 for values in (*parts, *targets)):
        raise DataError(f"{place} has a single number as x or y, expected examples along the first axis.{out}")
    if len({len(values) for values in (*parts, *targets)}) > 1:
        found = (" and ".join(dict.fromkeys(str(len(values)) for values in tensors)) for tensors in (parts, targets))
        raise DataError("{}: x has {} examples but y has {}; they must be equally many.{}".format(place, *found, out))
    if not parts or not targets or len(parts[0]) == 0:
        out = "" if place.endswith("train") else "; leave it out to split them off train"
        raise DataError(f"{place} is empty, expected examples{out}.")
    _tree(f"{place}.x", x, check_finite)
    _tree(f"{place}.y", y, check_finite)
    if isinstance(x, Tensor):
        x = _inputs(f"{place}.x", x, inputs)
    else:  # masks stay masks
        x = _tree(f"{place}.x", x, lambda name, of: of if of.dtype is torch.bool else _inputs(name, of, inputs))
    if not isinstance(y, Tensor):
        y = _tree(f"{place}.y", y, lambda _, of: of if of.is_floating_point() or of.dtype is torch.bool else of.long())
    of_x, of_y = (None if isinstance(tree, Tensor) else Structure.of(tree) for tree in (x, y))
    return Stored(x if of_x is None else of_x.pack(x), y if of_y is None else of_y.pack(y), of_x, of_y)


def _tree(place: str, value: Any, change: Callable[[str, Any], Any]) -> Any:  # noqa: ANN401 -- a tree of the user's
    """`change(place, part)` of each part of tuples, lists and dictionaries; a list of numbers is one part."""
    if isinstance(value, Mapping):
        if others := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{place} has the key {others[0]!r}; a key must be a name (text).")
        return {key: _tree(f"{place}[{key!r}]", part, change) for key, part in value.items()}
    if isinstance(value, tuple | list) and not _is_numbers(value):
        return tuple(_tree(f"{place}[{i}]", part, change) for i, part in enumerate(value))
    return change(place, value)


def _is_numbers(value: object) -> bool:
    """Whether a list holds numbers, or lists of them; only the first row is looked at."""
    return (
        isinstance(value, list) and bool(value) and (isinstance(value[0], bool | int | float) or _is_numbers(value[0]))
    )


def _pair(place: str, example: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- whatever the user's data set gives
    """Inputs and targets of an example or a batch."""
    if isinstance(example, Mapping):
        target = next((name for name in _TARGETS if name in example), None)
        if target is None or len(example) < 2:
            raise DataError(
                f"{place} is a dictionary of {', '.join(map(repr, example))}, expected inputs by name and 'labels'; or "
                "give a pair (x, y)."
            )
        return {name: part for name, part in example.items() if name != target}, example[target]
    if not isinstance(example, tuple | list) or len(example) < 2:
        raise DataError(f"{place} is of type {type(example).__name__}, expected a pair (x, y).")
    *x, y = example
    return x[0] if len(x) == 1 else tuple(x), y


def _stacked(place: str, examples: object) -> tuple[Any, Any]:
    """Inputs and targets of a map-style data set or of a `DataLoader` of one."""
    loader = examples if isinstance(examples, DataLoader) else None
    source = examples if loader is None else loader.dataset
    if not isinstance(source, MapStyle) or isinstance(source, IterableDataset):
        raise DataError(
            f"{place} is of type {type(source).__name__}, expected (x, y) or a data set with __len__ and __getitem__"
            f"{'; list(...) of it is one' * isinstance(source, Iterable)}."
        )
    collate: Callable[[list[Any]], Any] | None = None
    if loader is not None:
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            raise DataError(
                f"{place} is a DataLoader with a {type(loader.sampler).__name__}, which decides how often "
                "an example is seen; here each is trained on once per pass: give a data set, e.g. a Subset."
            )
        collate = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn

    def columns(items: list[Any]) -> tuple[Any, Any]:
        if collate is None:
            x, y = _columns(place, items)
        else:
            try:
                x, y = _pair(place, collate(items))
            except Exception as error:  # any error of the user's code
                raise DataError(f"the collate_fn of {place} fails: {in_words(error)}") from error
        return _tree(f"{place}.x", x, _tensor), _tree(f"{place}.y", y, _tensor)

    with seeded_generators(0):
        items = [_item(place, source, index) for index in range(len(source))]
        if not items:
            raise DataError(f"{place} is empty, expected examples.")
        found = columns(items)
        again = [_item(place, source, index) for index in range(min(len(items), _READ_AGAIN))]
        pairs = zip(*(flatten(columns(of))[0] for of in (items[: len(again)], again)), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        warnings.warn(
            f"{place} gives other examples when it is read again, as random transforms do, but it is read once: each "
            "example keeps what was drawn first. Leave random changes out of the data set and give them as "
            "augmentation=, a function of a batch that draws anew for each network and step.",
            stacklevel=2,
        )
    return found


def _item(place: str, source: MapStyle, index: int) -> Any:  # noqa: ANN401 -- whatever the user's data set gives
    try:
        return source[index]
    except Exception as error:  # any error of the user's code
        raise DataError(
            f"{place}[{index}] fails: {in_words(error)}. Its length is given as {len(source)}; correct the data set."
        ) from error


def _columns(place: str, items: list[Any]) -> tuple[Any, Any]:
    """The examples of a data set one below the other, as a tree for x and one for y."""
    rows: list[list[Tensor]] = []
    first: Form = None
    for index, item in enumerate(items):
        at = f"{place}[{index}]"
        x, y = (_tree(f"{at}.{field}", part, _tensor) for field, part in zip("xy", _pair(at, item), strict=True))
        tensors, form = flatten((x, y))
        rows.append(tensors)
        first = first or form
        if form != first:
            raise DataError(f"{at} has other parts than the first example; give all of them the same ones.")
        for tensor, expected in zip(tensors, rows[0], strict=True):
            if tensor.shape != expected.shape:
                field = "x" if any(tensor is part for part in flatten(x)[0]) else "y"
                raise DataError(
                    f"{at}.{field} has the shape {list(tensor.shape)}, but the first one has {list(expected.shape)}; "
                    "make all equal, e.g. resize or crop images, or pad sequences (in the collate_fn of a DataLoader)."
                )
    stacked: tuple[Any, Any] = unflatten(first, [torch.stack(column) for column in zip(*rows, strict=True)])
    return stacked


_OF_LABELS = "np.unique(labels, return_inverse=True)[1]"
"""What makes numbers of labels that are strings."""


def _tensor(place: str, value: object) -> Tensor:
    """A tensor on the CPU without gradient; floats as float32."""
    if hasattr(value, "to_numpy"):  # tables and columns of pandas and others
        table: Any = value
        value = array = table.to_numpy()
        if array.dtype.kind not in "biuf" and hasattr(table, "columns"):
            words = [name for name in table.columns if np.asarray(table[name]).dtype.kind not in "biuf"]
            raise DataError(
                f"{place} has columns that are not numbers: {', '.join(map(repr, words))}; give numbers for "
                "each: pandas.get_dummies(table, dtype=float), or for an embedding .astype('category').cat.codes; of "
                "another kind of numbers .astype(float)."
            )
    if np.ma.is_masked(value):
        raise DataError(
            f"{place} has masked values, which PyTorch does not know; fill them (.filled), or leave them out."
        )
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        native = value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.require(value, native, ["C", "W"]))  # copies only what PyTorch cannot share
    elif isinstance(value, bool | int | float | np.generic) or _is_numbers(value):
        try:
            value = torch.as_tensor(value)
        except (ValueError, TypeError) as error:
            raise DataError(f"{place} is a list that is not an array ({error}); make its rows equally long.") from error
    if not isinstance(value, Tensor):
        pictures = "the transform torchvision.transforms.PILToTensor()"
        ways = {"getbands": pictures, "toarray": ".toarray()", "encode": _OF_LABELS}
        kind = type(value).__name__
        way = next((way for name, way in ways.items() if hasattr(value, name)), "torch.as_tensor(...)")
        if isinstance(value, np.ndarray):
            of_kind = dict.fromkeys("OSU", f"{_OF_LABELS} where it holds labels, .astype(np.float32) where numbers")
            of_kind["c"] = "np.stack((z.real, z.imag), axis=1)"
            kind, way = f"ndarray of {value.dtype}", of_kind.get(value.dtype.kind, ".astype(np.float32)")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], str):
            way = _OF_LABELS
        raise DataError(f"{place} is of type {kind}, expected a tensor, an array or a number; convert it with {way}.")
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta or value.is_complex():
        raise DataError(
            f"{place} is a tensor of {value.dtype}, {value.layout} on {value.device}, expected a dense one of real "
            "numbers; use .to_dense() (sparse), .dequantize(), torch.view_as_real (complex), or load its values (meta)."
        )
    value = value.detach().cpu()
    return value.to(torch.float32) if value.is_floating_point() else value


def check_finite(place: str, values: Tensor) -> None:
    """Raise DataError if a value [n, ...] is NaN or infinite, or too large for int64."""
    if values.dtype is torch.uint64 and (values.view(torch.int64) < 0).any():
        raise DataError(f"{place} holds numbers of 2**63 or more, which int64 does not hold; give smaller ones.")
    if values.is_floating_point() and not values.isfinite().all():
        bad = (~values.isfinite().flatten(1).all(dim=1) if values.dim() > 1 else ~values.isfinite()).nonzero().flatten()
        others = f", and {len(bad) - 1} more" * (len(bad) > 1)
        columns = (~values.isfinite()).any(dim=0).nonzero().flatten().tolist() if values.dim() == 2 else []
        where = f" (column{'s' * (len(columns) > 1)} {', '.join(map(str, columns))})" * (0 < len(columns) < 11)
        raise DataError(
            f"{place}[{int(bad[0])}] is NaN or infinite (as float32){others}{where}; remove or replace such values."
        )


def _inputs(place: str, x: Tensor, inputs: Inputs | None) -> Tensor:
    if x.dtype == torch.uint8 and inputs is None:
        raise DataError(
            f"{place} holds bytes (uint8): give inputs that make numbers of them on the device, such as "
            "inputs=lambda x: x.float() / 255 for images, or convert it to floats (tokens to int64)."
        )
    return x if x.is_floating_point() or x.dtype == torch.uint8 else x.to(torch.int64)


def _targets(place: str, y: Tensor, objective: Objective) -> Tensor:
    match objective:
        case Classification(num_classes=classes):
            return _numbers(place, y, 1, 0, classes, "classes [n]")
        case NextToken(vocabulary=vocabulary):
            return _numbers(place, y, 2, PADDING, vocabulary, "tokens [n, T]")
        case MeanSquaredError():
            return y.to(torch.float32)
    return y if y.is_floating_point() else y.to(torch.int64)


def _numbers(place: str, y: Tensor, axes: int, least: int, beyond: int, words: str) -> Tensor:
    """Classes or tokens, int64."""
    if y.is_floating_point() or y.dim() != axes:
        raise DataError(
            f"{place} holds {y.dtype} {list(y.shape)}, expected {words} as integers; convert or reshape it."
        )
    y = y.to(torch.int64)
    if least == PADDING and (y == PADDING).all():
        raise DataError(f"{place} is {PADDING} (padding) everywhere, expected tokens that count; correct the targets.")
    wrong = ((y < least) | (y >= beyond)).nonzero()
    if len(wrong):
        index, expected = tuple(wrong[0].tolist()), f"{least}..{beyond - 1}" + " (-1 is padding)" * (least == PADDING)
        raise DataError(
            f"{place}[{', '.join(map(str, index))}] is {int(y[index])}, expected {expected}; correct it, "
            f"or the number of outputs of the network{'; labels that begin at 1 need y - 1' * (int(y.min()) == 1)}."
        )
    return y


def _split_off(train: Split, parts: Sequence[str], objective: Objective, run_seed: int) -> dict[str, Split]:
    """A tenth of the training examples for each of the parts, at least one, and "train", the rest."""
    sizes, left = [], len(train)
    for _ in parts:
        sizes.append(max(1, left // 10))
        left -= sizes[-1]
    labels, classes = torch.zeros(len(train), dtype=torch.int64), 1
    if isinstance(objective, Classification):
        labels, classes = train.y, objective.num_classes
    found = stratified_split(labels, sizes, classes, run_seed)
    return {part: Split(train.x[rows], train.y[rows]) for part, rows in zip((*parts, "train"), found, strict=True)}


def _digest(split: Split) -> str:
    """SHA-256 of shapes, types and values."""
    sha = hashlib.sha256()
    for values in (split.x, split.y):
        sha.update(f"{list(values.shape)} {values.dtype} ".encode())
        sha.update(values.contiguous().numpy().data)
    return sha.hexdigest()


def _words(change: object) -> str:
    """A data class with its values, another object by its name, the same in every process."""
    if change is None:
        return "none"
    if is_dataclass(change) and not isinstance(change, type):
        return repr(change)
    return getattr(change, "__qualname__", type(change).__qualname__)
