"""model.json: what a saved network is made of, and where it comes from. Plain values alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from esper.export.grown import GrownSeed
from esper.leyline.errors import ConfigError, ExportError
from esper.leyline.manifest import GrownSlot, GrowthManifest

FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where in a run a network grew: `round` from 1, global number of the `host`, its 100·J."""

    round: int
    host: int
    objective: float


@dataclass(frozen=True, kw_only=True)
class Description:
    """A network and its origin.

    Attributes:
        task: its name. data: identity of the data set. host: class and fields of the host's specification, None if they
            are no plain values. slots: those enabled in the run. seeds: what grew.
        input_shape, input_dtype: of one example as the host gets it. normalization: how stored examples become that,
            None if they are stored so.
        host_params, grown_params: numbers of parameters. flops: of one example, a multiply-add counts as two.
        unit: name of the figure of merit. val, test: its values; None where it was not measured.
        perplexity: of a text, on the validation examples; None for others, or where it was not measured.
        classes: names of the labels in order; None where they are not known.
        tokenizer: of a text, "bytes" or the name of a file in the folder; None for others.
        origin: the round and host of a run; None where it grew in no run.
    """

    task: str
    data: dict[str, Any]
    host: dict[str, Any] | None
    slots: tuple[str, ...]
    seeds: tuple[GrownSeed, ...]
    input_shape: tuple[int, ...]
    input_dtype: str
    normalization: dict[str, Any] | None
    host_params: int
    grown_params: int
    flops: int
    unit: str
    val: float | None
    test: float | None
    perplexity: float | None = None
    classes: tuple[str, ...] | None = None
    tokenizer: str | None = None
    origin: Origin | None = None

    @property
    def topology(self) -> GrowthManifest:
        """What grew, without weights."""
        return GrowthManifest(tuple(GrownSlot(s.slot, s.blueprint, s.algorithm) for s in self.seeds))

    def example(self, batch: int = 2) -> Tensor:
        """Made-up inputs [batch, ...]: a wave, or the tokens 0 and 1."""
        number = torch.arange(batch * math.prod(self.input_shape))
        dtype = getattr(torch, self.input_dtype)
        values = torch.sin(number) if dtype.is_floating_point else number % 2
        return values.to(dtype).view(batch, *self.input_shape)

    def text(self) -> str:
        """The JSON document."""
        tree = {"format": FORMAT, **asdict(self), "topology": self.topology.tree()}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def read_description(path: Path) -> Description:
    """The description in model.json; raises ExportError that says what is wrong with the file."""
    again = "export the network again"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}); name a folder made by `esper export`.") from error
    except ValueError as error:
        raise ExportError(f"{path} is no JSON ({error}): it was damaged; {again}.") from error
    found = tree.get("format") if isinstance(tree, dict) else None
    if found != FORMAT:
        raise ExportError(f"{path} has format {found!r}, but this version reads format {FORMAT}; {again}.")
    expected = {f.name for f in fields(Description)} | {"format", "topology"}
    if wrong := sorted(expected ^ tree.keys()):
        kind = "unknown" if wrong[0] in tree else "missing"
        raise ExportError(f"{path}: the key {wrong[0]!r} is {kind}; {again}.")
    try:
        topology, _ = GrowthManifest.of(tree.pop("topology")), tree.pop("format")
        description = TypeAdapter(Description).validate_python(tree)
        description.example()
    except (ValidationError, AttributeError, ConfigError) as error:
        raise ExportError(f"{path} is damaged ({error}); {again}.") from error
    if description.topology != topology:
        raise ExportError(f"{path} was changed: its seeds are not those of its topology; {again}.")
    return description


def fields_of(value: object) -> dict[str, Any] | None:
    """Class and fields of a dataclass, if they survive JSON; None for anything else: nothing is stored by halves."""
    if not is_dataclass(value) or isinstance(value, type):
        return None
    kind = type(value)
    tree = {"class": f"{kind.__module__}.{kind.__qualname__}", **asdict(value)}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(tree, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return plain


def restored(tree: Mapping[str, Any] | None, package: str) -> object:
    """The dataclass of `fields_of`; None if its class is not one of this package's, which alone are imported.

    Raises:
        TypeError, ConfigError: its fields are wrong.
    """
    values = dict(tree or {})
    place, _, name = str(values.pop("class", "")).rpartition(".")
    kind: Any = None
    if place.startswith(f"{package}.") and find_spec(place) is not None:
        kind = getattr(import_module(place), name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None
    return kind(**{key: _tupled(value) for key, value in values.items()})


def _tupled(value: Any) -> Any:  # noqa: ANN401 -- a value of a JSON document
    """Lists as tuples, which is what the fields of such classes are."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
