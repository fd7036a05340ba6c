"""Checkpoints: one file each, written atomically.

    checkpoints/round-00003.safetensors            after three rounds
    checkpoints/round-00003-step-0017.safetensors  in the middle of the fourth round
    checkpoints/best.safetensors                   after the ten rounds with the highest mean J; never deleted
    checkpoints/best-host.safetensors              see best_host.py

A file holds every tensor by dotted name; its metadata hold the header as JSON, and the SHA-256 of both. Nothing is ever
unpickled.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.files import draft_of, is_draft, remove, sync
from esper.runs.report import Cost
from esper.telemetry.anomalies import Trend
from esper.telemetry.run_directory import continuing

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

    rounds_done: int
    step: int
    cursor: dict[str, int]
    total: Cost
    begun: Cost
    shape: dict[str, Any]
    config: dict[str, Any]
    trend: Trend = field(default_factory=Trend)

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


def write_state(path: Path, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write tensors, and JSON values about them, to a file as a whole.

    Raises:
        CheckpointError: it cannot be written; a file of this name is untouched.
    """
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}
    text, draft = json.dumps(about), draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = {"about": json.dumps([_digest(text, tensors), text])}  # one key: safetensors orders several at random
        save_file(tensors, draft, written)
        sync(draft)
        draft.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({getattr(error, 'strerror', None) or error}); fix that, then continue with "
            f"{continuing(path.parent.parent)}."
        ) from error


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_state` wrote; raises CheckpointError that says what is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is not a mapping
        digest, text = json.loads(metadata["about"])
        about = json.loads(text)
        if _digest(text, state) != digest:
            raise CheckpointError(f"{path} does not match its checksum: the file was damaged or edited.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return about, state


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
    fields, state = read_state(path)
    try:
        return Checkpoint(path, Header.of(fields), state)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


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


def _digest(text: str, state: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{text}|{state_digest(state)}".encode()).hexdigest()
