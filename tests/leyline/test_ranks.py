"""Blocks of hosts, sums over them in a fixed order, and processes that exchange them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError
from esper.leyline.ranks import ALONE, Group, Ranks, _nodes, _tree_sum, group, is_launched, joined, parts_of

PROGRAM = Path(__file__).parents[1] / "rank_program.py"


def test_parts_are_contiguous_and_differ_by_one_at_most():
    assert parts_of(11, 3) == [range(0, 4), range(4, 8), range(8, 11)]
    assert parts_of(2, 3) == [range(0, 1), range(1, 2), range(2, 2)]


def test_one_block_is_summed_as_pytorch_does():
    rows = torch.randn(7, 5, 3)
    assert torch.equal(Ranks(7).sum(rows, 2), rows.sum(dim=(0, 1)))


def test_blocks_are_summed_by_pairs():
    # of 1e8, 3, 3, -1e8 in float32 a sum from left to right is 8, one by pairs is 0: 1e8 + 3 rounds to 1e8
    ranks, rows = Ranks(4, 4), torch.tensor([1e8, 3.0, 3.0, -1e8])
    assert ranks.sum(rows, 1).item() == (rows[0] + rows[1] + (rows[2] + rows[3])).item() == 0.0


@given(blocks=st.integers(1, 40), data=st.data())
def test_what_ranks_sum_within_their_own_blocks_gives_the_sum_over_all(blocks, data):
    size = data.draw(st.integers(1, blocks))
    values = torch.randn(blocks, generator=torch.Generator().manual_seed(blocks)) * 1e3
    leaves = {range(k, k + 1): values[k] for k in range(blocks)}
    shares = parts_of(blocks, size)
    known = {node: _tree_sum(node, leaves) for share in shares for node in _nodes(range(blocks), share)}
    assert sorted(block for node in known for block in node) == list(range(blocks))
    assert _tree_sum(range(blocks), known) == _tree_sum(range(blocks), leaves)
    assert max(len(_nodes(range(blocks), share)) for share in shares) <= 2 * blocks.bit_length()


@pytest.mark.parametrize(("rank", "hosts", "own"), [
    (0, range(0, 6), (slice(0, 3), slice(3, 6))),
    (1, range(6, 11), (slice(0, 3), slice(3, 5))),
])  # fmt: skip
def test_a_rank_has_whole_blocks(rank, hosts, own):
    ranks = Ranks(11, 4, Group(rank=rank, size=2))
    assert (ranks.hosts, ranks.own) == (hosts, own)
    # blocks 0 1 2 | 3 4 5 | 6 7 8 | 9 10, each in reverse and in two parts, of which the larger one goes to the pile
    # that has fewer hosts
    dealt = [
        [(part + hosts.start).tolist() for part in pile] for pile in ranks.deal(lambda _, n: n - 1 - torch.arange(n), 2)
    ]
    assert dealt == ([[[2, 1], [3]], [[0], [5, 4]]] if rank == 0 else [[[8, 7], [9]], [[6], [10]]])


def test_more_ranks_than_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"3 ranks cannot share 8 hosts in blocks = 2, because each rank needs"):
        Ranks(8, 2, Group(size=3))


def test_a_process_that_no_launcher_started_is_alone(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # but no address
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert not is_launched()
    with joined() as found:
        assert found is group() is ALONE
        assert (found.gathered(3), found.at_first(3), found.of_first(lambda: 3)) == ([3], [3], 3)


def test_three_processes_sum_and_meet():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(PROGRAM)]
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(3))
