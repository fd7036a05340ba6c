"""Who listens to a run. Listeners are told what was read already; what becomes of them is no concern of the run.

    runner --(kind, fields)--> Hub --> progress display, listeners of the user

A listener that raises loses that record and keeps its place: the loss is counted, and reported when the run ends. Only
the listener's own call is guarded, so that a mistake in building a record is still an error.
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
    """Let every training run of this process tell a listener; decorates a function or class `Path -> Sink`.

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
    """Tells every listener every record."""

    def __init__(self, listeners: Mapping[str, Sink]) -> None:
        self._listeners = dict(listeners)
        self._lost: dict[str, Counter[str]] = {}
        self._first_failure: dict[str, str] = {}

    def add_registered(self, run_directory: Path) -> None:
        """Make the listeners that were registered with `register_listener`; one that cannot be made is reported."""
        for name, factory in _FACTORIES.items():
            try:
                self._listeners[name] = factory(run_directory)
            except Exception as error:  # whatever a listener does, it does not stop a run
                self._count(name, "everything", error)

    @property
    def is_prompt(self) -> bool:
        """Whether a registered listener is among them: it hears of a step before the next one ends."""
        return not _FACTORIES.keys().isdisjoint(self._listeners)

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Hand one record on."""
        record = MappingProxyType(dict(fields))
        for name, listener in self._listeners.items():
            try:
                listener.write(kind, record)
            except Exception as error:  # whatever a listener does, it does not stop a run
                self._count(name, kind, error)

    def _count(self, name: str, kind: str, error: Exception) -> None:
        self._lost.setdefault(name, Counter())[kind] += 1
        self._first_failure.setdefault(name, f"{type(error).__name__}: {error}".rstrip(": "))

    @property
    def num_lost(self) -> int:
        """Records that some listener did not take."""
        return sum(lost.total() for lost in self._lost.values())

    def complaints(self) -> list[str]:
        """One sentence for each listener that lost records."""
        return [
            f"the listener {name!r} lost {lost.total()} records "
            f"({', '.join(f'{kind} {count}' for kind, count in lost.most_common())}); "
            f"its first failure was {' '.join(self._first_failure[name].split())}. The run itself is complete."
            for name, lost in self._lost.items()
        ]
