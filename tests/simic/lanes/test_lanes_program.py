"""Instructions and their encoding: what is left out, and where registers lie."""

import math

import numpy as np

from esper.simic.lanes.machine import control_machine
from esper.simic.lanes.program import LANES, OPERATIONS, Draft, Instruction


def sum_of_two(extra: bool = False) -> Draft:
    """a + b, read from tensor 0 and written to tensor 1; and something that nobody asks for."""
    draft = Draft()
    a, b, total = (draft.register("F") for _ in range(3))
    draft.instructions.append(Instruction("LOAD_F", ((a, 0), (b, 1)), (0, 2)))
    if extra:
        lost = draft.register("F")
        draft.instructions.append(Instruction("MUL_F", ((lost, a, b),)))
    draft.instructions.append(Instruction("ADD_F", ((total, a, b),)))
    draft.instructions.append(Instruction("STORE_F", ((total, 0),), (1, 1)))
    return draft


def test_the_words_of_a_program_are_those_that_the_machine_reads():
    words, number = sum_of_two().encoded().words.tolist(), OPERATIONS.index
    place = 4 * LANES
    load = [number("LOAD_F"), 2, 0, 2, 0, 0, place, 1]
    add = [number("ADD_F"), 1, 2 * place, 0, place]
    store = [number("STORE_F"), 1, 1, 1, 2 * place, 0]
    assert words == load + add + store


def test_what_nobody_asks_for_is_left_out():
    assert sum_of_two(extra=True).encoded().words.tolist() == sum_of_two().encoded().words.tolist()


def test_a_program_does_what_it_says_for_every_host():
    program, hosts = sum_of_two().encoded(), 131
    given, answer = np.arange(2 * hosts, dtype=np.float32).reshape(hosts, 2), np.full(hosts + 1, -1, dtype=np.float32)
    control_machine().run(program.words, program.arena(), np.array([given.ctypes.data, answer.ctypes.data]), hosts)
    assert np.array_equal(answer[:-1], given.sum(1))
    assert answer[-1] == -1, "nothing is written beyond the last host"


def test_a_place_is_used_again_when_its_register_was_read_last():
    draft = Draft()
    register = draft.register("D")
    draft.instructions.append(Instruction("LOAD_D", ((register, 0),), (0, 1)))
    for _ in range(50):
        following = draft.register("D")
        draft.instructions.append(Instruction("NEG_D", ((following, register),)))
        register = following
    draft.instructions.append(Instruction("STORE_D", ((register, 0),), (1, 1)))
    assert draft.encoded().arena_bytes == 2 * 8 * LANES


def test_constants_lie_in_the_arena_and_differ_by_their_bits():
    draft = Draft()
    assert draft.constant("F", 0.0) == draft.constant("F", 0.0) == -1
    assert draft.constant("F", -0.0) == -2
    assert draft.constant("D", 0.0) == -3
    assert draft.constant("F", math.nan) == draft.constant("F", math.nan) == -4
    assert [draft.kind_of(i) for i in (-1, -3)] == ["F", "D"]
    seven = draft.constant("I", 7)
    draft.instructions.append(Instruction("STORE_I", ((seven, 0),), (0, 1)))
    program = draft.encoded()
    assert program.arena().view(np.int64).tolist() == [7] * LANES
    assert program.arena().ctypes.data % 64 == 0
    assert program.tensors == {0}


def test_weights_and_biases_are_among_the_tensors_of_a_program():
    draft = Draft()
    x, y, z = (draft.register("F") for _ in range(3))
    draft.instructions.append(Instruction("LOAD_F", ((x, 0),), (3, 1)))
    draft.instructions.append(Instruction("AFFINE_F", ((y,),), (0, 0, 1, 1, 1, 2, 0), (x,)))
    draft.instructions.append(Instruction("NORM_F", ((z, y),), (0, 0, 4, 0, 5, 0)))
    draft.instructions.append(Instruction("STORE_F", ((z, 0),), (9, 1)))
    assert draft.encoded().tensors == {0, 2, 3, 4, 5, 9}


def test_operations_have_one_name_each():
    assert len(set(OPERATIONS)) == len(OPERATIONS)
