"""Puts this folder on the import path, makes shape checks cheap, and watches what is synced to the disk.

`--jaxtyping-packages` checks every call of every function, which takes 40 % of the time of a run. Here a function is
checked in its first eight calls of each test, then in the 16th, the 32nd, the 64th and so on.
"""

import inspect
import os
import stat
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import _decorator  # no public name can be replaced; constraints.txt fixes the version

ALWAYS_CHECKED = 8  # calls of a function in one test

_check_every_call = _decorator.jaxtyped
_calls: dict[Callable[..., Any], int] = {}


def _check_some_calls(fn: Any, *, typechecker: Any) -> Any:
    checked = _check_every_call(fn, typechecker=typechecker)
    if not inspect.isfunction(fn):
        return checked  # a class, a property or a static method: its functions come here one by one

    @wraps(checked)
    def function(*args: Any, **kwargs: Any) -> Any:
        calls = _calls[fn] = _calls.get(fn, 0) + 1
        return checked(*args, **kwargs) if calls <= ALWAYS_CHECKED or not calls & (calls - 1) else fn(*args, **kwargs)

    # error messages that name the line of a user's mistake skip frames of libraries, so this is one
    function.__code__ = function.__code__.replace(co_filename=_decorator.__file__)
    return function


_decorator.jaxtyped = _check_some_calls


def pytest_runtest_setup() -> None:
    """Count from one in each test."""
    _calls.clear()


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a file, or a folder with all that is in it, was synced as it is now; what is renamed must have been."""
    sizes: dict[int, int] = {}  # of each inode when it was synced last; none of a folder in which a name changed
    fsync, rename = os.fsync, os.rename

    def is_synced(path: Path) -> bool:
        found = path.lstat()
        synced = sizes.get(found.st_ino)
        return synced == found.st_size if stat.S_ISREG(found.st_mode) else synced is not None

    def whole(path: Path) -> bool:
        return all(map(is_synced, (path, *path.rglob("*"))))

    def note(descriptor: int) -> None:
        fsync(descriptor)
        sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def checked(source: Path, target: Path) -> None:
        assert whole(source), f"{source} gets the name {target} before it is on the disk"
        rename(source, target)
        sizes.pop(Path(target).parent.stat().st_ino, None)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", checked)
    return whole
