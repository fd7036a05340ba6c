"""Served runs: `a`, finished after two rounds of three hosts and eight steps, and `b`, after one round."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.telemetry.serve.runs import Runs
from served_runs import write_run


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, not to be changed."""
    path = tmp_path_factory.mktemp("written")
    write_run(path / "a", finished=True)
    write_run(path / "b", rounds=1)
    return path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy in the folder of the test."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


@pytest.fixture
def runs(folder: Path) -> Iterator[Runs]:
    with Runs(folder) as runs:
        yield runs
