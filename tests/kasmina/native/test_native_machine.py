"""Working memory, threads and addresses of the native executor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.native.assembler import Assembler, Operation, Place, Program, Rows
from esper.kasmina.native.machine import Batchwork, Machine, addresses_of

SPACE = 2


def doubling(rows: int) -> Program:
    """Images [lanes, rows] in space 2 are written as rows, and doubled into space 3."""
    a = Assembler(learns=False)
    h = a.rows(rows)
    a.emit(Operation.TRANSPOSE, Place(SPACE, 0), h, sizes=(rows,))
    a.emit(Operation.SCALE, Place(SPACE + 2, 0), h, Place(SPACE + 1, 0), sizes=(rows, 1))
    return a.program()


def run(machine: Machine, programs: list[Program], which: list[int], x: torch.Tensor) -> torch.Tensor:
    """x [H, lanes, rows] -> [H, rows, 32]."""
    hosts, lanes, rows = x.shape
    out, two = torch.zeros(hosts, rows, 32), torch.full((hosts, rows), 2.0)
    base = np.zeros((hosts, SPACE + 3), dtype=np.int64)
    for k, tensor in enumerate((x, out, two)):
        base[:, SPACE + k] = addresses_of(tensor)
    machine.run(Batchwork.of(programs, np.array(which)), base, lanes)
    return out


def test_each_host_runs_its_own_program_on_its_own_memory():
    x = torch.arange(3 * 20 * 4.0).view(3, 20, 4)
    out = run(Machine(), [doubling(4), doubling(2)], [0, 1, 0], x)
    assert torch.equal(out[0, :, :20], 2 * x[0].t())
    assert torch.equal(out[1, 0, :10], 2 * x[1].flatten()[:20:2])  # to it, an image is two numbers
    assert torch.equal(out[2, :, :20], 2 * x[2].t())
    assert not out[[0, 2], :, 20:].any()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_share_the_hosts_and_change_nothing(threads):
    x = torch.randn(5, 20, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        run(Machine(threads=threads), [doubling(4)], [0] * 5, x), run(Machine(), [doubling(4)], [0] * 5, x)
    )


def test_fewer_examples_after_more_leave_nothing_behind():
    machine, x = Machine(), torch.ones(1, 20, 4)
    run(machine, [doubling(4)], [0], x)
    assert not run(machine, [doubling(4)], [0], x[:, :17].contiguous())[..., 17:].any()


def test_addresses_are_those_of_rows():
    x = torch.zeros(4, 3)
    assert addresses_of(x).tolist() == [x[i].data_ptr() for i in range(4)]
    assert addresses_of(x, np.array([2, 0])).tolist() == [x[2].data_ptr(), x[0].data_ptr()]
    assert addresses_of(torch.zeros(0, 3)).tolist() == []


def test_an_operation_that_does_not_exist_is_noticed():
    program = doubling(4)
    program.code["operation"][1] = 999
    with pytest.raises(AssertionError, match="instruction 1 does not exist"):
        run(Machine(), [program], [0], torch.ones(1, 20, 4))


def test_rows_that_were_released_are_used_again():
    a = Assembler(learns=True)
    first, second, third = a.rows(4), a.rows(2), a.rows(3)
    a.release(second)
    assert a.rows(1) == Rows(4, 1)
    a.release(first)
    assert a.rows(5) == Rows(9, 5)  # the holes are of four and of one
    a.release(Rows(4, 1), third)
    assert a.rows(9) == Rows(0, 9)  # which have grown together
    assert a.program().rows == 14


def test_rows_that_are_released_twice_are_noticed():
    a = Assembler(learns=True)
    rows = a.rows(4)
    a.release(rows)
    with pytest.raises(AssertionError, match="released twice"):
        a.release(rows)


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-9, -1)), max_size=60))
def test_rows_in_use_never_overlap(wishes):
    """A positive number asks for so many rows, a negative one releases one of those in use."""
    a, used = Assembler(learns=True), []
    for wish in wishes:
        if wish > 0:
            used.append(a.rows(wish))
        elif used:
            a.release(used.pop(-wish % len(used)))
        taken = [row for rows in used for row in range(rows.first, rows.first + rows.size)]
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < a.program().rows or not taken
