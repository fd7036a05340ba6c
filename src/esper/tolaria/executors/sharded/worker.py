"""A worker: a process that runs some of the hosts for `sharded.py`, as it is told over a pipe.

    main process        a call, then its answer        worker
    prepare, a Shard    -------- once -------->        builds an executor of its own for some hosts
    Call                ---------------------->        calls the method of that name
    Answer              <----------------------        what it gave, or what it raised

Tensors of calls and answers are handed over in memory that both share (`shared_memory.py`).

Only the main process decides when a worker ends: signals are blocked in it, and it stops when the pipe closes.
"""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, final

import cloudpickle
import torch

from esper.kasmina.blueprints import AbstractBlueprint, registry
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.leyline.tensor_dataclass import replace
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.choice import network_executor
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import EvaluationSplit, Structure
from esper.tolaria.executors.sharded.shared_memory import Layout, SharedMemory
from esper.tolaria.memory import keep_freed_memory
from esper.tolaria.runtime import reads_so_far

CPU = torch.device("cpu")
R = TypeVar("R")


@dataclass(frozen=True)
class Shard:
    """What a worker builds its executor from; `config` is that of its own hosts. Made by `shard_of`.

    `blueprints` are those that users registered, `names` all names: their places are the values of the blueprint head.
    """

    config: EngineConfig
    task: TaskSpec
    dataset: Dataset
    threads: int
    blueprints: tuple[AbstractBlueprint, ...]
    names: tuple[str, ...]


def shard_of(config: EngineConfig, task: TaskSpec, dataset: Dataset) -> Shard:
    """A shard that another process can be sent, with as many threads as this one.

    Its task has no loader, because the data come with the shard.
    """
    bare = replace_field(task, load=_comes_with_the_shard)
    return Shard(config, bare, dataset, torch.get_num_threads(), registry.own(), registry.names())


def _comes_with_the_shard(folder: Path | None, run_seed: int) -> Dataset:
    raise AssertionError("a worker has its data already")


@dataclass(frozen=True)
class Call:
    """A method of `ShardRunner` and its arguments; where the first one is a tree of tensors, it is in `tensors`."""

    method: str
    arguments: tuple[Any, ...] = ()
    tensors: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call gave, or what it raised (where the hosts could not be built, the reason of that).

    `outputs` lie in the shared memory. `reads` are the host reads of the worker in this call.
    """

    outputs: Layout = field(default_factory=dict)
    raised: Exception | None = None
    reads: int = 0


@final
class ShardRunner:
    """The executor of some of the hosts, told of the slots by structures alone: a worker has no other state."""

    def __init__(self, executor: NetworkExecutor, config: EngineConfig) -> None:
        self.executor = executor
        self._fresh = empty_slots(config.num_envs, len(config.slots), CPU)
        self._slots = self._fresh

    def reset(self, episode: int) -> None:
        """Fresh hosts."""
        self.executor.reset(episode)
        self._slots = self._fresh

    def apply_structure(self, structure: Structure) -> None:
        """Operate on the parameters; keep what the next passes must know of the slots."""
        self.executor.apply_structure(structure)
        self._slots = slots_of(structure, self._fresh)

    def train_epoch(self, t: int) -> StateTree:
        """Fields of the train pass."""
        return vars(self.executor.train_epoch(t, self._slots))

    def measure(self, num_columns: int) -> StateTree:
        """Fields of the validation pass over the structure's coalitions."""
        return vars(self.executor.measure(self._slots.alpha, num_columns))

    def committed_accuracy(self, split: EvaluationSplit) -> StateTree:
        """Accuracy of each host with its fossilized seeds alone."""
        return {"accuracy": self.executor.committed_accuracy(split, self._slots)}

    def state_dict(self) -> StateTree:
        """Weights and all that belongs to them."""
        return self.executor.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        self.executor.load_state_dict(state)


def slots_of(structure: Structure, fresh: SlotState) -> SlotState:
    """The slots as the structure shows them: what it does not tell is as in fresh ones, and no executor looks at it."""
    told = ("stage", "blueprint", "algorithm", "alpha_mode", "has_gate", "alpha")
    return replace(fresh, **{name: torch.from_numpy(getattr(structure, name)) for name in told})


def send(pipe: Connection, message: object) -> None:
    """Send by value: a worker needs no shared memory, and no script whose classes the message is made of."""
    pipe.send_bytes(cloudpickle.dumps(message))


def receive(pipe: Connection) -> object:
    """The next message; raises EOFError when the other side is gone."""
    message: object = pickle.loads(pipe.recv_bytes())
    return message


def work(file: int, memory_file: int) -> None:
    """What a worker does from its start to its end, which is when the pipe `file` to the main process closes."""
    keep_freed_memory()
    pipe, memory = Connection(file), SharedMemory(open(memory_file, "r+b"))  # noqa: SIM115 -- until the process ends
    try:
        runner, failed = _guarded(lambda: _build(pipe))
        while True:
            call = receive(pipe)
            assert isinstance(call, Call)
            # where the hosts could not be built, the first call is told why, and so is every later one
            send(pipe, Answer(raised=failed) if runner is None else answered(runner, call, memory))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process is gone, or wants no more


def _build(pipe: Connection) -> ShardRunner:
    """The first message imports what the second one is made of: modules of the user."""
    prepare = receive(pipe)
    assert callable(prepare)
    prepare()
    shard = receive(pipe)
    assert isinstance(shard, Shard)
    for blueprint in shard.blueprints:
        registry.ensure(blueprint)
    assert registry.names() == shard.names, f"blueprints {registry.names()}, in the main process {shard.names}"
    torch.set_num_threads(shard.threads)
    executor, _ = network_executor(shard.config, shard.task, shard.dataset, CPU)
    assert isinstance(executor, NetworkExecutor), "a static graph stays in one process"
    return ShardRunner(executor, shard.config)


def answered(runner: ShardRunner, call: Call, memory: SharedMemory) -> Answer:
    """Carry out a call; its outputs are in `memory` then."""
    reads = reads_so_far()

    def run() -> Layout:
        given = () if call.tensors is None else (memory.read(call.tensors),)
        outputs = getattr(runner, call.method)(*given, *call.arguments)
        return {} if outputs is None else memory.write(outputs)

    outputs, raised = _guarded(run)
    return Answer(outputs=outputs or {}, raised=raised, reads=reads_so_far() - reads)


def _guarded(action: Callable[[], R]) -> tuple[R | None, Exception | None]:
    """What the action gives, or what it raises in a form that can be sent."""
    try:
        return action(), None
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise  # the other side is gone
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, portable(error)


def portable(error: Exception) -> Exception:
    """The error if it can be sent and rebuilt, else a RuntimeError that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of a user's own raises while it is rebuilt
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            replacement.add_note(note)
        return replacement
    return error
