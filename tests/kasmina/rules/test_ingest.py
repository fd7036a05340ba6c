"""Measurements into state: what is written, what is kept, and what stays missing."""

import math

import pytest
import torch
from driver import CPU, HOST_PARAMS, Driver, action, measured

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.slot_fields import empty_slots, ingest, new_hosts
from esper.leyline.lifecycle import LifecycleOp

NAN = float("nan")


def fresh(num_envs=1, num_slots=1):
    return empty_slots(num_envs, num_slots, CPU), new_hosts(num_envs, HOST_PARAMS, CPU)


def feed(series, num_slots=1, t0=1):
    """Ingest one measurement per entry into a fresh host; the states after each."""
    slots, hosts = fresh(1, num_slots)
    states = []
    for t, changes in enumerate(series, start=t0):
        tensors = {name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in changes}
        slots, hosts = ingest(slots, hosts, measured(t, slots, **tensors), t, torch.ones(1, dtype=torch.bool))
        states.append((slots, hosts))
    return states


def of_slot(name, values):
    """A series of measurements of one slot."""
    return [[(name, [[value]])] for value in values]


def of_host(name, values):
    return [[(name, [value])] for value in values]


def slot_values(states, name):
    return [getattr(slots, name)[0, 0].item() for slots, _ in states]


def host_values(states, name):
    return [getattr(hosts, name)[0].item() for _, hosts in states]


def nan_ok(*values):
    return pytest.approx(list(values), nan_ok=True, abs=1e-5)


# -- contributions ----------------------------------------------------------------------------------------------------


def test_velocity_starts_at_the_second_measurement_and_is_smoothed():
    states = feed(of_slot("contribution", [NAN, 2.0, 3.0, NAN, 1.0]))
    assert slot_values(states, "contribution") == nan_ok(NAN, 2.0, 3.0, 3.0, 1.0)
    # 0.7 * 0 + 0.3 * (3 - 2) = 0.3; kept; 0.7 * 0.3 + 0.3 * (1 - 3) = -0.39
    assert slot_values(states, "contribution_velocity") == nan_ok(NAN, NAN, 0.3, 0.3, -0.39)


def test_the_step_of_a_contribution_tells_its_age():
    assert slot_values(feed(of_slot("contribution", [NAN, 2.0, NAN, NAN, 0.0])), "contribution_step") == [
        -1,
        2,
        2,
        2,
        5,
    ]


def test_interactions_are_summed_and_the_best_partner_counts():
    pairs = torch.full((1, 3, 3), NAN)
    for i, j, value in ((0, 1, -2.0), (0, 2, 0.5), (1, 2, -1.0)):
        pairs[0, i, j] = pairs[0, j, i] = value
    slots, _ = feed([[("interactions", pairs)]], num_slots=3)[0]
    assert slots.interaction_sum[0].tolist() == pytest.approx([-1.5, -3.0, -0.5])
    assert slots.boost_received[0].tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_one_pair_of_two_players_is_enough_and_others_stay_missing():
    pairs = torch.full((1, 3, 3), NAN)
    pairs[0, 0, 2] = pairs[0, 2, 0] = 1.5
    slots, _ = feed([[("interactions", pairs)]], num_slots=3)[0]
    assert slots.interaction_sum[0].tolist() == nan_ok(1.5, NAN, 1.5)
    assert slots.boost_received[0].tolist() == nan_ok(1.5, NAN, 1.5)


def test_interactions_that_are_not_measured_in_this_step_are_missing():
    pairs = torch.full((1, 2, 2), 1.0)
    pairs[0, [0, 1], [0, 1]] = NAN
    states = feed([[("interactions", pairs)], []], num_slots=2)
    assert slot_values(states, "interaction_sum") == nan_ok(1.0, NAN)
    assert slot_values(states, "boost_received") == nan_ok(1.0, NAN)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_the_gradient_ratio_is_smoothed_from_its_first_value_and_kept_while_missing():
    states = feed(of_slot("grad_ratio", [NAN, 0.5, 0.1, NAN, 1.0]))
    # 0.9 * 0.5 + 0.1 * 0.1 = 0.46; kept; 0.9 * 0.46 + 0.1 * 1 = 0.514
    assert slot_values(states, "grad_ratio_ema") == nan_ok(NAN, 0.5, 0.46, 0.46, 0.514)


def test_gradient_health_is_of_this_step_and_the_one_before():
    states = feed(of_slot("grad_health", [NAN, 0.75, 0.5, NAN, NAN]))
    assert slot_values(states, "grad_health") == nan_ok(NAN, 0.75, 0.5, NAN, NAN)
    assert slot_values(states, "grad_health_prev") == nan_ok(NAN, NAN, 0.75, 0.5, NAN)


def test_nothing_of_an_old_seed_reaches_the_next_one_in_its_slot():
    rules = LifecycleConfig(min_training_epochs=1, min_prune_age=1, embargo_epochs=1)
    driver = Driver(1, 1, rules)
    germinate, prune = action(LifecycleOp.GERMINATE, tempo=0), action(LifecycleOp.PRUNE)
    steps = driver.run({1: germinate, 6: prune, 9: germinate}, until=10)
    old, new = steps[5].slots, steps[9].slots
    assert (old.serial.item(), new.serial.item()) == (0, 1)
    assert not math.isnan(old.contribution_velocity.item())
    for name in ("contribution", "contribution_velocity", "grad_health_prev"):
        assert math.isnan(getattr(new, name).item()), name
    assert new.grad_ratio_ema.item() == pytest.approx(0.5)
    assert new.contribution_step.item() == -1


# -- hosts ------------------------------------------------------------------------------------------------------------


def test_histories_hold_the_last_five_values_the_newest_last():
    states = feed([[("val_acc", [10.0 * t]), ("val_loss", [0.5 * t])] for t in range(1, 8)])
    assert states[1][1].acc_hist[0].tolist() == nan_ok(NAN, NAN, NAN, 10.0, 20.0)
    assert states[6][1].acc_hist[0].tolist() == [30.0, 40.0, 50.0, 60.0, 70.0]
    assert states[6][1].loss_hist[0].tolist() == [1.5, 2.0, 2.5, 3.0, 3.5]


def test_a_plateau_is_a_gain_of_less_than_half_a_point_and_starts_with_the_second_value():
    accuracies = [50.0, 50.25, 50.0, 50.5, 51.0, 51.25]
    #       gains   -    0.25  -0.25  0.5   0.5   0.25
    assert host_values(feed(of_host("val_acc", accuracies)), "plateau_count") == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize(
    ("losses", "counts", "latched"),
    [
        # relative falls of 0.5, 0, 0, 0: the third stable step closes the latch
        ([2.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 2, 3], [False, False, False, False, True]),
        # -0.04 and 0.02 are stable, 0.04 and -0.06 are not
        ([1.0, 1.04, 1.0192, 0.978432, 1.03713792], [0, 1, 2, 0, 0], [False] * 5),
        # a loss that cannot be compared with leaves the count alone
        ([1.0, 1.0, 0.0, 1.0, 1.0], [0, 1, 0, 0, 1], [False] * 5),
        ([1.0, 1.0, NAN, 1.0, 1.0, 1.0], [0, 1, 0, 0, 1, 2], [False] * 6),
        ([1.0, 1.0, 1.0, math.inf, 1.0, 1.0], [0, 1, 2, 0, 0, 1], [False] * 6),
    ],
)
def test_a_host_is_stabilized_after_three_steps_that_hardly_move_the_loss(losses, counts, latched):
    states = feed(of_host("val_loss", losses))
    assert host_values(states, "stable_count") == counts
    assert host_values(states, "stabilized") == latched


@pytest.mark.parametrize(("relative", "stable"), [(-0.05, False), (-0.0499, True), (0.0299, True), (0.03, False)])
def test_the_bounds_of_stability_are_exclusive(relative, stable):
    # 1000 - 1000 r is exact enough: the bounds themselves land 1e-8 outside, the others well inside
    states = feed(of_host("val_loss", [1.0, 1.0 - relative - (0.0 if stable else math.copysign(1e-6, relative))]))
    assert host_values(states, "stable_count") == [0, int(stable)]


# -- missing values, and hosts in panic -------------------------------------------------------------------------------


def test_what_is_never_measured_stays_missing_for_an_episode():
    everything_missing = {"contribution", "grad_norm", "grad_health", "grad_ratio"}

    def nothing(t, slots):
        return measured(t, slots, **{name: torch.full(slots.stage.shape, NAN) for name in everything_missing})

    driver = Driver(1, 1, LifecycleConfig(min_training_epochs=2), nothing)
    steps = driver.run({1: action(LifecycleOp.GERMINATE)}, until=12)
    for step in steps:
        for name in ("contribution", "contribution_velocity", "interaction_sum", "boost_received", "grad_norm",
                     "grad_health", "grad_health_prev", "grad_ratio_ema"):  # fmt: skip
            assert math.isnan(getattr(step.slots, name).item()), (step.t, name)
        assert step.slots.contribution_step.item() == -1
    assert steps[-1].after.stage.item() == 3  # without a measured health the permissive gate stays shut


def test_gradient_fields_vanish_when_a_seed_is_held():
    # HOLDING in the tick of 5: the train pass of 6 measures no gradient, step 7 has no previous one either
    steps = Driver(1, 1, LifecycleConfig(min_training_epochs=1)).run({1: action(LifecycleOp.GERMINATE, tempo=0)}, 7)
    held = steps[5].slots
    assert held.stage.item() == 6
    assert math.isnan(held.grad_norm.item())
    assert math.isnan(held.grad_health.item())
    assert held.grad_health_prev.item() == 1.0
    assert math.isnan(steps[6].slots.grad_health_prev.item())
    assert held.grad_ratio_ema.item() == pytest.approx(0.5)
