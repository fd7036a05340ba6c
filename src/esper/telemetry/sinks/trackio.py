"""trackio: the configuration and each round, in a local database; `trackio show` displays them.

The project is $TRACKIO_PROJECT, else "esper"; the database lies in $TRACKIO_DIR, else in the cache folder of Hugging
Face.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import trackio

from esper.telemetry.sinks.metrics import PROJECT, configuration, is_new, run_id, scalars


@final
class TrackioSink:
    """Logs each round at step = round; a resumed run continues the same run of trackio."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run_directory.resolve().name}-{run_id(run_directory)}",
            config=configuration(run_directory),
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
