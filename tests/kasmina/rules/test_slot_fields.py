"""Empty values, and writing many fields under one mask."""

import dataclasses

import pytest
import torch
from driver import CPU, HOST_PARAMS
from scalar_rules import EMPTY_SLOT, NEW_HOST

from esper.kasmina.rules.slot_fields import EMPTY, empty_slots, new_hosts, require_known_values
from esper.leyline.errors import CheckpointError
from esper.leyline.messages import HostState, SlotState
from esper.leyline.tensor_dataclass import replace

FIELDS = [field.name for field in dataclasses.fields(SlotState)]


def same(a, b):
    """Equal values, NaN equal to NaN."""
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=0.0, equal_nan=True)


def test_every_field_of_a_slot_has_an_empty_value():
    assert set(EMPTY) == set(FIELDS) == set(EMPTY_SLOT)


def test_new_hosts_know_nothing_but_the_size_of_their_network():
    hosts = new_hosts(3, HOST_PARAMS, CPU)
    assert hosts.host_params.tolist() == [HOST_PARAMS] * 3
    for field in dataclasses.fields(HostState):
        if field.name != "host_params":
            want = torch.tensor(NEW_HOST[field.name], dtype=torch.float64).expand(getattr(hosts, field.name).shape)
            assert same(getattr(hosts, field.name), want), field.name


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
