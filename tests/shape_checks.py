"""Shape checks in some calls only: `--jaxtyping-packages` checks every call, which takes 40 % of the time of a run.

Here a function is checked in its first eight calls of each test, then in the 16th, the 32nd, the 64th and so on.
"""

import inspect
import random
from functools import wraps
from types import CodeType
from typing import Any

from beartype._check.code import codemain
from jaxtyping import _decorator  # no public name can be replaced; constraints.txt fixes the version

ALWAYS_CHECKED = 8  # calls of a function in one test

_check_every_call = _decorator.jaxtyped
_calls: dict[CodeType, int] = {}  # by code: a function that is made in a call would keep its variables alive


def _check_some_calls(fn: Any, *, typechecker: Any) -> Any:
    checked = _check_every_call(fn, typechecker=typechecker)
    if not inspect.isfunction(fn):
        return checked  # a class, a property or a static method: its functions come here one by one

    @wraps(checked)
    def function(*args: Any, **kwargs: Any) -> Any:
        calls = _calls[fn.__code__] = _calls.get(fn.__code__, 0) + 1
        return checked(*args, **kwargs) if calls <= ALWAYS_CHECKED or not calls & (calls - 1) else fn(*args, **kwargs)

    # error messages that name the line of a user's mistake skip frames of libraries, so this is one
    function.__code__ = function.__code__.replace(co_filename=_decorator.__file__)
    return function


def install() -> None:
    """Replace the decorator that the import hook of jaxtyping uses, and keep beartype off the global generator."""
    codemain.getrandbits = random.Random(0).getrandbits  # it chooses the items of a list that it checks
    _decorator.jaxtyped = _check_some_calls


def begin_test() -> None:
    """Count from one in each test."""
    _calls.clear()
