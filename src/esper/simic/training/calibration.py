"""Ratios of times that were measured once on a machine and are kept in the user's cache folder.

A choice that rests on one falls the same way in every later run of its kind, however busy the machine is.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.leyline.files import replacing
from esper.telemetry.machine import cpu_name


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A ratio, and a few words for the user: where it comes from."""

    ratio: float
    source: str


def calibrated(work: str, device: torch.device, measure: Callable[[], float]) -> Calibrated:
    """The kept ratio of `work` on this machine, or a measured one that is then kept.

    A file that cannot be read or written costs another measurement in the next run, and is said.
    """
    path, key = calibration_file(), f"{_machine(device)}; {work}"
    kept, problem = _kept(path)
    if key in kept:
        return Calibrated(ratio=kept[key], source=f"as {path} says")
    ratio = measure()
    problem = problem or _keep(path, kept | {key: ratio})
    return Calibrated(ratio=ratio, source=f"not kept: {problem}" if problem else f"kept in {path}")


def calibration_file() -> Path:
    """Where ratios are kept: `calibration.json` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "esper" / "calibration.json"


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return f"{name}; torch {torch.__version__}; {torch.get_num_threads()} threads"


def _kept(path: Path) -> tuple[dict[str, float], str]:
    """Kept ratios, and what is wrong with the file; one that cannot be read is left as it is."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read ({error}); delete it"
    if not isinstance(found, dict) or not all(isinstance(ratio, float) and ratio >= 0 for ratio in found.values()):
        return {}, f"{path} does not hold ratios by name; delete it"
    return found, ""


def _keep(path: Path, ratios: dict[str, float]) -> str:
    """Write the ratios, whole or not at all; returns what went wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(ratios, indent=1) + "\n")
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})"
    return ""
