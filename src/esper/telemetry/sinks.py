"""Where the records of a run go besides its directory: listeners, and the sinks that `sinks = [...]` names.

    runner --(kind, fields)--> Hub --> progress display, listeners of the user, sinks

All are called at once, on the thread of the run, which waits for them. None can end a run: one that raises receives
nothing more after one warning, and so does a sink that takes too much of the run's time.
"""

import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from esper.leyline.errors import ConfigError, in_words, nearest, registering
from esper.leyline.files import Closing, read_text, read_toml
from esper.leyline.messages import ClosingSink, Sink
from esper.telemetry.progress import warn
from esper.telemetry.run_directory import CONFIG

SinkFactory = Callable[[Path], Sink]
"""Run directory -> listener or sink."""
METRICS_ONLY = frozenset({"run_started", "round", "run_finished"})
PATIENCE, SHARE = 5.0, 0.1
"""A sink may take so many seconds, and so much of the time since its start on top."""
PROJECT = "esper"

_LISTENERS: dict[str, SinkFactory] = {}


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


def register_listener(name: str) -> Callable[[SinkFactory], SinkFactory]:
    """Decorate a function or class `Path -> Sink`, which every training run of this process then calls.

    Raises:
        RegistryError: the name is taken.
    """
    return registering("listener", name, _LISTENERS, lambda factory: factory)


@contextmanager
def listening(name: str, listener: Sink) -> Iterator[None]:
    """Training runs that start inside pass their records to `listener` too; raises RegistryError like the above."""
    register_listener(name)(lambda run_directory: listener)
    try:
        yield
    finally:
        del _LISTENERS[name]


def register_sink(name: str, *, kinds: Collection[str] | None = None) -> Callable[[SinkFactory], SinkFactory]:
    """Decorate a function or class `Path -> Sink`, which runs with `sinks = [name]` then use.

    Args:
        name: for the configuration.
        kinds: the records it receives, such as ("round",); None for all.

    Raises:
        RegistryError: the name is taken.
    """
    return registering("sink", name, SINKS, lambda factory: SinkKind(make=factory, kinds=kinds))


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


@dataclass
class _Receiver:
    """A listener or a sink; `sink` is None once it has failed or was never made."""

    name: str
    sink: Sink | None
    kinds: Collection[str] | None = None
    is_sink: bool = False
    began: float = 0.0
    seconds: float = 0.0
    lost: int = 0

    def attempts(self, act: Callable[[], None]) -> bool:
        """Whether something that is not ours succeeds; no listener and no sink stops a run."""
        try:
            act()
        except Exception as error:
            self.give_up(f"failed: {in_words(error)}")
            return False
        return True

    def give_up(self, why: str) -> None:
        self.sink = None
        warn([f"{self.name} {why}. It receives nothing more; the run goes on."])

    def close(self, sink: Sink) -> None:
        if isinstance(sink, ClosingSink):
            self.attempts(sink.close)


@final
class Hub(Closing):
    """Passes every record to every listener and sink; a context manager that closes the sinks."""

    def __init__(self, listeners: Mapping[str, Sink]) -> None:
        self._receivers = [_Receiver(f"the listener {name!r}", listener) for name, listener in listeners.items()]
        self.is_prompt = False
        """Whether there is a registered listener, which must receive each step before the next one."""

    def add_registered(self, run_directory: Path) -> None:
        """Create the listeners registered with `register_listener`."""
        for name, factory in _LISTENERS.items():
            self._add(_Receiver(f"the listener {name!r}", None), factory, run_directory)
            self.is_prompt = True

    def start_sinks(self, names: Iterable[str], run_directory: Path) -> None:
        """Create sinks by name."""
        for name in names:
            kind = SINKS[name]
            self._add(_Receiver(f"the sink {name!r}", None, kind.kinds, is_sink=True), kind.make, run_directory)

    def _add(self, receiver: _Receiver, factory: SinkFactory, run_directory: Path) -> None:
        def make() -> None:
            receiver.sink = factory(run_directory)

        self._receivers.append(receiver)
        receiver.attempts(make)
        receiver.began = time.monotonic()

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Pass on one record."""
        record = MappingProxyType(dict(fields))
        for receiver in self._receivers:
            if receiver.kinds is not None and kind not in receiver.kinds:
                continue
            if receiver.sink is None:
                receiver.lost += 1
                continue
            began = time.monotonic()
            receiver.lost += not receiver.attempts(partial(receiver.sink.write, kind, record))
            ended = time.monotonic()
            receiver.seconds += ended - began
            allowed = PATIENCE + SHARE * (ended - receiver.began)
            if receiver.is_sink and receiver.sink is not None and receiver.seconds > allowed:
                slow = receiver.sink
                receiver.give_up(f"is slow, it has taken {receiver.seconds:.1f} seconds of the run")
                receiver.close(slow)

    def close(self) -> None:
        """Close the sinks."""
        for receiver in self._receivers:
            if receiver.is_sink and receiver.sink is not None:
                receiver.close(receiver.sink)

    @property
    def num_lost(self) -> int:
        """Records that listeners and sinks did not receive, or with which they failed."""
        return sum(receiver.lost for receiver in self._receivers)


def scalars(fields: Mapping[str, object], path: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record; those of inner tables as "ops/WAIT".

    The names are those of metrics.jsonl. What was not measured (NaN, None) is left out, and so is text.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield path + name, float(value)


def is_new(run_directory: Path, sink: str, number: int) -> bool:
    """Whether a sink gets this round for the first time: a resumed run may repeat some. Kept in the file SINK_round."""
    file = run_directory / f"{sink}_round"
    if number <= (int(read_text(file)) if file.exists() else 0):
        return False
    file.write_text(f"{number}\n", encoding="utf-8")
    return True


def run_id(run_directory: Path) -> str:
    """Eight letters that name the run in a tracker, the same after a resume; kept in the file `sink_id`."""
    file = run_directory / "sink_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return read_text(file).strip()


@final
class WandbSink:
    """Logs each round with `round` as the horizontal axis; a resumed run continues the same W&B run.

    The project is $WANDB_PROJECT, else "esper". WANDB_MODE=offline writes to RUN/wandb without a network; upload that
    later with `wandb sync`.

    Raises:
        ConfigError: W&B is online and no API key is stored.
    """

    def __init__(self, run_directory: Path) -> None:
        import wandb

        # asked here, because `init` would ask for a key at the terminal, in the middle of the display
        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise ConfigError("W&B has no API key; run `wandb login` once, or set WANDB_MODE=offline.")
        self._run_directory = run_directory
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_directory.resolve().name,
            id=run_id(run_directory),
            dir=str(run_directory),
            config=read_toml(run_directory / CONFIG),
            resume="allow",
            reinit="create_new",  # a run of the user's in this process stays as it is
            settings=wandb.Settings(console="off", silent=True),  # the terminal belongs to the display
        )
        self._run.define_metric("*", step_metric="round")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Log a record of kind "round", or put "run_finished" into the summary; others are ignored."""
        if kind == "round" and is_new(self._run_directory, "wandb", int(fields["round"])):
            self._run.log(dict(scalars(fields)))
        elif kind == "run_finished":
            self._run.summary.update({name: value for name, value in scalars(fields) if name not in ("t", "host")})

    def close(self) -> None:
        """Finish the run; online, this waits for the upload."""
        self._run.finish()


@final
class TrackioSink:
    """Logs each round at step = round; a resumed run continues the same run of trackio.

    The project is $TRACKIO_PROJECT, else "esper"; the local database lies in $TRACKIO_DIR, else in the cache folder of
    Hugging Face. `trackio show` displays it.
    """

    def __init__(self, run_directory: Path) -> None:
        import trackio

        self._run_directory = run_directory
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run_directory.resolve().name}-{run_id(run_directory)}",
            config=read_toml(run_directory / CONFIG),
            resume="allow",
            embed=False,
        )

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Log a record of kind "round"; others are ignored."""
        if kind == "round" and is_new(self._run_directory, "trackio", int(fields["round"])):
            self._run.log(dict(scalars(fields)), step=int(fields["round"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@final
class TensorBoardSink:
    """Writes each round as scalars at step = round, into one event file in RUN/tensorboard for each start of the run.

    The package tensorboard writes the files itself: importing `torch.utils.tensorboard` takes seconds.

    The first round of a resumed run tells TensorBoard to discard that round and later ones of earlier files.
    """

    def __init__(self, run_directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_directory / "tensorboard"))
        self._resumed = False

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a record of kind "round"; others are ignored."""
        if kind != "round":
            return
        step = int(fields["round"])
        if not self._resumed:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=start))
            self._resumed = True
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars(fields)]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a run that is killed keeps what it has shown

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


SINKS: dict[str, SinkKind] = {
    "tensorboard": SinkKind(
        make=TensorBoardSink, kinds=METRICS_ONLY, package="tensorboard", where="tensorboard --logdir {}"
    ),
    "wandb": SinkKind(make=WandbSink, kinds=METRICS_ONLY, package="wandb", where="files in {}/wandb"),
    "trackio": SinkKind(make=TrackioSink, kinds=METRICS_ONLY, package="trackio", where="trackio show"),
}
"""The sinks by name. The packages of these three are imported only when a run uses them."""
