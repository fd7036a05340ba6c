"""Working memory, threads and addresses of the native executor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.tasks.datasets.images import CropAndFlip, Pixels
from esper.tolaria.executors.native.executor import _values_of_bytes
from esper.tolaria.executors.native.lowering import loop
from esper.tolaria.executors.native.machine import Examples, Machine, Spaces, Workload, stride_of
from esper.tolaria.executors.native.program import (
    LOCAL,
    NUM_WORKING,
    ROWS,
    Assembler,
    Operation,
    Place,
    Pool,
    Program,
    Rows,
)

INPUTS, LABELS, OUTPUTS, OUT_GRADS, IN_GRADS, KEYS, TOTALS, DOUBLED = range(NUM_WORKING, NUM_WORKING + 8)


def doubling(rows: int) -> Program:
    """Inputs [lanes, rows] are written as rows, and doubled into a space of rows of 32 lanes."""
    a = Assembler()
    h = a.rows(rows)
    a.emit(Operation.LOAD, Place(INPUTS, 0, rows), h, sizes=(rows,))
    a.emit(Operation.AFFINE, h, Place(DOUBLED, 0, rows * 32), sizes=(rows,), numbers=(2.0, 0.0))
    return a.program()


def run(machine: Machine, programs: list[Program], which: list[int], x: torch.Tensor) -> torch.Tensor:
    """x [H, lanes, rows] -> [H, rows, 32]."""
    hosts, lanes, rows = x.shape
    out, spaces = torch.zeros(hosts, rows, 32), Spaces(hosts, DOUBLED + 1)
    for space, tensor in ((INPUTS, x), (DOUBLED, out)):
        spaces.rows(space, tensor)
    machine.run(Workload.of_each([programs[k] for k in which]), spaces, batch=lanes, numbers=rows)
    return out


def test_each_host_runs_its_own_program_on_its_own_memory():
    x = torch.arange(3 * 28 * 4.0).view(3, 28, 4)
    out = run(Machine(), [doubling(4), doubling(2)], [0, 1, 0], x)
    assert torch.equal(out[0, :, :28], 2 * x[0].t())
    assert torch.equal(out[1, 0, :10], 2 * x[1].flatten()[:20:2])  # to it, an image is two numbers
    assert torch.equal(out[2, :, :28], 2 * x[2].t())
    assert not out[[0, 2], :, 28:].any()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_share_the_hosts_and_change_nothing(threads):
    x = torch.randn(5, 28, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        run(Machine(threads=threads), [doubling(4)], [0] * 5, x), run(Machine(), [doubling(4)], [0] * 5, x)
    )


def test_fewer_examples_after_more_leave_nothing_behind():
    machine, x = Machine(), torch.ones(1, 28, 4)
    run(machine, [doubling(4)], [0], x)
    assert not run(machine, [doubling(4)], [0], x[:, :25].contiguous())[..., 25:].any()


def squares(rows: int, unused: int) -> Program:
    """The sum of the squares of all inputs, in TOTALS."""
    a = Assembler()
    h, y = a.rows(rows), a.rows(rows + unused)
    a.emit(Operation.LOAD, Place(INPUTS, 0, rows), h, sizes=(rows,))
    a.emit(Operation.AFFINE, h, y, sizes=(rows,), numbers=(1.0, 0.0))
    product = loop((1, rows), (0, 0), (0, 1), (0, 1))
    squared, ones = a.rows(1), a.rows(1)
    a.emit(Operation.SUM, y, y, squared, sizes=product, flag=1, numbers=(1.0,))
    a.emit(Operation.FILL, ones, sizes=(1,), numbers=(1.0,))
    a.emit(Operation.SPREAD_BACKWARD, squared, Place(TOTALS, 0, 1), sizes=(1,))
    return a.program()


def test_chunks_of_a_host_leave_nothing_in_the_empty_lanes_of_the_next_host(monkeypatch):
    monkeypatch.setattr("esper.tolaria.executors.native.program._CACHED_NUMBERS", 44 * 16)
    programs = [squares(18, 4), squares(4, 0)]
    assert [program.chunk for program in programs] == [16, 80]
    out, spaces = torch.zeros(2, 1), Spaces(2, TOTALS + 1)
    spaces.rows(TOTALS, out)
    images, labels = torch.full((37, 1, 18, 1), 2.0), torch.zeros(37, dtype=torch.int64)
    Machine().run_batches(Workload.of_each(programs), spaces, Examples(images, labels, None, 37))
    assert out.tolist() == [[37 * 18 * 4.0], [37 * 4 * 4.0]]  # to the second host, an image is four numbers


def test_spaces_are_rows_of_tensors_or_one_tensor_for_all():
    x, spaces = torch.zeros(4, 3), Spaces(4, 3)
    spaces.rows(0, x)
    spaces.rows(1, x, rows=np.array([2, 0]), hosts=np.array([3, 1]))
    spaces.share(2, x)
    rows = [x[i].data_ptr() for i in range(4)]
    assert spaces.begin.tolist() == [
        [rows[0], 0, rows[0]], [rows[1], rows[0], rows[0]], [rows[2], 0, rows[0]], [rows[3], rows[2], rows[0]],
    ]  # fmt: skip
    assert spaces.size.tolist() == [[12, 0, 48], [12, 12, 48], [12, 0, 48], [12, 12, 48]]
    assert spaces.of(np.array([3])).begin.tolist() == spaces.begin[3:].tolist()


def last_of(program, **fields):
    """The program with other fields in its last instruction."""
    for name, value in fields.items():
        program.code[name][-1] = value
    return program


def in_first_places(*values):
    """Operands or extents of an instruction, zero past these."""
    return [*values, *(0,) * (12 - len(values))]


@pytest.mark.parametrize(
    "program",
    [
        last_of(doubling(4), operation=999),
        last_of(doubling(4), operation=-1),
        last_of(doubling(4), space=in_first_places(ROWS, DOUBLED + 1)),
        last_of(doubling(4), space=in_first_places(-2, DOUBLED)),
        last_of(doubling(4), extent=in_first_places(5, 128)),
        last_of(doubling(4), extent=in_first_places(4, 129)),
        last_of(doubling(4), extent=in_first_places(4, -1)),
        last_of(doubling(4), offset=in_first_places(1, 0)),
        last_of(doubling(4), offset=in_first_places(0, 1)),
        last_of(doubling(4), offset=in_first_places(0, -1)),
    ],
)
def test_an_instruction_that_does_not_fit_its_memory_is_not_carried_out(program):
    with pytest.raises(IndexError, match=r"instruction 1, .*, does not fit the memory that it was given"):
        run(Machine(), [program], [0], torch.ones(1, 28, 4))


def summing(rows: int) -> Program:
    """Inputs [lanes, rows] and two classes: the loss of logits that are the first two numbers is added to a total."""
    a = Assembler()
    h = a.rows(rows)
    a.emit(Operation.LOAD, Place(INPUTS, 0, rows), h, sizes=(rows,))
    operands = Rows(h.first, 2), Place(LABELS, 0, 1), Place(TOTALS, 0, 3), None, a.rows(3)
    a.emit(Operation.CROSS_ENTROPY, *operands, sizes=(2, 1))
    return a.program()


def totals_of(images, labels, order, batch, *, hosts=3, threads=1, padded=False):
    """Summed losses, hits and examples [H, 3] of a pass."""
    spaces, totals = Spaces(hosts, TOTALS + 1), torch.zeros(hosts, 3, dtype=torch.float64)
    spaces.rows(TOTALS, totals)
    work = Workload.of_each([summing(4)] * hosts)
    Machine(threads=threads).run_batches(work, spaces, Examples(images, labels, order, batch, padded))
    return totals


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_a_pass_takes_each_host_s_examples_in_its_order_whatever_the_batch(count, batch, threads, padded, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(50, 1, 2, 2, generator=generator)
    labels = torch.randint(0, 2, (50,), generator=generator)
    order = torch.randint(0, 50, (3, count), generator=generator)
    found = totals_of(images, labels, order, batch, threads=threads, padded=padded)
    for own, taken in zip(found, order, strict=True):
        logits = images[taken].flatten(1)[:, :2]
        losses = torch.nn.functional.cross_entropy(logits, labels[taken], reduction="none")
        torch.testing.assert_close(own[0], losses.double().sum(), rtol=1e-5, atol=1e-5)
        assert own[1:].tolist() == [(logits.argmax(dim=1) == labels[taken]).sum(), count]


def test_without_an_order_all_hosts_take_all_examples():
    images, labels = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
    found = totals_of(images, labels, None, 2)
    assert torch.equal(found, totals_of(images, labels, torch.arange(5).repeat(3, 1), 2))
    assert (found[:, 0] > 0.0).all()


def test_a_host_whose_order_ends_with_minus_one_has_fewer_examples():
    images, labels = torch.rand(5, 1, 2, 2), torch.arange(5) % 2
    order = torch.tensor([[0, 1, 2], [3, 4, -1], [1, -1, -1]])
    found = totals_of(images, labels, order, 2)
    for n, own in enumerate(([0, 1, 2], [3, 4], [1])):
        assert torch.equal(found[n], totals_of(images, labels, torch.tensor([own]), 2, hosts=1)[0])


@pytest.mark.parametrize("wrong", [-2, 5])
def test_an_order_beyond_the_examples_is_refused(wrong):
    images, labels = torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.int64)
    order = torch.tensor([[0, 1], [2, wrong], [3, 4]])
    with pytest.raises(IndexError, match="names one that is not among the 5"):
        totals_of(images, labels, order, 2)


@given(st.integers(0, 99), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=20)
def test_bytes_become_numbers_and_windows_of_images_as_in_pytorch(seed, border, stored_as_bytes):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (7, 2, 4, 5), generator=generator, dtype=torch.uint8)
    order, hosts = torch.tensor([[3, 0, 6], [6, 6, 1]]), torch.arange(2)
    crop, pixels = CropAndFlip(border), Pixels((0.4, 0.5), (0.2, 0.3))
    moves = crop.draw(seed, hosts, 0, 1, 3)
    want = crop(images[order], moves)
    table = _values_of_bytes(pixels, 2) if stored_as_bytes else None
    out, spaces = torch.zeros(2, 40, 32), Spaces(2, DOUBLED + 1)
    spaces.rows(DOUBLED, out)
    stored = images if stored_as_bytes else images.float()
    examples = Examples(stored, torch.zeros(7, dtype=torch.int64), order, 3, table=table, moves=moves, border=border)
    Machine().run_batches(Workload.of_each([doubling(40)] * 2), spaces, examples)
    found = 0.5 * out.view(2, -1)[:, : 40 * stride_of(3)].view(2, 40, -1)[..., :3].transpose(1, 2).reshape(want.shape)
    assert torch.equal(found, pixels(want) if stored_as_bytes else want.float())


def test_threads_begin_with_the_host_that_has_the_most_work():
    work = Workload.of_each([doubling(2), doubling(8), doubling(4), doubling(8)])
    assert work.turn.tolist() == [1, 3, 2, 0]


def test_rows_that_were_given_back_are_taken_again():
    pool = Pool()
    first, second, third = pool.take(4), pool.take(2), pool.take(3)
    pool.give_back(second)
    assert pool.take(1) == Rows(4, 1)
    pool.give_back(first)
    assert pool.take(5) == Rows(9, 5)  # the holes are of four and of one
    pool.give_back(Rows(4, 1))
    pool.give_back(third)
    assert pool.take(9) == Rows(0, 9)  # which have grown together
    assert pool.size == 14


def test_rows_that_are_given_back_twice_are_noticed():
    pool = Pool()
    rows = pool.take(4)
    pool.give_back(rows)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(rows)


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-9, -1)), max_size=60))
def test_rows_in_use_never_overlap(wishes):
    """A positive number asks for so many rows, a negative one gives back those of one in use."""
    pool, used = Pool(), []
    for wish in wishes:
        if wish > 0:
            used.append(pool.take(wish))
        elif used:
            pool.give_back(used.pop(-wish % len(used)))
        taken = [row for rows in used for row in range(rows.first, rows.first + rows.size)]
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < pool.size


def test_rows_are_used_again_after_the_last_instruction_that_names_them():
    a = Assembler()
    x, y, z = a.rows(4), a.rows(4), a.rows(3)
    for source, target in ((x, y), (y, z)):
        a.emit(Operation.ACTIVATE, source, target, sizes=(3,))
    program = a.program()
    assert (program.rows, program.local) == (0, 8)
    assert program.code["space"][:, :2].tolist() == [[LOCAL, LOCAL]] * 2
    assert program.code["offset"][:, :2].tolist() == [[0, 4], [4, 0]]


def test_only_rows_that_wait_for_other_chunks_have_a_place_for_each_chunk():
    a = Assembler()
    x, y, z = a.rows(6), a.rows(6), a.rows(6)
    numbers = a.numbers(2)
    a.emit(Operation.ACTIVATE, x, y, sizes=(6,))
    a.emit(Operation.BATCH_NORM, y, *[numbers] * 6, z, sizes=(2, 3))
    a.emit(Operation.ACTIVATE, Rows(z.first + 4, 2), x, sizes=(2,))
    program = a.program()
    spaces = [program.code["space"][i, k] for i, k in ((0, 0), (0, 1), (1, 0), (1, 7), (2, 0), (2, 1))]
    assert spaces == [ROWS, ROWS, ROWS, LOCAL, LOCAL, ROWS]
    assert program.code["offset"][[1, 2], [7, 0]].tolist() == [0, 4]
    assert (program.rows, program.local) == (12, 6)
