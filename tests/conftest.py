"""Puts this folder on the import path, samples shape checks, and watches what is synced to the disk."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import shape_checks

shape_checks.install()


def pytest_runtest_setup() -> None:
    """Count calls from one in each test."""
    shape_checks.begin_test()


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


@pytest.fixture(autouse=True)
def _tasks_of_a_test_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not listed in another."""
    from esper.tasks import registry  # not before the checks are installed

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
