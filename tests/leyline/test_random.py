import random
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from esper.leyline.random import (
    Stream,
    local_generator,
    permutation,
    philox,
    seeded_generators,
    short_rows,
    to_normal,
    to_uniform,
    uniform,
    word_rows,
    words,
)

_MASK = 0xFFFFFFFF


def philox_scalar(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 with Python's whole numbers, which never overflow."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((_MASK,) * 4, (_MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert philox(torch.tensor(counter), key).tolist() == list(expected)


@given(st.lists(st.integers(0, _MASK), min_size=4, max_size=4), st.integers(0, _MASK), st.integers(0, _MASK))
@settings(max_examples=50, deadline=None)
def test_philox_agrees_with_its_twin_of_unbounded_whole_numbers(counter, k0, k1):
    assert philox(torch.tensor(counter), (k0, k1)).tolist() == philox_scalar(counter, (k0, k1))


def test_the_counter_is_laid_out_as_block_stream_and_slot_episode_and_step_host():
    seed = 0x1234567_89ABCDEF
    drawn = words(seed, Stream.SEED_INIT, torch.tensor(7), episode=3, t=5, slot=2, block=9)
    expected = philox_scalar([9, 1 * 256 + 2, 3 * 4096 + 5, 7], (0x89ABCDEF, 0x1234567))
    assert drawn.tolist() == expected


def test_arguments_broadcast_to_one_draw_per_combination():
    drawn = uniform(11, Stream.POLICY_SAMPLING, torch.arange(3)[:, None], t=4, block=torch.arange(8))
    assert drawn.shape == (3, 8)
    assert drawn[2, 5].item() == uniform(11, Stream.POLICY_SAMPLING, torch.tensor(2), t=4, block=5).item()


def test_a_uniform_is_the_upper_24_bits_and_never_reaches_1():
    # 0x80000000 >> 8 = 2^23;  2^23 * 2^-24 = 0.5;  the largest is 1 - 2^-24
    assert to_uniform(torch.tensor([0, 0xFF, 0x80000000, _MASK])).tolist() == [0.0, 0.0, 0.5, 1 - 2**-24]


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    drawn = words(5, Stream.SCRIPTED_NOISE, torch.arange(40_000))
    z = to_normal(drawn[:, 0], drawn[:, 1]).to(torch.float64)
    assert abs(z.mean().item()) < 0.02
    assert abs(z.std().item() - 1.0) < 0.02
    assert abs((z.abs() < 1.0).double().mean().item() - 0.6827) < 0.01


def test_normal_numbers_stay_finite_at_the_ends_of_the_range_of_words():
    z = to_normal(torch.tensor([0, _MASK]), torch.tensor([0, _MASK]))
    # sqrt(-2 ln 2^-32) = 6.6604
    torch.testing.assert_close(z, torch.tensor([6.6604, 0.0]), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_rows_of_words_run_through_the_words_of_one_block_after_another(length):
    rows = word_rows(3, Stream.TRAIN_ORDER, torch.tensor([2, 6]), length, episode=1, t=torch.tensor([4, 9]))
    assert rows.shape == (2, length)
    for row, host, t in ((rows[0], 2, 4), (rows[1], 6, 9)):
        blocks = [words(3, Stream.TRAIN_ORDER, torch.tensor(host), episode=1, t=t, block=b) for b in range(2)]
        assert row.tolist() == torch.cat(blocks)[:length].tolist()


def splitmix64(key: int, count: int) -> list[int]:
    """The published algorithm, in integers."""
    drawn = []
    for i in range(1, count + 1):
        z = (key + i * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        drawn.append(z ^ (z >> 31))
    return drawn


def test_splitmix64_gives_the_published_numbers():
    # the first outputs from the seed 1234567, as in the test of the reference implementation
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("length", [1, 4, 7])
def test_short_numbers_are_the_four_parts_of_each_number_of_splitmix64(length):
    keys = [1234567, 0, 2**63 + 5]
    rows = short_rows(torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys]), length)
    assert rows.dtype == torch.int16
    for row, key in zip(rows, keys, strict=True):
        parts = [z >> 16 * i & 0xFFFF for z in splitmix64(key, 2) for i in range(4)]
        assert (row.int() & 0xFFFF).tolist() == parts[:length]


@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_permutation_holds_every_index_once_and_is_the_hosts_own(seed, length, hosts):
    orders = permutation(seed, Stream.TRAIN_ORDER, torch.arange(hosts), length, t=3)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(length).expand(hosts, -1))
    alone = permutation(seed, Stream.TRAIN_ORDER, torch.tensor([hosts - 1]), length, t=3)
    assert torch.equal(alone[0], orders[-1])


def test_local_generators_are_equal_where_their_address_is_and_leave_the_global_one_alone():
    before = torch.get_rng_state()
    a, b = (torch.rand(4, generator=local_generator(9, Stream.HOST_INIT, 3, episode=1)) for _ in range(2))
    c = torch.rand(4, generator=local_generator(9, Stream.HOST_INIT, 4, episode=1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_threads_that_seed_the_generators_wait_for_each_other():
    def drawn(seed: int) -> list[float]:
        with seeded_generators(seed):
            return [(time.sleep(1e-3), torch.rand(()).item())[1] for _ in range(20)]

    alone = [drawn(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, range(4))) == alone


DRAWS = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": lambda: float(np.random.rand())}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seeded_generators_start_from_the_seed_and_are_restored(draw):
    def within(seed: int) -> float:
        with seeded_generators(seed) as used:
            assert not used()
            drawn = draw()
            assert used()
        return drawn

    with seeded_generators(0) as used:
        assert within(2**63 + 1) == within(2**63 + 1) != within(2**63 + 2)
        with pytest.raises(ZeroDivisionError), seeded_generators(1):
            draw() / 0
        assert not used()
