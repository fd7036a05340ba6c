"""The benchmark of large records, on a small one."""

from pathlib import Path

import pytest

import large_record as benchmark


def test_the_queries_of_the_benchmark_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    benchmark.make(run, rounds=3)
    assert benchmark.measure(run, 3, limited=False) == []
    out = capsys.readouterr().out
    assert all(name in out for name in ("open", "one episode of one host", *benchmark.OVERVIEW))
