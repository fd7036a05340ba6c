"""Writes the parts of a run record, in a thread of its own.

run --add--> steps that wait --every 10 s, or 1 % of the run--> thread: columns, Parquet, sync, rename

The thread of training only appends to a list. A disk that is slow or fails never stops training: steps that find no
place are dropped, counted, and named at the end of the run. A run that is killed loses the steps that waited.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, final, runtime_checkable

from esper.telemetry.record.parts import Place, Rows, write_part

if TYPE_CHECKING:
    import duckdb

SECONDS, SHARE = 10.0, 0.01
"""A part holds at least so many seconds, and at least this share of the run, so that a long run has few parts."""
MOST_BYTES = 32 * 2**20
"""Size of the waiting steps at which a part is written early."""
DROP_BYTES = 8 * MOST_BYTES
"""Size of the waiting steps at which they are dropped, because the disk is too slow."""


@runtime_checkable
class Step(Protocol):
    """What the writer must know of a step."""

    @property
    def episode(self) -> int:
        """Round, from 0."""
        ...

    @property
    def t(self) -> int:
        """Step, from 1."""
        ...


S = TypeVar("S", bound=Step)


@final
class RecordWriter(Generic[S]):
    """Collects the steps of a run and writes them as parts.

    Args:
        folder: of the parts; made when the first one is written. convert: the rows of successive steps; called in the
            thread of the writer. size: bytes that a step occupies while it waits. clock: monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        convert: Callable[[Sequence[S]], Iterable[Rows]],
        size: Callable[[S], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._convert, self._size, self._clock = folder, convert, size, clock
        self._began = self._last = clock()
        self._waiting: list[S] = []
        self._step_bytes = 0
        self._queue: Queue[list[S] | None] = Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self.dropped = 0
        """Steps that are not in the record."""
        self.written_bytes = 0
        """Size of the parts so far."""

    def add(self, step: S) -> None:
        """Take one step; does not wait for the disk."""
        self._step_bytes = self._step_bytes or self._size(step)
        self._waiting.append(step)
        waiting = len(self._waiting) * self._step_bytes
        if waiting >= DROP_BYTES:
            self._drop(self._waiting, "the disk is slower than the run")
            self._waiting = []
        elif waiting >= MOST_BYTES:
            self._hand_over()

    def round_ended(self) -> None:
        """Write a part if the last one is old enough."""
        now = self._clock()
        if now - self._last >= max(SECONDS, SHARE * (now - self._began)):
            self._hand_over()

    def flush(self) -> None:
        """Write all steps so far and wait for the disk."""
        if self._waiting:
            self._hand_over(wait=True)
        if self._thread is not None:
            self._queue.join()

    def close(self) -> None:
        """Write what waits and end the thread."""
        self.flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def complaints(self) -> list[str]:
        """A sentence if steps are missing."""
        if not self.dropped:
            return []
        return [
            f"the run record lacks {self.dropped} steps: {self._failure}; `esper query` shows the others. "
            "Results and checkpoints are not affected."
        ]

    def _hand_over(self, *, wait: bool = False) -> bool:
        """Pass the waiting steps to the thread, unless it is busy and we do not `wait`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="esper-record", daemon=True)
            self._thread.start()
        try:
            self._queue.put(self._waiting, block=wait)
        except Full:
            return False
        self._waiting, self._last = [], self._clock()
        return True

    def _run(self) -> None:
        """The thread: write parts until None arrives."""
        with ExitStack() as stack:
            connected: duckdb.DuckDBPyConnection | None = None
            while (steps := self._queue.get()) is not None:
                try:
                    connected = connected or stack.enter_context(_database())
                    self._folder.mkdir(exist_ok=True)
                    for rows in self._convert(steps):
                        self.written_bytes += write_part(
                            self._folder, rows, _place(steps[0]), _place(steps[-1]), connected
                        )
                except Exception as error:  # nothing in a record stops a run
                    self._drop(steps, f"{type(error).__name__}: {error}")
                finally:
                    self._queue.task_done()
        self._queue.task_done()

    def _drop(self, steps: Sequence[S], why: str) -> None:
        self.dropped += len(steps)
        self._failure = self._failure or " ".join(why.split())


def _database() -> "duckdb.DuckDBPyConnection":
    import duckdb  # in the thread: it takes a tenth of a second

    return duckdb.connect(":memory:", config={"threads": 1})


def _place(step: Step) -> Place:
    return step.episode + 1, step.t
