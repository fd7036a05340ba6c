"""The benchmark of workers, with two hosts and a few images."""

import json

import pytest

import workers
from grown_hosts import DIGITS_SHAPE
from workers import Options, Row, main, rows_of

TINY = {"hosts": (2,), "examples": 16, "val_examples": 8, "repetitions": 1}


def test_both_executors_are_measured_in_one_process_and_in_two():
    rows = rows_of(DIGITS_SHAPE, 2, Options(**TINY))
    assert [row.executor for row in rows] == ["streamed", "fused"]
    for row in rows:
        assert row.speedup == pytest.approx(row.one_ms / row.shared_ms)
        assert row.lowest == row.highest == row.speedup > 0.0


@pytest.mark.parametrize(("bound", "code"), [(1.5, 0), (1.7, 1)])
def test_a_speed_up_that_is_too_small_fails(monkeypatch, tmp_path, capsys, bound, code):
    row = Row(
        shape="toy", hosts=2, executor="fused", one_ms=8.0, shared_ms=5.0, speedup=1.6, lowest=1.5, highest=1.8
    )  # fmt: skip
    monkeypatch.setattr(workers, "rows_of", lambda shape, n, options: [row])
    path = tmp_path / "workers.json"
    assert main(Options(**TINY, min_speedup=bound, json=path)) == code
    shown = capsys.readouterr()
    assert "8 ms" in shown.out
    assert ("at least 1.7 was asked for" in shown.err) == (code == 1)
    assert [row["speedup"] for row in json.loads(path.read_text())["rows"]] == [1.6] * 3
