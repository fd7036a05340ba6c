"""The sharded executor: hosts split over processes of one machine, each of which runs its share.

    main process    hosts 0 .. n-1, in an executor of its own; what is asked is told to the workers first       [n]
    worker          the hosts that follow, in an executor of its own                                            [m]
    together        answers side by side, in order of hosts                                                     [N]

What is exchanged in a step is the structure (over a pipe) and the measurements (in shared memory), a few kilobytes;
weights stay where they are trained, and travel in checkpoints alone. A host's random draws have its global number, so a
host is the same in every shard: bit for bit under the streamed executor, up to rounding under the fused one.
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
from jaxtyping import Float
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError, WorkerError
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.executors.sharded.shared_memory import SharedMemory
from esper.tolaria.executors.sharded.worker import Answer, Call, Shard, ShardRunner, receive, send, work
from esper.tolaria.read_counter import note_intended_read


@dataclass(frozen=True)
class Worker:
    """A process, what it shares with this one, and its hosts: `begin` up to `end`, counted from 0 in this executor."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    memory: SharedMemory
    begin: int
    end: int

    @property
    def hosts(self) -> str:
        """Its hosts, in words."""
        return f"host {self.begin}" if self.end == self.begin + 1 else f"hosts {self.begin} to {self.end - 1}"

    def send(self, message: object) -> None:
        """Raises WorkerError where the process is gone."""
        try:
            send(self.pipe, message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Answer:
        """The next answer; raises WorkerError where the process is gone."""
        try:
            answer = receive(self.pipe)
        except (EOFError, OSError) as error:
            raise self._ended() from error
        assert isinstance(answer, Answer)
        note_intended_read(answer.reads)
        if answer.raised is not None:
            answer.raised.add_note(f"raised in the process that runs {self.hosts}.")
        return answer

    def _ended(self) -> WorkerError:
        code = self.process.wait(timeout=5)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(
            f"the process that runs {self.hosts} ended ({how}), perhaps for lack of memory; continue the run from its "
            "last checkpoint with --resume, or start it anew with workers = 1."
        )


@final
class ShardedExecutor:
    """N hosts in two or more processes, this one included.

    Args:
        own: runs the first hosts, in this process. num_own: how many.
        shards: what each worker builds its executor from, in order of hosts.
        prepare: called in each worker before it builds anything; imports the modules that register what it needs.

    Raises:
        ConfigError: a task that cannot be sent to another process.
        WorkerError: from any method, when a worker ended; this executor is of no use afterwards.
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

    # -- the executor ---------------------------------------------------------------------------------------------

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self._tell("reset", lambda begin, end: (episode,))

    def apply_structure(self, structure: Structure) -> None:
        """Every process operates on the parameters of its hosts."""
        self._tell("apply_structure", lambda begin, end: (part_of(structure, begin, end),))

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split; of the slots, the last structure has told all that is needed."""
        return TrainPass(**self._tell("train_epoch", lambda begin, end: (t,)))

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples."""
        num_columns = coalitions.sets.shape[1]
        return ValidationPass(**self._tell("measure", lambda begin, end: (num_columns,)))

    def committed_accuracy(self, split: EvaluationSplit, slots: SlotState) -> Float[Tensor, " N"]:
        """Each host with its fossilized seeds alone."""
        return self._tell("committed_accuracy", lambda begin, end: (split,))["accuracy"]

    def state_dict(self) -> StateTree:
        """That of one executor with all hosts, so that a checkpoint does not depend on the number of workers."""
        return self._tell("state_dict", lambda begin, end: ())

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave, here or without workers."""
        self._tell("load_state_dict", lambda begin, end: (self._rows(state, begin, end),))

    def close(self) -> None:
        """End the workers; happens by itself when the executor is no longer used."""
        _stop(self._workers)

    # -- the processes --------------------------------------------------------------------------------------------

    def _tell(self, method: str, arguments: Callable[[int, int], tuple[Any, ...]]) -> StateTree:
        """Call a method of all shards at once, with arguments for hosts (begin, end); their answers side by side.

        Raises what the first of them raised, after all have answered: nothing is left in a pipe.
        """
        for worker in self._workers:
            given = arguments(worker.begin, worker.end)
            trees = given and isinstance(given[0], dict)
            worker.send(Call(method, given[1:], worker.memory.write(given[0])) if trees else Call(method, given))
        try:
            own = getattr(self._own, method)(*arguments(0, self._num_own))
        finally:
            answers = [worker.receive() for worker in self._workers]
        for answer in answers:
            if answer.raised is not None:
                raise answer.raised
        if own is None:
            return {}
        others = zip(self._workers, answers, strict=True)
        return side_by_side([own, *(worker.memory.read(answer.outputs) for worker, answer in others)])

    def _rows(self, state: StateTree, begin: int, end: int) -> StateTree:
        """The rows of some hosts; what has no rows is for all."""
        part = {}
        for name, value in state.items():
            per_host, rest = divmod(len(value) if value.dim() else 0, self.num_envs)
            if rest:
                raise CheckpointError(
                    f"executor: {name} has {len(value)} rows, which {self.num_envs} hosts cannot share equally; load a "
                    "checkpoint of a run with as many hosts."
                )
            part[name] = value[begin * per_host : end * per_host] if value.dim() else value
        return part


def bounds(num_envs: int, workers: int) -> list[tuple[int, int]]:
    """First host and end of each shard: as equal as can be, the larger ones first."""
    size, larger = divmod(num_envs, workers)
    starts = [w * size + min(w, larger) for w in range(workers + 1)]
    return list(pairwise(starts))


def part_of(structure: Structure, begin: int, end: int) -> Structure:
    """The structure of some of the hosts."""
    arrays = {f.name: getattr(structure, f.name)[begin:end] for f in fields(structure) if f.name != "t"}
    return replace(structure, **arrays)


def side_by_side(parts: Sequence[StateTree]) -> StateTree:
    """Rows of all shards in order of hosts; what has no rows is the same in all."""
    return {
        name: torch.cat([part[name] for part in parts]) if first.dim() else first for name, first in parts[0].items()
    }


def _started(begin: int, end: int, prepare: Callable[[], None]) -> Worker:
    """A new interpreter; a fork would inherit locks of threads that it does not have, and what `__main__` has done."""
    ours, theirs = Pipe()
    memory = SharedMemory.create()
    files = (theirs.fileno(), memory.file.fileno())
    code = f"import sys; sys.path[:] = {sys.path!r}; from {work.__module__} import work; work{files}"
    # a new process inherits which signals are blocked: Ctrl-C and SIGTERM are for the main process alone
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=files, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    worker = Worker(process, ours, memory, begin, end)
    worker.send(prepare)
    return worker


def _stop(workers: list[Worker]) -> None:
    """Nothing is lost with a worker that is killed: what counts is in the main process and in checkpoints."""
    for worker in workers:
        worker.pipe.close()
        worker.memory.file.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
