"""How tensors lie in memory: hosts innermost, but rows of float32 where they are long."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.messages import HostState, SlotState
from esper.leyline.record import blank
from esper.simic.lanes.layouts import Layout
from esper.simic.lanes.step import host_axes
from esper.simic.rewards.state import RewardConfig, initial_state


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "strides"),
    [
        ((70,), torch.float32, 0, (1,)),
        ((70, 3), torch.float32, 0, (1, 70)),
        ((70, 16), torch.float32, 0, (16, 1)),
        ((70, 16), torch.float64, 0, (1, 70)),
        ((13, 70, 3), torch.int64, 1, (210, 1, 70)),
        ((2, 70, 128), torch.float32, 1, (8960, 128, 1)),
        ((70, 3, 3), torch.bool, 0, (1, 210, 70)),
        ((3, 4), torch.float32, None, (4, 1)),
        ((), torch.int64, None, ()),
        ((70, 0), torch.float32, 0, (1, 70)),
    ],
)
def test_the_strides_of_a_layout(shape, dtype, axis, strides):
    assert Layout(shape, dtype, axis).strides() == strides


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_places_are_where_the_numbers_of_a_host_lie(others, hosts, axis, wide):
    axis = min(axis, len(others))
    shape = (*others[:axis], hosts, *others[axis:])
    layout = Layout(shape, torch.float32 if wide else torch.int64, axis)
    size = torch.Size(shape).numel()
    x = torch.empty_strided(shape, layout.strides(), dtype=torch.int64)
    flat = x.as_strided((size,), (1,))
    flat.copy_(torch.arange(size))
    stride, places = layout.places()
    for host in range(hosts):
        assert x.select(axis, host).flatten().tolist() == [place + stride * host for place in places]


def test_the_axis_of_hosts_is_the_one_that_a_record_calls_so():
    sizes = {"N": 5, "S": 3}
    slots, hosts = (blank(kind, sizes, torch.device("cpu")) for kind in (SlotState, HostState))
    assert set(host_axes((slots, hosts))) == {0}
    assert list(host_axes((torch.ones(4, 3), torch.ones(()), {"a": [torch.ones(2)]}, None, True))) == [0, None, 0]
    state = initial_state(5, 3, 4, torch.device("cpu"), RewardConfig())
    assert list(host_axes(state)) == [0] * 7
