"""Alpha: curves, ramps, and that they land where they should, when they should."""

import pytest
import torch
from driver import Driver, action, actions
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_rules import share_of_ramp

from esper.kasmina.rules import lifecycle
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import AlphaCurve, AlphaMode, LifecycleOp, Style
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


numbers = st.floats(0.0, 1.0, width=32)
ramps = st.tuples(
    numbers,
    numbers,
    st.sampled_from([3, 5, 8]),
    st.sampled_from([LINEAR, COSINE, SIGMOID]),
    st.sampled_from([0.1, 6.0, 12.0, 24.0]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ramps, min_size=8, max_size=8))
def test_a_ramp_is_monotone_lands_exactly_and_takes_exactly_its_ticks(rows):
    start, target, ticks, curve, steepness = zip(*rows, strict=True)
    slots = start_ramp(start, target, ticks, curve, steepness)
    start_N, target_N = torch.tensor(start), torch.tensor(target)
    moves_N = start_N != target_N
    before_N = start_N
    for k in range(1, 9):
        moving_N = moves_N & (torch.tensor(ticks) >= k)
        assert torch.equal(slots.alpha_mode[:, 0] != AlphaMode.HOLD, moving_N)
        slots = tick(slots)
        now_N = slots.alpha[:, 0]
        assert torch.all((now_N - before_N) * torch.sign(target_N - start_N) >= 0.0)
        assert torch.equal(slots.alpha_done[:, 0], torch.tensor(ticks).clamp(max=k) * moves_N)
        before_N = now_N
    assert torch.equal(slots.alpha[:, 0], target_N)
    assert torch.equal(slots.alpha_done, slots.alpha_total)
    assert not torch.any(slots.alpha_mode)


@pytest.mark.parametrize("k", [0.1, 1.0, 6.0, 12.0, 24.0, 200.0])
def test_a_sigmoid_runs_from_0_to_1_as_worked_out_in_double_precision(k):
    x = torch.linspace(0.0, 1.0, 41)
    got = lifecycle.ramp(x, torch.full((41,), int(SIGMOID)), torch.full((41,), k))
    want = torch.tensor([share_of_ramp(v, int(SIGMOID), k) for v in x.tolist()])
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)
    assert (got[0], got[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("k", [0.0, 0.05, -3.0])
def test_a_sigmoid_is_never_flatter_than_steepness_one_tenth(k):
    x = torch.linspace(0.0, 1.0, 11)
    got = lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), k))
    torch.testing.assert_close(got, lifecycle.ramp(x, torch.full((11,), int(SIGMOID)), torch.full((11,), 0.1)))
    torch.testing.assert_close(got, x, rtol=0.0, atol=1e-3)  # at k = 0.1 a sigmoid is a straight line to 1e-4


def test_no_ticks_take_the_target_at_once_and_stay_in_hold():
    slots = start_ramp([0.0, 1.0], [0.7, 0.5], [0, 0], [LINEAR, SIGMOID], [12.0, 6.0])
    torch.testing.assert_close(slots.alpha[:, 0], torch.tensor([0.7, 0.5]), rtol=0.0, atol=0.0)
    assert slots.alpha_mode[:, 0].tolist() == [0, 0]
    assert slots.alpha_total[:, 0].tolist() == slots.alpha_done[:, 0].tolist() == [0, 0]


def test_a_target_that_is_already_reached_stays_in_hold_without_ticks():
    slots = start_ramp([0.5], [0.5], [5], [LINEAR], [12.0])
    assert (slots.alpha.item(), slots.alpha_mode.item(), slots.alpha_total.item()) == (0.5, 0, 0)


# -- steepness reaches every ramp -------------------------------------------------------------------------------------

QUICK = LifecycleConfig(min_training_epochs=1, min_prune_age=0)
GERMINATE = LifecycleOp.GERMINATE


def alphas(steps, host, first, last):
    """Alpha of one host's only slot after the steps `first` to `last`."""
    return [step.after.alpha[host, 0].item() for step in steps[first - 1 : last]]


def test_the_first_ramp_has_the_curve_of_the_style_and_the_ticks_of_the_tempo():
    curves = {
        Style.LINEAR_ADD: "linear",
        Style.LINEAR_MULTIPLY: "linear",
        Style.SIGMOID_ADD: "sigmoid 12",
        Style.GATED_GATE: "linear",
    }
    cases = [(style, tempo) for style in Style for tempo in range(3)]
    first = actions(*[action(GERMINATE, style=style, tempo=tempo) for style, tempo in cases])
    steps = Driver(len(cases), 1, QUICK).run({1: first}, until=11)
    for host, (style, tempo) in enumerate(cases):
        # germinated in 1, BLENDING from the tick of 2, ticks in 3 .. 2 + ticks
        ticks = (3, 5, 8)[tempo]
        assert alphas(steps, host, 3, 2 + ticks) == pytest.approx(VECTORS[ticks][curves[style]], abs=0.51e-4)
        stages = [step.after.stage[host, 0].item() for step in steps[1 : 2 + ticks]]
        assert stages == [4] * ticks + [6]


def test_later_ramps_have_the_curve_and_the_steepness_of_the_action():
    # HOLDING from the tick of 5; the ramp's ticks are those of steps 6 .. 10
    ends = {LifecycleOp.SET_ALPHA_TARGET: 0.5, LifecycleOp.PRUNE: 0.0}
    cases = [(op, curve) for op in ends for curve in range(5)]
    lower = actions(*[action(op, alpha_target=0, alpha_speed=2, alpha_curve=curve) for op, curve in cases])
    steps = Driver(len(cases), 1, QUICK).run({1: action(GERMINATE, tempo=0), 6: lower}, until=10)
    for host, (op, curve) in enumerate(cases):
        want = [1.0 + (ends[op] - 1.0) * p for p in VECTORS[5][list(CURVES)[curve]]]
        assert alphas(steps, host, 6, 10) == pytest.approx(want, abs=0.51e-4)


def test_a_ramp_of_a_seed_that_blends_may_be_steep_too():
    # target 0.5, reached in the tick of 5; in step 6 up to 1 in three ticks with k = 24
    up = action(LifecycleOp.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=1, alpha_curve=4)
    steps = Driver(1, 1, QUICK).run({1: action(GERMINATE, tempo=0, alpha_target=0), 6: up}, until=8)
    assert steps[5].slots.alpha.item() == 0.5
    assert alphas(steps, 0, 6, 8) == pytest.approx([0.5 + 0.5 * p for p in VECTORS[3]["sigmoid 24"]], abs=0.51e-4)
