"""Trackers of runs, Weights & Biases and trackio, and what the built-in sinks share.

The packages are imported only when a run uses them.
"""

import math
import os
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from esper.leyline.errors import ConfigError
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
            config=configuration(run_directory),
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
