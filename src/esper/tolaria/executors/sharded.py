"""The sharded executor: hosts split over processes of one machine.

    main process        pickled messages on a pipe     worker
    hosts 0 .. n-1                                     the next m hosts, each part in an executor of its own
    prepare, a Shard    -------- once -------->        builds that executor
    Call                ---------------------->        calls the method of that name
    Answer              <----------------------        the result, or the exception

Results are concatenated in order of hosts [N]. A step exchanges the structure and the measurements, a few kilobytes;
weights move only for checkpoints. Random draws are keyed by a host's global number, so a host does not depend on its
shard: bit for bit under the streamed executor, up to rounding under the fused one. Signals are blocked in a worker; it
ends when the main process closes the pipe.
"""

import pickle
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from dataclasses import replace as replace_field
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar, final

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints import AbstractBlueprint, registry
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import ConfigError, WorkerError
from esper.leyline.messages import SlotState
from esper.leyline.tensor_dataclass import StateTree, replace, rows_of
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import network_executor
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.runtime import keep_freed_memory, note_reads, reads_so_far

CPU = torch.device("cpu")
R = TypeVar("R")


@dataclass(frozen=True)
class Shard:
    """What a worker builds its executor from; made by `shard_of`.

    `config` covers the worker's own hosts. `blueprints` are those that users registered; `names` lists all blueprints
    in order, because the blueprint head chooses by position. `lr_factors` [n] are those of `HostData`, None for 1.
    """

    config: EngineConfig
    task: TaskSpec
    dataset: Dataset
    threads: int
    blueprints: tuple[AbstractBlueprint, ...]
    names: tuple[str, ...]
    lr_factors: Tensor | None = None


def shard_of(config: EngineConfig, task: TaskSpec, dataset: Dataset, lr_factors: Tensor | None = None) -> Shard:
    """A shard that can be pickled, with as many threads as this process; it contains the data instead of a loader."""
    without_loader = replace_field(task, load=_no_loader)
    blueprints = registry.own(), registry.names()
    return Shard(config, without_loader, dataset, torch.get_num_threads(), *blueprints, lr_factors)


def _no_loader(folder: Path | None, run_seed: int) -> Dataset:
    raise AssertionError("the shard contains the data already")


@dataclass(frozen=True)
class Call:
    """A method of `ShardRunner` and its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a call or the exception it raised, and how many host reads it made.

    `outputs` are arrays: pickling a small tensor takes ten times as long.
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    raised: Exception | None = None
    reads: int = 0


@final
class ShardRunner:
    """The executor of some of the hosts; it knows the slots from the last structure."""

    def __init__(self, executor: NetworkExecutor, config: EngineConfig) -> None:
        self.executor = executor
        self._empty = empty_slots(config.num_envs, len(config.slots), CPU)
        self._slots = self._empty

    def reset(self, episode: int) -> None:
        """Fresh hosts."""
        self.executor.reset(episode)
        self._slots = self._empty

    def apply_structure(self, structure: Structure) -> None:
        """Apply it to the parameters, and update the fields of the slots that it contains; executors read no others."""
        self.executor.apply_structure(structure)
        names = ("stage", "blueprint", "algorithm", "alpha_mode", "has_gate", "alpha")
        self._slots = replace(self._empty, **{name: torch.from_numpy(getattr(structure, name)) for name in names})

    def train_epoch(self, t: int) -> StateTree:
        """Fields of the train pass."""
        return vars(self.executor.train_epoch(t, self._slots))

    def measure(self, num_columns: int) -> StateTree:
        """Fields of the validation pass over the structure's coalitions."""
        return vars(self.executor.measure(self._slots.alpha, num_columns))

    def committed(self, split: EvaluationSplit) -> StateTree:
        """Fields of the pass over each host with its fossilized seeds alone."""
        return vars(self.executor.committed(split, self._slots))

    def state_dict(self) -> StateTree:
        """The hosts."""
        return self.executor.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`."""
        self.executor.load_state_dict(state)


def send(pipe: Connection, message: object) -> None:
    """Send by value, classes of `__main__` included: a worker does not run the user's script."""
    pipe.send_bytes(cloudpickle.dumps(message))


def receive(pipe: Connection) -> object:
    """The next message; raises EOFError when the other side is gone."""
    message: object = pickle.loads(pipe.recv_bytes())
    return message


def work(file: int) -> None:
    """Main function of a worker; `file` is its end of the pipe."""
    keep_freed_memory()
    pipe = Connection(file)
    try:
        runner, failed = _guarded(lambda: _build(pipe))
        while True:
            call = receive(pipe)
            assert isinstance(call, Call)
            # if the hosts could not be built, every call gets the reason
            send(pipe, Answer(raised=failed) if runner is None else answered(runner, call))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process closed the pipe


def _build(pipe: Connection) -> ShardRunner:
    """The first message imports the user's modules, which unpickling the second one may need."""
    prepare = receive(pipe)
    assert callable(prepare)
    prepare()
    shard = receive(pipe)
    assert isinstance(shard, Shard)
    for blueprint in shard.blueprints:
        registry.ensure(blueprint)
    assert registry.names() == shard.names, f"blueprints {registry.names()}, in the main process {shard.names}"
    torch.set_num_threads(shard.threads)
    executor, _ = network_executor(shard.config, shard.task, shard.dataset, CPU, shard.lr_factors)
    return ShardRunner(executor, shard.config)


def answered(runner: ShardRunner, call: Call) -> Answer:
    """Run a call."""
    reads = reads_so_far()
    outputs, raised = _guarded(lambda: getattr(runner, call.method)(*call.arguments))
    arrays = {name: np.from_dlpack(x.detach()) for name, x in (outputs or {}).items()}  # no copy, and nothing waits
    return Answer(outputs=arrays, raised=raised, reads=reads_so_far() - reads)


def _guarded(action: Callable[[], R]) -> tuple[R | None, Exception | None]:
    """The result of the action, or its exception in a form that can be sent."""
    try:
        return action(), None
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise  # the main process closed the pipe
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, portable(error)


def portable(error: Exception) -> Exception:
    """The error if it survives pickling, else a RuntimeError with the same text and notes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling runs the constructor of a class that may be the user's
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            replacement.add_note(note)
        return replacement
    return error


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
        self._call(
            "load_state_dict", lambda begin, end: (rows_of(state, self.num_envs, range(begin, end), "executor"),)
        )

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
