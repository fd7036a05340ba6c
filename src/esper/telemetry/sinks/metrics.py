"""What the built-in sinks share: numbers of a record by flat names, the configuration, and an id of the run."""

import math
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from esper.telemetry.run_directory import CONFIG

ID_FILE = "sink_id"
PROJECT = "esper"


def scalars(fields: Mapping[str, object], path: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record; those of inner tables as "ops/WAIT".

    The names are those of metrics.jsonl. What was not measured (NaN, None) is left out, and so is text.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield path + name, float(value)


def configuration(run_directory: Path) -> dict[str, Any]:
    """The tables of config.toml."""
    return tomllib.loads((run_directory / CONFIG).read_text(encoding="utf-8"))


def is_new(run_directory: Path, sink: str, number: int) -> bool:
    """Whether a sink gets this round for the first time: a resumed run may repeat some. Kept in the file SINK_round."""
    file = run_directory / f"{sink}_round"
    if number <= (int(file.read_text(encoding="utf-8")) if file.exists() else 0):
        return False
    file.write_text(f"{number}\n", encoding="utf-8")
    return True


def run_id(run_directory: Path) -> str:
    """Eight letters that name the run in a tracker, the same after a resume; kept in the file `sink_id`."""
    file = run_directory / ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
