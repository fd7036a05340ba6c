"""Quality gates, check by check, just below, at and just above their thresholds."""

import pytest
import torch
from driver import CPU, Driver, action
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_rules import gate_2 as scalar_gate_2
from scalar_rules import gate_3 as scalar_gate_3
from scalar_rules import gate_5 as scalar_gate_5
from scalar_rules import slot_dicts

from esper.kasmina.rules.conditions import FailedCheck, LifecycleConfig, gate_2, gate_3, gate_5
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import LifecycleOp

NAN = float("nan")
PERMISSIVE = LifecycleConfig(gate_mode="permissive")
STRICT = LifecycleConfig(gate_mode="strict")


def one_slot_each(rows, **common):
    """N hosts with one slot; each row names the fields in which its slot differs from `common` and from empty."""
    slots = empty_slots(len(rows), 1, CPU)
    for n, row in enumerate(rows):
        for name, value in (common | row).items():
            getattr(slots, name)[n] = value
    return slots


def ints(values):
    return torch.tensor(values)[:, None]


def failed(result):
    return result.failed[:, 0].tolist()


def scores(result):
    return pytest.approx(result.score[:, 0].tolist())


HEALTHY = {"stage": 3, "grad_health": 1.0, "grad_exploding": False}


def test_strict_g2_fails_while_the_accuracy_itself_is_missing():
    slots = one_slot_each([{}], **HEALTHY, acc_at_stage_start=40.0, grad_ratio_ema=0.5)
    assert failed(gate_2(slots, ints([10]), torch.tensor([NAN]), STRICT)) == [16]


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_the_score_of_g2_is_the_improvement_in_fifths_of_a_point_between_0_and_1(config):
    starts = [50.0, 49.0, 47.5, 45.0, 40.0, 51.0, NAN]
    slots = one_slot_each([{"acc_at_stage_start": start} for start in starts], **HEALTHY)
    got = gate_2(slots, ints([10] * len(starts)), torch.full((len(starts),), 50.0), config)
    assert scores(got) == [0.0, 0.2, 0.5, 1.0, 1.0, 0.0, 0.0]


ARRIVED = {"stage": 4, "alpha": 1.0, "alpha_target": 1.0, "alpha_mode": 0}


@pytest.mark.parametrize(("config", "too_early"), [(PERMISSIVE, 0), (STRICT, 1)])
def test_g3_asks_that_alpha_rests_at_the_full_target_and_strictly_for_time(config, too_early):
    table = [
        ({}, 10, 0),
        ({}, 9, too_early),
        ({}, 11, 0),
        ({"alpha_mode": 1}, 10, 64),
        ({"alpha_mode": 2}, 10, 64),
        ({"alpha": 0.5, "alpha_target": 0.5}, 10, 64),
        ({"alpha": 1.0 - 5e-7, "alpha_target": 1.0}, 10, 0),
        ({"alpha": 1.0 - 5e-6, "alpha_target": 1.0}, 10, 64),
        ({"alpha": 1.0 - 5e-7, "alpha_target": 1.0 - 5e-7}, 10, 0),
        ({"alpha": 1.0 - 5e-6, "alpha_target": 1.0 - 5e-6}, 10, 64),
        ({"alpha": 0.0, "alpha_target": 1.0}, 0, 64 + too_early),
    ]
    slots = one_slot_each([row for row, _, _ in table], **ARRIVED)
    got = gate_3(slots, ints([n for _, n, _ in table]), config)
    assert failed(got) == [bits for _, _, bits in table]
    assert torch.equal(got.score, slots.alpha)


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_the_score_of_g5_is_the_contribution_in_tenths_between_0_and_1(config):
    contributions = [(5.0, 3), (10.0, 3), (25.0, 3), (0.0, 3), (-4.0, 3), (5.0, 2), (NAN, -1)]
    slots = one_slot_each([{"stage": 6, "contribution": c, "contribution_step": at} for c, at in contributions])
    assert scores(gate_5(slots, 3, config)) == [0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_bits_of_the_failed_checks_are_those_that_reports_print():
    names = ("EPOCHS", "HEALTH_MISSING", "EXPLODING", "HEALTH_LOW", "IMPROVEMENT", "RATIO", "ALPHA",
             "CONTRIBUTION_MISSING", "CONTRIBUTION_LOW")  # fmt: skip
    assert {check.name: check.value for check in FailedCheck} == {name: 2**k for k, name in enumerate(names)}


# multiples of 1/8 are exact in single and double precision, so both twins see the same ties
eighths = st.integers(-16, 16).map(lambda k: k / 8)
slot_rows = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([3, 4, 6]),
        "grad_health": st.sampled_from([NAN, 0.625, 0.75, 0.875, 1.0]),
        "grad_exploding": st.booleans(),
        "grad_ratio_ema": st.sampled_from([NAN, 0.0, 0.125, 0.25]),
        "acc_at_stage_start": st.one_of(st.just(NAN), eighths.map(lambda k: 50.0 + k)),
        "alpha": st.sampled_from([0.5, 1.0]),
        "alpha_target": st.sampled_from([0.0, 0.5, 1.0]),
        "alpha_mode": st.sampled_from([0, 1, 2]),
        "contribution": eighths,
        "contribution_step": st.sampled_from([-1, 6, 7]),
    }
)
configs = st.builds(
    LifecycleConfig,
    gate_mode=st.sampled_from(["permissive", "strict"]),
    min_training_epochs=st.integers(1, 4),
    min_blending_epochs=st.integers(1, 4),
    g2_health=st.just(0.75),
    g2_ratio=st.just(0.125),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(slot_rows, min_size=6, max_size=6), st.lists(st.integers(0, 5), min_size=6, max_size=6), configs)
def test_gates_agree_with_their_scalar_twins(rows, epochs, config):
    slots = one_slot_each(rows)
    references = [slots_of_host[0] for slots_of_host in slot_dicts(slots)]
    pairs = list(zip(references, epochs, strict=True))
    got = gate_2(slots, ints(epochs), torch.full((6,), 50.0), config)
    assert failed(got) == [scalar_gate_2(reference, n, 50.0, config) for reference, n in pairs]
    assert failed(gate_3(slots, ints(epochs), config)) == [
        scalar_gate_3(reference, n, config) for reference, n in pairs
    ]
    assert failed(gate_5(slots, 7, config)) == [scalar_gate_5(reference, 7, config) for reference in references]


# -- gates where they are asked ---------------------------------------------------------------------------------------


def test_the_tick_reports_every_gate_that_was_asked_with_score_and_failed_checks():
    driver = Driver(1, 2, LifecycleConfig(min_training_epochs=2))
    steps = driver.run({1: action(LifecycleOp.GERMINATE, style=0, tempo=0), 8: action(LifecycleOp.FOSSILIZE)}, until=9)
    readings = [step.ticks.readings for step in steps]
    # accuracy climbs by a point per step, so G2 scores a fifth per step since the tick of 1; G5 scores 2 of 10
    assert [r.gate[0, 0].item() for r in readings] == [1, 2, 2, 3, 3, 3, 0, 5, 0]
    assert [r.passed[0, 0].item() for r in readings] == [True, False, True, False, False, True, False, True, False]
    assert [r.failed_checks[0, 0].item() for r in readings] == [0, 1, 0, 64, 64, 0, 0, 0, 0]
    asked = [r.score[0, 0].item() for r in readings if r.gate[0, 0] > 0]
    assert asked == pytest.approx([1.0, 0.2, 0.4, 1 / 3, 2 / 3, 1.0, 0.2])
    assert all(r.gate[0, 1] == 0 for r in readings)
