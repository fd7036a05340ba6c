"""A clean stop on signals."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from esper.leyline.ranks import group

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end that a system asks for, and that of the terminal."""
_STOPPING = b"\nesper: stopping after this step"
_AT_ONCE = b"; press Ctrl-C again to stop at once"


@contextmanager
def stop_signals() -> Iterator[set[int]]:
    """Those of `STOPS` that have come so far; the same one again raises KeyboardInterrupt where the program is.

    Where SIGHUP is ignored, as with nohup, it stays so. A launcher that got Ctrl-C, as its processes did, sends them
    SIGTERM besides.

    Signals reach the main thread alone: a run in another thread leaves them to it.
    """
    requested = set[int]()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number in requested:
            raise KeyboardInterrupt
        if not requested and group().is_first and (group().alone or number == signal.SIGINT):
            with suppress(OSError):  # of a terminal that was closed
                os.write(
                    2, _STOPPING + _AT_ONCE * (number == signal.SIGINT) + b"\n"
                )  # Python streams are not safe in a signal handler
        requested.add(number)

    caught = [at for at in STOPS if at != signal.SIGHUP or signal.getsignal(at) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield requested
    finally:
        for number, old in before.items():
            signal.signal(number, old)
