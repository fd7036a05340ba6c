"""What every verb does around its work: names of tasks, settings, and the state of the caller's process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from esper.api.task import Task
from esper.runs.plugins import names_task, task_in_file
from esper.runs.values import Values, nested
from esper.tasks.registry import TaskSpec, registered, task_by_name
from esper.telemetry.progress import RunConsole

AnyTask: TypeAlias = Task | TaskSpec | str
"""A task, the name of a registered one, or FILE.py:NAME."""


def spec_of(task: AnyTask) -> TaskSpec:
    """The specification of a task; raises RegistryError for an unknown name, ConfigError for a wrong file."""
    if isinstance(task, str):
        return task_in_file(task) if names_task(task) else task_by_name(task)
    return task.spec if isinstance(task, Task) else task


@contextmanager
def in_process(task: TaskSpec | None) -> Iterator[None]:
    """`task` has its name inside; at the end PyTorch has as many threads as before."""
    threads = torch.get_num_threads()
    try:
        if task is None:
            yield
        else:
            with registered(task):
                yield
    finally:
        torch.set_num_threads(threads)


def given(settings: Mapping[str, Any], **named: object) -> Values:
    """Configuration values from keyword arguments, with dots or as tables; None among `named` means not given.

    Raises:
        ConfigError: a name is both a value and a table.
    """
    values = {name: value for name, value in named.items() if value is not None}
    if isinstance(reward := values.pop("reward", None), str):
        values["reward.mode"] = reward
    return nested({**settings, **values})


def console(progress: bool) -> RunConsole:
    """Where a verb prints, silent without `progress`."""
    return RunConsole(quiet=not progress)


def folder(path: Path | str) -> Path:
    """The path of a folder, with ~ expanded."""
    return Path(path).expanduser()
