"""Its place puts this folder on the import path: `toys`, `tiny` and `contracts` serve the tests of all packages."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest


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
