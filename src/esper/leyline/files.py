"""Files: whole writes, and reads that neither wait nor take more than they should.

A new file or folder is written beside its place under a random name, synced, and then renamed.
"""

import errno
import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import time
import tomllib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOLCK})
"""What file systems answer that lack an operation: Lustre and NFS for locks, CIFS and FUSE for folders."""

_ABANDONED = 3600.0
"""Seconds after which a draft is that of a process that was killed."""
_Opened = TypeVar("_Opened", bound="Closing")  # the checks of shapes know no `Self` in a method


class Closing(ABC):
    """What is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what is open."""

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


LARGEST_TEXT = 64 << 20
"""Bytes of the largest file that is read as a whole, apart from data, tensors and the lines of a run."""


def open_to_read(path: Path, largest: int | None = None) -> io.BufferedReader:
    """Open a regular file. A pipe in its place is refused, instead of waited for.

    Raises:
        OSError: it cannot be opened, is not a regular file, or has more than `largest` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if largest is not None and status.st_size > largest:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than the {largest} expected", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: Path) -> None:
    """Raise OSError as `open_to_read` does; for libraries that open a path themselves."""
    open_to_read(path).close()


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; raises OSError like `open_to_read`."""
    with open_to_read(path, LARGEST_TEXT) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file; raises OSError like `open_to_read`, UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors)


def read_json(path: Path) -> Any:  # noqa: ANN401 -- any JSON value
    """The JSON value in a regular file; raises OSError like `open_to_read`, ValueError."""
    return json_of(read_text(path))


def json_of(text: str) -> Any:  # noqa: ANN401 -- any JSON value
    """The value of a JSON text; raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables in a regular TOML file; raises OSError like `open_to_read`, ValueError."""
    return toml_of(read_text(path))


def toml_of(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises ValueError, also where it is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def expanded(path: Path | str) -> Path:
    """`path` with the home folder in the place of ~; that of a user who is not known stays as it is."""
    return Path(os.path.expanduser(path))


def absolute(path: Path) -> str:
    """The absolute path of `path`; below the home folder as ~/..., which does not tell whose machine it is."""
    full, home = Path(os.path.abspath(expanded(path))), expanded("~")
    return f"~/{full.relative_to(home)}" if home.parent != home and full.is_relative_to(home) else str(full)


def draft_of(path: Path) -> Path:
    """A hidden random name in the folder of `path`."""
    return path.with_name(f".{path.name}.draft-{secrets.token_hex(8)}")


def is_draft(path: Path) -> bool:
    """Whether `draft_of` made the name of `path`."""
    return path.name.startswith(".") and ".draft-" in path.name


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that replaces `path` when the block ends; if the block raises, nothing has changed.

    The new file gets the permissions of the old one; a link is replaced, not followed.
    """
    draft = draft_of(path)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            if (mode := mode_of(path)) and stat.S_ISREG(mode):
                os.fchmod(descriptor, mode & 0o777)
            yield file
            file.flush()
            sync_file(descriptor)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder that replaces `path` when the block ends; if the block raises, nothing has changed.

    Drafts that a killed process left beside it more than an hour ago are deleted.
    """
    draft, old = draft_of(path), draft_of(path)
    draft.mkdir(parents=True)
    try:
        yield draft
        for file in (*draft.iterdir(), draft):
            sync(file)
        if mode_of(path):
            path.rename(old)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(path.parent)
    remove(old)
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}.draft-"):
            with suppress(FileNotFoundError):  # another process may finish its own
                if time.time() - left.lstat().st_mtime > _ABANDONED:
                    remove(left)


def mode_of(path: Path) -> int:
    """Type and permissions (`st_mode`) of `path`, without following a link; 0 if it does not exist."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def remove(path: Path) -> None:
    """Delete a folder with its content, a file, or a link (not its target)."""
    if stat.S_ISDIR(mode_of(path)):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_file(descriptor: int) -> None:
    """Wait until an open file or folder is on the disk; warns where the file system cannot tell."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        _go_on(error, "cannot sync files or folders, so that a power cut may lose the newest ones")


def lock(file: TextIO) -> None:
    """Lock an open file until it is closed; BlockingIOError if another process has. Warns where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        _go_on(error, "has no locks, so that nothing keeps a second process from writing to the same folder")


def _go_on(error: OSError, what: str) -> None:
    if error.errno not in UNSUPPORTED:
        raise error
    warnings.warn(f"the file system {what} ({error.strerror}).", stacklevel=3)
