"""Hosts drawn in text; the drawings here are the specification."""

from dataclasses import replace

import pytest

import tiny
from esper.runs.evaluation.tables import drawing
from esper.tasks import task_by_name, task_names

KEY = ["", "● slots of a run   ○ others: --set 'slots=[\"SLOT\", ...]'"]


def drawn(text: str) -> list[str]:
    return [*text.strip("\n").splitlines(), *KEY]


def test_slots_of_a_convolutional_host_follow_their_blocks_and_poolings():
    task = replace(tiny.task(), enabled=("r0c0", "r1c0"))
    assert drawing(task) == drawn("""
images, 1 channel
  │  convolution 3x3, batch norm, ReLU
  ● r0c0   4 channels
  │  max pooling 2x2
  ● r1c0   4 channels
  │  convolution 3x3, batch norm, ReLU
  ○ r0c1   8 channels
  │  mean over space, linear
3 classes
""")


@pytest.mark.parametrize("name", task_names())
def test_every_drawing_has_all_slots_and_fits_80_columns(name):
    task = task_by_name(name)
    lines = drawing(task)
    assert max(map(len, lines)) <= 80
    if task.host is not None:
        assert sorted(line.split()[1] for line in lines if line.startswith(("  ●", "  ○"))) == sorted(task.offered)
