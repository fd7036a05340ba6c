"""A sink on its own thread, behind a bounded queue: a run never waits for it while it trains.

    training --write--> queue --thread--> sink         full queue: the record is dropped and counted
                                                       sink raises: the record is lost and counted

A quarter of the queue is kept for rounds and the like, so that a flood of steps cannot push them out. After the run the
thread has half a second for the records that wait, then delivers the last one and closes the sink.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from queue import SimpleQueue
from typing import final

from esper.leyline.messages import ClosingSink, Sink

CAPACITY = 256
"""Records that may wait."""
DRAINING = 0.5
"""Seconds after the run for the records that wait."""
CLOSING = 30.0
"""Seconds after the run until a sink that has not closed is abandoned."""
LAST = "run_finished"
_RARE = frozenset({"run_started", "round", LAST})

Record = tuple[str, Mapping[str, object]]


def failure(error: Exception) -> str:
    """An exception in one line, e.g. "OSError: no space left"."""
    return " ".join(f"{type(error).__name__}: {error}".rstrip(": .").split())


@final
class BackgroundSink:
    """A sink whose thread starts at once; `write` returns at once and never raises.

    Args:
        name: of the sink, in sentences.
        make: creates the sink, on its thread.
        kinds: the records it receives; None for all.
        on_failure: called with a sentence after the first failure, on the thread of the sink.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        kinds: Collection[str] | None = None,
        on_failure: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.name, self._make, self._kinds, self._on_failure = name, make, kinds, on_failure
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._first_failure = ""
        self._closed_at: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Queue a record, or drop it if the queue is full. To be called from one thread only."""
        if self._kinds is not None and kind not in self._kinds:
            return
        if self._queue.qsize() < (CAPACITY if kind in _RARE else CAPACITY * 3 // 4):
            self._queue.put((kind, fields))
        else:
            self._dropped[kind] += 1

    def begin_closing(self) -> None:
        """Announce the end of the run; `close` must follow."""
        if self._closed_at is None:
            self._closed_at = time.monotonic()
            self._queue.put(None)

    def close(self) -> None:
        """Wait until the sink is closed, at most `CLOSING` seconds after `begin_closing`."""
        self.begin_closing()
        assert self._closed_at is not None
        self._thread.join(max(self._closed_at + CLOSING - time.monotonic(), 0.0))

    @property
    def num_lost(self) -> int:
        """Records that were dropped, or with which the sink failed."""
        return self._dropped.total() + self._failed.total()

    def complaints(self) -> list[str]:
        """A sentence each for dropped records, failures and a sink that is still busy."""
        found = []
        if self._dropped:
            found.append(f"was slower than the run and dropped {_listed(self._dropped)}")
        if self._first_failure:
            lost = f"lost {_listed(self._failed)}; its first failure was" if self._failed else "failed:"
            found.append(f"{lost} {self._first_failure}")
        if self._closed_at is not None and self._thread.is_alive():
            found.append(f"was still busy {CLOSING:.0f} seconds after the run and was abandoned")
        return [f"the sink {self.name!r} {what}. The run itself is not affected." for what in found]

    def _work(self) -> None:
        sink = self._made()
        ready = time.monotonic()
        while (record := self._queue.get()) is not None:
            kind, fields = record
            closed_at = self._closed_at
            late = closed_at is not None and time.monotonic() > max(closed_at, ready) + DRAINING
            if sink is None:
                self._failed[kind] += 1
            elif late and kind != LAST:
                self._dropped[kind] += 1
            elif not self._succeeds(partial(sink.write, kind, fields)):
                self._failed[kind] += 1
        if isinstance(sink, ClosingSink):
            self._succeeds(sink.close)

    def _made(self) -> Sink | None:
        """The sink, or None if it cannot be created."""
        made: list[Sink] = []
        self._succeeds(lambda: made.append(self._make()))
        return made[0] if made else None

    def _succeeds(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # no sink stops a run
            if not self._first_failure:
                self._first_failure = failure(error)
                self._on_failure(f"the sink {self.name!r} failed: {self._first_failure}. The run goes on.")
            return False
        return True


def _listed(counts: Counter[str]) -> str:
    """E.g. "103 records (step 100, round 3)"."""
    total = counts.total()
    return (
        f"{total} record{'s' * (total != 1)} ({', '.join(f'{kind} {count}' for kind, count in counts.most_common())})"
    )
