"""Parts on disk: what they hold, what a failing disk leaves, and how a resume cuts and continues them."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest

from esper.leyline.errors import RunDirectoryError
from esper.telemetry.record.schema import STORED
from esper.telemetry.record.writer import Rows, number_of, part_of, sha256_of
from esper.telemetry.run_directory import RECORD, RunDirectory, require_begun_round


def rows_of(number: int, first: int, last: int) -> list[Rows]:
    """Steps of two hosts in a round."""
    t = np.repeat(np.arange(first, last + 1, dtype=np.int32), 2)
    host = np.tile(np.arange(2, dtype=np.int32), last - first + 1)
    place = {"round": np.full_like(t, number), "t": t, "host": host}
    steps = place | {"val_loss": np.where(host == 0, np.nan, 0.5), "op": host - 1}
    nothing = {name: column[:0] for name, column in place.items()}
    return [Rows("steps", steps, {"op": ["it's"]}), Rows("slots", nothing, {}), Rows("coalitions", nothing, {})]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", {}) as made:
        yield made


def read(run: RunDirectory, number: int) -> list[tuple[object, ...]]:
    with duckdb.connect(":memory:") as database:
        return database.execute(f"FROM '{part_of(run.path / RECORD, 'steps', number)}'").fetchall()


def numbers(run: RunDirectory) -> set[int]:
    return set(map(number_of, (run.path / RECORD).iterdir()))


def test_missing_numbers_are_null_and_numbers_are_named(run: RunDirectory) -> None:
    digests = run.write_parts(rows_of(1, 1, 1), 1, 1)
    assert read(run, 1) == [(1, 1, 0, None, None), (1, 1, 1, 0.5, "it's")]
    assert digests == {kind: sha256_of(part_of(run.path / RECORD, kind, 1)) for kind in STORED}
    assert len(list((run.path / RECORD).iterdir())) == 3  # no draft is left


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_round_that_was_stopped_and_continued_has_every_step_once(run: RunDirectory, stop: int) -> None:
    run.write_parts(rows_of(1, 1, 4), 1, 1)
    whole = read(run, 1)
    run.write_parts(rows_of(2, 1, 3), 2, 1)
    run.write_parts(rows_of(2, stop + 1, 4), 2, stop + 1)  # from a checkpoint that may be older than the part
    assert [row[1:] for row in read(run, 2)] == [row[1:] for row in whole]


def test_a_disk_that_fails_ends_the_run_and_leaves_the_part_as_it_was(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_parts(rows_of(1, 1, 2), 1, 1)
    before = read(run, 1)

    def full(path: Path) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.telemetry.record.writer.sha256_of", full)
    with pytest.raises(RunDirectoryError, match=r"No space left on device.*then continue with"):
        run.write_parts(rows_of(1, 3, 4), 1, 3)
    assert read(run, 1) == before
    assert len(list((run.path / RECORD).iterdir())) == 3


@pytest.mark.parametrize(("rounds", "kept"), [(0, set()), (1, {1}), (2, {1, 2}), (9, {1, 2, 3})])
def test_a_resume_removes_the_parts_of_later_rounds(run: RunDirectory, rounds: int, kept: set[int]) -> None:
    for number in (1, 2, 3):
        run.write_parts(rows_of(number, 1, 4), number, 1)
    (run.path / RECORD / ".steps-000004.parquet.draft-1").touch()
    run.rewind({}, {}, rounds)
    assert numbers(run) == kept


def test_the_first_steps_of_a_round_must_be_there_to_continue_it(run: RunDirectory) -> None:
    run.write_parts(rows_of(2, 1, 3), 2, 1)
    require_begun_round(run.path, 1, 3)
    with pytest.raises(RunDirectoryError, match=r"steps-000002\.parquet, .* 4 steps of round 2, ends with step 3"):
        require_begun_round(run.path, 1, 4)
    part = part_of(run.path / RECORD, "coalitions", 2)
    part.write_bytes(b"nothing of use")
    with pytest.raises(RunDirectoryError, match=r"coalitions-000002\.parquet, .* cannot be read; restore it"):
        require_begun_round(run.path, 1, 3)
    part.unlink()
    with pytest.raises(RunDirectoryError, match="is missing"):
        require_begun_round(run.path, 1, 3)
