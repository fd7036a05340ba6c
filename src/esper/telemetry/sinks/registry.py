"""The sinks that `sinks = [...]` can name: those of esper, and those that a plugin registers.

The packages of the built-in ones are imported only when a run uses them, on the thread of the sink.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from esper.leyline.errors import ConfigError, RegistryError, nearest
from esper.leyline.messages import Sink
from esper.telemetry.sinks.trackers import TrackioSink, WandbSink

SinkFactory = Callable[[Path], Sink]
"""Run directory -> sink."""
METRICS_ONLY = frozenset({"run_started", "round", "run_finished"})


@dataclass(frozen=True, kw_only=True)
class SinkKind:
    """A sink that can be named.

    Attributes:
        make: creates it.
        kinds: the records it receives; None for all.
        package: what it imports, also the name of the extra that installs it; "" for none.
        where: how its records are looked at, with {} for the run directory; "" if there is nothing to say.
    """

    make: SinkFactory
    kinds: Collection[str] | None = None
    package: str = ""
    where: str = ""


def _tensorboard(run_directory: Path) -> Sink:
    from esper.telemetry.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_directory)


SINKS: dict[str, SinkKind] = {
    "tensorboard": SinkKind(
        make=_tensorboard, kinds=METRICS_ONLY, package="tensorboard", where="tensorboard --logdir {}"
    ),
    "wandb": SinkKind(make=WandbSink, kinds=METRICS_ONLY, package="wandb", where="files in {}/wandb"),
    "trackio": SinkKind(make=TrackioSink, kinds=METRICS_ONLY, package="trackio", where="trackio show"),
}


def register_sink(name: str, *, kinds: Collection[str] | None = None) -> Callable[[SinkFactory], SinkFactory]:
    """Decorate a function or class `Path -> Sink`, which runs with `sinks = [name]` then use.

    Args:
        name: for the configuration.
        kinds: the records it receives, such as ("round",); None for all.

    Raises:
        RegistryError: the name is taken.
    """
    if name in SINKS:
        raise RegistryError(f"a sink named {name!r} exists already; choose another name.")

    def register(factory: SinkFactory) -> SinkFactory:
        SINKS[name] = SinkKind(make=factory, kinds=kinds)
        return factory

    return register


def require_sinks(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is unknown or given twice."""
    seen: set[str] = set()
    for name in names:
        if name not in SINKS:
            raise ConfigError(
                f"unknown sink {name!r}; {nearest(name, SINKS)} Register your own in a module and name it in plugins."
            )
        if name in seen:
            raise ConfigError(f"sinks names {name!r} twice; name it once.")
        seen.add(name)


def require_installed(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a sink is missing."""
    for name in names:
        package = SINKS[name].package
        if package and find_spec(package) is None:
            raise ConfigError(
                f"the sink {name!r} needs the package {package}, which is not installed: "
                f"pip install 'esper-growth[{package}]', or leave the sink out."
            )
