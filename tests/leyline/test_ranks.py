"""Blocks of hosts, sums over them in a fixed order, and processes that exchange them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError, RankError
from esper.leyline.ranks import (
    ALONE,
    Group,
    Ranks,
    _nodes,
    _Store,
    _tree_sum,
    group,
    is_launched,
    joined,
    parts_of,
    require_own_gpus,
)

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
    divided = [
        [(part + hosts.start).tolist() for part in minibatch]
        for minibatch in ranks.minibatches(lambda _, n: n - 1 - torch.arange(n), 2)
    ]
    assert divided == ([[[2, 1], [3]], [[0], [5, 4]]] if rank == 0 else [[[8, 7], [9]], [[6], [10]]])


def test_more_ranks_than_blocks_or_blocks_than_hosts_are_refused():
    said = "3 ranks cannot share 8 hosts in blocks = 2, .* fewer ranks, or a new run with more blocks"
    with pytest.raises(ConfigError, match=said):
        Ranks(8, 2, Group(size=3))
    with pytest.raises(ConfigError, match="blocks is 9, but there are 8 hosts"):
        Ranks(8, 9)


def test_a_process_that_no_launcher_started_is_alone(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # but no address
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert not is_launched()
    with joined() as found:
        assert found is group() is ALONE
        assert (found.gathered(3), found.at_first(3), found.of_first(lambda: 3)) == ([3], [3], 3)


def test_ranks_that_would_share_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr("esper.leyline.ranks.local_ranks", lambda: 2)
    for gpus, device in ((0, "cpu"), (1, "cpu"), (2, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        require_own_gpus(torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks of this machine cannot share its 1 GPU; start 1, or set device"):
        require_own_gpus(torch.device("cuda", 0))


@pytest.mark.parametrize(("name", "value", "said"), [
    ("RANK", "x", "the variable RANK is 'x', expected a number"),
    ("WORLD_SIZE", "-2", "the variable WORLD_SIZE is '-2', expected a number"),
    ("MASTER_PORT", "22x", "the variable MASTER_PORT is '22x', expected a number"),
    ("LOCAL_WORLD_SIZE", "two", "the variable LOCAL_WORLD_SIZE is 'two', expected a number"),
    ("RANK", "5", "the variable RANK is 5 and WORLD_SIZE is 2; ranks count from 0"),
])  # fmt: skip
def test_a_variable_of_the_launcher_that_is_wrong_is_named(monkeypatch, name, value, said):
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for variable, text in (right | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(RankError, match=re.escape(said)), joined(1.0):
        pass


def test_a_store_that_is_gone_is_said_in_a_sentence():
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise torch.distributed.DistNetworkError("Broken pipe")

    alone = Group(rank=1, size=2, store=_Store(Gone()))
    with pytest.raises(RankError, match=r"the launcher of the ranks ended, so they cannot go on\."):
        alone.stop_asked()
    assert not alone.leave(RankError("anything"))  # the first rank prints


@pytest.mark.slow
def test_a_rank_that_is_silent_in_an_exchange_is_named():
    assert "rank 1 on" in (said := launched(2, "silent").stdout)
    assert "did not answer within 3 s (rank_timeout), so the others cannot go on." in said


def launched(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launch, str(PROGRAM), *arguments], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_three_processes_sum_and_meet():
    done = launched(3)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(3))
