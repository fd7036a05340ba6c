"""A sink on a thread of its own: slow, broken or hanging, it costs the run nothing."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from esper.leyline.messages import Sink
from esper.telemetry import background as module
from esper.telemetry.background import CAPACITY, BackgroundSink


class Notebook:
    """Writes everything down, and notes that it was closed."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.taken.append((kind, dict(fields)))

    def close(self) -> None:
        self.closed += 1


class Locked(Notebook):
    """Takes nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.open = threading.Event(), threading.Event()

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.busy.set()
        assert self.open.wait(10.0)
        super().write(kind, fields)


def test_records_arrive_in_order_and_the_sink_is_closed_after_the_last_one() -> None:
    notebook = Notebook()
    sink = BackgroundSink("notebook", lambda: notebook)
    for t in range(5):
        sink.write("step", {"t": t})
    sink.close()
    assert notebook.taken == [("step", {"t": t}) for t in range(5)]
    assert notebook.closed == 1
    assert (sink.num_lost, sink.complaints()) == (0, [])


def test_a_sink_receives_only_the_kinds_it_asked_for() -> None:
    notebook = Notebook()
    sink = BackgroundSink("notebook", lambda: notebook, kinds={"round"})
    for kind in ("step", "round", "alarm"):
        sink.write(kind, {})
    sink.close()
    assert [kind for kind, _ in notebook.taken] == ["round"]
    assert sink.num_lost == 0


def test_a_full_queue_drops_new_steps_but_has_room_for_rounds() -> None:
    locked = Locked()
    sink = BackgroundSink("locked", lambda: locked)
    sink.write("step", {"t": 0})
    assert locked.busy.wait(10.0)  # one record is with the sink, the queue is empty
    room = CAPACITY * 3 // 4
    for t in range(1, room + 8):
        sink.write("step", {"t": t})
    sink.write("round", {"round": 1})
    assert sink.num_lost == 7
    locked.open.set()
    sink.close()
    assert [fields["t"] for kind, fields in locked.taken if kind == "step"] == list(range(room + 1))
    assert locked.taken[-1] == ("round", {"round": 1})
    (complaint,) = sink.complaints()
    assert complaint == (
        "the sink 'locked' was slower than the run and dropped 7 records (step 7). The run itself is not affected."
    )


def test_after_the_run_a_slow_sink_gets_the_last_record_and_the_rest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRAINING", -1.0)
    locked = Locked()
    sink = BackgroundSink("locked", lambda: locked)
    sink.write("round", {"round": 1})
    assert locked.busy.wait(10.0)
    for number in (2, 3):
        sink.write("round", {"round": number})
    sink.write("run_finished", {})
    sink.begin_closing()
    locked.open.set()
    sink.close()
    assert locked.taken == [("round", {"round": 1}), ("run_finished", {})]
    assert "dropped 2 records (round 2)." in sink.complaints()[0]


def test_a_failing_sink_is_told_about_at_once_and_counted() -> None:
    class Failing:
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            raise OSError("no space\nleft")

    told: list[str] = []
    sink = BackgroundSink("failing", Failing, on_failure=told.append)
    for _ in range(3):
        sink.write("round", {})
    sink.close()
    assert told == ["the sink 'failing' failed: OSError: no space left. The run goes on."]
    assert sink.num_lost == 3
    assert sink.complaints() == [
        "the sink 'failing' lost 3 records (round 3); its first failure was OSError: no space left. "
        "The run itself is not affected."
    ]


def test_a_sink_that_cannot_be_created_loses_every_record() -> None:
    def impossible() -> Sink:
        raise ConnectionError("nobody there")

    sink = BackgroundSink("impossible", impossible)
    sink.write("round", {})
    sink.close()
    assert sink.num_lost == 1
    assert "lost 1 record (round 1); its first failure was ConnectionError: nobody there." in sink.complaints()[0]


def test_a_sink_that_fails_to_close_says_so() -> None:
    class Stuck(Notebook):
        def close(self) -> None:
            raise TimeoutError("upload")

    sink = BackgroundSink("stuck", Stuck)
    sink.write("round", {})
    sink.close()
    assert sink.complaints() == ["the sink 'stuck' failed: TimeoutError: upload. The run itself is not affected."]


def test_a_sink_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING", 0.1)
    locked = Locked()
    sink = BackgroundSink("locked", lambda: locked)
    sink.write("round", {})
    before = time.monotonic()
    sink.close()
    assert time.monotonic() - before < 5.0
    assert "was still busy 0 seconds after the run and was abandoned" in sink.complaints()[0]
    locked.open.set()
    sink._thread.join()
