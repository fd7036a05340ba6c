"""Compiled libraries in the user's cache folder.

    <cache>/esper/cpp/<name>-<digest>.so      name: of everything it was made of; digest: SHA-256 of its own bytes

A library is code, so it is taken only from a folder that nobody else can write, and only if its bytes still have the
digest in its name; a broken one is removed and made again. A new one is written beside its place and renamed, so that
processes that build at the same time do not meet.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

from esper.leyline.errors import ConfigError

_OTHERS_MAY_WRITE = 0o022


def cache_folder() -> Path | None:
    """`esper/cpp` in $XDG_CACHE_HOME or $HOME/.cache; None where there is neither."""
    named, home = (Path(os.environ.get(variable, "")) for variable in ("XDG_CACHE_HOME", "HOME"))
    if not named.is_absolute():
        named = home / ".cache"
    return named / "esper" / "cpp" if named.is_absolute() else None


@contextmanager
def library(folder: Path | None, name: str, make: Callable[[Path], object]) -> Iterator[Path]:
    """The library of this name; it may be gone after the `with` block, but what was loaded stays loaded.

    Args:
        folder: where it is kept. Where there is none, or it cannot be written, a folder of this process alone is used.
        name: tells what the library was made of.
        make: writes the library.

    Raises:
        ConfigError: somebody else owns the folder or may write into it.
    """
    found = _intact(folder, name) if folder is not None and _is_private(folder) else None
    if found is not None:
        yield found
        return
    draft = None if folder is None else _draft(folder)
    if folder is not None and draft is not None:
        try:
            make(draft)
            found = _install(draft, folder, name)
        finally:
            draft.unlink(missing_ok=True)
        yield found
        return
    with TemporaryDirectory(prefix="esper-") as own:
        make(Path(own) / f"{name}.so")
        yield Path(own) / f"{name}.so"


def _is_private(folder: Path) -> bool:
    """False where there is no such folder."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    problem = f"belongs to user {status.st_uid}" if status.st_uid != os.geteuid() else None
    if problem is None and status.st_mode & _OTHERS_MAY_WRITE:
        problem = f"can be written by others (mode {status.st_mode & 0o777:o})"
    if problem is None:
        return True
    raise ConfigError(
        f"{folder} {problem}, and libraries in it would be executed; expected a folder that only user {os.geteuid()} "
        "can write. Remove it, or set XDG_CACHE_HOME to a folder of your own."
    )


def _intact(folder: Path, name: str) -> Path | None:
    """A library whose bytes have the digest in its name; others of the same name are removed."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.name == f"{name}-{_digest(path)}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _draft(folder: Path) -> Path | None:
    """An empty file in the folder, which is made if needed; None where it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _is_private(folder)
        handle, path = mkstemp(prefix=".draft-", suffix=".so", dir=folder)
    except OSError:
        return None
    os.close(handle)
    return Path(path)


def _install(draft: Path, folder: Path, name: str) -> Path:
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    return draft.replace(folder / f"{name}-{_digest(draft)}.so")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
