"""Passes the records of a run to listeners and sinks. None of them can stop the run by failing.

    runner --(kind, fields)--> Hub --> progress display, listeners of the user     at once: the run waits
                                   --> queue --> sink                              on the sink's thread

A listener that raises loses that record and stays registered. A sink (`background.py`) that is too slow loses records
too. Lost records are counted and reported at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import final

from esper.leyline.errors import RegistryError
from esper.leyline.messages import Sink
from esper.telemetry.background import BackgroundSink, failure
from esper.telemetry.sinks import SINKS

ListenerFactory = Callable[[Path], Sink]
"""Run directory -> listener."""

_FACTORIES: dict[str, ListenerFactory] = {}


def register_listener(name: str) -> Callable[[ListenerFactory], ListenerFactory]:
    """Decorate a function or class `Path -> Sink`, which every training run of this process then calls.

    Raises:
        RegistryError: the name is taken.
    """
    if name in _FACTORIES:
        raise RegistryError(f"a listener named {name!r} is registered already; choose another name.")

    def register(factory: ListenerFactory) -> ListenerFactory:
        _FACTORIES[name] = factory
        return factory

    return register


@final
class Hub:
    """Passes every record to every listener and sink; a context manager that closes the sinks."""

    def __init__(self, listeners: Mapping[str, Sink]) -> None:
        self._listeners = dict(listeners)
        self._sinks: list[BackgroundSink] = []
        self._lost: dict[str, Counter[str]] = {}
        self._first_failure: dict[str, str] = {}

    def add_registered(self, run_directory: Path) -> None:
        """Create the listeners registered with `register_listener`."""
        for name, factory in _FACTORIES.items():
            try:
                self._listeners[name] = factory(run_directory)
            except Exception as error:  # no listener stops a run
                self._count(name, "everything", error)

    def start_sinks(
        self, names: Iterable[str], run_directory: Path, on_failure: Callable[[str], None] = lambda sentence: None
    ) -> None:
        """Start sinks by name; `on_failure` is told about the first failure of each, from its thread."""
        for name in names:
            kind = SINKS[name]
            self._sinks.append(BackgroundSink(name, partial(kind.make, run_directory), kind.kinds, on_failure))

    def close(self) -> None:
        """Close the sinks, which takes as long as the slowest of them needs, within limits."""
        for sink in self._sinks:
            sink.begin_closing()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_prompt(self) -> bool:
        """Whether there is a registered listener, which must receive each step before the next one."""
        return not _FACTORIES.keys().isdisjoint(self._listeners)

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Pass on one record."""
        record = MappingProxyType(dict(fields))
        for name, listener in self._listeners.items():
            try:
                listener.write(kind, record)
            except Exception as error:  # no listener stops a run
                self._count(name, kind, error)
        for sink in self._sinks:
            sink.write(kind, record)

    def _count(self, name: str, kind: str, error: Exception) -> None:
        self._lost.setdefault(name, Counter())[kind] += 1
        self._first_failure.setdefault(name, failure(error))

    @property
    def num_lost(self) -> int:
        """Records lost by all listeners and sinks so far."""
        return sum(lost.total() for lost in self._lost.values()) + sum(sink.num_lost for sink in self._sinks)

    def complaints(self) -> list[str]:
        """A sentence for each listener that lost records, and those of the sinks."""
        of_listeners = [
            f"the listener {name!r} lost {lost.total()} records "
            f"({', '.join(f'{kind} {count}' for kind, count in lost.most_common())}); "
            f"its first failure was {self._first_failure[name]}. The run itself is not affected."
            for name, lost in self._lost.items()
        ]
        return [*of_listeners, *(sentence for sink in self._sinks for sentence in sink.complaints())]
