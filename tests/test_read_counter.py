import pytest
import torch
from torch import Tensor, nn

from esper.leyline.random import Stream, local_generator
from esper.tolaria.runtime import host_read, reads_so_far
from read_counter import HostReadCounter

X = torch.arange(6.0)
MASK = X > 2

LEAKS = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "to": lambda: X.to("cpu"),
    "__bool__": lambda: bool(X[0] == 0),
    "__int__": lambda: int(X[0]),
    "__float__": lambda: float(X[0]),
    "__index__": lambda: X[: torch.tensor(2)],
    "__repr__": lambda: repr(X),
    "__format__": lambda: f"{X[0]:.2f}",
    "nonzero": lambda: torch.nonzero(X),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "aten::index": lambda: X[MASK],
    "aten::index_put_": lambda: X.clone().index_put_((MASK,), torch.zeros(3)),
    "aten::_local_scalar_dense": lambda: X[torch.tensor(2)],
    "aten::nonzero": lambda: torch.where(MASK),
    "aten::repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
}

HARMLESS = {
    "arithmetic": lambda: (X * 2 + X.sum()).softmax(0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "integer index": lambda: X[torch.tensor([0, 3])],
    "masked scalar": lambda: torch.where(MASK, X, torch.tensor(1.0)),
    "to dtype": lambda: X.to(torch.float64),
    "to the device of the run": lambda: X.to(X.device),
    "to like another": lambda: X.to(X),
    "non-blocking": lambda: X.to("cpu", non_blocking=True),
    "shape": lambda: (len(X), X.shape, X.numel(), X.device),
    "host_read": lambda: host_read(X, MASK),
}


@pytest.mark.parametrize("call", LEAKS)
def test_each_way_of_reading_is_counted_once_with_its_place(call):
    with HostReadCounter() as reads:
        LEAKS[call]()
    assert [read.call for read in reads.unintended] == [call]
    assert __file__ in reads.unintended[0].site
    assert reads.intended == 0


@pytest.mark.parametrize("call", HARMLESS)
def test_what_does_not_read_is_not_counted(call):
    with HostReadCounter() as reads:
        HARMLESS[call]()
    assert reads.unintended == []


def test_reads_of_a_parameter_are_counted_too():
    weight = nn.Parameter(torch.ones(1))
    with HostReadCounter() as reads:
        if weight:
            weight.item()
    assert [read.call for read in reads.unintended] == ["__bool__", "item"]


def test_a_copy_that_leaves_a_device_is_counted_whatever_its_name():
    away = torch.empty(3, device="meta")  # a device that is not the CPU and has no contents to copy
    with HostReadCounter() as reads:
        with pytest.raises(NotImplementedError):
            away.to(torch.device("cpu"))
        with pytest.raises(NotImplementedError):
            torch.empty(3).copy_(away)
    assert [read.call for read in reads.unintended] == ["to", "aten::copy_"]


def test_the_place_of_a_read_is_the_first_frame_inside_the_package():
    with HostReadCounter() as reads:
        local_generator(0, Stream.HOST_INIT)
    assert [read.site.split(":")[0] for read in reads.unintended] == ["esper/leyline/random.py"]
    assert reads.by_site.total() == 1


def test_intended_reads_are_counted_apart():
    before = reads_so_far()
    with HostReadCounter() as reads:
        host_read(X, MASK)
        host_read(X)
    assert reads.intended == 2
    assert reads_so_far() - before == 2


def test_everything_is_restored_also_by_an_exception():
    before = {name: vars(Tensor).get(name) for name in ("item", "__bool__", "__repr__", "cpu", "to")}
    nonzero = torch.nonzero
    with pytest.raises(RuntimeError), HostReadCounter():
        X.item()  # six elements
    assert {name: vars(Tensor).get(name) for name in before} == before
    assert torch.nonzero is nonzero
    with HostReadCounter() as reads:
        pass
    X[0].item()
    assert reads.unintended == []


def test_an_error_inside_a_read_does_not_switch_counting_off():
    with HostReadCounter() as reads:
        with pytest.raises(RuntimeError):
            X.item()
        X[0].item()
    assert [read.call for read in reads.unintended] == ["item", "item"]


def test_nested_counters_count_each_for_itself():
    with HostReadCounter() as outer:
        X[0].item()
        with HostReadCounter() as inner:
            X[MASK]
            host_read(X)
        X.tolist()
    assert [read.call for read in inner.unintended] == ["aten::index"]
    assert [read.call for read in outer.unintended] == ["item", "aten::index", "tolist"]
    assert (inner.intended, outer.intended) == (1, 1)


def test_the_result_of_a_watched_call_is_unchanged():
    with HostReadCounter():
        assert X[1].item() == 1.0
        assert X.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert torch.nonzero(MASK).shape == (3, 1)
        assert X.to("cpu", torch.float64).dtype == torch.float64
