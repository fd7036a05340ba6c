"""Tensors by dotted name and JSON values about them in one file, with the SHA-256 of both; nothing is unpickled."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.files import draft_of, json_of, require_regular, sync
from esper.leyline.tensor_dataclass import state_digest
from esper.runs.assembly.values import parse
from esper.telemetry.run_directory import CHECKPOINTS, continuing

C = TypeVar("C")


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
        draft.touch(exist_ok=False)
        mode = draft.stat().st_mode
        save_file(tensors, draft, written)
        draft.chmod(mode)  # that of the umask, where safetensors makes the file private
        sync(draft)
        draft.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        of_run = path.parent.name == CHECKPOINTS
        next_ = f"continue with {continuing(path.parent.parent)}" if of_run else "give the command again"
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written ({why}); fix that, then {next_}.") from error


def read_state(path: Path, way: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_state` wrote; raises CheckpointError that says what is damaged, and this `way` out."""
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is not a mapping
        digest, text = json_of(metadata["about"])
        about = json_of(text)
        if _digest(text, state) != digest:
            raise CheckpointError(f"{path} does not match its checksum: the file was damaged or edited{way}.")
        if not isinstance(about, dict):
            raise CheckpointError(f"{path} holds no JSON object about its tensors; it is not a file of esper{way}.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).removesuffix('.')}{way}.") from error
    return about, state


def read_checked(path: Path, kind: type[C], way: str = "") -> tuple[C, dict[str, Tensor]]:
    """The same with the values as a dataclass, whose types are checked."""
    about, state = read_state(path, way)
    try:
        return parse(kind, about), state
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).removesuffix('.')}{way}.") from error


def _digest(text: str, state: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(f"{text}|{state_digest(state)}".encode()).hexdigest()
