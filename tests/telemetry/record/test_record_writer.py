"""Parts on disk: when they are written, what a failing or slow disk costs, and how a resume cuts them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pytest

from esper.telemetry.record import writer as writer_module
from esper.telemetry.record.parts import Part, Rows, checksum, parts_in, rewind
from esper.telemetry.record.writer import SECONDS, RecordWriter


@dataclass
class Step:
    """A step of two hosts."""

    episode: int
    t: int


def rows_of(steps: Sequence[Step]) -> Iterator[Rows]:
    places = np.repeat([(step.episode + 1, step.t) for step in steps], 2, axis=0).astype(np.int32)
    host = np.tile(np.arange(2, dtype=np.int32), len(steps))
    loss = np.where(host == 0, np.nan, 0.5)
    columns = {"round": places[:, 0], "t": places[:, 1], "host": host, "val_loss": loss, "op": host - 1}
    yield Rows("steps", columns, {"op": ["it's"]})


class Bench:
    """A writer with a clock of its own."""

    def __init__(self, folder: Path, convert: Callable[[Sequence[Step]], Iterator[Rows]] = rows_of) -> None:
        self.folder, self.now = folder, 0.0
        self.writer = RecordWriter(folder, convert, lambda step: 1000, clock=lambda: self.now)

    def round(self, episode: int, seconds: float, steps: int = 4) -> None:
        for t in range(1, steps + 1):
            self.writer.add(Step(episode, t))
        self.now += seconds
        self.writer.round_ended()
        self.writer._queue.join()  # the disk is fast

    def parts(self) -> list[Part]:
        return parts_in(self.folder)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "record")
    yield made
    made.writer.close()


def read(folder: Path) -> list[tuple[object, ...]]:
    files = ", ".join(f"'{folder / part.name}'" for part in parts_in(folder))
    with duckdb.connect(":memory:") as database:
        return database.execute(f"SELECT * FROM read_parquet([{files}]) ORDER BY round, host, t").fetchall()


def test_rounds_wait_until_there_is_enough_time_between_two_parts(bench: Bench) -> None:
    for episode in range(5):
        bench.round(episode, SECONDS / 2)
    bench.writer.close()
    assert [(part.first, part.last) for part in bench.parts()] == [
        ((1, 1), (2, 4)),
        ((3, 1), (4, 4)),
        ((5, 1), (5, 4)),
    ]


def test_a_long_run_has_few_parts(bench: Bench) -> None:
    bench.round(0, 1e6)  # one percent of a million seconds is ten thousand
    bench.round(1, 9_000)
    bench.round(2, 2_000)
    bench.writer.flush()
    assert [part.last for part in bench.parts()] == [(1, 4), (3, 4)]


def test_missing_numbers_are_null_and_numbers_are_named(bench: Bench) -> None:
    bench.round(0, 0.0, steps=1)
    bench.writer.close()
    assert read(bench.folder) == [(1, 1, 0, None, None), (1, 1, 1, 0.5, "it's")]
    (part,) = bench.parts()
    assert checksum(bench.folder / part.name) == part.checksum
    assert [path.name for path in bench.folder.iterdir()] == [part.name]  # no draft is left


def test_many_waiting_steps_make_a_part_before_its_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MOST_BYTES", 3000)
    for t in range(1, 4):
        bench.writer.add(Step(0, t))
    bench.writer.flush()
    assert [part.last for part in bench.parts()] == [(1, 3)]


def test_a_slow_disk_never_stops_a_run_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_BYTES", 1000)
    monkeypatch.setattr(writer_module, "DROP_BYTES", 5000)
    disk = threading.Event()

    def slow(steps: Sequence[Step]) -> Iterator[Rows]:
        assert disk.wait(60)
        yield from rows_of(steps)

    bench = Bench(tmp_path / "record", slow)
    for t in range(1, 41):
        bench.writer.add(Step(0, t))
    disk.set()
    bench.writer.close()
    assert bench.writer.dropped > 0
    written = len(read(bench.folder)) // 2
    assert written + bench.writer.dropped == 40
    (line,) = bench.writer.complaints()
    assert line.startswith(f"the run record lacks {bench.writer.dropped} steps: the disk is slower than the run;")


def test_a_disk_that_fails_costs_its_steps_alone(bench: Bench) -> None:
    bench.folder.write_text("in the way")
    bench.round(0, SECONDS)
    bench.writer.flush()
    bench.folder.unlink()
    bench.round(1, SECONDS)
    bench.writer.close()
    assert bench.writer.dropped == 4
    assert [part.first for part in bench.parts()] == [(2, 1)]
    (line,) = bench.writer.complaints()
    assert "lacks 4 steps: " in line
    assert "FileExistsError" in line


def test_a_run_without_complaints_has_none(bench: Bench) -> None:
    bench.round(0, SECONDS)
    bench.writer.close()
    assert bench.writer.complaints() == []


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ((3, 10**9), [((1, 1), (2, 4)), ((3, 1), (3, 4))]),
        ((2, 10**9), [((1, 1), (2, 4))]),
        ((2, 3), [((1, 1), (2, 3))]),
        ((1, 10**9), [((1, 1), (1, 10**9))]),
        ((0, 10**9), []),
    ],
)
def test_a_resume_removes_what_came_after_its_checkpoint(
    bench: Bench, end: tuple[int, int], kept: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    bench.round(0, SECONDS / 2)
    bench.round(1, SECONDS / 2)
    bench.round(2, SECONDS)
    bench.writer.close()
    before = read(bench.folder)
    rewind(bench.folder, end)
    assert [(part.first, part.last) for part in bench.parts()] == kept
    assert all(checksum(bench.folder / part.name) == part.checksum for part in bench.parts())
    expected = [row for row in before if row[:2] <= end]
    assert (read(bench.folder) if kept else []) == expected


def test_a_resume_leaves_a_part_that_it_cannot_read_for_the_reader_to_name(bench: Bench) -> None:
    bench.round(0, SECONDS / 2)
    bench.round(1, SECONDS / 2)
    bench.writer.close()
    (part,) = bench.parts()
    (bench.folder / part.name).write_bytes(b"nothing of use")
    rewind(bench.folder, (1, 10**9))
    assert bench.parts() == [part]


def test_a_resume_without_a_record_has_nothing_to_do(tmp_path: Path) -> None:
    rewind(tmp_path / "record", (1, 1))
    assert list(tmp_path.iterdir()) == []
