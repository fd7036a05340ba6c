"""Plugins: user modules that register tasks, blueprints, rewards, policies or listeners.

plugins = ["my_package.growth", "rewards/frugal.py"]      an importable module, or a file
plugins = ["networks/mine.py:task"]                       a file whose variable `task` is registered as a task
"""

import hashlib
import importlib
import importlib.util
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from esper.leyline.errors import ConfigError, in_shell, in_words, nearest
from esper.leyline.files import expanded
from esper.tasks.registry import TaskSpec, register_task, task_by_name, task_names
from esper.telemetry.progress import warn
from esper.telemetry.record.writer import sha256_of


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins, each once per process: modules, paths that end in .py, or such a path with the name of a task.

    Raises:
        ConfigError: a plugin is missing or fails; the message names file, line and error.
    """
    for name in names:
        if names_task(name):
            task_in_file(name)
        else:
            _imported(name)


def task_in_file(name: str) -> TaskSpec:
    """The task of FILE.py:NAME, registered under its own name; executes the file.

    Raises:
        ConfigError: the file fails or has no such task, or another task has that name.
    """
    variable, variables = _parts(name)[1], vars(_imported(name))
    found = variables.get(variable)
    task = getattr(found, "spec", found)  # an esper.Task, or what it contains
    if not isinstance(task, TaskSpec):
        kind = f"is of type {type(found).__name__}" if variable in variables else "does not exist"
        tasks = [key for key, value in variables.items() if isinstance(getattr(value, "spec", value), TaskSpec)]
        raise ConfigError(f"{name}: {variable!r} {kind}, expected an esper.Task; {nearest(variable, tasks)}")
    if task.name not in task_names():
        register_task(task)
    elif task_by_name(task.name) is not task:
        raise ConfigError(f"{name}: another task is named {task.name!r}; choose a name: esper.Task(..., name=...).")
    return task


def _parts(name: str) -> tuple[str, str]:
    """FILE.py and, of FILE.py:NAME, the name."""
    file, colon, task = name.rpartition(":")
    return (file, task) if colon and file.endswith(".py") else (name, "")


def require_trusted(names: Sequence[str], allowed: Sequence[str], *, trust: bool) -> None:
    """Refuse to run code that only a run directory names, which may have been downloaded.

    Raises:
        ConfigError: some of the `names` are not among those `allowed` on the command line, without `trust` in all.
    """
    unknown = not_among(names, allowed)
    if unknown and not trust:
        named = shlex.join(unknown)
        way = f"it by name (--plugins {named}) or all code of the run (--trust)" if in_shell() else "it with trust=True"
        raise ConfigError(
            f"the run directory names code that would be executed: {named}. Read it first, then allow {way}."
        )


def not_among(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Plugins of `names` that are not among `others`, comparing files by their real path."""
    known = {_identity(name) for name in others}
    return [name for name in names if _identity(name) not in known]


def _identity(name: str) -> str:
    return str(expanded(_parts(name)[0]).resolve()) if is_file(name) else name


def is_file(name: str) -> bool:
    """Whether a plugin is a file, with or without the name of a task, rather than a module."""
    return _parts(name)[0].endswith(".py")


def names_task(name: str) -> bool:
    """Whether a plugin is FILE.py:NAME."""
    return bool(_parts(name)[1])


def source_of(name: str) -> Path | None:
    """The file of a plugin that was imported; None for a module without one."""
    if is_file(name):
        return expanded(_parts(name)[0])
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file else None


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the file of each plugin that has one."""
    return {name: sha256_of(file) for name in names if (file := source_of(name)) is not None}


def warn_of_changed(names: Iterable[str], before: object) -> None:
    """Say which plugins have another file than when a run was started, when `digests_of` gave `before`."""
    for name, digest in digests_of(names).items():
        if isinstance(before, dict) and before.get(name, digest) != digest:
            warn([f"{name} was changed after the run was started: its network, data or rewards may be others."])


def _imported(name: str) -> ModuleType:
    """The module of a plugin, which is executed unless it was before."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that local files never shadow installed modules
    path = expanded(_parts(name)[0]).resolve()
    if is_file(name) and not path.is_file():
        raise ConfigError(f"there is no file {path}; correct the path of the task or plugin, or leave it out.")
    try:
        return _of_file(path) if is_file(name) else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file(name) and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"there is no plugin module {name!r}; start esper where it can be imported, or name the file, such as "
                "plugins/mine.py."
            ) from error
        raise _failed(str(path) if is_file(name) else name, error) from error


def _of_file(path: Path) -> ModuleType:
    """The module of a file; one that was imported under another name, or runs as a program, is not executed again."""
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    name = f"esper_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during import
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _failed(name: str, error: BaseException) -> ConfigError:
    """The error with the innermost line of user code."""
    if isinstance(error, SyntaxError):
        place = f" in line {error.lineno} of {error.filename}"
    else:
        others = (str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib"), "<frozen")
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [f for f in frames if not f.filename.startswith(others) and "site-packages" not in f.filename]
        place = f" in line {user_frames[-1].lineno} of {user_frames[-1].filename}" if user_frames else ""
    return ConfigError(f"the plugin {name} fails{place}: {in_words(error)}. Fix it, or leave it out of plugins.")
