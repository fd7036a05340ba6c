"""The JSON result of a script: its name, environment, settings and results."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from esper.telemetry.machine import environment
from esper.telemetry.run_directory import plain_json


def write_result(path: Path, script: str, device: torch.device, config: Mapping[str, object], results: object) -> None:
    """Write {script, version, environment, config, results}; numbers that are not finite become null."""
    content = {
        "script": script,
        "version": 1,
        "environment": environment(device),
        "config": dict(config),
        "results": results,
    }
    path.write_text(json.dumps(plain_json(content), indent=2, default=str) + "\n", encoding="utf-8")
