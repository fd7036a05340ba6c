"""The sharded executor: hosts split over processes of one machine.

    main process    hosts 0 .. n-1, in its own executor
    worker          the next m hosts, in its own executor
    together        results concatenated in order of hosts                                                     [N]

A step exchanges the structure and the measurements, a few kilobytes; weights move only for checkpoints. Random draws
are keyed by a host's global number, so a host does not depend on its shard: bit for bit under the streamed executor, up
to rounding under the fused one.
"""

import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, Pipe
from typing import Any, final

import torch

from esper.leyline.checkpoint_tree import rows_of
from esper.leyline.errors import ConfigError, WorkerError
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.executors.sharded.worker import Answer, Call, Shard, ShardRunner, receive, send, work
from esper.tolaria.runtime import note_reads


@dataclass(frozen=True)
class Worker:
    """A process, the pipe to it, and its hosts: `begin` up to `end`, counted from 0 in this executor."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    begin: int
    end: int

    @property
    def hosts(self) -> str:
        """Its hosts, in words."""
        return f"host {self.begin}" if self.end == self.begin + 1 else f"hosts {self.begin} to {self.end - 1}"

    def send(self, message: object) -> None:
        """Raises WorkerError if the process has ended."""
        try:
            send(self.pipe, message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Answer:
        """The next answer; raises WorkerError if the process has ended."""
        try:
            answer = receive(self.pipe)
        except (EOFError, OSError) as error:
            raise self._ended() from error
        assert isinstance(answer, Answer)
        note_reads(answer.reads)
        if answer.raised is not None:
            answer.raised.add_note(f"raised in the process that runs {self.hosts}.")
        return answer

    def _ended(self) -> WorkerError:
        code = self.process.wait(timeout=5)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(
            f"the process that runs {self.hosts} ended ({how}), perhaps for lack of memory; continue the run from its "
            "last checkpoint, or start it anew with workers = 1."
        )


@final
class ShardedExecutor:
    """N hosts in two or more processes, this one included.

    Args:
        own: runs the first `num_own` hosts, in this process.
        shards: what each worker builds its executor from, in order of hosts.
        prepare: each worker calls it first, to import the modules that register what the shard uses.

    Raises:
        ConfigError: a task that cannot be pickled.
        WorkerError: from any method, if a worker has ended; the executor cannot be used afterwards.
    """

    def __init__(self, own: ShardRunner, num_own: int, shards: Sequence[Shard], prepare: Callable[[], None]) -> None:
        self.costs, self.host_params = own.executor.costs, own.executor.host_params
        self.refused = own.executor.refused
        self._own, self._num_own = own, num_own
        ends = list(accumulate((shard.config.num_envs for shard in shards), initial=num_own))
        self.num_envs = ends[-1]
        self._workers = [_started(begin, end, prepare) for begin, end in pairwise(ends)]
        weakref.finalize(self, _stop, self._workers)  # also at the end of this process
        for worker, shard in zip(self._workers, shards, strict=True):
            try:
                worker.send(shard)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"task {shard.task.name!r} cannot be sent to another process ({error}); define what it is made of "
                    "at the top level of a module, or set workers = 1."
                ) from error

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self._call("reset", lambda begin, end: (episode,))

    def apply_structure(self, structure: Structure) -> None:
        """Each process applies the structure of its hosts."""
        self._call("apply_structure", lambda begin, end: (part_of(structure, begin, end),))

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split; `slots` is not read, the last structure contains what is needed."""
        return TrainPass(**self._call("train_epoch", lambda begin, end: (t,)))

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples."""
        num_columns = coalitions.sets.shape[1]
        return ValidationPass(**self._call("measure", lambda begin, end: (num_columns,)))

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """Each host with its fossilized seeds alone."""
        return ValidationPass(**self._call("committed", lambda begin, end: (split,)))

    def state_dict(self) -> StateTree:
        """That of one executor with all hosts: a checkpoint does not depend on the number of workers."""
        return self._call("state_dict", lambda begin, end: ())

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`, saved with any number of workers."""
        # copies: a pickled view would carry all rows
        self._call("load_state_dict", lambda begin, end: (rows_of(state, self.num_envs, begin, end, "executor"),))

    def close(self) -> None:
        """End the workers; also done when the executor is garbage collected."""
        _stop(self._workers)

    def _call(self, method: str, arguments: Callable[[int, int], tuple[Any, ...]]) -> StateTree:
        """Call a method of all shards at once, with arguments for hosts (begin, end); concatenate the results.

        Raises the first exception of a shard after all have answered, so that no answer is left in a pipe.
        """
        for worker in self._workers:
            worker.send(Call(method, arguments(worker.begin, worker.end)))
        try:
            own = getattr(self._own, method)(*arguments(0, self._num_own))
        finally:
            answers = [worker.receive() for worker in self._workers]
        for answer in answers:
            if answer.raised is not None:
                raise answer.raised
        others = ({name: torch.from_numpy(x) for name, x in answer.outputs.items()} for answer in answers)
        return concatenated([own or {}, *others])


def bounds(num_envs: int, workers: int) -> list[tuple[int, int]]:
    """First and end of the hosts of each shard, in sizes as equal as possible, the larger ones first."""
    size, larger = divmod(num_envs, workers)
    starts = [w * size + min(w, larger) for w in range(workers + 1)]
    return list(pairwise(starts))


def part_of(structure: Structure, begin: int, end: int) -> Structure:
    """The structure of some of the hosts."""
    arrays = {f.name: getattr(structure, f.name)[begin:end] for f in fields(structure) if f.name != "t"}
    return replace(structure, **arrays)


def concatenated(parts: Sequence[StateTree]) -> StateTree:
    """Rows of all shards in order of hosts; scalars are the same in all shards."""
    return {
        name: torch.cat([part[name] for part in parts]) if first.dim() else first for name, first in parts[0].items()
    }


def _started(begin: int, end: int, prepare: Callable[[], None]) -> Worker:
    """A new interpreter: a fork would inherit locks held by other threads, and the effects of the user's script."""
    ours, theirs = Pipe()
    file = theirs.fileno()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {work.__module__} import work; work({file})"
    # a new process inherits the signal mask: Ctrl-C and SIGTERM are for the main process alone
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(file,), stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    worker = Worker(process, ours, begin, end)
    worker.send(prepare)
    return worker


def _stop(workers: list[Worker]) -> None:
    """Kill the workers; they hold nothing that a checkpoint needs."""
    for worker in workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
