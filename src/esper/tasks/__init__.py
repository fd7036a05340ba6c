"""Tasks: a host, a data set and default settings, by name."""

from esper.tasks import presets as presets  # registers the built-in tasks
from esper.tasks.registry import TaskSpec as TaskSpec
from esper.tasks.registry import register_task as register_task
from esper.tasks.registry import task_by_name as task_by_name
from esper.tasks.registry import task_names as task_names
