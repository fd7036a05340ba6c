"""The threads that a run takes."""

import os
from pathlib import Path

from esper.runs.assembly.assemble import usable_cores


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = tmp_path / "own"
    own.write_text("0::/user/job\n")
    assert usable_cores(tmp_path, own) == 16
    group(tmp_path / "user", cpu__max="600000 100000\n")
    assert usable_cores(tmp_path, own) == 6
    group(tmp_path / "user" / "job", cpu__max="max 100000\n")
    assert usable_cores(tmp_path, own) == 6
    group(tmp_path / "user" / "job", cpu__max="50000 100000\n")
    assert usable_cores(tmp_path, own) == 1  # half a core
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 3


def test_control_groups_of_version_1_count(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    group(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert usable_cores(tmp_path, tmp_path / "none") == 16
    group(tmp_path / "cpu", cpu__cfs_quota_us="400000\n")
    assert usable_cores(tmp_path, tmp_path / "none") == 4
