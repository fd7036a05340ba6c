"""Code of the user: modules that register tasks, blueprints and rewards, imported before their names are looked up.

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
    """Import each of them, once per process.

    Args:
        names: importable modules (the working directory counts), or paths that end in .py.

    Raises:
        ConfigError: one is missing or fails; the message names the file, the line and what went wrong there.
    """
    for name in names:
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last: a file that is named like an installed module does not replace it
        if is_file(name):
            _load_file(Path(name))
        else:
            _load_module(name)


def require_trusted(names: Sequence[str], allowed: Sequence[str], *, trust: bool) -> None:
    """Refuse to import code that only a run directory names: whoever made it would decide what runs here.

    Args:
        names: plugins that the run directory names.
        allowed: plugins that the command line names.
        trust: whether the command line allows all of them.

    Raises:
        ConfigError: some are not allowed.
    """
    unknown = not_among(names, allowed)
    if unknown and not trust:
        raise ConfigError(
            f"the run directory names code that would be executed: {', '.join(unknown)}. Read it first; then allow it "
            f"by name (--plugins {' '.join(unknown)}) or allow all code that the run names (--trust)."
        )


def not_among(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Plugins of `names` that are neither the same file nor the same module as one of `others`."""
    known = {_identity(name) for name in others}
    return [name for name in names if _identity(name) not in known]


def _identity(name: str) -> str:
    return str(Path(name).expanduser().resolve()) if is_file(name) else name


def is_file(name: str) -> bool:
    """Whether a plugin's name is a path rather than a module."""
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
    sys.modules[name] = module  # dataclasses look their module up while it is being imported
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
    """Says where it went wrong: in the innermost frame that is the user's own."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    if isinstance(error, SyntaxError):
        place = f" in line {error.lineno} of {error.filename}"
    else:
        others = (str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib"), "<frozen")
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not f.filename.startswith(others) and "site-packages" not in f.filename]
        place = f" in line {theirs[-1].lineno} of {theirs[-1].filename}" if theirs else ""
    return ConfigError(f"the plugin {name} fails{place}: {what}. Mend it, or leave it out of plugins.")
