"""esper tasks: lists the tasks."""

from dataclasses import dataclass

from esper.cli.options import Plugins, joined


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List the tasks."""

    plugins: Plugins = ()
    """Plugins that register tasks."""


def tasks(command: Tasks) -> int:
    """Print the table of tasks."""
    from esper.runs import tables
    from esper.runs.plugins import load_plugins
    from esper.tasks import presets  # noqa: F401 -- registers the built-in tasks
    from esper.tasks.registry import task_by_name, task_names
    from esper.telemetry.progress import RunConsole

    load_plugins(joined(command.plugins))
    RunConsole().print(tables.tasks([task_by_name(name) for name in task_names()]))
    return 0
