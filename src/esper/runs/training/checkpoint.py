"""Checkpoints: one folder each, written atomically.

    checkpoints/round-00003/            after three rounds
    checkpoints/round-00003-step-0017/  in the middle of the fourth round
    checkpoints/best/                   after the ten rounds with the highest mean J; never deleted
        state.safetensors               every tensor, by dotted name
        header.json                     format, position in the run, sizes of the record files, cost, shape, config
        checksums.json                  SHA-256 of both
    checkpoints/best-host.safetensors   see best_host.py

A folder is written under a temporary name and renamed once it is on disk. Nothing is ever unpickled.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.files import is_draft, remove, replacing_folder
from esper.runs.report import Cost
from esper.telemetry.anomalies import Trend
from esper.telemetry.run_directory import continuing

FORMAT = 5
KEEP = 3
BEST = "best"
_STATE, _HEADER, _CHECKSUMS = "state.safetensors", "header.json", "checksums.json"
_NAME = re.compile(r"round-(\d{5,})(?:-step-(\d{4}))?")
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

    rounds_done: int
    step: int
    cursor: dict[str, int]
    total: Cost
    begun: Cost
    shape: dict[str, Any]
    config: dict[str, Any]
    trend: Trend = field(default_factory=Trend)
    format: int = FORMAT

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Header":
        """A header from JSON; raises TypeError if keys are missing or unknown."""
        costs = {name: Cost(**fields[name]) for name in ("total", "begun")}
        return cls(**{**fields, **costs, "trend": Trend.of(fields["trend"])})

    @property
    def place(self) -> str:
        """The position in the run, such as "3 rounds and 17 steps"."""
        rounds = f"{self.rounds_done} round{'s' * (self.rounds_done != 1)}"
        return f"{rounds} and {self.step} steps" if self.step else rounds


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums match."""

    path: Path
    header: Header
    state: dict[str, Tensor]


def save(folder: Path, header: Header, state: Mapping[str, Tensor], *, best: bool = False) -> Path:
    """Write a checkpoint under `folder`, remove all but the newest three, and return its path.

    With `best` it replaces the best checkpoint, which does not count among the three.

    Raises:
        CheckpointError: it cannot be written; older checkpoints are untouched.
    """
    place = f"round-{header.rounds_done:05d}" + (f"-step-{header.step:04d}" if header.step else "")
    target = folder / (BEST if best else place)
    try:
        _write(target, header, state)
        for old in (*checkpoints(folder)[KEEP:], *filter(is_draft, folder.iterdir())):
            remove(old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {target} cannot be written ({getattr(error, 'strerror', None) or error}); fix that, then "
            f"continue with {continuing(folder.parent)}."
        ) from error
    return target


def _write(target: Path, header: Header, state: Mapping[str, Tensor]) -> None:
    with replacing_folder(target) as draft:  # a resumed run may reach the same position again
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in state.items()}, draft / _STATE)
        (draft / _HEADER).write_text(json.dumps(asdict(header), indent=1))
        sums = {name: _digest(draft / name) for name in (_STATE, _HEADER)}
        (draft / _CHECKSUMS).write_text(json.dumps(sums, indent=1))


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda item: (int(item[0][1]), int(item[0][2] or 0)), reverse=True)
    return [path for _, path in found]


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raises CheckpointError that names what is damaged."""
    try:
        sums = json.loads((path / _CHECKSUMS).read_text())
        for name in (_STATE, _HEADER):
            if _digest(path / name) != sums.get(name):
                raise CheckpointError(f"{path / name} does not match its checksum: the file was damaged or edited.")
        fields = json.loads((path / _HEADER).read_text())
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {fields.get('format')}, but this version reads format {FORMAT}.")
        return Checkpoint(path, Header.of(fields), load_file(path / _STATE))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not complete: {Path(error.filename or path).name} is missing.") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[Path], list[str]]:
    """The newest intact checkpoint; if all are damaged, the best one.

    Returns:
        The checkpoint, or None if there is none; the damaged newer ones; a sentence for each of those.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    damaged: list[Path] = []
    complaints: list[str] = []
    best = folder / BEST
    for path in (*checkpoints(folder), *([best] if best.is_dir() else ())):
        try:
            return load(path), damaged, complaints
        except CheckpointError as error:
            damaged.append(path)
            complaints.append(str(error))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {' '.join(complaints)} Start the run again in a new directory."
        )
    return None, [], []


def set_aside(damaged: list[Path]) -> None:
    """Rename damaged checkpoints, so that they no longer count as the newest."""
    for path in damaged:
        path.rename(path.with_name(f"{_ASIDE}{path.name}-{secrets.token_hex(4)}"))


def require_same_shape(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError that names the first difference between the shapes of checkpoint and run."""
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} = {_short(found.get(key))}, but this run has "
                f"{_short(expected.get(key))}; use the configuration, data and plugins of its own run directory."
            )


def _short(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
