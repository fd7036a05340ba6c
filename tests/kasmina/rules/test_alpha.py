"""Alpha: curves, ramps, and that they land where they should, when they should."""

import pytest
import torch

from esper.kasmina.rules import lifecycle
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import AlphaCurve, AlphaMode
from esper.leyline.tensor_dataclass import replace

LINEAR, COSINE, SIGMOID = AlphaCurve.LINEAR, AlphaCurve.COSINE, AlphaCurve.SIGMOID
CURVES = {"linear": (LINEAR, 12.0), "cosine": (COSINE, 12.0), **{f"sigmoid {k}": (SIGMOID, k) for k in (6, 12, 24)}}
EIGHT_TICKS = {
    "linear": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1),
    "cosine": (0.0381, 0.1464, 0.3087, 0.5, 0.6913, 0.8536, 0.9619, 1),
    "sigmoid 6": (0.0529, 0.1491, 0.3020, 0.5, 0.6980, 0.8509, 0.9471, 1),
    "sigmoid 12": (0.0086, 0.0452, 0.1808, 0.5, 0.8192, 0.9548, 0.9914, 1),
    "sigmoid 24": (0.0001, 0.0025, 0.0474, 0.5, 0.9526, 0.9975, 0.9999, 1),
}


def column(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (1.0, 0.0), (1.0, 0.5), (0.5, 0.7)])
def test_ramps_follow_the_table_of_their_curve(start, target):
    curves, steepness = zip(*CURVES.values(), strict=True)
    slots = empty_slots(len(CURVES), 1, torch.device("cpu"))
    slots = lifecycle.retarget(
        replace(slots, alpha=torch.full_like(slots.alpha, start)),
        torch.ones(len(CURVES), 1, dtype=torch.bool),
        target=torch.full_like(slots.alpha, target),
        ticks=torch.full_like(slots.age, 8),
        curve=column([int(curve) for curve in curves], torch.int64),
        steepness=column([float(k) for k in steepness]),
    )
    for tick in range(8):
        slots = lifecycle.step_ramps(slots, slots.alpha_mode != AlphaMode.HOLD)
        share = column([EIGHT_TICKS[name][tick] for name in CURVES])
        torch.testing.assert_close(slots.alpha, start + (target - start) * share, rtol=0.0, atol=0.51e-4)


@pytest.mark.parametrize("k", [0.0, 0.05, -3.0])
def test_a_sigmoid_is_never_flatter_than_steepness_one_tenth(k):
    x = torch.linspace(0.0, 1.0, 11)
    got = lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), k))
    torch.testing.assert_close(got, lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), 0.1)))
    torch.testing.assert_close(got, x, rtol=0.0, atol=1e-3)  # at k = 0.1 a sigmoid is a straight line to 1e-4
