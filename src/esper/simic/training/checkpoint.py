"""Checkpoints: one folder each, complete or absent.

    checkpoints/round-00003/            after three rounds
    checkpoints/round-00003-step-0017/  inside the fourth round
        state.safetensors               every tensor, by dotted name
        header.json                     format, place, record cursor, what kind of run it belongs to
        checksums.json                  SHA-256 of both

A folder is written under another name and renamed when it is on the disk, so a crash leaves no half of one. Nothing is
ever unpickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from esper.leyline.errors import CheckpointError

FORMAT = 1
KEEP = 3
_STATE, _HEADER, _CHECKSUMS = "state.safetensors", "header.json", "checksums.json"
_NAME = re.compile(r"round-(\d{5,})(?:-step-(\d{4}))?")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint says of itself.

    Attributes:
        rounds_done: complete rounds. step: steps done of the next round, 0 at its boundary.
        env_steps, seconds: cost of the run so far. cursor: length in bytes of each record file at this point.
        shape: what must agree with the run that loads it (task, data identity, slots, sizes).
    """

    rounds_done: int
    step: int
    env_steps: int
    steps: int
    reads: int
    seconds: float
    cursor: dict[str, int]
    shape: dict[str, Any]
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    header: Header
    state: dict[str, Tensor]


def save(folder: Path, header: Header, state: Mapping[str, Tensor]) -> Path:
    """Write one checkpoint under `folder` and remove all but the newest three; returns its path."""
    name = f"round-{header.rounds_done:05d}" + (f"-step-{header.step:04d}" if header.step else "")
    target, draft = folder / name, folder / f".draft-{name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in state.items()}, draft / _STATE)
    (draft / _HEADER).write_text(json.dumps(asdict(header), indent=1))
    sums = {name: _digest(draft / name) for name in (_STATE, _HEADER)}
    (draft / _CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    _sync(folder)
    for old in checkpoints(folder)[KEEP:]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, newest first."""
    found = (
        [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))] if folder.is_dir() else []
    )
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
        return Checkpoint(path, Header(**fields), load_file(path / _STATE))
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is damaged.

    Raises:
        CheckpointError: there is none.
    """
    complaints: list[str] = []
    for path in checkpoints(folder):
        try:
            return load(path), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    details = " ".join(complaints) or "there is none in it."
    raise CheckpointError(f"no checkpoint in {folder} can be used: {details} Start the run again in a new directory.")


def require_same_shape(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another kind of run; raises CheckpointError that names the first difference."""
    for key, want in expected.items():
        if found.get(key) != want:
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} = {found.get(key)}, but this run has {want}; "
                f"resume with the configuration of its own run directory."
            )


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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
