"""Measurements into state: what is written, what is kept, and what stays missing."""

import math

import pytest
import torch
from driver import CPU, HOST_PARAMS, measured

from esper.kasmina.rules.slot_fields import empty_slots, ingest, new_hosts

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


def test_velocity_starts_at_the_second_measurement_and_is_smoothed():
    states = feed(of_slot("contribution", [NAN, 2.0, 3.0, NAN, 1.0]))
    assert slot_values(states, "contribution") == nan_ok(NAN, 2.0, 3.0, 3.0, 1.0)
    # 0.7 * 0 + 0.3 * (3 - 2) = 0.3; kept; 0.7 * 0.3 + 0.3 * (1 - 3) = -0.39
    assert slot_values(states, "contribution_velocity") == nan_ok(NAN, NAN, 0.3, 0.3, -0.39)


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
