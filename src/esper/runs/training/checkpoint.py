"""Checkpoints: one file each, written atomically.

    checkpoints/round-00003.safetensors            after three rounds
    checkpoints/round-00003-step-0017.safetensors  in the middle of the fourth round
    checkpoints/best.safetensors                   after the ten rounds with the highest mean J; never deleted
    checkpoints/best-host.safetensors              see best_host.py

A file holds every tensor by dotted name (`state_file`); its metadata hold the header as JSON.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.files import is_draft, remove
from esper.leyline.settings import Count
from esper.runs.assembly.values import differences, flat
from esper.runs.report import Cost
from esper.runs.state_file import read_checked, write_state
from esper.telemetry.anomalies import Trend

KEEP = 3
BEST = "best.safetensors"
_NAME = re.compile(r"round-(\d{5,})(?:-step-(\d{4}))?\.safetensors")
_ASIDE = "damaged-"


@dataclass(frozen=True, kw_only=True)
class Header:
    """Metadata of a checkpoint.

    Attributes:
        rounds_done: complete rounds. step: completed steps of the next round, 0 between rounds.
        cursor: length in bytes of each record file.
        total: cost of the complete rounds. begun: cost of the steps of the next round.
        shape: properties that must match the run that loads it (`run_shape`).
        config: the configuration, as in config.toml.
        trend: mean J of the last rounds, and the best so far.
    """

    rounds_done: Count
    step: Count
    cursor: dict[Annotated[str, Field(pattern=r"^(metrics|events)\.jsonl$")], Count]
    total: Cost
    begun: Cost
    shape: dict[str, Any]
    config: dict[str, Any]
    trend: Trend = field(default_factory=Trend)

    @property
    def place(self) -> str:
        """The position in the run, such as "3 rounds and 17 steps"."""
        rounds = f"{self.rounds_done} round{'s' * (self.rounds_done != 1)}"
        return f"{rounds} and {self.step} steps" if self.step else rounds

    @property
    def rounds_begun(self) -> int:
        """Complete rounds, and the one that has begun."""
        return self.rounds_done + (self.step > 0)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums match."""

    path: Path
    header: Header
    state: dict[str, Tensor]


def save(folder: Path, header: Header, state: Mapping[str, Tensor], *, best: bool = False) -> Path:
    """Write a checkpoint under `folder`, remove all but the newest three, and return its path.

    With `best` it replaces the best checkpoint, which does not count among the three. Raises CheckpointError.
    """
    place = f"round-{header.rounds_done:05d}" + (f"-step-{header.step:04d}" if header.step else "")
    path = folder / (BEST if best else f"{place}.safetensors")
    write_state(path, asdict(header), state)
    for old in (*checkpoints(folder)[KEEP:], *filter(is_draft, folder.iterdir())):
        remove(old)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint files, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda item: (int(item[0][1]), int(item[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raises CheckpointError that says what is damaged."""
    return Checkpoint(path, *read_checked(path, Header))


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[Path], list[str]]:
    """The newest intact checkpoint; if all are damaged, the best one.

    Returns:
        The checkpoint, or None if there is none; the damaged newer ones; a sentence for each of those.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    damaged: list[Path] = []
    problems: list[str] = []
    if any(path.is_dir() and path.name.startswith("round-") for path in folder.glob("*")):
        raise CheckpointError(f"{folder} was written by another version of esper; continue the run with that version.")
    for path in (*checkpoints(folder), *folder.glob(BEST)):
        try:
            return load(path), damaged, problems
        except CheckpointError as error:
            damaged.append(path)
            problems.append(str(error))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {' '.join(problems)} Start the run again in a new directory."
        )
    return None, [], []


def set_aside(damaged: list[Path]) -> None:
    """Rename damaged checkpoints, so that they no longer count as the newest."""
    for path in damaged:
        path.rename(path.with_name(f"{_ASIDE}{path.name}-{secrets.token_hex(4)}"))


def require_same_shape(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError that names the first difference between the shapes of checkpoint and run."""
    for key, values in differences(flat(found), flat(expected)).items():
        was, now = ("nothing" if value is None else json.dumps(value) for value in values)
        raise CheckpointError(
            f"the checkpoint {path} was made with {key} = {was}, but this run has {now}; use the configuration, data "
            "and plugins of its own run directory."
        )
