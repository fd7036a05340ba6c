"""Keeping freed memory in the process.

glibc returns large freed blocks to the kernel, so each step would fault in fresh pages. A run allocates the same sizes
again and again, and is faster if it keeps them.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER = 2**31 - 1
_PAD = 2**26


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the rest of the process; returns False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)
