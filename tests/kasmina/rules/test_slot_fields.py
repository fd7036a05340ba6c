"""Empty values, and writing many fields under one mask."""

import dataclasses
import functools

import pytest
import torch
from driver import CPU, HOST_PARAMS, random_episode
from scalar_rules import EMPTY_SLOT, NEW_HOST, ON_RELEASE

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.slot_fields import EMPTY, empty_slots, new_hosts, release, require_known_values, vacate
from esper.leyline.errors import CheckpointError
from esper.leyline.messages import HostState, SlotState
from esper.leyline.tensor_dataclass import replace

FIELDS = [field.name for field in dataclasses.fields(SlotState)]


def same(a, b):
    """Equal values, NaN equal to NaN."""
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=0.0, equal_nan=True)


@functools.cache
def full_slots():
    """Slots in the middle of their lives, with every field filled somewhere."""
    config = LifecycleConfig(min_training_epochs=1, min_prune_age=1, embargo_epochs=1, sequential=False)
    return random_episode(seed=4, num_hosts=48, num_slots=3, length=12, config=config, panics=False)[-1].after


def every_other(slots):
    return (torch.arange(slots.stage.numel()) % 2 == 0).reshape(slots.stage.shape)


def test_every_field_of_a_slot_has_an_empty_value():
    assert set(EMPTY) == set(FIELDS) == set(EMPTY_SLOT)


def test_new_slots_are_dormant_and_nothing_is_known_of_them():
    slots = empty_slots(2, 3, CPU)
    for name in FIELDS:
        value = getattr(slots, name)
        assert value.shape == (2, 3), name
        assert same(value, torch.full((2, 3), float(EMPTY_SLOT[name]))), name


def test_new_hosts_know_nothing_but_the_size_of_their_network():
    hosts = new_hosts(3, HOST_PARAMS, CPU)
    assert hosts.host_params.tolist() == [HOST_PARAMS] * 3
    for field in dataclasses.fields(HostState):
        if field.name != "host_params":
            want = torch.tensor(NEW_HOST[field.name], dtype=torch.float64).expand(getattr(hosts, field.name).shape)
            assert same(getattr(hosts, field.name), want), field.name


@pytest.mark.parametrize(("forget", "emptied"), [(release, set(ON_RELEASE)), (vacate, set(FIELDS))])
def test_release_forgets_the_module_and_vacate_forgets_everything_where_the_mask_is_set(forget, emptied):
    slots = full_slots()
    where = every_other(slots)
    got = forget(slots, where)
    for name in FIELDS:
        old, new = getattr(slots, name), getattr(got, name)
        want = torch.where(where, torch.tensor(EMPTY_SLOT[name], dtype=old.dtype), old) if name in emptied else old
        assert new.dtype == old.dtype, name
        assert same(new, want), name


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
