"""A worker: a process that runs some of the hosts for `ShardedExecutor`.

    main process        pickled messages on a pipe     worker
    prepare, a Shard    -------- once -------->        builds an executor for its hosts
    Call                ---------------------->        calls the method of that name
    Answer              <----------------------        the result, or the exception

Signals are blocked in a worker; it ends when the main process closes the pipe.
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
import numpy as np
import torch

from esper.kasmina.blueprints import AbstractBlueprint, registry
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.protocols import StateTree
from esper.leyline.tensor_dataclass import replace
from esper.tasks.datasets import Dataset
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import network_executor
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import EvaluationSplit, Structure
from esper.tolaria.memory import keep_freed_memory
from esper.tolaria.runtime import reads_so_far

CPU = torch.device("cpu")
R = TypeVar("R")


@dataclass(frozen=True)
class Shard:
    """What a worker builds its executor from; made by `shard_of`.

    `config` covers the worker's own hosts. `blueprints` are those that users registered; `names` lists all blueprints
    in order, because the blueprint head chooses by position.
    """

    config: EngineConfig
    task: TaskSpec
    dataset: Dataset
    threads: int
    blueprints: tuple[AbstractBlueprint, ...]
    names: tuple[str, ...]


def shard_of(config: EngineConfig, task: TaskSpec, dataset: Dataset) -> Shard:
    """A shard that can be pickled, with as many threads as this process; it contains the data instead of a loader."""
    without_loader = replace_field(task, load=_no_loader)
    return Shard(config, without_loader, dataset, torch.get_num_threads(), registry.own(), registry.names())


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
    executor, _ = network_executor(shard.config, shard.task, shard.dataset, CPU)
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
