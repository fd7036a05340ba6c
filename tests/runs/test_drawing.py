"""Hosts drawn in text; the drawings here are the specification."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import tiny
from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.host import Host, InjectionPoint
from esper.leyline.lifecycle import HostFamily
from esper.runs.evaluation.tables import drawing, words
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


def test_an_unshuffled_image_is_drawn_with_the_channels_that_the_first_block_gets():
    host = CNNHostSpec(in_channels=3, base=4, blocks=2, kernel=1, pools=0, classes=3, unshuffle=2)
    assert words(host) == "CNN 4-8, 1x1, unshuffle 2"
    assert drawing(tiny.task(host=host, enabled=("r0c0",))) == drawn("""
images, 3 channels
  │  pixel unshuffle 2x2: 12 channels
  │  convolution 1x1, batch norm, ReLU
  ● r0c0   4 channels
  │  convolution 1x1, batch norm, ReLU
  ○ r0c1   8 channels
  │  mean over space, linear
3 classes
""")


def test_slots_of_a_transformer_follow_its_segments():
    assert drawing(replace(task_by_name("tinystories"), enabled=("r0c1",))) == drawn("""
up to 256 tokens
  │  token and position embedding (384)
  │  2 layers: attention (6 heads), MLP (1536)
  ○ r0c0   384 channels
  │  2 layers: attention (6 heads), MLP (1536)
  ● r0c1   384 channels
  │  2 layers: attention (6 heads), MLP (1536)
  ○ r0c2   384 channels
  │  layer norm, token table
logits of 257 tokens
""")


@dataclass(frozen=True)
class Mystery:
    """Architecture of a user."""

    family: ClassVar[HostFamily] = HostFamily.CNN

    def points(self) -> tuple[InjectionPoint, ...]:
        late, early = ((f"r0c{i}", 1.0 - i / 2) for i in range(2))
        return tuple(
            InjectionPoint(slot_id=slot_id, channels=4, order=order, position=position)
            for order, (slot_id, position) in enumerate((late, early))
        )

    def num_params(self) -> int:
        return 1

    def build(self, slot_ids: Iterable[str], example: torch.Tensor) -> Host:
        raise NotImplementedError


def test_of_another_host_the_slots_are_drawn_in_the_order_of_the_forward_pass():
    assert drawing(tiny.task(host=Mystery(), enabled=("r0c0",))) == drawn("""
input
  │  layers
  ○ r0c1   4 channels
  │  layers
  ● r0c0   4 channels
  │  layers
output
""")


def test_where_all_slots_are_used_the_key_names_no_others():
    assert drawing(task_by_name("tinystories"))[-1] == "● slots of a run"


@pytest.mark.parametrize("name", task_names())
def test_every_drawing_has_all_slots_and_fits_80_columns(name):
    task = task_by_name(name)
    lines = drawing(task)
    assert max(map(len, lines)) <= 80
    if task.host is not None:
        assert sorted(line.split()[1] for line in lines if line.startswith(("  ●", "  ○"))) == sorted(task.offered)
