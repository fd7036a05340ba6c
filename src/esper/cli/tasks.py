"""esper tasks: lists the tasks, or draws one."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from esper.cli.options import FilePath, Plugins, joined, placeholder


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List the tasks, or draw the host of one with its slots."""

    name: Annotated[tyro.conf.Positional[str], placeholder("TASK")] = ""
    """The task to draw, or FILE.py:NAME."""
    data_dir: FilePath = None
    """Folder of the data files. ($ESPER_DATA)"""
    plugins: Plugins = ()
    """Plugins that register tasks."""


def tasks(command: Tasks) -> int:
    """Print the table of tasks, or one task."""
    from esper.runs import tables
    from esper.runs.config import data_folder
    from esper.runs.plugins import load_plugins, names_task, task_in_file
    from esper.tasks import presets  # noqa: F401 -- registers the built-in tasks
    from esper.tasks.registry import task_by_name, task_names
    from esper.telemetry.progress import RunConsole

    load_plugins(joined(command.plugins))
    console, folder = RunConsole(), data_folder(str(command.data_dir or ""))
    if command.name:
        name = command.name
        lines = tables.task(task_in_file(name) if names_task(name) else task_by_name(name), folder)
    else:
        found = [task_by_name(name) for name in task_names()]
        console.print(tables.tasks(found, folder))
        lines = ["", *tables.data_lines(found, folder), "", "esper tasks TASK draws the host of a task with its slots."]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return 0
