"""What three ranks do together, each assertion on every rank; `tests/leyline/test_ranks.py` starts it by torchrun."""

import sys
import time

import torch

from esper.leyline.errors import ConfigError, RankError
from esper.leyline.ranks import Ranks, group, joined

HOSTS = 11


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def sums_do_not_depend_on_the_ranks() -> None:
    for blocks in (3, 5, 8, 11):
        shared, alone = Ranks(HOSTS, blocks, group()), Ranks(HOSTS, blocks)
        own = slice(shared.hosts.start, shared.hosts.stop)
        for width in (3, 4096, 4097, 10_000):  # in one message, and in slices
            rows = numbers(HOSTS, width)
            assert torch.equal(shared.sum(rows[own], 1), alone.sum(rows, 1)), (blocks, width)
        rows = numbers(HOSTS, 4, 2)
        assert torch.equal(shared.sum(rows[own], 2), alone.sum(rows, 2))
        assert torch.equal(shared.all_hosts(rows[own]), rows)
    largest = Ranks(HOSTS, 3, group()).largest(torch.tensor([1.0, 2.0]) * group().rank)
    assert largest.tolist() == [2.0, 4.0]


def objects_come_in_order() -> None:
    of, rank = group(), group().rank
    assert of.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert of.at_first(rank) == ([0, 1, 2] if rank == 0 else [])
    assert of.of_first(lambda: f"from {rank}") == "from 0"
    try:
        of.of_first(lambda: int("x"))
    except ValueError as error:
        assert "invalid literal" in str(error)  # noqa: PT017 -- a program, on every rank
    else:
        raise AssertionError("every rank raises what the first one raises")


def ranks_meet() -> None:
    of, rank = group(), group().rank
    assert of.meet("round 1", 10 + rank) == [10, 11, 12]
    assert of.meet("round 2", rank) == [0, 1, 2]
    assert not of.stop_asked()
    of.meet("before", 0)
    if rank == 2:
        of.ask_to_stop()
    of.meet("after", 0)
    assert of.stop_asked()
    shown = of.newest(f"step of {rank}")
    of.meet("shown", 0)
    assert (shown[:1] if rank == 0 else of.newest("x")) == (["step of 0"] if rank == 0 else [])
    try:
        of.require_same({"the task": "null", "the data": "digits" if rank < 2 else "clothes"})
    except RankError as error:
        assert "the data of rank 2" in str(error)  # noqa: PT017
        assert "is clothes, that of rank 0 is digits" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a difference is an error")
    try:
        Ranks(HOSTS, 2, of)
    except ConfigError as error:
        assert "3 ranks cannot share 11 hosts in blocks = 2" in str(error)  # noqa: PT017
    else:
        raise AssertionError("each rank needs a block")


def one_is_silent() -> None:
    """Rank 1 does not answer; rank 0 prints what it hears of it."""
    if group().rank == 1:
        time.sleep(15.0)
        return
    try:
        group().gathered(0)
    except RankError as error:
        print(error)


if __name__ == "__main__":
    if sys.argv[1:] == ["silent"]:
        with joined(3.0):
            one_is_silent()
        sys.exit(0)
    for _ in range(2):  # a program may join more than once
        with joined(60.0):
            objects_come_in_order()
    with joined(60.0):
        sums_do_not_depend_on_the_ranks()
        objects_come_in_order()
        ranks_meet()
        print(f"rank {group().rank} is done")
    sys.exit(0)
