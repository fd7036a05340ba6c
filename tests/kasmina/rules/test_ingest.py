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


def of_host(name, values):
    return [[(name, [value])] for value in values]


def host_values(states, name):
    return [getattr(hosts, name)[0].item() for _, hosts in states]


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
