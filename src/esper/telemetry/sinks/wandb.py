"""Weights & Biases: the configuration, each round, and the summary.

The project is $WANDB_PROJECT, else "esper". WANDB_MODE=offline writes to RUN/wandb without a network; upload that later
with `wandb sync`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import wandb

from esper.leyline.errors import ConfigError
from esper.telemetry.sinks.metrics import PROJECT, configuration, is_new, run_id, scalars


@final
class WandbSink:
    """Logs each round with `round` as the horizontal axis; a resumed run continues the same W&B run.

    Raises:
        ConfigError: W&B is online and no API key is stored.
    """

    def __init__(self, run_directory: Path) -> None:
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
