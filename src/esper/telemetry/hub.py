"""Passes the records of a run to listeners. A failing listener never stops the run.

    runner --(kind, fields)--> Hub --> progress display, listeners of the user

A listener that raises loses that record and stays registered; lost records are counted and reported at the end.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from esper.leyline.errors import RegistryError
from esper.leyline.protocols import Sink

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
    """Passes every record to every listener."""

    def __init__(self, listeners: Mapping[str, Sink]) -> None:
        self._listeners = dict(listeners)
        self._lost: dict[str, Counter[str]] = {}
        self._first_failure: dict[str, str] = {}

    def add_registered(self, run_directory: Path) -> None:
        """Create the listeners registered with `register_listener`."""
        for name, factory in _FACTORIES.items():
            try:
                self._listeners[name] = factory(run_directory)
            except Exception as error:  # no listener stops a run
                self._count(name, "everything", error)

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

    def _count(self, name: str, kind: str, error: Exception) -> None:
        self._lost.setdefault(name, Counter())[kind] += 1
        self._first_failure.setdefault(name, f"{type(error).__name__}: {error}".rstrip(": "))

    @property
    def num_lost(self) -> int:
        """Records lost by all listeners."""
        return sum(lost.total() for lost in self._lost.values())

    def complaints(self) -> list[str]:
        """One sentence for each listener that lost records."""
        return [
            f"the listener {name!r} lost {lost.total()} records "
            f"({', '.join(f'{kind} {count}' for kind, count in lost.most_common())}); "
            f"its first failure was {' '.join(self._first_failure[name].split())}. The run itself is not affected."
            for name, lost in self._lost.items()
        ]
