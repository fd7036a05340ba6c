"""Plugins: user modules that register tasks, blueprints, rewards or listeners.

plugins = ["my_package.growth", "rewards/frugal.py"]      an importable module, or a file
"""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from esper.leyline.errors import ConfigError


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins, each once per process.

    Args:
        names: modules importable from the working directory or the environment, or paths that end in .py.

    Raises:
        ConfigError: a plugin is missing or fails; the message names file, line and error.
    """
    for name in names:
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last, so that local files never shadow installed modules
        if is_file(name):
            _load_file(Path(name))
        else:
            _load_module(name)


def require_trusted(names: Sequence[str], allowed: Sequence[str], *, trust: bool) -> None:
    """Refuse to run code that only a run directory names, which may have been downloaded.

    Args:
        names: plugins that the run directory names.
        allowed: plugins named on the command line.
        trust: whether --trust allows all.

    Raises:
        ConfigError: some are not allowed.
    """
    unknown = not_among(names, allowed)
    if unknown and not trust:
        raise ConfigError(
            f"the run directory names code that would be executed: {', '.join(unknown)}. Read it first, then allow it "
            f"by name (--plugins {' '.join(unknown)}) or allow all code of the run (--trust)."
        )


def not_among(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Plugins of `names` that are not among `others`, comparing files by their real path."""
    known = {_identity(name) for name in others}
    return [name for name in names if _identity(name) not in known]


def _identity(name: str) -> str:
    return str(Path(name).expanduser().resolve()) if is_file(name) else name


def is_file(name: str) -> bool:
    """Whether a plugin is a file rather than a module."""
    return name.endswith(".py")


def _load_file(path: Path) -> None:
    path = path.expanduser().resolve()
    name = f"esper_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    if not path.is_file():
        raise ConfigError(f"there is no plugin {path}; correct the path in plugins, or leave it out.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during import
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(str(path), error) from error


def _load_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"there is no plugin module {name!r}; start esper where it can be imported, "
                "or name the file, such as plugins/mine.py."
            ) from error
        raise _failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException) -> ConfigError:
    """The error with the innermost line of user code."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError):
        place = f" in line {error.lineno} of {error.filename}"
    else:
        others = (str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib"), "<frozen")
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [f for f in frames if not f.filename.startswith(others) and "site-packages" not in f.filename]
        place = f" in line {user_frames[-1].lineno} of {user_frames[-1].filename}" if user_frames else ""
    return ConfigError(f"the plugin {name} fails{place}: {what}. Fix it, or leave it out of plugins.")
