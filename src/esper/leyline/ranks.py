"""Ranks: the processes that share the hosts of a run, and sums over all hosts that do not depend on how many there are.

    hosts    0 1 2 | 3 4 5 | 6 7 8 | 9 10 11     blocks: contiguous, as equal as possible, part of the configuration
    ranks    ------ 0 ---- | ------- 1 -----     each has whole blocks

A sum is taken within each block, then over the blocks by pairs, as in a tournament:

    ((block 0 + block 1) + (block 2 + block 3)) + ...

A rank computes the largest sums that lie within its own blocks, and every rank adds those of all ranks in the same
order. So the result is the same to the bit for any number of ranks. Within an episode ranks exchange nothing.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import count, pairwise
from types import FrameType
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # documented, but not exported

from esper.leyline.errors import ConfigError, RankError

T = TypeVar("T")
SMALL = 4096
"""Numbers up to which a sum is exchanged in one message; longer ones of many ranks in slices, each added by one."""
_GOODBYE = 5.0
"""Seconds that a rank which fails waits for the others, so that one of them prints the error."""
_FAILURE, _STOP = "failure", "stop"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


def parts_of(number: int, parts: int) -> list[range]:
    """`number` things in contiguous parts as equal as possible, the larger ones first."""
    size, larger = divmod(number, parts)
    ends = [i * size + min(i, larger) for i in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


@final
class _Store:
    """The store of the launcher, texts by key; raises RankError where it is gone."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401 -- a Store has no type where torch has no distributed part
        self._store = store

    def set(self, key: str, text: str) -> None:
        self._asked(lambda: self._store.set(key, text))

    def has(self, *keys: str) -> bool:
        return bool(self._asked(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> str:
        found: bytes = self._asked(lambda: self._store.get(key))
        return found.decode()

    def delete(self, key: str) -> None:
        self._asked(lambda: self._store.delete_key(key))

    def _asked(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except RuntimeError as error:
            raise RankError("the launcher of the ranks ended, so they cannot go on.") from error


@final
@dataclass(eq=False)
class Group:
    """The processes of a job, this one among them; alone, or made by `joined`.

    Attributes:
        rank: number of this process. size: of all. store: shared by all. timeout: seconds to wait for another one.
        bytes_received: by this process in sums, so far.
    """

    rank: int = 0
    size: int = 1
    store: "_Store | None" = None
    timeout: float = 600.0
    bytes_received: int = 0
    _names: list[str] = field(default_factory=list)
    _last_place: str = ""

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes what belongs to all."""
        return self.rank == 0

    def gathered(self, own: T) -> list[T]:
        """The objects of all ranks, in their order, on every rank."""
        found: list[Any] = [own] * self.size
        if not self.alone:
            self._exchange(lambda: dist.all_gather_object(found, own))
        return found

    def at_first(self, own: T) -> list[T]:
        """The objects of all ranks on the first one; elsewhere nothing."""
        if self.alone:
            return [own]
        found: list[Any] | None = [None] * self.size if self.is_first else None
        self._exchange(lambda: dist.gather_object(own, found))
        return found or []

    def of_first(self, compute: Callable[[], T]) -> T:
        """What the first rank computes, on every rank; every rank raises what it raises."""
        if self.alone:
            return compute()
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found[0] = compute()
            except Exception as error:
                found[1] = error
        self._exchange(lambda: dist.broadcast_object_list(found))
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one shape, in their order."""
        if self.alone:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._exchange(lambda: dist.all_gather(found, own.contiguous()))
        self.bytes_received += own.nbytes * (self.size - 1)
        return found

    def _exchange(self, act: Callable[[], object]) -> None:
        """Communicate; raises RankError if another rank is gone."""
        try:
            act()
        except RuntimeError as error:  # all errors of gloo and nccl
            self._raise_failure()
            gone = [self._names[rank] for rank in range(self.size) if not self._is_running(rank)]
            silent = [self._names[rank] for rank in self._missing("failed", _GOODBYE)]
            if gone:
                why = f"{', '.join(gone)} ended"
            elif silent:
                why = f"{', '.join(silent)} did not answer within {self.timeout:g} s (rank_timeout)"
            else:
                why = "the connection between the ranks broke"
            raise RankError(f"{why}, so the others cannot go on.") from error

    def _missing(self, place: str, seconds: float) -> list[int]:
        """Say that this rank is at `place`, and wait for the others so long; returns the ranks that are not."""
        self._shared.set(f"{place}/{self.rank}", "1")
        keys, began = [f"{place}/{rank}" for rank in range(self.size)], time.monotonic()
        while not self._shared.has(*keys) and time.monotonic() - began < seconds:
            time.sleep(0.02)
        return [rank for rank, key in enumerate(keys) if not self._shared.has(key)]

    @property
    def _shared(self) -> "_Store":
        assert self.store is not None, "there is no other rank"
        return self.store

    def meet(self, place: str, t: int) -> list[int]:
        """Wait until every rank is at `place`, with its number `t`; returns all numbers.

        Raises RankError that names a rank which failed, is gone, or has not come in time.
        """
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        self._shared.set(keys[self.rank], str(t))
        began, pause = time.monotonic(), 0.0005
        while not self._shared.has(*keys):
            self._raise_failure()
            late = [rank for rank, key in enumerate(keys) if not self._shared.has(key)]
            if gone := [self._names[rank] for rank in late if not self._is_running(rank)]:
                raise RankError(f"{', '.join(gone)} ended before {place}.")
            if late and time.monotonic() - began > self.timeout:
                raise RankError(
                    f"{', '.join(self._names[rank] for rank in late)} did not reach {place} within {self.timeout:g} s "
                    "after this rank; find out what holds it, or set a larger rank_timeout."
                )
            time.sleep(pause := min(pause * 1.5, 0.05))
        found = [int(self._shared.get(key)) for key in keys]
        if self._last_place and self.is_first:
            for rank in range(self.size):  # all have left it: they are here
                self._shared.delete(f"{self._last_place}/{rank}")
        self._last_place = place
        return found

    def newest(self, text: str) -> list[str]:
        """Leave a text for the first rank; there its own one and the newest of the others, without waiting for any."""
        if not self.is_first:
            self._shared.set(f"newest/{self.rank}", text)
            return []
        keys = [f"newest/{rank}" for rank in range(1, self.size)]
        return [text, *(self._shared.get(key) for key in keys if self._shared.has(key))]

    def ask_to_stop(self) -> None:
        """Let `stop_asked` be true on every rank."""
        self._shared.set(_STOP, "1")

    def stop_asked(self) -> bool:
        """Whether a rank asked all to stop."""
        return self._shared.has(_STOP)

    def require_same(self, what: Mapping[str, str]) -> None:
        """Raise RankError that names the first thing in which a rank differs from the first one."""
        self.meet("the start", 0)
        first, *others = self.gathered(dict(what))
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other.get(name) != value:
                    raise RankError(
                        f"{name} of {self._names[rank]} is {other.get(name)}, that of rank 0 is {value}; all ranks of "
                        "a run need the same program, settings and data."
                    )

    def _introduce(self) -> None:
        """Tell the others who this is; they come to the first meeting after they did."""
        self._names = [f"rank {rank}" for rank in range(self.size)]
        self._shared.set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")

    def _is_running(self, rank: int) -> bool:
        """False if the process of a rank on this machine is gone; a rank elsewhere counts as living."""
        if not self._shared.has(f"who/{rank}"):
            return True  # still starting
        machine, pid = self._shared.get(f"who/{rank}").split()
        self._names[rank] = f"rank {rank} on {machine}"
        if machine != socket.gethostname():
            return True
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return not _is_zombie(int(pid))

    def _raise_failure(self) -> None:
        if self._shared.has(_FAILURE):
            raise RankError(self._shared.get(_FAILURE))

    def leave(self, error: Exception | None = None) -> bool:
        """Wait a little for the others, who learn of an error; returns whether this rank prints it.

        A rank that ended at once would break the connections that others are closing.
        """
        try:
            if error is not None and not self._shared.has(_FAILURE):
                own = "" if self.is_first else f"rank {self.rank} on {socket.gethostname()}: "
                self._shared.set(_FAILURE, own + " ".join(str(error).split()))
            missing = self._missing("end", _GOODBYE)
        except RankError:  # the store is gone, and with it the launcher
            return self.is_first
        return self.is_first or 0 in missing


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended, but was not waited for; known on Linux alone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] == ["Z"]
    except OSError:
        return False


ALONE = Group()
"""One process."""
_joined: list[Group] = []
_calls = count()
"""Numbers of the groups that this process has joined, which are the same on all ranks."""


def group() -> Group:
    """The job of this process: what `joined` made, else this process alone."""
    return _joined[-1] if _joined else ALONE


def is_launched() -> bool:
    """Whether torchrun, or another launcher with the same variables, started this process as one of several."""
    return all(name in os.environ for name in _VARIABLES) and os.environ["WORLD_SIZE"].strip() != "1"


def is_restarted() -> bool:
    """Whether torchrun started the ranks of this job again, after one of them had ended."""
    return not group().alone and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _require_numbers() -> None:
    """Raise RankError that names a variable of the launcher which is not a number in its range."""
    numbers = {name: os.environ[name] for name in _NUMBERS if name in os.environ}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise RankError(f"the variable {name} is {text!r}, expected a number; start the ranks by torchrun.")
    if int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        raise RankError(
            f"the variable RANK is {numbers['RANK']} and WORLD_SIZE is {numbers['WORLD_SIZE']}; ranks count from 0 to "
            "WORLD_SIZE - 1."
        )


def local_ranks() -> int:
    """How many ranks share this machine."""
    return 1 if group().alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def require_own_gpus(device: torch.device) -> None:
    """Raise ConfigError if the ranks of this machine would share a GPU, over which they could not communicate."""
    ranks, gpus = local_ranks(), torch.cuda.device_count()
    if device.type == "cuda" and ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks of this machine cannot share its {gpus} GPU{'s' * (gpus > 1)}; start {gpus}, or set device "
            "to 'cpu'."
        )


@contextmanager
def joined(timeout: float = 600.0) -> Iterator[Group]:
    """Join the other processes of a job that torchrun started; alone without one. Nested calls give the same group.

    Raises:
        RankError: the others cannot be reached.
    """
    if _joined or not is_launched():
        yield group()
        return
    _require_numbers()
    within = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=within))
        # the launcher keeps one store for all attempts and all calls: it has addresses of groups that have ended
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"{attempt}/{next(_calls)}", store)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore("collectives", store), rank=rank, world_size=size, timeout=within
        )
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"the {os.environ['WORLD_SIZE']} ranks of this job did not meet at {address} within {timeout:g} s "
            f"({str(error).partition(chr(10))[0]}); start all of them, with a port that is free."
        ) from error
    found = Group(rank, size, _Store(PrefixStore("esper", store)), timeout)
    found._introduce()
    _joined.append(found)
    try:
        yield found
        found.leave()
    except Exception as error:
        error.is_printed = not found.leave(error)  # type: ignore[attr-defined]
        raise
    finally:
        _joined.remove(found)
        dist.destroy_process_group()


@final
@dataclass(frozen=True)
class Ranks:
    """The share of one rank in the hosts of a run.

    Args:
        num_envs: N, of all ranks. blocks: B, from 1 to N. group: the processes.

    Raises:
        ConfigError: more blocks than hosts, or more ranks than blocks.
    """

    num_envs: int
    blocks: int = 1
    group: Group = ALONE

    def __post_init__(self) -> None:
        if self.blocks > self.num_envs:
            raise ConfigError(
                f"blocks is {self.blocks}, but there are {self.num_envs} hosts, and a block needs one; set it lower."
            )
        if self.group.size > self.blocks:
            more = "hosts" if self.blocks >= self.num_envs else "blocks"
            raise ConfigError(
                f"{self.group.size} ranks cannot share {self.num_envs} hosts in blocks = {self.blocks}, because each "
                f"rank needs a block of its own; start fewer ranks, or a new run with more {more}."
            )

    @property
    def alone(self) -> bool:
        """Whether this rank has all hosts."""
        return self.group.alone

    @cached_property
    def hosts(self) -> range:
        """The global numbers of the hosts of this rank."""
        return self.hosts_of(self.group.rank)

    def hosts_of(self, rank: int) -> range:
        """The global numbers of the hosts of a rank."""
        blocks = self._blocks[self._shares[rank].start : self._shares[rank].stop]
        return range(blocks[0].start, blocks[-1].stop)

    @cached_property
    def own(self) -> tuple[slice, ...]:
        """The hosts of each block of this rank, counted from its first host."""
        share, first = self._shares[self.group.rank], self.hosts.start
        return tuple(slice(block.start - first, block.stop - first) for block in self._blocks[share.start : share.stop])

    @cached_property
    def _blocks(self) -> list[range]:
        return parts_of(self.num_envs, self.blocks)

    @cached_property
    def _shares(self) -> list[range]:
        """The blocks of each rank."""
        return parts_of(self.blocks, self.group.size)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over the blocks of all ranks, of which `parts` has one tensor for each block of this rank."""
        if self.blocks == 1:
            return parts[0]
        share = self._shares[self.group.rank]
        own = {range(block, block + 1): part for block, part in zip(share, parts, strict=True)}
        sums = [_tree_sum(node, own) for node in _nodes(range(self.blocks), share)]
        if self.alone:
            return sums[0]
        return self._exchanged(torch.stack([x.reshape(-1) for x in sums])).view_as(parts[0])

    def _exchanged(self, own: Tensor) -> Tensor:
        """The sum [K] over all ranks of their sums [nodes of a rank, K]."""
        nodes = [_nodes(range(self.blocks), share) for share in self._shares]
        width, most = own.shape[1], max(map(len, nodes))
        size, rank = self.group.size, self.group.rank
        if width <= SMALL or size <= 3:  # then it is no more than in slices
            padded = torch.cat((own, own.new_zeros(most - len(own), width)))
            received = [x[: len(found)] for x, found in zip(self.group.all_gather(padded), nodes, strict=True)]
            return self._over_all(torch.cat(received), nodes)
        slices = parts_of(width, size)
        sent = torch.cat([own[:, cut.start : cut.stop].reshape(-1) for cut in slices])
        mine = len(slices[rank])
        counts = [len(found) * mine for found in nodes]
        received_flat = own.new_empty(sum(counts))
        self.group._exchange(
            lambda: dist.all_to_all_single(received_flat, sent, counts, [len(own) * len(cut) for cut in slices])
        )
        self.group.bytes_received += received_flat.nbytes - counts[rank] * own.element_size()
        added = self._over_all(received_flat.view(-1, mine), nodes)
        longest = len(slices[0])
        all_added = self.group.all_gather(torch.cat((added, added.new_zeros(longest - mine))))
        return torch.cat([x[: len(cut)] for x, cut in zip(all_added, slices, strict=True)])

    def _over_all(self, sums: Tensor, nodes: Sequence[Sequence[range]]) -> Tensor:
        """The sum over all blocks from those of the nodes, [nodes, K] in order of ranks."""
        known = dict(zip((node for found in nodes for node in found), sums, strict=True))

        return _tree_sum(range(self.blocks), known)

    def minibatches(self, orders: Callable[[int, int], Tensor], number: int) -> list[list[Tensor]]:
        """Divide all hosts: a minibatch has as many hosts as the others, also of each block, or one more.

        Args:
            orders: number and size of a block -> an order of its hosts, from 0.
            number: of minibatches.

        Returns:
            For each minibatch the hosts of each own block, counted from the first own one.
        """
        blocks = [(k, self._blocks[k]) for k in self._shares[self.group.rank]]
        divided = [
            (block.start, (orders(k, len(block)) + (block.start - self.hosts.start)).tensor_split(number))
            for k, block in blocks
        ]
        # of a block that does not divide, the larger parts go to the minibatches after those of the block before
        return [[parts[(m - begin) % number] for begin, parts in divided] for m in range(number)]

    def sum(self, rows: Tensor, dims: int) -> Tensor:
        """The sum over the first `dims` axes, the first of which is that of the hosts of this rank."""
        leading = tuple(range(dims))
        return self.total([rows[block].sum(dim=leading) for block in self.own])

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of each number over all ranks."""
        return torch.stack(self.group.all_gather(numbers)).amax(dim=0)

    def all_hosts(self, rows: Tensor) -> Tensor:
        """The rows [N, ...] of the hosts of all ranks."""
        if self.alone:
            return rows
        counts = [len(self.hosts_of(rank)) for rank in range(self.group.size)]
        padding = rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])
        found = self.group.all_gather(torch.cat((rows, padding)))
        return torch.cat([x[:count] for x, count in zip(found, counts, strict=True)])


def _halves(node: range) -> tuple[range, range]:
    """The two nodes that are added to this one; the first one is full."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


def _tree_sum(node: range, known: Mapping[range, Tensor]) -> Tensor:
    """The sum over the blocks of a node from known ones below it."""
    if node in known:
        return known[node]
    first, second = _halves(node)
    return _tree_sum(first, known) + _tree_sum(second, known)


def _nodes(node: range, share: range) -> list[range]:
    """The largest nodes below `node` that lie within `share`."""
    if share.start <= node.start and node.stop <= share.stop:
        return [node]
    if node.stop <= share.start or share.stop <= node.start:
        return []
    return [found for half in _halves(node) for found in _nodes(half, share)]


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end that a system asks for, and that of the terminal."""
_STOPPING = b"\nesper: stopping after this step"
_AT_ONCE = b"; press Ctrl-C again to stop at once"


@contextmanager
def stop_signals() -> Iterator[set[int]]:
    """Those of `STOPS` that have come so far; the same one again raises KeyboardInterrupt where the program is.

    Where SIGHUP is ignored, as with nohup, it stays so. A launcher that got Ctrl-C, as its processes did, sends them
    SIGTERM besides.

    Signals reach the main thread alone: a run in another thread leaves them to it.
    """
    requested = set[int]()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number in requested:
            raise KeyboardInterrupt
        if not requested and group().is_first and (group().alone or number == signal.SIGINT):
            with suppress(OSError):  # of a terminal that was closed
                os.write(
                    2, _STOPPING + _AT_ONCE * (number == signal.SIGINT) + b"\n"
                )  # Python streams are not safe in a signal handler
        requested.add(number)

    caught = [at for at in STOPS if at != signal.SIGHUP or signal.getsignal(at) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield requested
    finally:
        for number, old in before.items():
            signal.signal(number, old)
