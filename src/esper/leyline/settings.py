"""Range checks of settings: frozen dataclasses whose types say what a field may be, checked by pydantic.

class PPOConfig:
    lr: Positive = 5e-4

    def __post_init__(self) -> None:
        check_fields(self, "ppo")           raises "ppo.lr is -1.0; it must be above 0."

Fields of other types than numbers, truth values, text and tuples of them are left to the code that uses them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from esper.leyline.errors import ConfigError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
AtLeast0 = Annotated[int, Field(ge=0, le=2**31 - 1)]
AtLeast1 = Annotated[int, Field(ge=1, le=2**31 - 1)]
AtLeast2 = Annotated[int, Field(ge=2, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Of what was done, in a file."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Sizes of numbers that float32 can hold, and most of their products."""


def check_fields(settings: Any, table: str = "") -> None:  # noqa: ANN401 -- any dataclass
    """Raise ConfigError for the first field of a dataclass out of its range; `table` is its name in messages."""
    kind: type = type(settings)
    try:
        _validator(kind)({f.name: getattr(settings, f.name) for f in fields(kind)})
    except ValidationError as error:
        raise ConfigError(first_problem(error, table)) from None
    for f in fields(kind):
        value = getattr(settings, f.name)
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float) and 0 < abs(number) < math.inf
            if is_number and not _SMALLEST <= abs(number) <= _LARGEST:
                name = f"{table}.{f.name}".lstrip(".")
                raise ConfigError(f"{name} is {number}; its size must be {_SMALLEST} to {_LARGEST}, or 0.")


def first_problem(error: ValidationError, table: str = "") -> str:
    """What was found, and what is allowed, of the first field that is not valid."""
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (table, *problem["loc"])).lstrip(
        "."
    )
    if problem["type"] == "missing":
        return f"{name} is missing."
    wish = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ").partition(" after validation")[0]
    for long, short in _SHORT.items():
        wish = wish.replace(long, short)
    if isinstance(problem["input"], float) and math.isnan(problem["input"]):
        wish = "a finite number"
    found = problem["input"] if isinstance(problem["input"], float) else json.dumps(problem["input"], default=repr)
    return f"{name} is {found}; it must be {_KINDS.get(problem['type'], wish)}."


_SHORT = {"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "above",
          "less than": "below", "Tuple should have": "a list of"}  # fmt: skip
_KINDS = {
    "dataclass_type": "a table",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "int_type": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'text in quotation marks, such as "cpu"',
    "tuple_type": 'a list, such as ["r0c0", "r0c1"] or [0.9, 0.999]',
}


@cache
def _validator(kind: type) -> Callable[[object], object]:
    """Validates the plain fields of a dataclass, given by name."""
    hints = get_type_hints(kind, include_extras=True)
    plain = {f.name: hints[f.name] for f in fields(kind) if _is_plain(hints[f.name])}
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    adapter = TypeAdapter(with_config(strict)(TypedDict(kind.__name__, plain)))  # type: ignore[operator]
    return adapter.validate_python


def _is_plain(kind: Any) -> bool:  # noqa: ANN401 -- any annotation
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_plain(inner[0])
    if origin in (Union, UnionType, tuple):
        return all(_is_plain(one) for one in inner if one is not ...)
    return origin is Literal or kind in (int, float, bool, str, NoneType)
