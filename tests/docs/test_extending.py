"""The examples of docs/extending.md, each as a program of its own."""

import re

import pytest

from docs import ROOT, run_python

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^## ([\w ]+)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAYS = {
    "A blueprint": ("the controller can choose blueprint 13", "run directory: runs/own-blueprint"),
    "A reward": ("round 1: committed ", "round 2: committed "),
    "A task": ("esper: bars, 2 hosts x 6 steps x 1 round", "committed test"),
    "A controller": ("live accuracy ", " fossils, "),
    "A sink": ("sink: csv", "done: 100·J", "round,objective_mean", "\n2,"),
}


EXAMPLES = dict(EXAMPLE.findall(PAGE))


def test_every_block_of_the_page_is_one_of_the_tested_examples():
    assert list(EXAMPLES) == list(SAYS)
    assert PAGE.count("```python") == len(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("heading", SAYS)
def test_the_example_runs_as_it_stands(heading, tmp_path):
    (tmp_path / "example.py").write_text(EXAMPLES[heading], encoding="utf-8")
    shown = run_python(tmp_path, "example.py")
    for line in SAYS[heading]:
        assert line in shown
