"""A recorded function: what it takes and gives, what makes another recording, what it refuses."""

import math

import pytest
import torch
from lane_toys import floats, integers
from torch import Tensor

from esper.cpp import build
from esper.leyline.errors import ConfigError
from esper.leyline.messages import Hidden
from esper.simic.compilation import graphs_compiled
from esper.simic.lanes import machine
from esper.simic.lanes.recorder import RecordingError
from esper.simic.lanes.step import RecordedStep


def mixed(state: Hidden, x: Tensor) -> tuple[Hidden, tuple[Tensor, ...]]:
    """Half of the state changed, an answer given twice, hosts on another axis, and arguments handed on."""
    up = torch.stack((x + 1.0, x - 1.0))
    return Hidden(h=state.h, c=state.c * 2.0), (up, x[:, :1] * 3.0, up, x, up.sum(0).t())


def state_of(n: int) -> tuple[Hidden, Tensor]:
    wide = floats(n, 40).t().contiguous().t().reshape(1, n, 40)
    return Hidden(h=wide + 1.0, c=wide), floats(n, 3, seed=1).nan_to_num(0, 1, 1)


def test_what_is_handed_on_is_the_argument_itself_and_the_rest_is_computed():
    step = RecordedStep(mixed, name="the toy")
    for n in (70, 3, 70):
        state, x = state_of(n)
        after, answers = step(state, x)
        want_after, want = mixed(state, x)
        assert after.h is state.h
        assert answers[3] is x
        assert torch.equal(after.c.nan_to_num(), want_after.c.nan_to_num())
        assert all(torch.equal(a, b) for a, b in zip(answers, want, strict=True))
    assert step.num_graphs == 2, "one for each number of hosts"


def test_another_order_in_memory_is_the_same_recording():
    step = RecordedStep(mixed, name="the toy")
    state, x = state_of(5)
    want = mixed(state, x)[1][1]
    for given in (x, x.t().contiguous().t(), torch.cat((x, x), dim=1)[:, :3], x.repeat(2, 1)[::2][:5] * 0 + x):
        assert torch.equal(step(state, given)[1][1], want)
    assert step.num_graphs == 1


def test_another_form_of_arguments_is_a_recording_of_its_own_and_is_counted():
    step, before = RecordedStep(lambda x, twice: x * 2 if twice else x + 0, name="the toy"), graphs_compiled()
    for x in (torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3), torch.ones(3, 0)):
        assert torch.equal(step(x, True), x * 2)
        assert step(x, True).dtype == x.dtype
    assert torch.equal(step(torch.ones(3), False), torch.ones(3))
    assert step.num_graphs == 5
    assert graphs_compiled() == before + 5


def test_shapes_count_even_of_what_is_not_read():
    step = RecordedStep(lambda x, like: x[:, None].expand(-1, like.shape[1]) + 0.0, name="the toy")
    assert step(torch.ones(3), torch.ones(3, 2)).shape == (3, 2)
    assert step(torch.ones(3), torch.ones(3, 5)).shape == (3, 5)


@pytest.mark.parametrize("n", [3, 64, 70])
def test_an_answer_is_written_where_it_is_told_to_however_that_lies_in_memory(n):
    step = RecordedStep(lambda x, y: (x * 2.0, y, x.sum(1)), name="the toy")
    x, y = floats(n, 20, seed=1).nan_to_num(0, 1, 1), floats(n, 1, seed=2)[:, 0]
    slab, rows = torch.zeros(n, 5, 20), torch.zeros(2, n)
    for t in (0, 4):
        doubled, same, total = step.write((slab[:, t], rows[0]), x, y)
        assert doubled.data_ptr() == slab[:, t].data_ptr()
        assert torch.equal(slab[:, t], x * 2.0)
        assert torch.equal(rows[0].nan_to_num(), y.nan_to_num()), "an argument that is handed on is copied"
        assert torch.equal(same.nan_to_num(), y.nan_to_num())
        torch.testing.assert_close(total, x.sum(1), rtol=1e-4, atol=0.0)
    assert not slab[:, 1:4].any()
    assert not rows[1].any()
    assert step.num_graphs == 1
    turned = torch.zeros(20, n).t()
    step.write((turned, rows[1]), x, y)
    assert torch.equal(turned, x * 2.0)
    assert torch.equal(step(x, y)[0], x * 2.0)
    assert step.num_graphs == 3, "one for each order in memory, and one that makes its answers"


@pytest.mark.parametrize("place", [torch.zeros(3, 4), torch.zeros(2, 3), torch.zeros(3, 3, dtype=torch.float64)])
def test_a_place_of_another_form_than_the_answer_is_refused(place):
    step = RecordedStep(lambda x: x + 1.0, name="the toy")
    with pytest.raises(RecordingError, match="is to be written to a tensor of"):
        step.write(place, torch.ones(3, 3))


def test_what_all_hosts_share_may_change_from_call_to_call_and_constants_may_not():
    shared, table = torch.ones(()), torch.tensor([1.0, 10.0, 100.0])
    step = RecordedStep(lambda x, t: x * t + table, name="the toy")
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(step(x, shared), x + table)
    assert torch.equal(step(x, shared * 4), x * 4 + table)
    assert step.num_graphs == 1


def test_an_answer_that_does_not_depend_on_the_hosts_is_that_of_every_host():
    step = RecordedStep(lambda x: (torch.zeros_like(x), torch.full((len(x), 2), 7)), name="the toy")
    zeros, sevens = step(torch.ones(70))
    assert torch.equal(zeros, torch.zeros(70))
    assert torch.equal(sevens, torch.full((70, 2), 7))


@pytest.mark.parametrize("far", [3, -1, 2**40])
def test_an_index_that_is_out_of_range_is_an_error_as_in_pytorch(far):
    index = torch.zeros(70, 1, dtype=torch.int64)
    x = torch.ones(70, 3)
    for step in (
        RecordedStep(lambda x, i: x.gather(1, i), name="the toy"),
        RecordedStep(lambda x, i: torch.arange(3.0)[i[:, 0]] + x[:, 0], name="the toy"),
    ):
        step(x, index)
        index[69] = far
        with pytest.raises(IndexError, match="out of range"):
            step(x, index)
        index[69] = 0


def other_hosts(x: Tensor) -> dict[str, object]:
    return {
        "the mean of all": x - x.mean(0),
        "the next host": x + x.roll(1, 0),
        "the number of a host": x + torch.arange(len(x))[:, None],
        "by place among all": x.reshape(-1).take(torch.arange(len(x)) * 3 + x[:, 0].long()),
        "all of them": x.sum(),
        "one of them": x[0],
    }


@pytest.mark.parametrize("name", other_hosts(torch.zeros(2, 3)))
def test_a_function_that_looks_at_other_hosts_is_refused(name):
    with pytest.raises(RecordingError, match=r"the toy cannot be recorded: .*set compile = 'off'"):
        RecordedStep(lambda x: other_hosts(x)[name], name="the toy")(torch.ones(4, 3))


def test_what_no_rule_is_written_for_is_named():
    x, kept = torch.ones(4, 3), torch.zeros(2, 3)
    for function, what in (
        (lambda x: x.sort(1).values, "aten.sort"),
        (lambda x: x[x > 2.0], "by a mask"),
        (lambda x: x * float(x[0, 0]), "_local_scalar_dense.* reads a number that is not known yet"),
        (lambda x: x + 1 if torch.equal(x, x) else x, "aten.equal.* reads a number"),
        (lambda x: x.add_(1.0), "aten.add_.* writes into what the function was given"),
        (lambda x: x[:, 0].zero_(), "aten.zero_.* writes into what"),
        (lambda x: kept.copy_(x[:2]) + 0.0, "aten.copy_.* writes into what"),
        (lambda x: x.to(torch.bfloat16), "torch.bfloat16"),
        (lambda x: x / x.to(torch.int32), "torch.int32"),
        (lambda x: torch.div(x, 2.0, rounding_mode="floor"), "division of whole numbers"),
        (lambda x: torch.div(x, 2.0, rounding_mode="trunc"), "rounded by 'trunc'"),
        (lambda x: x.long() % x.long(), "no constant, or is 0"),
        (lambda x: torch.rsub(x, 1.0, alpha=2), "rsub with alpha = 2"),
        (lambda x: torch.addmm(x, x, torch.ones(3, 3), beta=2), "addmm with beta = 2"),
        (lambda x: torch.ones(4, 4)[x[:, 0].long(), x[:, 1].long()], "several tensors"),
        (lambda x: torch.nn.functional.layer_norm(x, (3,)), "weight and bias"),
        (lambda x: x.double().view(torch.int64) + 1, "the bits of torch.float64 are read as torch.int64"),
        (lambda x: x.double().view(torch.float32), "the bits of torch.float64 are read as torch.float32"),
        (lambda x: x[0, 0] * 0 + torch.ones(2), "no axis of hosts|other hosts|another way"),
    ):
        with pytest.raises(RecordingError, match=what):
            RecordedStep(function, name="the toy")(x)


def test_a_plain_number_would_be_recorded_for_good_and_is_refused():
    with pytest.raises(TypeError, match="plain number 3"):
        RecordedStep(lambda a, n: a * n, name="the toy")(torch.ones(2), 3)


def test_a_missing_compiler_is_a_mistake_of_configuration(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine.control_machine.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"compile = 'native'\) needs a C\+\+ compiler, but CXX names.*compile to 'off'"
        ):
            RecordedStep(lambda x: x + 1.0, name="the toy")(torch.ones(2))
    finally:
        machine.control_machine.cache_clear()
    assert build.compiler() is None


def test_nothing_of_the_arguments_is_written_or_kept():
    def greedy(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = math.pi
        return y + i

    step, x, i = RecordedStep(greedy, name="the toy"), floats(20, 3), integers(20, 3)
    before = x.clone()
    first = step(x, i)
    kept = first.clone()
    second = step(x + 1.0, i)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert torch.equal(first.nan_to_num(), kept.nan_to_num())
    assert not torch.equal(second.nan_to_num(), kept.nan_to_num())
