"""The public names of esper, one file each, and what every public function checks first: its arguments.

Import the names from `esper` itself.
"""

import collections.abc
import inspect
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, partial, wraps
from types import SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from esper.leyline.errors import ConfigError, in_a_sentence, nearest, refusing_exit
from esper.runs.assembly.run_config import RunConfig
from esper.tasks.datasets.arrays import Examples

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: a call raises ConfigError for arguments missing, unknown or of a wrong type.

    Numbers of NumPy become those of Python, and a text where a list of texts is expected becomes that list. What
    functions and data give is checked where they are used, and `**settings` with the configuration.
    """
    signature, kinds = inspect.signature(function), cache(partial(_kinds, function))
    home = "esper.gym" if function.__module__ == "esper.gym" else "esper"
    name = f"{home}.{function.__qualname__.removesuffix('.__init__')}"
    known = [each for each in signature.parameters if each != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs.keys() - set(known):
            if "settings" not in known:
                raise ConfigError(f"{name} has no argument {given!r}; {nearest(given, known)}")
            close = get_close_matches(given, known, n=1, cutoff=0.7)
            if close and given.partition(".")[0] not in {field.name for field in fields(RunConfig)}:
                raise ConfigError(f"{name} has no argument {given!r}; did you mean {close[0]!r}?")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}; its arguments are {', '.join(known)}.") from None
        for key, value in bound.arguments.items():
            several = signature.parameters[key].kind is inspect.Parameter.VAR_POSITIONAL
            kind = kinds().get(key, Any)
            plain = [one.item() if isinstance(one, np.generic) else one for one in (value if several else [value])]
            for place, one in enumerate(plain):
                if isinstance(one, str) and not _fits(one, kind) and _fits([one], kind):
                    plain[place] = [one]
                elif not _fits(one, kind):
                    raise ConfigError(f"{name}: {key} is {_shown(one)}; it must be {_expected(kind)}.")
            bound.arguments[key] = tuple(plain) if several else plain[0]
        # a network is trained in a call from torch.no_grad() or inference_mode() as in any other
        with in_a_sentence(), refusing_exit(), torch.inference_mode(False), torch.enable_grad():
            return function(*bound.args, **bound.kwargs)

    return call


def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """The type of each argument; what a function returns may be a class that only its call imports."""
    hints = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=hints), vars(sys.modules[function.__module__]))


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401 -- any annotation
    """Whether a value is of the annotated type; elements of lists are looked at, those of pairs are not."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin in (int, float):
        return isinstance(value, int | origin) and not isinstance(value, bool)
    if inner and issubclass(origin, Collection) and not issubclass(origin, tuple | Mapping):
        return isinstance(value, origin) and not isinstance(value, str) and all(_fits(one, inner[0]) for one in value)
    return isinstance(value, origin)


def _expected(kind: Any) -> str:  # noqa: ANN401 -- any annotation
    if get_origin(kind) is collections.abc.Callable:
        return "a function"
    if set(get_args(Examples)) <= set(get_args(kind)):
        words = "(x, y), a dictionary of arrays with 'labels', a data set or a DataLoader"
        return words + ", or None" * (type(None) in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("None" if one is type(None) else _expected(one) for one in get_args(kind))
    return _PLAIN.get(kind) or re.sub(r"\w+\.", "", inspect.formatannotation(kind)).replace("Sequence", "list")


_PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return " ".join(reprlib.repr(value).split()) if plain else f"a {type(value).__name__}"
