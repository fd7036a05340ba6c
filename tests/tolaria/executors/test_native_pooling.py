"""Pooling, padding and resizing as instructions give what PyTorch gives."""

import pytest
import torch
import torch.nn.functional as F
from native_agreement import MAPS, Of, agree, parts

from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import by_instructions, disagreement
from esper.tolaria.executors.native.trace import BATCH, NoRuleError, trace

# -- pooling and moving pixels -----------------------------------------------------------------------------------------

MOVED = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "overlapping max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max, ceil": lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "dilated max": lambda x: F.max_pool2d(x, 2, 2, 1, 2, ceil_mode=True),
    "max of equals": lambda x: F.max_pool2d(F.relu(x), 2) + F.max_pool2d(F.relu(x), 3, 1, 1)[:, :, :3, :2],
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average without padding": lambda x: F.avg_pool2d(x, (2, 3), (2, 1), (1, 0), True, False),
    "average with a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive average of some": lambda x: F.adaptive_avg_pool2d(x, (9, None)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (4, 3)),
    "largest": lambda x: F.adaptive_max_pool2d(x, 1),
    "area": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :4, :4], 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest by a factor": lambda x: F.interpolate(x, scale_factor=(0.6, 1.1)),
    "nearest by size": lambda x: F.interpolate(x, size=(9, 4)),
    "nearest exact": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear by a factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bilinear, aligned": lambda x: F.interpolate(x, size=(1, 9), mode="bilinear", align_corners=True),
    "zeros": lambda x: F.pad(x, (1, 2)),
    "constants": lambda x: F.pad(x, (1, 0, 2, 1, 0, 1), value=3.0),
    "cropped": lambda x: F.pad(x, (-1, 2, 1, -2)),
    "reflected": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "replicated": lambda x: F.pad(x, (1, 3, 2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 3, 2, 1), mode="circular"),
    "flipped": lambda x: x.flip(-1) + x.flip((1, 3)),
    "rolled": lambda x: x.roll((2, -1), (1, 2)),
}
MOVED_ROWS = {
    "max": lambda x: F.max_pool1d(x, 2),
    "average": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "mean": lambda x: F.adaptive_avg_pool1d(x, 1),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 3) + F.adaptive_max_pool1d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "linear": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "reflected": lambda x: F.pad(x, (2, 1), mode="reflect"),
}


@pytest.mark.parametrize("name", MOVED)
def test_images_are_pooled_resized_and_padded_as_in_pytorch(name):
    agree(MOVED[name], *MAPS, batches=((40, 16),))


@pytest.mark.parametrize("name", MOVED_ROWS)
def test_rows_are_pooled_resized_and_padded_as_in_pytorch(name):
    agree(MOVED_ROWS[name], 4, 7, batches=((7, None),))


def test_images_of_parts_of_examples_are_pooled_and_shuffled():
    agree(lambda x: F.max_pool2d(parts(x), 2).reshape(len(x), -1), 3, 4, 4, 4)
    agree(lambda x: F.pixel_shuffle(parts(x), 2).reshape(len(x), -1), 3, 4, 4, 4)


def test_a_maximum_that_is_nan_wins():
    graph = trace(Template(Of(lambda x: F.max_pool2d(x, 3, 1))), torch.randn(BATCH, 1, 4, 4), training=True)
    x = torch.randn(3, 1, 4, 4).double()
    x[0, 0, 1, 2], x[1, 0, 0, 0], x[2, 0, 3, 3] = torch.nan, torch.inf, -torch.inf
    found = by_instructions(graph, x[0, 0, 0, :0], x[0, 0, 0, :0], x, training=True)
    assert torch.equal(found.outputs.nan_to_num(9.0), F.max_pool2d(x, 3, 1).nan_to_num(9.0))


def test_examples_are_never_moved():
    for function in (lambda x: x.flip(0), lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), lambda x: F.softmax(x, 0)):
        with pytest.raises(NoRuleError, match="examples"):
            disagreement(Of(function), torch.randn(7, 4, 3))
