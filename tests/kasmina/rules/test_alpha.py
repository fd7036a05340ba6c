"""Alpha: curves, ramps, and that they land where they should, when they should."""

import pytest
import torch

from esper.kasmina.rules import lifecycle
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import AlphaCurve, AlphaMode
from esper.leyline.tensor_dataclass import replace

LINEAR, COSINE, SIGMOID = AlphaCurve.LINEAR, AlphaCurve.COSINE, AlphaCurve.SIGMOID
CURVES = {"linear": (LINEAR, 12.0), "cosine": (COSINE, 12.0), **{f"sigmoid {k}": (SIGMOID, k) for k in (6, 12, 24)}}
VECTORS = {
    3: {
        "linear": (0.3333, 0.6667, 1),
        "cosine": (0.2500, 0.7500, 1),
        "sigmoid 6": (0.2447, 0.7553, 1),
        "sigmoid 12": (0.1173, 0.8827, 1),
        "sigmoid 24": (0.0180, 0.9820, 1),
    },
    5: {
        "linear": (0.2, 0.4, 0.6, 0.8, 1),
        "cosine": (0.0955, 0.3455, 0.6545, 0.9045, 1),
        "sigmoid 6": (0.1043, 0.3391, 0.6609, 0.8957, 1),
        "sigmoid 12": (0.0242, 0.2301, 0.7699, 0.9758, 1),
        "sigmoid 24": (0.0007, 0.0832, 0.9168, 0.9993, 1),
    },
    8: {
        "linear": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1),
        "cosine": (0.0381, 0.1464, 0.3087, 0.5, 0.6913, 0.8536, 0.9619, 1),
        "sigmoid 6": (0.0529, 0.1491, 0.3020, 0.5, 0.6980, 0.8509, 0.9471, 1),
        "sigmoid 12": (0.0086, 0.0452, 0.1808, 0.5, 0.8192, 0.9548, 0.9914, 1),
        "sigmoid 24": (0.0001, 0.0025, 0.0474, 0.5, 0.9526, 0.9975, 0.9999, 1),
    },
}


def column(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None]


def start_ramp(start, target, ticks, curve, steepness):
    """One slot per entry of the lists, in HOLD at `start`, retargeted."""
    slots = replace(empty_slots(len(start), 1, torch.device("cpu")), alpha=column(start))
    return lifecycle.retarget(
        slots,
        torch.ones(len(start), 1, dtype=torch.bool),
        target=column(target),
        ticks=column(ticks, torch.int64),
        curve=column([int(c) for c in curve], torch.int64),
        steepness=column([float(k) for k in steepness]),
    )


def tick(slots):
    """One tick of whatever moves."""
    return lifecycle.step_ramps(slots, slots.alpha_mode != AlphaMode.HOLD)


def ramp_of(slots, ticks):
    """Alpha after each of `ticks` ticks, [ticks, N]."""
    seen = []
    for _ in range(ticks):
        slots = tick(slots)
        seen.append(slots.alpha[:, 0])
    return torch.stack(seen), slots


@pytest.mark.parametrize("ticks", [3, 5, 8])
@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (1.0, 0.0), (1.0, 0.5), (0.5, 0.7)])
def test_ramps_follow_the_table_of_their_curve(ticks, start, target):
    names = list(CURVES)
    n = len(names)
    slots = start_ramp([start] * n, [target] * n, [ticks] * n, *zip(*CURVES.values(), strict=True))
    got, _ = ramp_of(slots, ticks)
    share = torch.tensor([VECTORS[ticks][name] for name in names]).t()
    torch.testing.assert_close(got, start + (target - start) * share, rtol=0.0, atol=0.51e-4)


@pytest.mark.parametrize("k", [0.0, 0.05, -3.0])
def test_a_sigmoid_is_never_flatter_than_steepness_one_tenth(k):
    x = torch.linspace(0.0, 1.0, 11)
    got = lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), k))
    torch.testing.assert_close(got, lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), 0.1)))
    torch.testing.assert_close(got, x, rtol=0.0, atol=1e-3)  # at k = 0.1 a sigmoid is a straight line to 1e-4
