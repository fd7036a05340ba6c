"""Esper grows neural networks while they train, and learns how.

task = esper.Task(model=MyNet, slots=["stem", "layer2.1"], train=(x, y), val=(xv, yv), test=(xt, yt))
run = esper.train(task, rounds=30)
grown = esper.grow(task, budget=esper.Budget(minutes=10))  # or let a trained controller grow it: method=run

The names in `__all__` are public and stay; everything else may change. They are imported when they are used, so that
`import esper` takes no time.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper import tasks as tasks
    from esper.api import blueprints as blueprints
    from esper.api.blueprints import register_blueprint as register_blueprint
    from esper.api.grow import grow as grow
    from esper.api.grow import load as load
    from esper.api.run import evaluate as evaluate
    from esper.api.run import train as train
    from esper.api.run import train_policy as train_policy
    from esper.api.task import Task as Task
    from esper.api.task import register_task as register_task
    from esper.leyline.errors import ConfigError as ConfigError
    from esper.leyline.errors import EsperError as EsperError
    from esper.runs.growth import Budget as Budget
    from esper.simic.rewards import register_reward as register_reward
    from esper.tamiyo.baselines import register_policy as register_policy

__version__ = "0.1.0"
_HOME = {
    "Budget": "esper.runs.growth",
    "ConfigError": "esper.leyline.errors",
    "EsperError": "esper.leyline.errors",
    "Task": "esper.api.task",
    "train": "esper.api.run",
    "train_policy": "esper.api.run",
    "evaluate": "esper.api.run",
    "grow": "esper.api.grow",
    "load": "esper.api.grow",
    "tasks": "esper",
    "blueprints": "esper.api",
    "register_blueprint": "esper.api.blueprints",
    "register_policy": "esper.tamiyo.baselines",
    "register_reward": "esper.simic.rewards",
    "register_task": "esper.api.task",
}
"""The module, or for a module the package, where each name is defined."""
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- typed above
    if name not in _HOME:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    if name in ("tasks", "blueprints"):
        return import_module(f"{_HOME[name]}.{name}")
    value = getattr(import_module(_HOME[name]), name)
    if isinstance(value, FunctionType):
        value = import_module("esper.api").checked(value)
    elif name == "Budget":  # a dataclass of a layer that does not know this check
        value.__init__ = import_module("esper.api").checked(value.__init__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
