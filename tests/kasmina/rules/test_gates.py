"""Quality gates, check by check, just below, at and just above their thresholds."""

from dataclasses import replace as data_replace

import pytest
import torch
from driver import CPU, Driver, action, measured
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_rules import gate_2 as scalar_gate_2
from scalar_rules import gate_3 as scalar_gate_3
from scalar_rules import gate_5 as scalar_gate_5
from scalar_step import slot_dicts

from esper.kasmina.rules.conditions import FailedCheck, LifecycleConfig, gate_2, gate_3, gate_5
from esper.kasmina.rules.slot_fields import EMPTY, empty_slots
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.tensor_dataclass import replace

NAN = float("nan")
EPS = 1e-3
PERMISSIVE = LifecycleConfig(gate_mode="permissive")
STRICT = LifecycleConfig(gate_mode="strict")


def one_slot_each(rows, **common):
    """N hosts with one slot; each row names the fields in which its slot differs from `common` and from empty."""
    names = {name for row in (common, *rows) for name in row}
    columns = {
        name: torch.tensor([row.get(name, common.get(name, EMPTY[name][1])) for row in rows], dtype=EMPTY[name][0])
        for name in names
    }
    return replace(empty_slots(len(rows), 1, CPU), **{name: column[:, None] for name, column in columns.items()})


def ints(values):
    return torch.tensor(values)[:, None]


def failed(result):
    return result.failed[:, 0].tolist()


def scores(result):
    return pytest.approx(result.score[:, 0].tolist())


HEALTHY = {"stage": 3, "grad_health": 1.0, "grad_exploding": False}


def test_permissive_g2_asks_for_epochs_health_and_no_explosion():
    table = [
        ({}, 10, 0),
        ({}, 9, 1),
        ({}, 11, 0),
        ({"grad_health": NAN}, 10, 2),
        ({"grad_exploding": True}, 10, 4),
        ({"grad_health": 0.7}, 10, 0),
        ({"grad_health": 0.7 - EPS}, 10, 8),
        ({"grad_health": 0.7 + EPS}, 10, 0),
        ({"grad_health": 0.2, "grad_exploding": True}, 3, 1 + 4 + 8),
        ({"grad_health": NAN}, 0, 1 + 2),
        # what a missing measurement says about explosions is worth nothing
        ({"grad_health": NAN, "grad_exploding": True}, 10, 2),
        # neither improvement nor gradient ratio matter here
        ({"acc_at_stage_start": 90.0, "grad_ratio_ema": 0.0}, 10, 0),
        ({"acc_at_stage_start": NAN, "grad_ratio_ema": NAN}, 10, 0),
    ]
    slots = one_slot_each([row for row, _, _ in table], **HEALTHY, acc_at_stage_start=50.0)
    got = gate_2(slots, ints([n for _, n, _ in table]), torch.full((len(table),), 50.0), PERMISSIVE)
    assert failed(got) == [bits for _, _, bits in table]
    assert torch.equal(got.passed, got.failed == 0)


def test_strict_g2_asks_for_epochs_improvement_and_gradient_ratio():
    table = [
        ({}, 10, 0),
        ({}, 9, 1),
        ({"acc_at_stage_start": 49.5}, 10, 0),
        ({"acc_at_stage_start": 49.5 + EPS}, 10, 16),
        ({"acc_at_stage_start": 49.5 - EPS}, 10, 0),
        ({"acc_at_stage_start": 51.0}, 10, 16),
        ({"acc_at_stage_start": NAN}, 10, 16),
        ({"grad_ratio_ema": 0.10}, 10, 0),
        ({"grad_ratio_ema": 0.10 - EPS}, 10, 32),
        ({"grad_ratio_ema": 0.10 + EPS}, 10, 0),
        ({"grad_ratio_ema": NAN}, 10, 32),
        ({"grad_ratio_ema": NAN, "acc_at_stage_start": NAN}, 9, 1 + 16 + 32),
        # health is the permissive mode's question
        ({"grad_health": NAN, "grad_exploding": True}, 10, 0),
        ({"grad_health": 0.0}, 10, 0),
    ]
    common = {**HEALTHY, "acc_at_stage_start": 40.0, "grad_ratio_ema": 0.5}
    slots = one_slot_each([row for row, _, _ in table], **common)
    got = gate_2(slots, ints([n for _, n, _ in table]), torch.full((len(table),), 50.0), STRICT)
    assert failed(got) == [bits for _, _, bits in table]


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


def test_g5_asks_for_a_contribution_of_this_very_step_and_strictly_for_one_point():
    table = [
        # contribution, its step, failed bits in permissive and in strict mode; the present step is 17
        (2.0, 17, 0, 0),
        (1.0, 17, 0, 0),
        (1.0 - EPS, 17, 0, 256),
        (1.0 + EPS, 17, 0, 0),
        (-3.0, 17, 0, 256),
        (2.0, 16, 128, 128),
        (0.0, 16, 128, 128),
        (NAN, -1, 128, 128),
    ]
    rows = [{"stage": 6, "contribution": c, "contribution_step": at} for c, at, _, _ in table]
    slots = one_slot_each(rows)
    assert failed(gate_5(slots, 17, PERMISSIVE)) == [bits for _, _, bits, _ in table]
    assert failed(gate_5(slots, 17, STRICT)) == [bits for _, _, _, bits in table]


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_the_score_of_g5_is_the_contribution_in_tenths_between_0_and_1(config):
    contributions = [(5.0, 3), (10.0, 3), (25.0, 3), (0.0, 3), (-4.0, 3), (5.0, 2), (NAN, -1)]
    slots = one_slot_each([{"stage": 6, "contribution": c, "contribution_step": at} for c, at in contributions])
    assert scores(gate_5(slots, 3, config)) == [0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_bits_of_the_failed_checks_are_those_that_reports_print():
    assert {check.name: check.value for check in FailedCheck} == {
        "EPOCHS": 1,
        "HEALTH_MISSING": 2,
        "EXPLODING": 4,
        "HEALTH_LOW": 8,
        "IMPROVEMENT": 16,
        "RATIO": 32,
        "ALPHA": 64,
        "CONTRIBUTION_MISSING": 128,
        "CONTRIBUTION_LOW": 256,
    }


def test_thresholds_are_those_of_the_configuration():
    config = LifecycleConfig(min_training_epochs=3, g2_health=0.25)
    slots = one_slot_each([{"grad_health": 0.25}, {"grad_health": 0.24}], stage=3)
    assert failed(gate_2(slots, ints([3, 3]), torch.tensor([50.0, 50.0]), config)) == [0, 8]
    config = LifecycleConfig(gate_mode="strict", min_training_epochs=1, g2_improvement=-1.0, g2_ratio=2.0)
    slots = one_slot_each([{"grad_ratio_ema": 2.0}, {"grad_ratio_ema": 1.9}], stage=3, acc_at_stage_start=51.0)
    assert failed(gate_2(slots, ints([1, 1]), torch.tensor([50.0, 49.9]), config)) == [0, 16 + 32]
    config = LifecycleConfig(gate_mode="strict", min_blending_epochs=2, g5_contribution=0.25)
    slots = one_slot_each([{"contribution": 0.25}, {"contribution": 0.2}], **ARRIVED, contribution_step=1)
    assert failed(gate_3(slots, ints([2, 1]), config)) == [0, 1]
    assert failed(gate_5(slots, 1, config)) == [0, 256]


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


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_g0_refuses_a_blueprint_that_may_not_be_chosen(config):
    driver = Driver(1, 1, config)
    step = driver.step(torch.tensor([action(LifecycleOp.GERMINATE, blueprint=0)]))
    assert step.legal[0, LifecycleOp.GERMINATE, 0]
    assert (step.after.stage.item(), step.success.item(), step.effective.item()) == (1, False, LifecycleOp.WAIT)
    assert step.hosts_after.n_germinated.item() == 0
    step = driver.step(torch.tensor([action(LifecycleOp.GERMINATE, blueprint=1)]))
    assert (step.after.stage.item(), step.success.item()) == (3, True)


@pytest.mark.parametrize("config", [PERMISSIVE, STRICT])
def test_g1_needs_no_measurement_at_all(config):
    driver = Driver(1, 2, config)
    nothing = dict.fromkeys(("grad_health", "grad_ratio", "contribution"), torch.full((1, 2), NAN))
    driver.measure = lambda t, slots: measured(t, slots, **nothing)
    step = driver.run({1: action(LifecycleOp.GERMINATE)}, until=1)[0]
    assert step.after.stage.tolist() == [[3, 1]]
    readings = step.ticks.readings
    assert (readings.gate.tolist(), readings.passed.tolist()) == ([[1, 0]], [[True, False]])
    assert (readings.score[0, 0].item(), readings.failed_checks[0, 0].item()) == (1.0, 0)


@pytest.mark.parametrize(
    ("config", "missing", "bit"), [(PERMISSIVE, "grad_health", 2), (STRICT, "grad_ratio", 32), (STRICT, "val_acc", 16)]
)
def test_a_seed_whose_measurement_never_comes_stays_in_training(config, missing, bit):
    def told(t, slots):
        seen = measured(t, slots)
        return replace(seen, **{missing: torch.full_like(getattr(seen, missing), NAN)})

    config = data_replace(config, min_training_epochs=1)
    steps = Driver(1, 1, config, told).run({1: action(LifecycleOp.GERMINATE)}, until=9)
    assert [step.after.stage.item() for step in steps] == [3] * 9
    assert {step.ticks.readings.failed_checks.item() for step in steps[1:]} == {bit}
    whole = Driver(1, 1, config).run({1: action(LifecycleOp.GERMINATE)}, until=2)
    assert whole[-1].after.stage.item() == 4


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


def test_a_refused_fossilize_is_reported_and_changes_nothing():
    def unmeasured(t, slots):
        return measured(t, slots, contribution=torch.full(slots.stage.shape, NAN))

    steps = Driver(1, 1, LifecycleConfig(min_training_epochs=1), unmeasured).run(
        {1: action(LifecycleOp.GERMINATE, tempo=0), 7: action(LifecycleOp.FOSSILIZE)}, until=7
    )
    refused, readings = steps[-1], steps[-1].ticks.readings
    assert refused.legal[0, LifecycleOp.FOSSILIZE, 0]
    assert (readings.gate.item(), readings.passed.item(), readings.failed_checks.item()) == (5, False, 128)
    assert (refused.success.item(), refused.effective.item(), refused.after.stage.item()) == (False, 0, 6)
    assert refused.hosts_after.n_fossilized.item() == 0
