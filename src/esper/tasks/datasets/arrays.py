"""A data set from the user's own tensors, arrays or map-style `torch.utils.data.Dataset`.

x   float64, float16 -> float32      uint8 stays (give `inputs`, e.g. Pixels)      other integers -> int64 (tokens)
y   Classification   classes [n]     NextToken   tokens [n, T], -1 is padding      else      float32 or int64 [n, ...]
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from esper.leyline.errors import DataError
from esper.leyline.objective import Objective
from esper.tasks.datasets import Augmentation, Dataset, Inputs, PlainValue, Split
from esper.tasks.datasets.splits import stratified_split
from esper.tasks.objectives import PADDING, Classification, MeanSquaredError, NextToken, WithMetric


@runtime_checkable
class MapStyle(Sized, Protocol):
    """Examples by index, like a map-style `torch.utils.data.Dataset`: pairs (x, y) of tensors, arrays or numbers."""

    def __getitem__(self, index: int, /) -> Any:  # noqa: ANN401 -- whatever the user's data set gives; checked here
        """The example at an index."""


Array = Tensor | np.ndarray
Examples = tuple[Array, Array] | MapStyle
"""(x [n, ...], y [n, ...]), or a map-style data set, which is read once: random transforms are drawn once."""


def from_arrays(
    name: str,
    train: Examples,
    val: Examples | None,
    test: Examples | None,
    *,
    objective: Objective,
    inputs: Inputs | None = None,
    augmentation: Augmentation | None = None,
    class_names: Sequence[str] = (),
    run_seed: int,
) -> Dataset:
    """The data set of the user's examples.

    Tensors and arrays of the right type are shared, not copied: leave them unchanged afterwards.
    Where `test` or `val` is None, a tenth of the training examples (or of what is left of them) is split off at random,
    stratified by class where there are classes. Give them where examples depend on each other, as in a time series.

    Args:
        name: its name.
        train: training examples.
        val: validation examples, or None.
        test: test examples, or None.
        objective: decides what targets may be.
        inputs: applied to every batch on the device.
        augmentation: applied to training batches before `inputs`.
        class_names: of the labels in order, or nothing.
        run_seed: key of the split.

    Raises:
        DataError: what is wrong, with the split, the field and the index of the first bad example.
    """
    given = {
        part: examples for part, examples in (("train", train), ("val", val), ("test", test)) if examples is not None
    }
    splits = {part: _split(f"{name}.{part}", examples, objective, inputs) for part, examples in given.items()}
    for part, split in splits.items():
        _check_shapes(f"{name}.{part}", split, splits["train"])
    identity: dict[str, PlainValue] = {"name": name, "source": "arrays"}
    identity |= {f"sha256_{part}": _digest(split) for part, split in splits.items()}
    if missing := [part for part in ("test", "val") if part not in splits]:
        splits |= _split_off(splits["train"], missing, objective, run_seed)
        identity["split_seed"] = run_seed
    identity["sizes"] = tuple(len(splits[part]) for part in ("train", "val", "test"))
    identity |= {"inputs": _words(inputs), "augmentation": _words(augmentation)}
    classes = objective.num_classes if isinstance(objective, Classification) else 0
    _check_names(name, class_names, objective)
    return Dataset(
        identity=identity,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        num_classes=classes,
        inputs=inputs,
        augmentation=augmentation,
        class_names=tuple(class_names),
    )


def _check_names(name: str, names: Sequence[str], objective: Objective) -> None:
    if not names:
        return
    losses = objective.objective if isinstance(objective, WithMetric) else objective
    if not isinstance(losses, Classification):
        raise DataError(f"{name}: {len(names)} class names are given, but its targets are no classes; leave them out.")
    count = losses.num_classes
    if len(names) != count or len(set(names)) != count or not all(isinstance(one, str) for one in names):
        raise DataError(f"{name}: the class names are {list(names)}, expected {count} different texts, in order.")


def _split(place: str, examples: object, objective: Objective, inputs: Inputs | None) -> Split:
    """Checked examples of one split; `place` names it in messages."""
    x, y = stored_pair(place, examples, inputs)
    return Split(x, _targets(f"{place}.y", y, objective))


def stored_pair(place: str, examples: object, inputs: Inputs | None) -> tuple[Tensor, Tensor]:
    """Inputs as they are stored and targets as they are given, on the CPU; `place` names them in messages.

    Raises:
        DataError: they are no examples; targets are not compared with an objective yet.
    """
    pair = examples if isinstance(examples, tuple) else _stacked(place, examples)
    if len(pair) != 2:
        raise DataError(f"{place} has {len(pair)} parts, expected inputs and targets: (x, y).")
    x, y = (_tensor(f"{place}.{field}", value) for field, value in zip("xy", pair, strict=True))
    if x.dim() == 0 or y.dim() == 0:
        raise DataError(f"{place} has a single number as x or y, expected examples along the first axis.")
    if len(x) != len(y):
        raise DataError(f"{place}: x has {len(x)} examples but y has {len(y)}; they must be equally many.")
    if len(x) == 0:
        raise DataError(f"{place} is empty, expected examples; leave it out to split them off train.")
    for field, values in (("x", x), ("y", y)):
        _check_finite(f"{place}.{field}", values)
    return _inputs(f"{place}.x", x, inputs), y


def _stacked(place: str, examples: object) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a map-style data set."""
    if not isinstance(examples, MapStyle) or isinstance(examples, IterableDataset | Mapping):
        raise DataError(
            f"{place} is a {type(examples).__name__}, expected (x, y) or a data set with __len__ and __getitem__."
        )
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index in range(len(examples)):
        try:
            example = examples[index]
        except Exception as error:  # any error of the user's code
            raise DataError(
                f"{place}[{index}] fails: {type(error).__name__}: {error}. Its length is given as {len(examples)}; "
                "correct the data set."
            ) from error
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise DataError(f"{place}[{index}] is a {type(example).__name__}, expected a pair (x, y).")
        for field, value, column in zip("xy", example, columns, strict=True):
            tensor = _tensor(f"{place}[{index}].{field}", value)
            if column and tensor.shape != column[0].shape:
                raise DataError(
                    f"{place}[{index}].{field} has the shape {list(tensor.shape)}, but the first one has "
                    f"{list(column[0].shape)}; make all equal, e.g. resize or crop images."
                )
            column.append(tensor)
    if not columns[0]:
        raise DataError(f"{place} is empty, expected examples.")
    return torch.stack(columns[0]), torch.stack(columns[1])


def _tensor(place: str, value: object) -> Tensor:
    """A tensor on the CPU without gradient; floats as float32."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        native = value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.require(value, native, ["C", "W"]))  # copies only what PyTorch cannot share
    elif isinstance(value, bool | int | float | np.generic):
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor):
        kind = f"ndarray of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        ways = {"to_numpy": ".to_numpy()", "getbands": "the transform torchvision.transforms.PILToTensor()"}
        way = next((way for name, way in ways.items() if hasattr(value, name)), "torch.as_tensor(...)")
        raise DataError(f"{place} is of type {kind}, expected a tensor, an array or a number; convert it with {way}.")
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta or value.is_complex():
        raise DataError(
            f"{place} is a tensor of {value.dtype}, {value.layout} on {value.device}, expected a dense one of real "
            "numbers; use .to_dense() (sparse), .dequantize(), torch.view_as_real (complex), or load its values (meta)."
        )
    value = value.detach().cpu()
    return value.to(torch.float32) if value.is_floating_point() else value


def _check_finite(place: str, values: Tensor) -> None:
    if values.is_floating_point() and not values.isfinite().all():
        bad = (~values.isfinite().flatten(1).all(dim=1) if values.dim() > 1 else ~values.isfinite()).nonzero().flatten()
        raise DataError(
            f"{place}[{int(bad[0])}] is NaN or infinite (as float32), and {len(bad) - 1} more; remove or replace them."
        )


def _inputs(place: str, x: Tensor, inputs: Inputs | None) -> Tensor:
    if x.dtype == torch.uint8:
        if inputs is None:
            raise DataError(
                f"{place} holds bytes (uint8): give inputs that make numbers of them on the device, such as "
                "inputs=lambda x: x.float() / 255 for images, or convert it to floats (tokens to int64)."
            )
        return x
    return x if x.is_floating_point() else x.to(torch.int64)


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
    wrong = ((y < least) | (y >= beyond)).nonzero()
    if len(wrong):
        index, expected = tuple(wrong[0].tolist()), f"{least}..{beyond - 1}" + " (-1 is padding)" * (least == PADDING)
        raise DataError(
            f"{place}[{', '.join(map(str, index))}] is {int(y[index])}, expected {expected}; correct it, or the "
            "number of classes or tokens of the objective."
        )
    return y


def _check_shapes(place: str, split: Split, train: Split) -> None:
    for field in ("x", "y"):
        found, expected = getattr(split, field), getattr(train, field)
        if (found.shape[1:], found.dtype) != (expected.shape[1:], expected.dtype):
            raise DataError(
                f"{place}.{field} has examples {list(found.shape[1:])} of {found.dtype}, but those of train are "
                f"{list(expected.shape[1:])} of {expected.dtype}; make them equal."
            )


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
    if dataclasses.is_dataclass(change) and not isinstance(change, type):
        return repr(change)
    return getattr(change, "__qualname__", type(change).__qualname__)
