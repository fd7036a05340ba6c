"""The examples of docs/extending.md, each as a program of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EXAMPLE = re.compile(r"^## ([\w ]+)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAYS = {
    "A blueprint": ("the controller can choose blueprint 13", "run directory: runs/own-blueprint"),
    "A reward": ("round 1: committed ", "round 2: committed "),
    "A task": ("esper: bars, 2 hosts x 6 steps x 1 round", "committed test"),
    "A controller": ("live accuracy ", " fossils, "),
    "A sink": ("sink: csv", "done: 100·J", "round,objective_mean", "\n2,"),
}


def examples() -> dict[str, str]:
    return dict(EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))


def test_every_block_of_the_page_is_one_of_the_tested_examples():
    assert list(examples()) == list(SAYS)
    assert PAGE.read_text(encoding="utf-8").count("```python") == len(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("heading", SAYS)
def test_the_example_runs_as_it_stands(heading, tmp_path):
    (tmp_path / "example.py").write_text(examples()[heading], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in SAYS[heading]:
        assert line in done.stdout
