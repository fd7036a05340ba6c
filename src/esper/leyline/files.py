"""Files that appear whole or not at all.

What is written goes to a draft beside its place: a new file or folder under a name that nobody can guess, so that
nothing that was put there before is followed or overwritten. The draft is renamed when it is on the disk.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def draft_of(path: Path) -> Path:
    """A free name in the folder of `path`, which begins with a dot."""
    return path.with_name(f".{path.name}.draft-{secrets.token_hex(8)}")


def is_draft(path: Path) -> bool:
    """Whether `path` has a name that `draft_of` gives."""
    return path.name.startswith(".") and ".draft-" in path.name


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends; where the block raises, nothing has changed.

    A file that stood there gives its permissions to the new one; a link is replaced, not followed.
    """
    draft = draft_of(path)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            if (mode := mode_of(path)) and stat.S_ISREG(mode):
                os.fchmod(descriptor, mode & 0o777)
            yield file
            file.flush()
            os.fsync(descriptor)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def mode_of(path: Path) -> int:
    """Kind and permissions (`st_mode`) of what stands at `path`, without following a link; 0 where nothing does."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, or a file; of a link, the link."""
    if stat.S_ISDIR(mode_of(path)):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
