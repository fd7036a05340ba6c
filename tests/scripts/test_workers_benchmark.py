"""The benchmark of workers, with two hosts and a few images."""

import json

import pytest

import workers
from grown_hosts import DIGITS_SHAPE
from paired import row_of
from workers import Options, main, rows_of

TINY = {"hosts": (2,), "examples": 16, "val_examples": 8, "repetitions": 1}


@pytest.mark.slow  # starts six processes
def test_every_executor_is_measured_in_one_process_and_in_two():
    rows = rows_of(DIGITS_SHAPE, 2, Options(**TINY))
    assert [row.name.rpartition(", ")[2] for row in rows] == ["streamed", "fused", "native"]
    assert all(row.ratio == pytest.approx(row.first_ms / row.second_ms) for row in rows)


@pytest.mark.parametrize(("bound", "code"), [(1.5, 0), (1.7, 1)])
def test_a_speed_up_that_is_too_small_fails(monkeypatch, tmp_path, capsys, bound, code):
    row = row_of("toy", "1 process", "2 processes", [(8.0, 5.0)])
    monkeypatch.setattr(workers, "rows_of", lambda shape, n, options: [row])
    path = tmp_path / "workers.json"
    assert main(Options(**TINY, min_speedup=bound, json=path)) == code
    shown = capsys.readouterr()
    assert "2 processes" in shown.out
    assert ("at least 1.7 was required" in shown.err) == (code == 1)
    assert [row["ratio"] for row in json.loads(path.read_text())["rows"]] == [1.6] * 3
