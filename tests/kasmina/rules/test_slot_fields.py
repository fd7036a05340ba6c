"""Empty values of fields, and what measurements make of them."""

import dataclasses
import math

import pytest
import torch
from driver import CPU, HOST_PARAMS, measured
from scalar_rules import EMPTY_SLOT

from esper.kasmina.rules.slot_fields import EMPTY, empty_slots, ingest, new_hosts, require_known_values
from esper.leyline.errors import CheckpointError
from esper.leyline.messages import SlotState
from esper.leyline.tensor_dataclass import replace


def test_every_field_of_a_slot_has_an_empty_value():
    assert set(EMPTY) == {field.name for field in dataclasses.fields(SlotState)} == set(EMPTY_SLOT)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stage", 0), ("stage", 5), ("stage", 11), ("stage", -1), ("algorithm", 4), ("alpha_mode", -1), ("alpha_curve", 4),
     ("germ_curve", 9), ("blueprint", 13), ("blueprint", -2)],
)  # fmt: skip
def test_a_state_from_outside_with_an_unknown_value_is_refused(name, value):
    slots = empty_slots(2, 3, torch.device("cpu"))
    require_known_values(slots, 13)
    strange = getattr(slots, name).clone()
    strange[1, 2] = value
    with pytest.raises(CheckpointError, match=rf"{name} \[{value}\]"):
        require_known_values(replace(slots, **{name: strange}), 13)


# -- measurements into state ------------------------------------------------------------------------------------------

NAN = float("nan")


def stability(losses):
    """The count of stable steps, and whether the host is stabilized, after each of these validation losses."""
    slots, hosts = empty_slots(1, 1, CPU), new_hosts(1, HOST_PARAMS, CPU)
    counts, latched = [], []
    for t, loss in enumerate(losses, start=1):
        seen = measured(t, slots, val_loss=torch.tensor([loss]))
        slots, hosts = ingest(slots, hosts, seen, t, torch.ones(1, dtype=torch.bool))
        counts.append(hosts.stable_count.item())
        latched.append(hosts.stabilized.item())
    return counts, latched


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
    assert stability(losses) == (counts, latched)


@pytest.mark.parametrize(("relative", "stable"), [(-0.05, False), (-0.0499, True), (0.0299, True), (0.03, False)])
def test_the_bounds_of_stability_are_exclusive(relative, stable):
    # 1000 - 1000 r is exact enough: the bounds themselves land 1e-8 outside, the others well inside
    counts, _ = stability([1.0, 1.0 - relative - (0.0 if stable else math.copysign(1e-6, relative))])
    assert counts == [0, int(stable)]
