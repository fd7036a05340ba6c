"""Freed memory that is kept, so that the next step does not wait for the kernel to hand it out again.

glibc returns large blocks to the kernel as soon as they are freed; every step then touches fresh pages, and each first
touch of a page is a fault. A run allocates the same sizes over and over, so it keeps what it has.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER = 2**31 - 1
_PAD = 2**26


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, for the rest of the process; returns whether it does.

    Nothing happens where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)
