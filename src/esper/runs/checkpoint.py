"""Checkpoints: one folder each, complete or absent.

    checkpoints/round-00003/            after three rounds
    checkpoints/round-00003-step-0017/  inside the fourth round
    checkpoints/best/                   after the ten rounds with the best committed accuracy; stays
        state.safetensors               every tensor, by dotted name
        header.json                     format, place, record cursor, cost so far, what kind of run it belongs to
        checksums.json                  SHA-256 of both

A folder is written under another name and renamed when it is on the disk, so a crash leaves no half of one. Nothing is
ever unpickled.
"""

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.files import draft_of, is_draft, mode_of, remove, sync
from esper.runs.report import Cost
from esper.runs.trend import Trend

FORMAT = 4
KEEP = 3
BEST = "best"
_STATE, _HEADER, _CHECKSUMS = "state.safetensors", "header.json", "checksums.json"
_NAME = re.compile(r"round-(\d{5,})(?:-step-(\d{4}))?")
_ASIDE = "damaged-"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint says of itself.

    Attributes:
        rounds_done: complete rounds. step: steps done of the next round, 0 at its boundary.
        cursor: length in bytes of each record file at this point.
        total: cost of the complete rounds. begun: cost of the steps of the next one.
        shape: what must agree with the run that loads it (task, data identity, slots, sizes).
        config: the configuration of the run, as in config.toml.
        trend: committed accuracies of the last rounds, and the best so far.
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
        """The header that was written as JSON; raises TypeError where keys are missing or unknown."""
        costs = {name: Cost(**fields[name]) for name in ("total", "begun")}
        return cls(**{**fields, **costs, "trend": Trend.of(fields["trend"])})

    @property
    def place(self) -> str:
        """Where in the run it was taken, in words."""
        rounds = f"{self.rounds_done} round{'s' * (self.rounds_done != 1)}"
        return f"{rounds} and {self.step} steps" if self.step else rounds


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    header: Header
    state: dict[str, Tensor]


def save(folder: Path, header: Header, state: Mapping[str, Tensor], *, best: bool = False) -> Path:
    """Write one checkpoint under `folder` and remove all but the newest three.

    Args:
        folder: where checkpoints lie.
        header: what it says of itself.
        state: every tensor, by name.
        best: it takes the place of the best one so far, which is not counted among the three.

    Returns:
        Its path.

    Raises:
        CheckpointError: it cannot be written; those that were there are left as they are.
    """
    place = f"round-{header.rounds_done:05d}" + (f"-step-{header.step:04d}" if header.step else "")
    target = folder / (BEST if best else place)
    try:
        _write(target, header, state)
        for old in (*checkpoints(folder)[KEEP:], *filter(is_draft, folder.iterdir())):
            remove(old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {target} cannot be written ({getattr(error, 'strerror', None) or error}); mend that, then "
            f"continue with --resume {folder.parent}."
        ) from error
    return target


def _write(target: Path, header: Header, state: Mapping[str, Tensor]) -> None:
    draft = draft_of(target)
    draft.mkdir(parents=True)
    try:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in state.items()}, draft / _STATE)
        (draft / _HEADER).write_text(json.dumps(asdict(header), indent=1))
        sums = {name: _digest(draft / name) for name in (_STATE, _HEADER)}
        (draft / _CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for file in (*draft.iterdir(), draft):
            sync(file)
        if mode_of(target):  # the same place of the same run, reached again after a resume
            target.rename(draft_of(target))
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(target.parent)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: _place(item[0]), reverse=True)]


def _place(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2] or 0)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; raises CheckpointError that says what is damaged."""
    try:
        sums = json.loads((path / _CHECKSUMS).read_text())
        for name in (_STATE, _HEADER):
            if _digest(path / name) != sums.get(name):
                raise CheckpointError(f"{path / name} does not match its checksum: the file was damaged or changed.")
        fields = json.loads((path / _HEADER).read_text())
        if fields.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {fields.get('format')}, but this version reads format {FORMAT}.")
        return Checkpoint(path, Header.of(fields), load_file(path / _STATE))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not complete: {Path(error.filename or path).name} is missing.") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[Path], list[str]]:
    """The newest whole checkpoint; the best one, which may be older, where all others are damaged.

    Returns:
        It, or None where the run ended before its first one; the newer ones that are damaged; a sentence for each.

    Raises:
        CheckpointError: there are some, and all are damaged.
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
    """Rename checkpoints that cannot be used, so that they are not the newest any more; none replaces another."""
    for path in damaged:
        path.rename(path.with_name(f"{_ASIDE}{path.name}-{secrets.token_hex(4)}"))


def require_same_shape(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another kind of run; raises CheckpointError that names the first difference."""
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} = {_short(found.get(key))}, but this run has "
                f"{_short(expected.get(key))}; resume it with the configuration, the data and the plugins of its own "
                "run directory."
            )


def _short(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
