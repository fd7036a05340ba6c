"""What the reports of all scripts have in common: where the numbers come from, and one file of JSON."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def write_report(path: Path, script: str, config: Mapping[str, Any], results: object, device: torch.device) -> None:
    """Write {script, version, environment, config, results}."""
    try:
        own = version("esper-growth")
    except PackageNotFoundError:
        own = "not installed"
    where = environment(device)
    report = {"script": script, "version": own, "environment": where, "config": dict(config), "results": results}
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def environment(device: torch.device, *, amp: str = "off", compiled: bool = False) -> dict[str, Any]:
    """Machine, versions and settings that numbers depend on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "driver": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "amp": amp,
        "compile": compiled,
        "commit": commit(),
    }


def cpu_name() -> str:
    """Model of the processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Commit of the working tree, None where it is none."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else None
