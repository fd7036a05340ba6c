"""TensorBoard: one event file per start of the run, in RUN/tensorboard, with the names of metrics.jsonl.

The files are written by the package tensorboard itself, without `torch.utils.tensorboard`, whose import takes seconds.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from esper.telemetry.sinks.trackers import scalars

FOLDER = "tensorboard"


@final
class TensorBoardSink:
    """Writes each round as scalars at step = round.

    The first round of a resumed run tells TensorBoard to discard that round and later ones of earlier files.
    """

    def __init__(self, run_directory: Path) -> None:
        self._writer = EventFileWriter(str(run_directory / FOLDER))
        self._resumed = False

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a record of kind "round"; others are ignored."""
        if kind != "round":
            return
        step = int(fields["round"])
        if not self._resumed:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
            self._resumed = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(fields)]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()  # a run that is killed keeps what it has shown

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
